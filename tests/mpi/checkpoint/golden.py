"""Checkpoints of each release, for later ones to read: one small file for each method that keeps a state.

    mpirun -n 2 python tests/mpi/checkpoint/golden.py            writes those of the newest that are missing

Files are added, never replaced: a reader that changes must go on reading them, or refuse them by name.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch

import mpisgd
from mpisgd import checkpoint

FOLDER = Path(__file__).parent / "golden"
SAVED_AT, LAST, RANKS = 5, 9, 2
_FIRST = ("AdamW", "TopK", "PowerSGD", "LocalSGD, TopK, state", "DiLoCo", "CHOCO", "OneBitAdam", "Sharded")
# By the version that has written them; v1 is the format before the first release.
NAMES = {
    "v1": _FIRST,
    "0.1.0": (
        *_FIRST,
        *("DeepGradient", "ChunkTopK", "OneBit, two steps", "shared parameters", "LocalSGD", "DiLoCo, TopK"),
        *("SparseLoCo", "ElasticAveraging", "Gossip", "push-sum", "Dion", "ZeroOneAdam"),
    ),
}
NEWEST = list(NAMES)[-1]


def path_of(name: str, version: str = NEWEST) -> Path:
    return FOLDER / f"{version}-{re.sub('[^a-z0-9]+', '-', name.lower())}.safetensors"


def write(name: str) -> None:
    """Save after some steps; with what the ranks come to, and their consensus then."""
    from methods import METHODS, OWN_MODELS, Net, train, values

    model, going_on = Net(), Net()
    optimizer, later = METHODS[name](model), METHODS[name](going_on)
    train(model, optimizer, 0, SAVED_AT)
    train(going_on, later, 0, LAST)
    after: list[Any] = [None] * mpisgd.size()
    mpisgd.all_gather_object(after, values(going_on))
    together = values(model)
    if name in OWN_MODELS:
        with optimizer.consensus():
            together = values(model)
    elif name == "ZeroOneAdam":  # whose ranks differ between meetings
        mpisgd.all_reduce_coalesced(together, mpisgd.ReduceOp.AVG)
    extra = {"after": after, "together": together}
    saved = checkpoint.save(FOLDER, SAVED_AT, rng=False, model=model, optimizer=optimizer, **extra)
    if mpisgd.rank() == 0:
        saved.rename(path_of(name))
    mpisgd.barrier()


def main() -> None:
    tests = Path(__file__).parents[2]
    sys.path[:0] = [str(tests / "mpi" / "strategies"), str(tests / "mpi")]
    mpisgd.init()
    assert mpisgd.size() == RANKS, f"run it at {RANKS} ranks"
    torch.set_num_threads(1)
    for name in NAMES[NEWEST]:
        if not mpisgd.broadcast_object(path_of(name).exists()):
            write(name)


if __name__ == "__main__":
    main()
