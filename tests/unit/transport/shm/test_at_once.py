"""What every rank combines for itself has the bits of the oracle, in whichever form it is added up."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.transport.ipc.segment import Segment
from mpisgd.transport.shm import at_once
from mpisgd.transport.shm.at_once import AllGatherAtOnce, AllReduceAtOnce, BroadcastAtOnce
from mpisgd.transport.shm.staging_memory import StagingMemory
from mpisgd.transport.torch_reduction import combine_in_rank_order

SHARE_BYTES = 2**16


def ranks_of(size: int) -> list[StagingMemory]:
    """The staging memory of a host as each of its ranks sees it."""
    segment = Segment(-1, SHARE_BYTES, size)
    shares = [segment.share(rank) for rank in range(size)]
    half = SHARE_BYTES // 2
    return [
        StagingMemory([[s[:half] for s in shares], [s[half:] for s in shares]], rank) for rank in range(size)
    ]


def values(size: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of very different sizes, so that another order of additions has other bits."""
    torch.manual_seed(size * numel)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return [torch.randint(limits.min, limits.max, (numel,), dtype=dtype) for _ in range(size)]
    scales = [10.0 ** torch.randint(-4, 5, (numel,)) for _ in range(size)]
    return [(torch.randn(numel, dtype=torch.float64) * scale).to(dtype) for scale in scales]


def reduced(size: int, given: list[Tensor], op: ReduceOp) -> list[Tensor]:
    """Play two operations, so that both buffers are used; return what the ranks have of the second."""
    results = [given, given]
    ranks = ranks_of(size)
    for turn in range(2):
        results[turn] = [mine.clone() for mine in given]
        pairs = [
            (AllReduceAtOnce(shm, mine.numel(), mine.dtype, op), mine)
            for shm, mine in zip(ranks, results[turn], strict=True)
        ]
        for begin in (True, False):
            for reduction, mine in pairs:
                (reduction.begin if begin else reduction.finish)(mine)
    return results[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX])
@pytest.mark.parametrize("size", [2, 3, 4, 9, 33])
def test_bits_of_the_oracle(size, op, dtype):
    for numel in (1, 2, 3, 7, 17, 1000, 1024, 2048):
        given = values(size, numel, dtype)
        wanted = combine_in_rank_order(given, op)
        for mine in reduced(size, given, op):
            assert torch.equal(mine.view(torch.uint8), wanted.view(torch.uint8)), (size, op, dtype, numel)


def test_numpy_adds_up_where_torch_would_need_many_calls(monkeypatch):
    monkeypatch.setattr(at_once, "combine_in_rank_order", None)
    assert (
        reduced(4, [torch.full((3,), float(rank)) for rank in range(4)], ReduceOp.SUM)[2].tolist()
        == [6.0] * 3
    )
    assert reduced(2, [torch.ones(3)] * 2, ReduceOp.SUM)[0].tolist() == [2.0] * 3
    with pytest.raises(TypeError):
        reduced(2, [torch.ones(3)] * 2, ReduceOp.MAX)


@pytest.mark.parametrize("values", [[3e38, 3e38, 1.0], [float("inf"), float("-inf"), 0.0]])
def test_nobody_is_warned_of_what_torch_says_nothing_about(values):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = reduced(3, [torch.tensor([value]) for value in values], ReduceOp.SUM)
    wanted = torch.tensor(values[:1]) + values[1] + values[2]
    assert all(torch.equal(mine, wanted) or mine.isnan().all() == wanted.isnan().all() for mine in results)


def test_any_shape_and_a_parameter():
    given = [torch.full((2, 3), float(rank), requires_grad=True) for rank in range(2)]
    results = reduced(2, [mine.detach() for mine in given], ReduceOp.SUM)
    assert results[0].tolist() == [[1.0] * 3] * 2
    scalars = reduced(3, [torch.tensor(float(rank)) for rank in range(3)], ReduceOp.AVG)
    assert [mine.item() for mine in scalars] == [1.0] * 3


def play(pairs: list[tuple[Any, Any]]) -> None:
    """Do what each rank does before all have come, and then the rest."""
    for operation, tensors in pairs:
        operation.begin(tensors)
    for operation, tensors in pairs:
        operation.finish(tensors)


@pytest.mark.parametrize("root", [0, 2])
def test_a_broadcast_leaves_the_tensor_of_root_alone(root):
    operations = [BroadcastAtOnce(shm, 12, root) for shm in ranks_of(3)]
    for turn in range(3):
        tensors = [torch.full((3,), 10.0 * turn + rank) for rank in range(3)]
        play(list(zip(operations, tensors, strict=True)))
        assert [mine.tolist() for mine in tensors] == [[10.0 * turn + root] * 3] * 3


def test_an_all_gather_may_come_from_where_it_goes_to():
    """As a rank's own slice of the output, or as that of another rank, which is overwritten."""
    operations = [AllGatherAtOnce(shm, 8) for shm in ranks_of(3)]
    for turn in range(3):
        outputs = [torch.full((6,), 10.0 * turn + rank) for rank in range(3)]
        inputs = [outputs[0][:2], outputs[1][:2], torch.full((2,), 10.0 * turn + 2)]
        play(list(zip(operations, zip(outputs, inputs, strict=True), strict=True)))
        wanted = [10.0 * turn + rank for rank in (0, 0, 1, 1, 2, 2)]
        assert [mine.tolist() for mine in outputs] == [wanted] * 3
