"""Every collective of torch.distributed, blocking and not, against a local oracle."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from closed_form import (
    COMPLEX,
    DTYPES,
    FLOATS,
    assert_equal,
    assert_near,
    combined,
    given,
    ops_of,
)
from verdicts import raises_everywhere

from mpisgd import CollectiveMismatch, ReduceOp, ShapeMismatch, UnsupportedOp

# torch 2.13 has other names for two of them; programs use the old ones, and so do the tests.
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch.distributed.\w+_tensor` is deprecated:FutureWarning")

N = 37  # odd, and more than a vector of anything

# All dtypes in the default group; in the others two that take different transports through the code.
CASES = [(dtype, "default") for dtype in DTYPES] + [
    (dtype, kind) for dtype in (torch.bfloat16, torch.int64) for kind in ("half", "reversed")
]
every_dtype = pytest.mark.parametrize(("dtype", "pg"), CASES, indirect=["pg"], ids=str)
BOTH = (False, True)


def inputs_of(pg: dist.ProcessGroup, dtype: torch.dtype, shape: tuple[int, ...] = (N,)) -> list[torch.Tensor]:
    return [given(rank, dtype, shape) for rank in range(pg.size())]


def blanks(pg: dist.ProcessGroup, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.zeros(N, dtype=dtype) for _ in range(pg.size())]


def torch_ops_of(dtype: torch.dtype) -> list[tuple[ReduceOp, dist.ReduceOp]]:
    """The reductions that torch lets this dtype have, by our name and by torch's."""
    ops = [ReduceOp.SUM, ReduceOp.AVG] if dtype in COMPLEX else ops_of(dtype)
    return [(op, getattr(dist.ReduceOp, op.name)) for op in ops]


def finish(work: dist.Work | None, async_op: bool) -> None:
    assert (work is not None) == async_op
    assert work is None or work.wait() is True


@every_dtype
def test_dist_all_reduce(pg, dtype):
    inputs = inputs_of(pg, dtype)
    for op, torch_op in torch_ops_of(dtype):
        for async_op in BOTH:
            mine = inputs[pg.rank()].clone()
            finish(dist.all_reduce(mine, torch_op, pg, async_op), async_op)
            assert_near(mine, combined(inputs, op))


@every_dtype
def test_dist_reduce_to_every_root(pg, dtype):
    inputs = inputs_of(pg, dtype)
    for place, root in enumerate(dist.get_process_group_ranks(pg)):
        for async_op in BOTH:
            mine = inputs[pg.rank()].clone()
            finish(dist.reduce(mine, root, group=pg, async_op=async_op), async_op)
            assert_near(mine, combined(inputs, ReduceOp.SUM) if pg.rank() == place else inputs[pg.rank()])
            mine = inputs[pg.rank()].clone()
            finish(dist.reduce(mine, group_dst=place, group=pg, async_op=async_op), async_op)
            assert_near(mine, combined(inputs, ReduceOp.SUM) if pg.rank() == place else inputs[pg.rank()])


@every_dtype
def test_dist_broadcast_from_every_root(pg, dtype):
    for place, root in enumerate(dist.get_process_group_ranks(pg)):
        for async_op in BOTH:
            mine, again = given(pg.rank(), dtype), given(pg.rank(), dtype)
            finish(dist.broadcast(mine, root, pg, async_op), async_op)
            finish(dist.broadcast(again, group_src=place, group=pg, async_op=async_op), async_op)
            assert_equal(mine, given(place, dtype))
            assert_equal(again, given(place, dtype))


@every_dtype
def test_dist_all_gather(pg, dtype):
    inputs, mine = inputs_of(pg, dtype), given(pg.rank(), dtype, (N,))
    for async_op in BOTH:
        outputs = blanks(pg, dtype)
        stacked, joined = torch.zeros(pg.size(), N, dtype=dtype), torch.zeros(pg.size() * N, dtype=dtype)
        finish(dist.all_gather(outputs, mine, pg, async_op), async_op)
        finish(dist.all_gather_into_tensor(stacked, mine, pg, async_op), async_op)
        finish(dist.all_gather_into_tensor(joined, mine, pg, async_op), async_op)
        assert_equal(torch.stack(outputs), torch.stack(inputs))
        assert_equal(stacked, torch.stack(inputs))
        assert_equal(joined, torch.cat(inputs))
        assert_equal(mine, inputs[pg.rank()])


@every_dtype
def test_dist_reduce_scatter(pg, dtype):
    inputs = inputs_of(pg, dtype, (pg.size(), N))
    mine = inputs[pg.rank()].clone()
    for op, torch_op in torch_ops_of(dtype):
        wanted = combined(inputs, op)[pg.rank()]
        for async_op in BOTH:
            by_list, by_tensor = torch.zeros(N, dtype=dtype), torch.zeros(N, dtype=dtype)
            finish(dist.reduce_scatter(by_list, list(mine), torch_op, pg, async_op), async_op)
            finish(dist.reduce_scatter_tensor(by_tensor, mine, torch_op, pg, async_op), async_op)
            assert_near(by_list, wanted)
            assert_near(by_tensor, wanted)
    assert_equal(mine, inputs[pg.rank()])


@every_dtype
def test_dist_gather_to_every_root(pg, dtype):
    inputs, mine = inputs_of(pg, dtype), given(pg.rank(), dtype, (N,))
    for place, root in enumerate(dist.get_process_group_ranks(pg)):
        for async_op in BOTH:
            outputs = blanks(pg, dtype) if pg.rank() == place else None
            finish(dist.gather(mine, outputs, root, pg, async_op), async_op)
            assert outputs is None or torch.equal(torch.stack(outputs), torch.stack(inputs))


@every_dtype
def test_dist_scatter_from_every_root(pg, dtype):
    for place, root in enumerate(dist.get_process_group_ranks(pg)):
        pieces = [given(10 * place + rank, dtype, (N,)) for rank in range(pg.size())]
        for async_op in BOTH:
            mine = torch.zeros(N, dtype=dtype)
            finish(dist.scatter(mine, pieces if pg.rank() == place else None, root, pg, async_op), async_op)
            assert_equal(mine, pieces[pg.rank()])


@every_dtype
def test_dist_all_to_all_is_a_transpose(pg, dtype):
    mine = [given(100 * pg.rank() + to, dtype, (N,)) for to in range(pg.size())]
    wanted = [given(100 * source + pg.rank(), dtype, (N,)) for source in range(pg.size())]
    for async_op in BOTH:
        outputs, joined = blanks(pg, dtype), torch.zeros(pg.size() * N, dtype=dtype)
        finish(dist.all_to_all(outputs, mine, pg, async_op), async_op)
        finish(dist.all_to_all_single(joined, torch.cat(mine), group=pg, async_op=async_op), async_op)
        assert_equal(torch.stack(outputs), torch.stack(wanted))
        assert_equal(joined, torch.cat(wanted))


def test_dist_all_to_all_of_lists_with_tensors_of_every_size(pg):
    rank, size = pg.rank(), pg.size()
    mine = [given(100 * rank + to, torch.float64, (to + 2 * rank,)) for to in range(size)]
    wanted = [given(100 * source + rank, torch.float64, (rank + 2 * source,)) for source in range(size)]
    for async_op in BOTH:
        outputs = [torch.zeros_like(want) for want in wanted]
        finish(dist.all_to_all(outputs, mine, pg, async_op), async_op)
        for output, want in zip(outputs, wanted, strict=True):
            assert_equal(output, want)


def test_dist_tensors_that_are_part_of_the_result_and_of_the_input(pg):
    """FSDP gathers out of a slice of what it gathers into."""
    inputs = inputs_of(pg, torch.float64, (pg.size() * N,))
    own = slice(pg.rank() * N, (pg.rank() + 1) * N)
    for async_op in BOTH:
        gathered, reduced = torch.zeros(pg.size() * N, dtype=torch.float64), inputs[pg.rank()].clone()
        gathered[own] = inputs[pg.rank()][own]
        finish(dist.all_gather_into_tensor(gathered, gathered[own], pg, async_op), async_op)
        finish(dist.reduce_scatter_tensor(reduced[own], reduced, group=pg, async_op=async_op), async_op)
        assert_equal(gathered, torch.cat([x[r * N : (r + 1) * N] for r, x in enumerate(inputs)]))
        assert_near(reduced[own], combined(inputs, ReduceOp.SUM)[own])


def test_dist_all_to_all_single_with_pieces_of_every_size(pg):
    """Rank r sends s + 2 r rows to rank s; rank 0 sends none to itself."""
    rank, size = pg.rank(), pg.size()
    sent, received = [to + 2 * rank for to in range(size)], [rank + 2 * source for source in range(size)]
    mine = torch.cat([given(100 * rank + to, torch.float64, (sent[to], 3)) for to in range(size)])
    wanted = torch.cat([given(100 * src + rank, torch.float64, (received[src], 3)) for src in range(size)])
    for async_op in BOTH:
        out = torch.zeros_like(wanted)
        finish(dist.all_to_all_single(out, mine, received, sent, pg, async_op), async_op)
        assert_equal(out, wanted)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_premultiplied_sums(pg, dtype):
    """PREMUL_SUM: a number or a tensor of one element, multiplied before the sum; what was given in stays."""
    inputs = inputs_of(pg, dtype, (pg.size(), N))
    wanted = combined(inputs, ReduceOp.SUM) * 0.25
    for factor in (0.25, torch.tensor([0.25], dtype=dtype)):
        op = dist._make_nccl_premul_sum(factor)
        for async_op in BOTH:
            whole, part, given_in = inputs[pg.rank()].clone(), torch.zeros(N, dtype=dtype), inputs[pg.rank()]
            finish(dist.all_reduce(whole, op, pg, async_op), async_op)
            finish(dist.reduce_scatter_tensor(part, given_in, op, pg, async_op), async_op)
            assert_near(whole, wanted)
            assert_near(part, wanted[pg.rank()])
            assert_equal(given_in, given(pg.rank(), dtype, (pg.size(), N)))


def test_a_premultiplied_reduce_leaves_what_others_gave_in(pg):
    # It was multiplied in place, on the ranks that do not get the result, too.
    inputs = inputs_of(pg, torch.float64)
    op = dist._make_nccl_premul_sum(0.25)
    for root in range(pg.size()):
        for async_op in BOTH:
            mine = inputs[pg.rank()].clone()
            finish(dist.reduce(mine, op=op, group=pg, async_op=async_op, group_dst=root), async_op)
            if pg.rank() == root:
                assert_near(mine, combined(inputs, ReduceOp.SUM) * 0.25)
            else:
                assert_equal(mine, inputs[pg.rank()])


def test_a_premultiplied_sparse_sum(pg):
    # The factor was left out.
    for factor in (0.25, torch.tensor([0.25], dtype=torch.float64)):
        mine = torch.eye(3, dtype=torch.float64).mul(pg.rank() + 1).to_sparse()
        dist.all_reduce(mine, dist._make_nccl_premul_sum(factor), pg)
        total = pg.size() * (pg.size() + 1) / 2
        assert_near(mine.to_dense(), torch.eye(3, dtype=torch.float64) * 0.25 * total)


def uneven(pg: dist.ProcessGroup, seed: int = 0) -> list[torch.Tensor]:
    """Rank r has 2 r rows: rank 0 has none."""
    return [given(rank + seed, torch.float64, (2 * rank, 3)) for rank in range(pg.size())]


def test_all_gather_of_uneven_sizes(pg):
    # torch's text allows it; it was refused.
    inputs = uneven(pg)
    for async_op in BOTH:
        out = [torch.zeros_like(each) for each in inputs]
        finish(dist.all_gather(out, inputs[pg.rank()], pg, async_op), async_op)
        for got, want in zip(out, inputs, strict=True):
            assert_equal(got, want)
    out[pg.rank()] = inputs[pg.rank()]  # in place, and strided
    out[0 if pg.rank() else -1] = torch.zeros(3, len(inputs[0 if pg.rank() else -1])).double().t()
    dist.all_gather(out, inputs[pg.rank()], pg)
    for got, want in zip(out, inputs, strict=True):
        assert_equal(got, want)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("pg", ["default"], indirect=True)
def test_uneven_sizes_of_which_ranks_differ_are_refused(pg):
    sizes = [rank + 1 for rank in range(pg.size())]
    with raises_everywhere(ShapeMismatch) as caught:
        out = [torch.zeros(size) for size in sizes]
        dist.all_gather(out, torch.zeros(sizes[pg.rank()] + 1), pg)
    assert f"{sizes[pg.rank()] + 1}" in caught.text
    sizes[0] += 7 * (pg.rank() == 1)
    with raises_everywhere(CollectiveMismatch) as caught:
        dist.all_gather([torch.zeros(size) for size in sizes], torch.zeros(sizes[pg.rank()]), pg)
    for size in (1, 8):
        assert f"shape=[{size}, 2" in caught.text
    dist.barrier(pg)


def test_reduce_scatter_of_uneven_sizes(pg):
    # As with NCCL; it was refused.
    size = pg.size()
    lists = [uneven(pg, 10 * rank) for rank in range(size)]
    wanted = sum(parts[pg.rank()] for parts in lists)
    for op, factor in ((dist.ReduceOp.SUM, 1.0), (dist._make_nccl_premul_sum(0.25), 0.25)):
        for async_op in BOTH:
            mine = [part.clone() for part in lists[pg.rank()]]
            out = torch.zeros(2 * pg.rank(), 3, dtype=torch.float64)
            finish(dist.reduce_scatter(out, mine, op, pg, async_op), async_op)
            assert_near(out, wanted * factor)
            for part, given_in in zip(mine, lists[pg.rank()], strict=True):
                assert_equal(part, given_in)
    with raises_everywhere(ShapeMismatch):
        dist.reduce_scatter(torch.zeros(2 * size + 1, 3).double(), lists[pg.rank()], group=pg)


def test_reductions_that_a_dtype_does_not_have_are_refused_and_the_group_goes_on(pg):
    for dtype, op in ((torch.bool, dist.ReduceOp.AVG), (torch.float32, dist.ReduceOp.BAND)):
        with raises_everywhere(UnsupportedOp):
            dist.all_reduce(torch.ones(3, dtype=dtype), op, pg)
    with raises_everywhere(ValueError):
        dist.all_reduce(torch.ones(3, dtype=torch.complex64), dist.ReduceOp.MAX, pg)
    dist.barrier(pg)


def test_sparse_all_reduce(pg):
    """Every rank has another number of entries, some in the same place, one twice."""
    rank, size = pg.rank(), pg.size()

    def sparse_of(r: int) -> torch.Tensor:
        rows = torch.tensor([0, 0, *range(1, r + 2)])
        return torch.sparse_coo_tensor(
            rows[None], given(r, torch.float64, (len(rows), 3)), (size + 2, 3), check_invariants=True
        )

    for async_op in BOTH:
        mine = sparse_of(rank)
        finish(dist.all_reduce(mine, group=pg, async_op=async_op), async_op)
        assert mine.is_sparse
        assert_near(mine.to_dense(), sum(sparse_of(r).to_dense() for r in range(size)))


def test_tensors_of_any_layout(pg):
    """Transposed, strided, empty, without dimensions, and parameters that require gradients."""
    whole = torch.stack([given(rank, torch.float64, (4, 6)) for rank in range(pg.size())])
    mine = whole[pg.rank()].t().contiguous().t()
    dist.all_reduce(mine, group=pg)
    assert_near(mine, whole.sum(0))
    every_second = torch.zeros(8, 6, dtype=torch.float64)
    every_second[::2] = whole[pg.rank()]
    dist.all_reduce(every_second[::2], group=pg)
    assert_near(every_second[::2], whole.sum(0))
    assert not every_second[1::2].any()
    empty, number = torch.zeros(0), torch.tensor(float(pg.rank()))
    dist.all_reduce(empty, group=pg)
    dist.all_reduce(number, group=pg)
    assert number.item() == sum(range(pg.size()))
    parameter = torch.nn.Parameter(whole[pg.rank()].clone())
    with torch.no_grad():
        dist.all_reduce(parameter, group=pg)
    assert_near(parameter.detach(), whole.sum(0))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_eight_bit_floats_travel(pg, dtype):
    inputs = [given(rank, torch.float32, (N,)).to(dtype) for rank in range(pg.size())]
    out, mine = torch.zeros(pg.size() * N, dtype=dtype), inputs[pg.rank()].clone()
    dist.all_gather_into_tensor(out, mine, pg)
    assert torch.equal(out.view(torch.uint8), torch.cat(inputs).view(torch.uint8))
    dist.broadcast(mine, group_src=0, group=pg)
    assert torch.equal(mine.view(torch.uint8), inputs[0].view(torch.uint8))
