"""Each collective by shared memory and by MPI's own: around the borders of chunks, from every root."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from closed_form import assert_equal, assert_near, combined, given
from torch import Tensor
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd import Group, ReduceOp
from mpisgd.collectives import dispatch
from mpisgd.collectives.all_gather import all_gather_ragged
from mpisgd.transport.shm import data_movement, reduction
from mpisgd.transport.shm.transport import ShmTransport

CHUNK_BYTES = 2**12  # here: the borders are the same, and there are more of them in a short time
ONE_PER_CLASS = [torch.uint8, torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128]
# In chunks of a stream: nothing, one element, just below, at and above one, and several with a rest.
LENGTHS = ["0", "1", "3", "chunk - 1", "chunk", "chunk + 1", "3 * chunk + 7"]


@pytest.fixture
def small_chunks(monkeypatch) -> None:
    for module in (data_movement, reduction):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES)


@pytest.fixture(params=["node", "mpi"])
def transport(request, groups, monkeypatch) -> str:
    """The transport that every collective takes, whatever is the better one."""
    if request.param == "node" and groups["world"].shared_memory is None:
        pytest.skip("one rank, several hosts, or MPISGD_SHARED_MEMORY=0")
    taken = groups["world"].transports[:1] if request.param == "node" else ()
    monkeypatch.setattr(dispatch, "transport_for", lambda *_, **__: next(iter(taken), None))
    monkeypatch.setattr(groups["world"], "known_calls", {})  # of those that take another one
    for small in ("broadcast_at_once", "all_gather_at_once"):  # that have one chunk and no steps
        monkeypatch.setattr(ShmTransport, small, lambda *_: None)
    return request.param


@pytest.fixture
def world(groups) -> Group:
    return groups["world"]


def length_of(text: str, dtype: torch.dtype) -> int:
    return eval(text, {"chunk": CHUNK_BYTES // dtype.itemsize})


def spread_out(tensor: Tensor) -> Tensor:
    """The same elements, every other place in memory."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def blank(numel: int, dtype: torch.dtype, apart: bool) -> Tensor:
    return spread_out(torch.zeros(numel, dtype=dtype)) if apart else torch.zeros(numel, dtype=dtype)


# -- one check per collective: does it once, on inputs that differ by rank, and looks at everything afterwards


def check_broadcast(world: Group, dtype: torch.dtype, numel: int, apart: bool) -> None:
    for root in range(world.size):
        mine = given(world.rank, dtype, (numel,))
        mine = spread_out(mine) if apart else mine
        mpisgd.broadcast(mine, root)
        assert_equal(mine, given(root, dtype, (numel,)))


def check_gather(world: Group, dtype: torch.dtype, numel: int, apart: bool) -> None:
    for root in range(world.size):
        mine = given(world.rank + root, dtype, (numel,))
        outputs = [blank(numel, dtype, apart) for _ in range(world.size)] if world.rank == root else None
        mpisgd.gather(mine, outputs, root)
        assert_equal(mine, given(world.rank + root, dtype, (numel,)))
        for rank, output in enumerate(outputs or ()):
            assert_equal(output, given(rank + root, dtype, (numel,)))


def check_scatter(world: Group, dtype: torch.dtype, numel: int, apart: bool) -> None:
    for root in range(world.size):
        pieces = [given(rank + 7 * root, dtype, (numel,)) for rank in range(world.size)]
        mine = blank(numel, dtype, apart)
        mpisgd.scatter(mine, pieces if world.rank == root else None, root)
        assert_equal(mine, given(world.rank + 7 * root, dtype, (numel,)))


def check_all_gather(world: Group, dtype: torch.dtype, numel: int, apart: bool) -> None:
    inputs = [given(rank, dtype, (numel,)) for rank in range(world.size)]
    outputs = [blank(numel, dtype, apart) for _ in inputs]
    joined = blank(world.size * numel, dtype, apart)
    mpisgd.all_gather(outputs, inputs[world.rank])
    mpisgd.all_gather_into_tensor(joined, inputs[world.rank])
    assert_equal(torch.cat(outputs), torch.cat(inputs))
    assert_equal(joined, torch.cat(inputs))


def check_all_gather_ragged(world: Group, dtype: torch.dtype, numel: int, apart: bool) -> None:
    mine = given(world.rank, dtype, (numel + world.rank,))
    pieces = all_gather_ragged(spread_out(mine) if apart else mine)
    for rank, piece in enumerate(pieces):
        assert_equal(piece, given(rank, dtype, (numel + rank,)))


def check_all_to_all(world: Group, dtype: torch.dtype, numel: int, apart: bool) -> None:
    gives = [given(world.rank + 10 * dst, dtype, (numel,)) for dst in range(world.size)]
    output = blank(world.size * numel, dtype, apart)
    mpisgd.all_to_all_single(output, torch.cat(gives))
    wanted = [given(src + 10 * world.rank, dtype, (numel,)) for src in range(world.size)]
    assert_equal(output, torch.cat(wanted))


def check_all_to_all_of_any_sizes(world: Group, dtype: torch.dtype, numel: int, apart: bool) -> None:
    """Rank s gives rank d numel * (s > d) + d elements: some of the streams are longer than others."""
    gives = [numel * (world.rank > dst) + dst for dst in range(world.size)]
    takes = [numel * (src > world.rank) + world.rank for src in range(world.size)]
    pieces = [given(world.rank + 10 * dst, dtype, (length,)) for dst, length in enumerate(gives)]
    wanted = [given(src + 10 * world.rank, dtype, (length,)) for src, length in enumerate(takes)]
    output, outputs = blank(sum(takes), dtype, apart), [blank(length, dtype, apart) for length in takes]
    mpisgd.all_to_all_single(output, torch.cat(pieces), takes, gives)
    mpisgd.all_to_all(outputs, pieces)
    assert_equal(output, torch.cat(wanted))
    assert_equal(torch.cat(outputs), torch.cat(wanted))


def check_reduce(world: Group, dtype: torch.dtype, numel: int, apart: bool) -> None:
    inputs = [given(rank, dtype, (numel,)) for rank in range(world.size)]
    for root in range(world.size):
        mine = spread_out(inputs[world.rank]) if apart else inputs[world.rank].clone()
        mpisgd.reduce(mine, root)
        if world.rank == root:
            assert_near(mine, combined(inputs, ReduceOp.SUM))
        else:
            assert_equal(mine, inputs[world.rank])


def check_reduce_scatter(world: Group, dtype: torch.dtype, numel: int, apart: bool) -> None:
    inputs = [given(rank, dtype, (world.size, numel)) for rank in range(world.size)]
    mine, by_list, by_tensor = inputs[world.rank].clone(), *(blank(numel, dtype, apart) for _ in range(2))
    mpisgd.reduce_scatter(by_list, list(mine))
    mpisgd.reduce_scatter_tensor(by_tensor, mine)
    wanted = combined(inputs, ReduceOp.SUM)[world.rank]
    assert_near(by_list, wanted)
    assert_near(by_tensor, wanted)
    assert_equal(mine, inputs[world.rank])


def check_coalesced(world: Group, dtype: torch.dtype, numel: int, apart: bool) -> None:
    """Many small tensors around a large one: several in a chunk, and one in several."""
    lengths = [3, 0, numel, 1, 5]
    for root in range(world.size):
        tensors = [given(world.rank + i, dtype, (length,)) for i, length in enumerate(lengths)]
        tensors = [spread_out(tensor) for tensor in tensors] if apart else tensors
        mpisgd.broadcast_coalesced(tensors, root)
        for i, tensor in enumerate(tensors):
            assert_equal(tensor, given(root + i, dtype, (lengths[i],)))


CHECKS: dict[str, Callable[[Group, torch.dtype, int, bool], None]] = {
    name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")
}


@pytest.mark.parametrize("collective", CHECKS)
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_around_the_borders_of_chunks(transport, small_chunks, world, collective, length):
    CHECKS[collective](world, torch.float32, length_of(length, torch.float32), False)


@pytest.mark.parametrize("collective", CHECKS)
def test_several_chunks_as_large_as_they_are(transport, world, collective):
    CHECKS[collective](world, torch.float32, 2 * data_movement.CHUNK_BYTES // 4 + 3, False)


@pytest.mark.parametrize("collective", CHECKS)
@pytest.mark.parametrize("dtype", ONE_PER_CLASS, ids=str)
def test_dtypes_and_scattered_memory(transport, small_chunks, world, collective, dtype):
    for apart, text in ((True, "chunk + 1"), (False, "chunk // 2"), (True, "5")):
        CHECKS[collective](world, dtype, length_of(text, dtype), apart)


def test_the_transport_is_the_one_that_was_asked_for(transport, world):
    before = world.queue.communicator.calls.total()
    mpisgd.broadcast(torch.zeros(5), 0)
    mpisgd.reduce(torch.zeros(5), 0)
    mpisgd.all_gather_into_tensor(torch.zeros(5 * world.size), torch.zeros(5))
    assert world.queue.communicator.calls.total() - before == (0 if transport == "node" else 3)


@pytest.mark.parametrize("steps", [reduction.reduce_at_root, reduction.reduce_in_parts])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint16, torch.bool], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_reductions_add_in_rank_order(small_chunks, world, monkeypatch, steps, dtype, length):
    """Bit for bit, whoever adds; AVG and products, too, wherever the dtype has them."""
    if world.shared_memory is None:
        pytest.skip("one rank, several hosts, or MPISGD_SHARED_MEMORY=0")
    monkeypatch.setattr(ShmTransport, "reduce", steps)
    inputs = [given(rank, dtype, (length_of(length, dtype),)) for rank in range(world.size)]
    for op in (ReduceOp.SUM, ReduceOp.MAX if dtype is torch.bool else ReduceOp.AVG):
        for root in range(world.size):
            mine = inputs[world.rank].clone()
            mpisgd.reduce(mine, root, op)
            assert_equal(mine, combined(inputs, op) if world.rank == root else inputs[world.rank])


@pytest.mark.parametrize("numel", [5, CHUNK_BYTES // 4 + 3])
def test_what_a_rank_gives_may_lie_where_results_arrive(transport, small_chunks, world, numel):
    rank, size = world.rank, world.size
    inputs = [given(other, torch.float32, (numel,)) for other in range(size)]
    outputs = [torch.zeros(numel) for _ in range(size)]
    outputs[rank].copy_(inputs[rank])
    mpisgd.all_gather(outputs, outputs[rank])
    assert_equal(torch.cat(outputs), torch.cat(inputs))
    outputs[size - 1].copy_(inputs[rank])  # where the last one's will arrive
    mpisgd.all_gather(outputs, outputs[size - 1])
    assert_equal(torch.cat(outputs), torch.cat(inputs))
    for root in range(size):
        mpisgd.gather(outputs[rank], outputs if rank == root else None, root)
        assert_equal(torch.cat(outputs), torch.cat(inputs))
        mpisgd.scatter(outputs[root], outputs if rank == root else None, root)
        if rank != root:
            assert_equal(outputs[root], inputs[rank])
            outputs[root].copy_(inputs[root])
    both = torch.cat(inputs).view(size, numel)
    mpisgd.reduce_scatter_tensor(both[rank], both)
    assert_near(both[rank], inputs[rank] * size)


def test_operations_of_all_kinds_follow_each_other_without_a_race(transport, small_chunks, world):
    """A chunk is written before the consistency check: nobody may still be reading there."""
    for round_ in range(24):
        numel = (1, 700, CHUNK_BYTES // 4 + 5, CHUNK_BYTES // 2)[round_ % 4]
        if round_ % world.size == world.rank:
            torch.randn(150, 150) @ torch.randn(150, 150)
        for collective in ("broadcast", "all_gather", "reduce", "all_to_all", "reduce_scatter", "scatter"):
            CHECKS[collective](world, torch.float32, numel, False)
            mine = given(world.rank + round_, torch.float64, (numel,))
            mpisgd.all_reduce(mine)
            inputs = [given(rank + round_, torch.float64, (numel,)) for rank in range(world.size)]
            assert_near(mine, combined(inputs, ReduceOp.SUM))


@pytest.mark.mpi(min_size=2)
def test_a_disagreement_leaves_the_buffers_in_step(transport, groups):
    """Some have written a chunk before the check, which then fails; the next operation must be right."""
    group = groups["duplicate"]
    for odd in range(2):
        with raises_everywhere(mpisgd.CollectiveMismatch):
            if group.rank == odd:
                mpisgd.barrier(group)
            else:
                mpisgd.broadcast(torch.full((7,), 99.0), 1 - odd, group)
        for root in range(group.size):
            mine = given(group.rank, torch.float32, (7,))
            mpisgd.broadcast(mine, root, group)
            assert_equal(mine, given(root, torch.float32, (7,)))


def test_several_in_flight_at_once(transport, small_chunks, world):
    numel = CHUNK_BYTES // 8
    outputs = [torch.zeros(world.size * numel) for _ in range(6)]
    works = [
        mpisgd.all_gather_into_tensor(output, given(world.rank + i, torch.float32, (numel,)), async_op=True)
        for i, output in enumerate(outputs)
    ]
    for work in works:
        assert work is not None
        work.wait()
    for i, output in enumerate(outputs):
        wanted = [given(rank + i, torch.float32, (numel,)) for rank in range(world.size)]
        assert_equal(output, torch.cat(wanted))


def test_tensors_of_inference_mode(transport, world):
    with torch.inference_mode():
        mine, reduced = given(world.rank, torch.float32), given(world.rank, torch.float32)
        gathered = torch.zeros(world.size, 131)
    mpisgd.broadcast(mine, world.size - 1)
    mpisgd.reduce(reduced, 0)
    mpisgd.all_gather_into_tensor(gathered, mine)
    wanted = given(world.size - 1, torch.float32)
    assert_equal(mine, wanted)
    assert_equal(gathered, wanted.expand(world.size, -1))
    if world.rank == 0:
        inputs = [given(rank, torch.float32) for rank in range(world.size)]
        assert_near(reduced, combined(inputs, ReduceOp.SUM))


def test_autograd_sees_that_the_tensor_has_changed(transport, world):
    """As after any in-place operation of torch: a gradient that needs the old elements must not come out."""
    leaf = torch.ones(5, requires_grad=True)
    outputs = [torch.ones(5) for _ in range(world.size)]
    loss = (leaf * outputs[0]).sum()
    mpisgd.all_gather(outputs, torch.full((5,), 2.0))
    stopped = False
    try:
        loss.backward()
    except RuntimeError as exc:
        stopped = "modified by an inplace operation" in str(exc)
    everyone(stopped, "backward went on with other elements than forward")
