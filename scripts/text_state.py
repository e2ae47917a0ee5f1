"""Checkpoints of `train_text.py`, which any layout can load: torch.distributed.checkpoint, and a JSON file.

    DIR/step-00000200/run.json       what run this is, and how it went so far; rank 0 writes it
    DIR/step-00000200/*.distcp       every rank's part of the parameters and of the optimizer's state
    DIR/step-00000200/.metadata      which part is where; written last, so without it the rest is incomplete

In them every tensor has the name it has in the whole model, and a divided one says which part of it this is.
All ranks write, so the folder must be on a file system that all hosts share.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from ranks import on_rank_0
from records import check_identity
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from mpisgd import CheckpointError, JobError

__all__ = ["read_run", "read_state", "write_checkpoint"]

# Flat: the state of a parameter goes by its name, wherever it is in the optimizer of this stage.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def write_checkpoint(folder: Path, model: nn.Module, optimizer: Optimizer, run: dict[str, Any]) -> None:
    """Write the state after `run["step"]` steps into a folder of its own below `folder`. Collective."""
    path = folder / f"step-{run['step']:08d}"

    def begin() -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".metadata").unlink(missing_ok=True)  # of an earlier run
        (path / "run.json").write_text(json.dumps(run))

    on_rank_0(begin)
    dcp.save(state_of(model, optimizer), checkpoint_id=path)


def read_run(folder: Path, identity: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The newest complete checkpoint in `folder`, or `folder` itself, and what `run` it was given.

    Raises:
        CheckpointError: none there, a damaged one, or another run's.
    """
    complete = sorted(path.parent for path in folder.glob("step-*/.metadata"))
    path = complete[-1] if complete else folder
    if not (path / ".metadata").exists():
        raise CheckpointError(f"{folder} holds no complete checkpoint of this program")
    try:
        run = json.loads((path / "run.json").read_text())
        theirs = run["identity"]
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged or no checkpoint of this program") from error
    check_identity(path, theirs, identity)
    return path, run


def read_state(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load what this rank holds of the model and of the optimizer's state. Collective.

    Raises:
        JobError: a part is missing or damaged; on every rank.
    """
    state = state_of(model, optimizer)
    try:
        dcp.load(state, checkpoint_id=path)
    except dcp.CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise JobError(f"cannot load checkpoint {path}: {first}") from error
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, held_here(optimizer), state["optimizer"], options=BY_NAME)


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What this rank holds of the parameters and of the optimizer's state."""
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, held_here(optimizer), options=BY_NAME),
    }


def held_here(optimizer: Optimizer) -> Optimizer:
    """The optimizer that has the state: with ZeRO-1 a plain one inside, of some of the parameters."""
    return getattr(optimizer, "optim", optimizer)
