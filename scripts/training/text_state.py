"""Checkpoints of `train_text.py`, which any layout can load: torch.distributed.checkpoint, and a JSON file.

    DIR/step-00000200/run.json       what run this is, and how it went so far; rank 0 writes it
    DIR/step-00000200/*.distcp       every rank's part of the parameters and of the optimizer's state
    DIR/step-00000200/rank-3.pt      with --strategy or --compression: what rank 3 has of its own
    DIR/step-00000200/.metadata      which part is where; written last, so without it the rest is incomplete

In them every tensor has the name it has in the whole model, and a divided one says which part of it this is.
Where ranks have models of their own, these are of the common model: any layout goes on from it. The same
method on as many ranks goes on from what each rank has of its own, as if nothing had been.
All ranks write, so the folder must be on a file system that all hosts share.
"""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

import mpisgd
from mpisgd import CheckpointError, JobError
from training.methods import common_model
from training.ranks import everywhere, on_rank_0
from training.records import check_identity

# Flat: the state of a parameter goes by its name, wherever it is in the optimizer of this stage.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def write_checkpoint(folder: Path, model: nn.Module, optimizer: Optimizer, run: dict[str, Any]) -> None:
    """Write the state after `run["step"]` steps into a folder of its own below `folder`. Collective."""
    path = folder / f"step-{run['step']:08d}"

    def begin() -> None:
        path.mkdir(parents=True, exist_ok=True)
        (path / ".metadata").unlink(missing_ok=True)  # of an earlier run
        (path / "run.json").write_text(json.dumps({**run, "method": method_of(optimizer)}))

    on_rank_0(begin)
    if method_of(optimizer):
        own = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        everywhere(lambda: torch.save(own, own_part(path)))
    with common_model(optimizer):
        dcp.save(state_of(model, optimizer), checkpoint_id=path)


def method_of(optimizer: Optimizer) -> list[Any] | None:
    """The strategy, the compression and the number of ranks; None where torch divides the work."""
    if not isinstance(optimizer, mpisgd.DistributedOptimizer):
        return None
    compression = optimizer.synchronizer.training.options.compression
    return [repr(optimizer.strategy), repr(compression), mpisgd.size()]


def own_part(path: Path) -> Path:
    """The file of what this rank has of its own."""
    return path / f"rank-{mpisgd.rank()}.pt"


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


def read_state(path: Path, run: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Load what this rank holds of the model and of the optimizer's state. Collective.

    Args:
        path: of the checkpoint, as for `run`: what `read_run` has returned.
        model: to load into, as for `optimizer`.

    Raises:
        JobError: a part is missing or damaged; on every rank.
    """
    method = method_of(optimizer)
    if method is None:
        read_common_state(path, model, optimizer)
    elif method == run.get("method"):
        read_own_state(path, model, optimizer)
    else:
        plain = copy.copy(
            optimizer
        )  # torch takes a step to find out what state there is: not one of all ranks
        read_common_state(path, model, plain)
        optimizer.load_state_dict(plain.state_dict())


def read_own_state(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load what this rank has written as its own."""

    def read() -> dict[str, Any]:
        try:
            return torch.load(own_part(path), weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise JobError(f"cannot load checkpoint {own_part(path)}: {error}") from error

    own = everywhere(read)
    model.load_state_dict(own["model"])
    optimizer.load_state_dict(own["optimizer"])


def read_common_state(path: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Load this rank's part of what all ranks have written together."""
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
