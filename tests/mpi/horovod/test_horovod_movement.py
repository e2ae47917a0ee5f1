"""`allgather`, `broadcast`, `alltoall`, `reducescatter`: rows go where they should, in every form."""

from __future__ import annotations

import pytest
import torch
from closed_form import DTYPES, assert_equal, given
from reductions import everyones, near, wanted
from verdicts import raises_everywhere

import mpisgd.horovod as hvd


def wait(handle):
    return hvd.synchronize(handle)


# --- allgather ----------------------------------------------------------------------------------------


def rows(rank: int, dtype: torch.dtype = torch.float32, first: int = 0) -> torch.Tensor:
    """As many rows as the rank's number, and `first` more."""
    return given(rank, dtype, (rank + first, 3))


def test_allgather_of_ragged_tensors_of_every_dtype():
    for first in (0, 2):  # with and without a rank that has nothing
        handles = [
            hvd.allgather_async(rows(hvd.rank(), dtype, first), name=f"gather.{dtype}") for dtype in DTYPES
        ]
        for dtype, handle in zip(DTYPES, handles, strict=True):
            assert_equal(wait(handle), torch.cat([rows(rank, dtype, first) for rank in range(hvd.size())]))


def test_allgather_forms_and_layouts():
    mine = rows(hvd.rank(), first=1)
    right = torch.cat([rows(rank, first=1) for rank in range(hvd.size())])
    assert_equal(hvd.allgather(mine), right)
    assert_equal(hvd.allgather(mine.t().contiguous().t(), name="strided"), right)
    kinds = [(torch.int8, (2,)), (torch.float64, (hvd.rank(), 2)), (torch.bool, (0, 5))]
    tensors = [given(hvd.rank(), dtype, shape) for dtype, shape in kinds]
    for results in (
        hvd.grouped_allgather(tensors),
        wait(hvd.grouped_allgather_async(tensors, name="several")),
    ):
        assert_equal(results[0], torch.cat(everyones(torch.int8, (2,))))
        assert_equal(results[1], torch.cat([given(r, torch.float64, (r, 2)) for r in range(hvd.size())]))
        assert results[2].shape == (0, 5)
    everyones_rows = hvd.allgather(torch.zeros(3, 0))
    assert everyones_rows.shape == (3 * hvd.size(), 0)


# --- broadcast ----------------------------------------------------------------------------------------


def test_broadcast_from_every_root_of_every_dtype():
    mine = {dtype: given(hvd.rank(), dtype) for dtype in DTYPES}
    handles = {
        (root, dtype): hvd.broadcast_async(x, root, name=f"cast.{root}.{dtype}")
        for root in range(hvd.size())
        for dtype, x in mine.items()
    }
    for (root, dtype), handle in handles.items():
        assert_equal(wait(handle), given(root, dtype))
    for dtype, x in mine.items():
        assert_equal(x, given(hvd.rank(), dtype))


def test_broadcast_forms():
    root = hvd.size() - 1
    right = given(root, torch.float64)
    assert_equal(hvd.broadcast(given(hvd.rank(), torch.float64), root), right)
    for form in (hvd.broadcast_, lambda *a, **k: wait(hvd.broadcast_async_(*a, **k))):
        x = given(hvd.rank(), torch.float64)
        assert form(x, root, name="in place") is x
        assert_equal(x, right)


def turned_round(x: torch.Tensor) -> torch.Tensor:
    """The same tensor with its dimensions in the opposite order."""
    return x.permute(tuple(reversed(range(x.dim()))))


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,), (3, 5)], ids=str)
def test_broadcast_shapes_and_layouts(shape):
    x = given(hvd.rank(), torch.float32, shape)
    turned = turned_round(given(hvd.rank(), torch.float32, shape[::-1]))
    handles = [hvd.broadcast_async_(x, 0, "straight"), hvd.broadcast_async_(turned, 0, "turned")]
    assert_equal(wait(handles[0]), given(0, torch.float32, shape))
    right = turned_round(given(0, torch.float32, shape[::-1]))
    assert_equal(wait(handles[1]), right)


def test_broadcast_between_different_layouts():
    square = given(hvd.rank(), torch.float32, (4, 4))
    x = square if hvd.rank() == 0 else square.t()
    hvd.broadcast_(x, 0)
    assert_equal(x.contiguous(), given(0, torch.float32, (4, 4)))


@pytest.mark.parametrize("root", [-1, 99])
def test_a_root_that_is_not_there(root):
    with raises_everywhere(ValueError) as caught:
        hvd.broadcast(torch.zeros(1), root)
    assert f"broadcast received invalid root rank {root} for provided process set" in caught.text


# --- alltoall -----------------------------------------------------------------------------------------


def num_rows(source: int, to: int) -> int:
    """Differs by source and destination; nobody sends to the first rank but itself."""
    return (source + 2 * to) % 4 if to else int(source == 0)


def piece(source: int, to: int, dtype: torch.dtype) -> torch.Tensor:
    return given(5 * source + to, dtype, (num_rows(source, to), 2))


def test_alltoall_with_splits_of_every_dtype():
    rank, ranks = hvd.rank(), range(hvd.size())
    splits = [num_rows(rank, to) for to in ranks]
    handles = [
        hvd.alltoall_async(torch.cat([piece(rank, to, dtype) for to in ranks]), splits, name=f"all.{dtype}")
        for dtype in DTYPES
    ]
    for dtype, handle in zip(DTYPES, handles, strict=True):
        received, counts = wait(handle)
        assert_equal(received, torch.cat([piece(source, rank, dtype) for source in ranks]))
        assert counts.tolist() == [num_rows(source, rank) for source in ranks]
        assert counts.dtype == torch.int32


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, list, tuple])
def test_alltoall_takes_splits_of_any_kind_and_may_leave_rows_behind(kind):
    rank, ranks = hvd.rank(), range(hvd.size())
    counts = [num_rows(rank, to) for to in ranks]
    splits = torch.tensor(counts, dtype=kind) if isinstance(kind, torch.dtype) else kind(counts)
    tensor = torch.cat([*[piece(rank, to, torch.float32) for to in ranks], torch.full((3, 2), torch.nan)])
    received, _ = hvd.alltoall(tensor, splits)
    assert_equal(received, torch.cat([piece(source, rank, torch.float32) for source in ranks]))


@pytest.mark.parametrize("each", [0, 1, 3])
def test_alltoall_without_splits_returns_a_tensor_alone(each):
    rank, size = hvd.rank(), hvd.size()
    mine = given(rank, torch.float32, (each * size, 2))
    right = [given(r, torch.float32, (each * size, 2))[each * rank : each * (rank + 1)] for r in range(size)]
    assert_equal(hvd.alltoall(mine), torch.cat(right))
    assert_equal(wait(hvd.alltoall_async(mine.t().contiguous().t())), torch.cat(right))


# --- reducescatter ------------------------------------------------------------------------------------


def own(total: torch.Tensor) -> torch.Tensor:
    return total.tensor_split(hvd.size())[hvd.rank()]  # the first ranks have a row more if need be


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_reducescatter_with_and_without_a_remainder(op):
    kinds = [
        (dtype, (length, 3))
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8)
        for length in {0, 1, hvd.size(), 2 * hvd.size() + 1, 7}
    ]
    handles = [
        hvd.reducescatter_async(given(hvd.rank(), dtype, shape), f"scatter.{dtype}.{shape}", getattr(hvd, op))
        for dtype, shape in kinds
    ]
    for (dtype, shape), handle in zip(kinds, handles, strict=True):
        near(wait(handle), own(wanted(op, everyones(dtype, shape))))


def test_reducescatter_forms_factors_and_layouts():
    mine = given(hvd.rank(), torch.float64, (7, 2))
    right = own(wanted("Sum", everyones(torch.float64, (7, 2))))
    near(hvd.reducescatter(mine, op=hvd.Sum), right)
    near(hvd.reducescatter(mine), right / hvd.size())
    near(hvd.reducescatter(mine.t().contiguous().t(), op=hvd.Sum), right)
    near(
        hvd.reducescatter(mine, None, hvd.Compression.none, hvd.Sum, hvd.global_process_set, 0.5, 3.0),
        right * 1.5,
    )
    assert_equal(mine, given(hvd.rank(), torch.float64, (7, 2)))
    tensors = [mine, given(hvd.rank(), torch.int32, (5,))]
    many = [
        hvd.grouped_reducescatter(tensors, op=hvd.Sum),
        wait(hvd.grouped_reducescatter_async(tensors, op=hvd.Sum)),
    ]
    for results in many:
        near(results[0], right)
        near(results[1], own(wanted("Sum", everyones(torch.int32, (5,)))))
    half = hvd.reducescatter(mine.float(), compression=hvd.Compression.fp16)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half.double(), right / hvd.size(), rtol=2e-2, atol=2e-2)


def test_reducescatter_has_no_other_reductions():
    with raises_everywhere(hvd.HorovodInternalError) as caught:
        hvd.reducescatter(torch.zeros(4), op=hvd.Max)
    assert "only supports AVERAGE and SUM" in caught.text


@pytest.mark.parametrize("operation", [hvd.allgather, hvd.alltoall, hvd.reducescatter])
def test_tensors_without_rows_are_refused(operation):
    with raises_everywhere(ValueError) as caught:
        operation(torch.tensor(1.0))
    assert "no dimension" in caught.text
