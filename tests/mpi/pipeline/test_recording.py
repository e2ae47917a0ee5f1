"""What a pipeline has done, measured on all ranks and put beside the ideal."""

from __future__ import annotations

import itertools
import json

import pytest
from stage_models import batch, make_stages, sgd
from torch.nn.functional import mse_loss
from verdicts import everyone, same_on_all_ranks

import mpisgd
from mpisgd.pipeline import Kind, Pipeline


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_recording_has_every_action_of_every_rank_in_order(schedule, tmp_path):
    count = max(4, mpisgd.size())
    pipeline = Pipeline(
        make_stages(count), schedule=schedule, num_micro_batches=6, loss=mse_loss, optimizer=sgd
    )
    pipeline.start_recording()
    for number in range(2):
        pipeline.step(*batch(number, 12, count))
    pipeline.flush()
    recording = pipeline.stop_recording()
    same_on_all_ranks(repr(recording.measured))
    everyone([len(own) for own in recording.measured.spans] == [len(own) for own in pipeline.plan(2).actions])
    ends = {}
    for own in recording.measured.spans:
        everyone(all(a.begin <= a.end <= b.begin for a, b in itertools.pairwise(own)))
        for span in own:
            if span.action.kind is Kind.FORWARD:
                ends.setdefault((span.action.stage, span.action.micro_batch), span)
    everyone(len(ends) == count * 12)
    # A stage's forward follows that of the stage before, by the clock of all.
    everyone(
        all(ends[stage - 1, number].end <= span.begin for (stage, number), span in ends.items() if stage)
    )
    everyone(0.0 <= recording.ideal.idle_share < 1.0)
    everyone("all ranks" in str(recording))
    if mpisgd.rank() == 0 and schedule == "1f1b":
        pytest.importorskip("matplotlib")
        recording.draw(tmp_path / "pipeline.png")
        assert (tmp_path / "pipeline.png").exists()


def test_the_timeline_of_the_job_shows_the_actions(tmp_path):
    path = str(mpisgd.broadcast_object(tmp_path / "run.json"))
    mpisgd.start_timeline(path)
    count = max(4, mpisgd.size())
    pipeline = Pipeline(make_stages(count), num_micro_batches=2, loss=mse_loss)
    pipeline.step(*batch(0, 4, count))
    mpisgd.stop_timeline()
    with open(path) as file:
        names = {event["name"] for event in json.load(file)}
    everyone({"F0.0v0", "B3.1v0"} <= names, f"{sorted(names)}")
