"""What is left of files after kill -9, and a model that is larger than the memory it may take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launcher import run_python

from mpisgd.checkpoint import format
from mpisgd.checkpoint.files import Folder

PROGRAM = str(Path(__file__).parent / "programs" / "offloaded.py")


def run(num_ranks, fresh=False, **options):
    return run_python(PROGRAM, json.dumps(options), num_ranks=num_ranks, fresh=fresh)


def result(done):
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr
    return json.loads(lines[0])


@pytest.mark.parametrize("what", ["optimizer,parameters", pytest.param("optimizer", marks=pytest.mark.long)])
def test_after_kill_9_in_a_step_the_folder_has_the_last_checkpoint_and_nothing_else(tmp_path, what):
    done = run(2, folder=str(tmp_path), what=what, block_bytes=4096, steps=50, save_every=2, kill_at=200)
    assert done.returncode != 0
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("step-")
    document, tensors = format.read(Folder(path.parent), path.name, ["model", "optimizer"])
    assert document.step < 50
    assert tensors


# In MiB: what the process may take beyond what it takes before there is a model, or all that it may take.
LIMITS = [{"room_mib": 128}, pytest.param({"limit_mib": 400}, marks=pytest.mark.long)]


@pytest.mark.parametrize("limit", LIMITS)
def test_a_model_of_three_times_the_memory_limit_trains(tmp_path, limit):
    (mib,) = limit.values()
    width, nbytes = 1024, 3 * mib * 2**20
    size = {"width": width, "depth": -(-nbytes // (12 * width * (width + 1))), "steps": 2}
    within = result(run(1, fresh=True, folder=str(tmp_path), what="optimizer,parameters", **limit, **size))
    freely = result(run(1, **size))
    assert within["bytes"] >= nbytes
    assert within["losses"] == freely["losses"]
    assert list(tmp_path.iterdir()) == []


def test_steps_and_the_disk_are_measured(tmp_path):
    folder, out = str(tmp_path / "disk"), tmp_path / "out"
    words = ("bench", "offload", "--quick", "--folder", folder, "--json", str(out))
    done = run_python("-m", "mpisgd", *words, "--block", "64KiB", "--io", "buffered")
    assert done.returncode == 0, done.stderr
    rows = {row["variant"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["state in memory", "the disk alone, buffered", "state in files, buffered"]
    assert rows["state in files, buffered"]["ratio_to_bound"] > 0
    done = run_python("-m", "mpisgd", "bench", "offload")
    assert done.returncode == 2
    assert "--folder" in done.stderr
