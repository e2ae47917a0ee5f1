"""What an earlier version has written, this one reads: see `golden.py`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import FOLDER, LAST, NAMES, NEWEST, RANKS, SAVED_AT, path_of
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "strategies"))
from methods import ALIKE, METHODS, Net, train, values


def off(model: torch.nn.Module, expected: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(values(model), expected, strict=True))


@pytest.mark.parametrize(("version", "name"), [(each, name) for each in NAMES for name in NAMES[each]])
def test_a_checkpoint_of_an_earlier_version_is_read(name: str, version: str) -> None:
    """As many ranks go on as those would have; others go on from the consensus of those."""
    model = Net(seed=1)
    optimizer = METHODS[name](model)
    saved = checkpoint.load(path_of(name, version), model=model, optimizer=optimizer)
    everyone((saved.step, saved.ranks) == (SAVED_AT, RANKS), str(saved))
    if mpisgd.size() != RANKS:
        everyone(off(model, saved["together"]) < 1e-12, f"{off(model, saved['together'])}")
    train(model, optimizer, SAVED_AT, LAST)
    expected = saved["after"][mpisgd.rank()] if mpisgd.size() == RANKS else values(model)
    everyone(off(model, expected) < 1e-9, f"{off(model, expected)}")


def test_every_kind_of_state_that_is_written_today_has_one() -> None:
    """Of a method whose state is like that of another one, that one has; "documented" is a user's."""
    assert METHODS.keys() - ALIKE - {"documented"} <= set(NAMES[NEWEST])
    assert {path.name for path in FOLDER.iterdir()} == {path_of(n, v).name for v in NAMES for n in NAMES[v]}


class Elsewhere:
    """Has the state of an optimizer, as a later version may write it."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_a_state_of_a_later_version_is_refused_by_name(folder: Path) -> None:
    model = Net()
    optimizer = METHODS["LocalSGD"](model)
    train(model, optimizer, 0, 2)
    state = optimizer.state_dict()
    later = Elsewhere({**state, "mpisgd": {**state["mpisgd"], "version": 99, "own": None}})
    checkpoint.save(folder, 1, optimizer=later)
    with raises_everywhere(mpisgd.CheckpointError) as caught:
        checkpoint.load(folder, optimizer=optimizer)
    everyone("version 99" in caught.text and "reads version 1" in caught.text, caught.text)
