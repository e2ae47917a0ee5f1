"""A mistake on one rank is an error on every rank, soon; the job goes on."""

from __future__ import annotations

import time

import pytest
import torch
from stage_models import batch, make_stages, sgd
from torch import nn
from torch.nn.functional import mse_loss
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd.errors import (
    CollectiveMismatch,
    InvalidArgument,
    PipelineFailed,
    ShapeMismatch,
    UnsupportedTensor,
)
from mpisgd.pipeline import Pipeline

SOON_S = 15.0


def make(stages=None, **options):
    stages = make_stages(max(4, mpisgd.size())) if stages is None else stages
    options = {"num_micro_batches": 4, "loss": mse_loss, "optimizer": sgd} | options
    if options.get("schedule") == "pipedream-2bw":
        options["num_micro_batches"] = len(stages)
    return Pipeline(stages, **options)


@pytest.fixture(autouse=True)
def _soon():
    """Not after a timeout; and the ranks are together afterwards."""
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    mpisgd.barrier()
    everyone(took < SOON_S, f"{took:.1f} s")


@pytest.mark.parametrize(
    ("rows", "num_targets", "text"),
    [(3, 3, "3 rows for num_micro_batches=4"), (8, 7, "8 rows of inputs, 7 of targets"), (0, 8, "0 rows")],
)
def test_a_batch_that_does_not_fit_is_refused_and_the_next_one_taken(rows, num_targets, text):
    pipeline = make()
    inputs, targets = batch(0, 8, pipeline.shape.num_stages)
    with raises_everywhere(InvalidArgument) as caught:
        pipeline.step(inputs[:rows], targets[:num_targets])
    everyone(text in caught.text, caught.text)
    loss = pipeline.step(inputs, targets)
    everyone(loss is None or loss > 0)


def test_no_batch_where_one_is_needed():
    pipeline = make()
    with raises_everywhere(InvalidArgument) as caught:
        pipeline.step()
    everyone("expected a tensor whose first dimension is the batch" in caught.text, caught.text)


class Raises(nn.Module):
    """Raises in the forward or in the backward of one micro-batch."""

    def __init__(self, when: int, backward: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.when, self.backward, self.calls = when, backward, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.when and not self.backward:
            raise KeyError("broken stage")
        out = self.linear(x)
        if self.calls == self.when:
            out.register_hook(self.fail)
        return out

    def fail(self, grad):
        raise KeyError("broken stage")


@pytest.mark.parametrize(
    ("schedule", "backward"),
    [("gpipe", True), ("1f1b", False), ("pipedream", True), ("pipedream-2bw", False)],
)
def test_a_stage_that_raises_ends_the_step_of_all_ranks(schedule, backward):
    """In the second step, so that ranks are at different places."""
    count = max(4, mpisgd.size())
    stages = make_stages(count)
    stages[1] = nn.Sequential(Raises(6, backward), nn.Linear(6, 4).double())
    pipeline = make(stages, schedule=schedule)
    owner = 1 in pipeline.stages
    with raises_everywhere(Exception) as caught:
        for number in range(6):
            inputs, targets = batch(number, 2 * count, count)
            pipeline.step(inputs, targets)
        pipeline.flush()
    expected = KeyError if owner else PipelineFailed
    everyone(isinstance(caught.error, expected), f"{caught.error!r}")
    where = f"stage 1, {'backward' if backward else 'forward'} of micro-batch"
    everyone(owner or (where in caught.text and "broken stage" in caught.text), caught.text)
    with raises_everywhere(PipelineFailed) as again:
        pipeline.step(inputs, targets)
    everyone("of no use any more" in again.text, again.text)


def test_an_optimizer_that_raises_ends_the_step_of_all_ranks():
    """While replicas and others wait for it."""

    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyError("broken optimizer")

    pipeline = make(
        optimizer=lambda params: Broken(params, lr=0.1), schedule="pipedream", loss_on_all_ranks=True
    )
    with raises_everywhere(Exception) as caught:
        for number in range(6):
            pipeline.step(*batch(number, 8, pipeline.shape.num_stages))
    everyone(isinstance(caught.error, (KeyError, PipelineFailed)), f"{caught.error!r}")
    everyone("broken optimizer" in caught.text, caught.text)


def test_shapes_that_change_within_a_stage_are_named():
    """Of the same number of rows, another width."""

    class Grows(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x if self.calls < 3 else torch.cat([x, x], 1)

    if mpisgd.size() == 1:
        return  # what does not travel has no shape to keep
    count = mpisgd.size()
    stages = [nn.Sequential(nn.Linear(5, 5).double(), Grows()), *(nn.Identity() for _ in range(count - 1))]
    pipeline = make(stages, optimizer=None, loss=lambda output, target: output.mean())
    inputs, targets = batch(0, 8)
    with raises_everywhere(Exception) as caught:
        pipeline.step(inputs, targets)
    everyone(isinstance(caught.error, (ShapeMismatch, PipelineFailed)), f"{caught.error!r}")
    everyone("[2, 10] of torch.float64 for micro-batch 2, and sent [2, 5]" in caught.text, caught.text)


def test_batches_that_change_while_the_pipeline_is_full_are_named():
    pipeline = make(schedule="pipedream")
    count = pipeline.shape.num_stages
    pipeline.step(*batch(0, 8, count))
    pipeline.flush()
    inputs, targets = batch(1, 8, count)
    with raises_everywhere(Exception) as caught:
        pipeline.step(*batch(0, 12, count))  # after a flush another size is welcome
        for _ in range(6):
            pipeline.step(inputs, targets)
    everyone(isinstance(caught.error, (InvalidArgument, PipelineFailed)), f"{caught.error!r}")
    everyone("those before had 12" in caught.text, caught.text)


def test_forward_before_the_flush_is_refused():
    pipeline = make(schedule="pipedream")
    pipeline.step(*batch(0, 8, pipeline.shape.num_stages))
    with raises_everywhere(InvalidArgument) as caught:
        pipeline.forward(batch(0, 8)[0])
    everyone("call flush() before" in caught.text, caught.text)
    pipeline.flush()


def test_a_stage_that_returns_no_tensor():
    class Dictionary(nn.Module):
        def forward(self, x):
            return {"x": x}

    stages = make_stages(max(4, mpisgd.size()))
    stages[0] = Dictionary()
    pipeline = make(stages)
    with raises_everywhere(Exception) as caught:
        pipeline.step(*batch(0, 8, pipeline.shape.num_stages))
    everyone(isinstance(caught.error, (UnsupportedTensor, PipelineFailed)), f"{caught.error!r}")
    everyone("stage 0 returned a dict" in caught.text, caught.text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "zero bubble"}, "expected one of gpipe"),
        ({"num_micro_batches": 0}, "num_micro_batches=0"),
        ({"schedule": "pipedream", "optimizer": None}, "optimizer=None does not go with PipeDream"),
        ({"optimizer": lambda params: 3}, "optimizer made 3"),
        ({"loss": None}, "loss=None"),
        ({"loss_reduction": "median"}, "loss_reduction='median'"),
        ({"replicas": 9}, "replicas=9"),
        ({"stages": 3}, "stages is a int"),
        ({"tied": [[(0, "0.weight")]]}, "tied has"),
        ({"checkpoint": "some"}, "checkpoint='some'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_opened(options, text):
    with raises_everywhere(InvalidArgument) as caught:
        make(**options)
    everyone(text in caught.text, caught.text)


@pytest.mark.mpi(min_size=2)
def test_arguments_that_differ_between_ranks():
    with raises_everywhere(CollectiveMismatch) as caught:
        make(num_micro_batches=4 + mpisgd.rank())
    everyone("different arguments" in caught.text, caught.text)


@pytest.mark.mpi(min_size=2)
def test_a_stage_that_cannot_be_made_on_one_rank():
    def broken():
        raise OSError("no such file")

    count = mpisgd.size()
    with raises_everywhere(Exception) as caught:
        make([*make_stages(count)[: count - 1], broken])
    everyone(isinstance(caught.error, (OSError, InvalidArgument)), f"{caught.error!r}")
    everyone("no such file" in caught.text, caught.text)


def test_a_loss_that_is_no_number():
    pipeline = make(loss=lambda output, target: output)
    with raises_everywhere(Exception) as caught:
        pipeline.step(*batch(0, 8, pipeline.shape.num_stages))
    everyone(isinstance(caught.error, (InvalidArgument, PipelineFailed)), f"{caught.error!r}")
    everyone("expected a tensor of one element" in caught.text, caught.text)
