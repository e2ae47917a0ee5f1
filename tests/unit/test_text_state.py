"""Which checkpoint of a folder is taken, and which are refused."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from mpisgd import CheckpointError

with warnings.catch_warnings():  # torch.distributed.optim uses what torch itself has deprecated
    warnings.filterwarnings("ignore", "`torch.jit.* is deprecated", DeprecationWarning)
    from training.text_state import read_run

IDENTITY = {"--dim": 16, "--seed": 0}


def leave_checkpoint(folder: Path, step: int, *, complete: bool = True, **changes) -> Path:
    """What `write_checkpoint` leaves, without its tensors."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    run = {"identity": IDENTITY | changes, "step": step, "history": []}
    (path / "run.json").write_text(json.dumps(run))
    if complete:
        (path / ".metadata").touch()
    return path


def test_newest_complete_one_is_taken(tmp_path):
    for step in (90, 100, 20):
        leave_checkpoint(tmp_path, step)
    leave_checkpoint(tmp_path, 120, complete=False)
    path, run = read_run(tmp_path, IDENTITY)
    assert (path.name, run["step"]) == ("step-00000100", 100)


def test_one_that_is_named_is_taken(tmp_path):
    named = leave_checkpoint(tmp_path, 20)
    leave_checkpoint(tmp_path, 90)
    assert read_run(named, IDENTITY)[1]["step"] == 20


def test_folder_without_a_complete_one_is_refused(tmp_path):
    leave_checkpoint(tmp_path, 120, complete=False)
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=f"{folder.name} holds no complete checkpoint"):
            read_run(folder, IDENTITY)


def test_one_of_another_run_is_refused_with_the_difference(tmp_path):
    leave_checkpoint(tmp_path, 20, **{"--dim": 32})
    with pytest.raises(CheckpointError, match=r"is of a run with --dim 32 \(here 16\)"):
        read_run(tmp_path, IDENTITY)


@pytest.mark.parametrize("content", ["", "[1, 2]", '{"step": 20}'])
def test_one_whose_description_is_damaged_is_refused(tmp_path, content):
    path = leave_checkpoint(tmp_path, 20)
    (path / "run.json").write_text(content)
    with pytest.raises(CheckpointError, match="is damaged or no checkpoint"):
        read_run(tmp_path, IDENTITY)
