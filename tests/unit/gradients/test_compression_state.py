"""What compressors keep goes with the parameters, whatever buckets they are in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mpisgd
from mpisgd.compress.compressor import BucketLayout
from mpisgd.gradients.bucketing import Bucket
from mpisgd.gradients.compression_state import CompressionState, Untouched
from mpisgd.gradients.gradient_flags import DENSE, MISSING
from mpisgd.job.lifecycle import world
from mpisgd.job.threads_as_ranks import run_ranks

NUMELS = {0: 2, 1: 3, 2: 1}


class Keeping:
    """A reducer that keeps what it is given."""

    leads_alone = False

    def __init__(self, **state: Any) -> None:
        self.state: dict[str, Any] = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)

    def reset(self) -> None:
        self.state = {}


def plan(*buckets: tuple[tuple[int, ...], Keeping]) -> list[Any]:
    slots = []
    for indices, reducer in buckets:
        offsets = [sum(NUMELS[i] for i in indices[:place]) for place in range(len(indices))]
        numel = sum(NUMELS[i] for i in indices)
        slots.append(
            SimpleNamespace(bucket=Bucket("float32:cpu", indices, tuple(offsets), numel), reducer=reducer)
        )
    return slots


def first_plan() -> Any:
    kept = Keeping(residual=torch.tensor([10.0, 11, 12, 0, 1]), factors=["Q1", "Q0"], steps=7, whole={1: 2})
    return plan(((1, 0), kept), ((2,), Keeping(residual=torch.tensor([20.0]), factors=[None], steps=7)))


def test_another_plan_gets_what_its_parameters_had():
    state, new = CompressionState(), [Keeping(), Keeping()]
    state.move_to(first_plan())
    state.move_to(plan(((0, 2), new[0]), ((1,), new[1])))
    assert new[0].state["residual"].tolist() == [0, 1, 20]
    assert new[0].state["factors"] == ["Q0", None]
    assert new[1].state["residual"].tolist() == [10, 11, 12]
    assert new[1].state["factors"] == ["Q1"]
    assert [reducer.state["steps"] for reducer in new] == [7, 7]
    assert not any("whole" in reducer.state for reducer in new)


def test_the_same_bucket_gets_what_cannot_be_taken_apart():
    state, new = CompressionState(), Keeping()
    state.move_to(first_plan())
    state.move_to(plan(((1, 0), new)))
    assert new.state["whole"] == {1: 2}
    assert new.state["residual"].tolist() == [10, 11, 12, 0, 1]


def test_a_parameter_that_is_in_no_bucket_for_a_while_keeps_what_it_had():
    state, new = CompressionState(), Keeping()
    state.move_to(first_plan())
    state.move_to(plan(((0,), Keeping())))
    assert state.pieces().own["own"]["2"]["residual"].tolist() == [20]
    state.move_to(plan(((2, 0), new)))
    assert new.state["residual"].tolist() == [20, 0, 1]


@pytest.mark.parametrize("has_own", [True, False])
@pytest.mark.parametrize("early", [True, False])
def test_a_loaded_state_is_that_of_this_rank_or_what_all_have(has_own, early):
    first, second, reducer = CompressionState(), CompressionState(), Keeping(residual=torch.ones(5), steps=1)
    first.move_to(first_plan())
    saved = first.pieces()
    if not early:
        second.move_to(plan(((0, 1), reducer)))
    second.take(saved.alike, saved.own if has_own else None)
    saved.own["own"]["0"]["residual"].zero_()  # it was copied
    if early:
        reducer.reset()
        second.move_to(plan(((0, 1), reducer)))
    assert ("residual" in reducer.state) == has_own
    assert not has_own or reducer.state["residual"].tolist() == [0, 1, 10, 11, 12]
    assert reducer.state["steps"] == 7
    assert reducer.state["factors"] == ["Q0", "Q1"]


def test_nothing_loaded_begins_anew():
    state, reducer = CompressionState(), Keeping(residual=torch.ones(2))
    state.move_to(plan(((0,), reducer)))
    state.take({}, {})
    assert reducer.state == {}
    assert state.pieces() == ({}, {})


def test_the_order_of_packing_is_saved_beside_what_the_reducers_keep():
    first, second = CompressionState(), CompressionState()
    first.move_to(first_plan())
    first.order = (1, 0, 2)
    saved = first.pieces()
    assert {key: entries["place"] for key, entries in saved.alike.items()} == {"1": 0, "0": 1, "2": 2}
    second.take(saved.alike, saved.own)
    assert second.order == (1, 0, 2)
    assert second.pieces().alike == saved.alike
    reducer = Keeping()
    second.move_to(plan(((1, 0, 2), reducer)))
    assert "place" not in reducer.state
    second.take({}, {})
    assert second.order == ()


def test_what_an_owner_left_out_of_a_parameter_without_a_gradient_stays_where_the_chunk_is_the_same():
    """Where a rank is lost, that may be another one: of 200 elements 128 to 200, and then 0 to 128."""

    def kept_of(begin: int, length: int) -> list[float]:
        layout = BucketLayout((torch.Size([100]), torch.Size([100])), torch.float64)
        reducer = mpisgd.compress.OneBit(two_step=True).reducer(layout)
        kept = {"server_error": torch.arange(1.0, length + 1)[None], "server_begin": torch.tensor(begin)}
        reducer.load_state_dict(kept)
        slot: Any = SimpleNamespace(bucket=Bucket("float64:cpu", (0, 1), (0, 100), 200), reducer=reducer)
        untouched = Untouched(slot, bytes([MISSING, DENSE]))
        reducer.reduce(torch.ones(200, dtype=torch.float64), world(), mpisgd.ReduceOp.AVG)
        untouched.put_back()
        left: list[float] = reducer.state.server_error.flatten()[: 100 if mpisgd.rank() == 0 else 0].tolist()
        return left

    assert run_ranks(2, lambda: kept_of(*[(0, 128), (128, 72)][mpisgd.rank()]))[0] == list(range(1, 101))
    assert not any(run_ranks(2, lambda: kept_of(*[(128, 72), (0, 128)][mpisgd.rank()]))[0])
