"""The arithmetic behind reductions: what MPI adds, what torch adds, and the oracle of both."""

from __future__ import annotations

import pytest
import torch

from mpisgd.dtypes import BITWISE, FLOATING, INTEGER, REDUCIBLE, ReduceOp, check_op
from mpisgd.errors import UnsupportedOp
from mpisgd.transport.mpi_reduction import for_mpi
from mpisgd.transport.torch_reduction import AT_ONCE_NUMEL, COMBINE, combine, combine_in_rank_order, for_torch

NAN = float("nan")


def allowed(op: ReduceOp, dtype: torch.dtype) -> bool:
    try:
        check_op("test", op, dtype)
    except UnsupportedOp:
        return False
    return True


CASES = [(op, dtype) for op in ReduceOp for dtype in REDUCIBLE if allowed(op, dtype)]


def example(dtype: torch.dtype, shift: int) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.tensor([True, False, bool(shift % 2), False])
    values = torch.tensor([3, 100 + shift, 7 * shift, 1])
    if dtype in INTEGER and not dtype.is_signed:
        values[1] = 255 - shift  # with the sign bit set, in the narrowest of them
    return values.to(dtype)


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=str)
def test_both_forms_lead_to_the_oracle(op, dtype):
    """Adding in the form for MPI or for torch, then finishing, equals adding in rank order."""
    pieces = [example(dtype, shift) for shift in range(3)]
    copies = [piece.clone() for piece in pieces]
    wanted = combine_in_rank_order(pieces, op)
    assert wanted.dtype == dtype
    for piece, copy in zip(pieces, copies, strict=True):
        assert torch.equal(piece, copy)
    total, arithmetic, finish = for_torch(pieces[0].clone(), op, 3)
    for piece in pieces[1:]:
        combine(arithmetic, total, for_torch(piece, op, 3)[0])
    assert torch.equal(finish(total), wanted)
    total, name, finish = for_mpi(pieces[0].clone(), op, 3)
    if total.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return  # torch cannot add these: only MPI can, and the tests under mpirun show that it does
    for piece in pieces[1:]:
        COMBINE[ReduceOp[name]](total, for_mpi(piece.clone(), op, 3)[0], out=total)
    assert torch.equal(finish(total), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_rounded_once(dtype):
    """1 + 2**-9 + 2**-9 ... is lost when every partial sum is rounded to a half."""
    small = 2.0**-12
    pieces = [torch.tensor([1.0], dtype=dtype)] + [torch.tensor([small], dtype=dtype)] * 64
    exact = torch.tensor([1.0 + 64 * small]).to(dtype)
    assert exact != 1
    assert torch.equal(combine_in_rank_order(pieces, ReduceOp.SUM), exact)
    work, name, _ = for_mpi(pieces[0], ReduceOp.AVG, 65)
    assert (work.dtype, name) == (torch.float32, "SUM")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX])
def test_two_halves_are_rounded_as_from_float32(dtype, op):
    """All bit patterns, against others: tiny ones, huge ones, infinities, NaN."""
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)
    torch.manual_seed(0)
    for other in (every.flip(0), every.roll(1), every[torch.randperm(2**16)]):
        wide = COMBINE[op](every.float(), other.float())
        wanted = (wide / 2 if op is ReduceOp.AVG else wide).to(dtype)
        assert torch.allclose(combine_in_rank_order([every, other], op), wanted, 0.0, 0.0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
def test_order_of_floats_survives_their_keys(dtype, op):
    """MPI gets integers: their order is that of the numbers, and NaN wins."""
    values = torch.tensor([-float("inf"), -3.5, -1e-7, -0.0, 0.0, 1e-7, 2.0, float("inf")]).to(dtype)
    keys, name, finish = for_mpi(values, op, 2)
    assert name == op.name
    assert not keys.dtype.is_floating_point
    assert (keys[1:] >= keys[:-1]).all()
    assert torch.equal(finish(keys).view(torch.uint8), values.view(torch.uint8))
    sick = for_mpi(torch.tensor([NAN, -NAN]).to(dtype), op, 2)[0]
    assert (sick > keys.max()).all() if op is ReduceOp.MAX else (sick < keys.min()).all()
    assert torch.isnan(finish(sick)).all()


@pytest.mark.parametrize("op", [op for op in ReduceOp if op not in BITWISE])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.uint16, torch.int16])
def test_mpi_never_adds_narrow_integers(op, dtype):
    """Open MPI's vector instructions saturate where they should wrap around."""
    if allowed(op, dtype):
        assert for_mpi(torch.ones(3).to(dtype), op, 2)[0].dtype is torch.int32


@pytest.mark.parametrize("op", ["mean", None, 0, torch.distributed.ReduceOp.PREMUL_SUM], ids=str)
def test_what_is_no_op_is_refused(op):
    with pytest.raises(UnsupportedOp, match="expected one of SUM, AVG"):
        check_op("all_reduce", op, torch.float32)


def test_dtypes_without_arithmetic_are_refused():
    for dtype in (torch.float8_e4m3fn, torch.complex32):
        with pytest.raises(UnsupportedOp, match=str(dtype)):
            check_op("all_reduce", ReduceOp.SUM, dtype)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("place", [None, 0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_an_average_in_one_pass_has_the_bits_of_two(count, place, dtype):
    draw = torch.Generator().manual_seed(count)
    scale = 10.0 ** torch.randint(-30, 30, (AT_ONCE_NUMEL + 3,), generator=draw)
    pieces = [torch.randn(AT_ONCE_NUMEL + 3, dtype=dtype, generator=draw) * scale for _ in range(count)]
    wanted = pieces[0].clone()
    for piece in pieces[1:]:
        wanted += piece
    wanted = (wanted / count).to(dtype)
    out = None if place is None else pieces[place]
    assert torch.equal(combine_in_rank_order(pieces, ReduceOp.AVG, out=out), wanted)


@pytest.mark.parametrize("dtype", INTEGER, ids=str)
@pytest.mark.parametrize("count", [2, 3, 300])
def test_an_average_of_integers_is_truncated_toward_zero(dtype, count):
    """As in C, and in NCCL; the sum wraps around before. 300 ranks are more than 8 bits can count."""
    limits = torch.iinfo(dtype)
    mine = [limits.min, limits.max, limits.max - 1, 7, 1, 0]
    mine += [-7, -1, -301, limits.min + 1] if dtype.is_signed else [limits.max // 2 + 3]
    first = torch.tensor([value if limits.min <= value <= limits.max else 0 for value in mine], dtype=dtype)
    others = [torch.zeros_like(first) for _ in range(count - 2)] + [torch.ones_like(first)]
    sums = [_wrapped(value + 1, limits) for value in first.tolist()]
    wanted = [abs(value) // count * (1 if value >= 0 else -1) for value in sums]
    assert combine_in_rank_order([first, *others], ReduceOp.AVG).tolist() == wanted


def _wrapped(value: int, limits: torch.iinfo) -> int:
    return (value - limits.min) % 2**limits.bits + limits.min


def test_there_is_no_average_of_bools():
    with pytest.raises(UnsupportedOp, match=r"AVG of torch\.bool is not defined"):
        check_op("all_reduce", ReduceOp.AVG, torch.bool)
