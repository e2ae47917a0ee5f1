"""Tensors of any layout in and out; what is not in order in memory travels in logical order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from closed_form import assert_equal, assert_near, combined, given
from torch import Tensor
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd import ReduceOp
from mpisgd.collectives.sparse import all_reduce_sparse

SHAPE = (2, 3, 2, 4)
EMPTY: dict[str, Callable[[torch.dtype], Tensor]] = {
    "contiguous": lambda dtype: torch.zeros(SHAPE, dtype=dtype),
    "every_second": lambda dtype: torch.zeros(2, 3, 2, 8, dtype=dtype)[..., ::2],
    "permuted": lambda dtype: torch.zeros(4, 2, 3, 2, dtype=dtype).permute(3, 2, 1, 0),
    "channels_last": lambda dtype: torch.zeros(SHAPE, dtype=dtype).to(memory_format=torch.channels_last),
    "inner_view": lambda dtype: torch.zeros(100, dtype=dtype)[3:51].view(SHAPE),
    "conjugated": lambda dtype: torch.zeros(SHAPE, dtype=dtype).conj(),
}
KINDS = list(EMPTY)


def laid_out(kind: str, values: Tensor) -> Tensor:
    """The same elements in another layout."""
    tensor = EMPTY[kind](values.dtype)
    return tensor.copy_(values)


def blank(kind: str) -> Tensor:
    return EMPTY[kind](torch.complex64)


def value(rank: int) -> Tensor:
    return given(rank, torch.complex64, SHAPE)


@pytest.fixture(params=range(len(KINDS)), ids=KINDS)
def kind(request):
    """A layout that differs by rank, so that all of them meet."""
    return KINDS[(request.param + mpisgd.rank()) % len(KINDS)]


@pytest.fixture
def ranks():
    return range(mpisgd.size())


@pytest.mark.parametrize("algorithm", ["auto", "ring", "all_to_all"])
def test_all_reduce(kind, ranks, algorithm):
    mine = laid_out(kind, value(mpisgd.rank()))
    strides = mine.stride()
    mpisgd.all_reduce(mine, algorithm=algorithm)
    assert_near(mine.resolve_conj(), combined([value(rank) for rank in ranks], ReduceOp.SUM))
    assert mine.stride() == strides


def test_reduce(kind, ranks):
    for dst in ranks:
        mine = laid_out(kind, value(mpisgd.rank()))
        mpisgd.reduce(mine, dst, ReduceOp.AVG)
        if mpisgd.rank() == dst:
            assert_near(mine.resolve_conj(), combined([value(rank) for rank in ranks], ReduceOp.AVG))
        else:
            assert_equal(mine, value(mpisgd.rank()))


def test_broadcast(kind, ranks):
    for src in ranks:
        mine = laid_out(kind, value(mpisgd.rank()))
        mpisgd.broadcast(mine, src)
        assert_equal(mine, value(src))


def test_gather_and_scatter(kind, ranks):
    for root in ranks:
        here = mpisgd.rank() == root
        outputs = [blank(KINDS[i % len(KINDS)]) for i in ranks] if here else None
        mpisgd.gather(laid_out(kind, value(mpisgd.rank())), outputs, root)
        for rank, output in enumerate(outputs or []):
            assert_equal(output, value(rank))
        mine = blank(kind)
        pieces = [laid_out(KINDS[i % len(KINDS)], value(i + 10)) for i in ranks] if here else None
        mpisgd.scatter(mine, pieces, root)
        assert_equal(mine, value(mpisgd.rank() + 10))


def test_all_gather(kind, ranks):
    mine = laid_out(kind, value(mpisgd.rank()))
    outputs = [blank(KINDS[i % len(KINDS)]) for i in ranks]
    mpisgd.all_gather(outputs, mine)
    for rank, output in enumerate(outputs):
        assert_equal(output, value(rank))
    wide = torch.zeros(*SHAPE, len(ranks), dtype=torch.complex64).movedim(-1, 0)
    mpisgd.all_gather_into_tensor(wide, mine)
    assert_equal(wide, torch.stack([value(rank) for rank in ranks]))
    assert_equal(mine, value(mpisgd.rank()))


def test_reduce_scatter(kind, ranks):
    mine = blank(kind)
    mpisgd.reduce_scatter(mine, [laid_out(kind, value(mpisgd.rank() + 10 * i)) for i in ranks])
    wanted = combined([value(rank + 10 * mpisgd.rank()) for rank in ranks], ReduceOp.SUM)
    assert_near(mine.resolve_conj(), wanted)
    whole = torch.stack([value(mpisgd.rank() + 10 * i) for i in ranks], dim=-1).movedim(-1, 0)
    mine = blank(kind)
    mpisgd.reduce_scatter_tensor(mine, whole)
    assert_near(mine.resolve_conj(), wanted)


def test_all_to_all(kind, ranks):
    rank = mpisgd.rank()
    outputs = [blank(KINDS[i % len(KINDS)]) for i in ranks]
    mpisgd.all_to_all(outputs, [laid_out(kind, value(100 * rank + to)) for to in ranks])
    for source, output in enumerate(outputs):
        assert_equal(output, value(100 * source + rank))
    out = torch.zeros(*SHAPE, len(ranks), dtype=torch.complex64).movedim(-1, 0)
    mpisgd.all_to_all_single(out, torch.stack([value(100 * rank + to) for to in ranks]))
    assert_equal(out, torch.stack([value(100 * source + rank) for source in ranks]))


def test_messages(kind, ranks):
    rank, size = mpisgd.rank(), len(ranks)
    mine = blank(kind)
    works = [mpisgd.irecv(mine, (rank - 1) % size)]
    works.append(mpisgd.isend(laid_out(kind, value(rank)), (rank + 1) % size))
    for work in works:
        work.wait()
    assert_equal(mine, value((rank - 1) % size))


def test_negated_views():
    mine = torch.zeros(5, dtype=torch.complex64).conj().imag
    assert mine.is_neg()
    mine.copy_(torch.arange(5.0) + mpisgd.rank())
    mpisgd.all_reduce(mine)
    size = mpisgd.size()
    assert_equal(mine.resolve_neg(), torch.arange(5.0) * size + size * (size - 1) / 2)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint16], ids=str)
def test_scalars_and_empty_tensors(shape, dtype, ranks):
    rank, size = mpisgd.rank(), len(ranks)
    inputs = [given(i, dtype, shape) for i in ranks]
    for algorithm in ("auto", "mpi", "ring", "halving_doubling", "reduce_broadcast", "all_to_all"):
        mine = inputs[rank].clone()
        mpisgd.all_reduce(mine, algorithm=algorithm)
        assert_near(mine, combined(inputs, ReduceOp.SUM))
    mine = inputs[rank].clone()
    mpisgd.broadcast(mine, size - 1)
    assert_equal(mine, inputs[-1])
    out = torch.zeros((size, *shape), dtype=dtype)
    mpisgd.all_gather_into_tensor(out, inputs[rank])
    assert_equal(out, torch.stack(inputs))
    outputs = [torch.zeros(shape, dtype=dtype) for _ in ranks]
    mpisgd.all_gather(outputs, inputs[rank])
    assert_equal(torch.stack(outputs), torch.stack(inputs))
    mpisgd.all_to_all(outputs, [inputs[rank]] * size)
    assert_equal(torch.stack(outputs), torch.stack(inputs))
    mpisgd.gather(inputs[rank], outputs if rank == 0 else None)
    mpisgd.scatter(mine, inputs if rank == 0 else None)
    assert_equal(mine, inputs[rank])
    part = torch.zeros(shape, dtype=dtype)
    mpisgd.reduce_scatter(part, [inputs[rank]] * size)
    assert_near(part, combined(inputs, ReduceOp.SUM))
    mpisgd.reduce_scatter_tensor(part, torch.stack([inputs[rank]] * size))
    assert_near(part, combined(inputs, ReduceOp.SUM))
    mpisgd.reduce(mine, 0)


def test_leaves_that_require_grad(ranks):
    leaf = torch.arange(4.0).add_(mpisgd.rank()).requires_grad_()
    mpisgd.all_reduce(leaf)
    assert_equal(leaf.detach(), torch.arange(4.0) * len(ranks) + sum(ranks))
    assert leaf.is_leaf
    assert leaf.requires_grad
    (leaf * 3).sum().backward()
    assert_equal(leaf.grad, torch.full((4,), 3.0))
    mpisgd.all_reduce(leaf.grad, ReduceOp.AVG)
    assert_equal(leaf.grad, torch.full((4,), 3.0))


OVERWRITING = {
    "all_reduce": lambda t: mpisgd.all_reduce(t),
    "broadcast": lambda t: [mpisgd.broadcast(t, src) for src in range(mpisgd.size())],
    "reduce": lambda t: [mpisgd.reduce(t, dst) for dst in range(mpisgd.size())],
    "scatter": lambda t: mpisgd.scatter(t, [t.detach()] * mpisgd.size() if mpisgd.rank() == 0 else None),
    "all_gather": lambda t: mpisgd.all_gather([t] * mpisgd.size(), t.detach().clone()),
    "all_gather_into_tensor": lambda t: mpisgd.all_gather_into_tensor(
        t, t.detach().flatten()[: t.numel() // mpisgd.size()].clone()
    ),
    "reduce_scatter_tensor": lambda t: mpisgd.reduce_scatter_tensor(
        t, torch.zeros(mpisgd.size() * t.numel())
    ),
    "all_to_all_single": lambda t: mpisgd.all_to_all_single(t, t.detach().clone()),
    "all_reduce_coalesced": lambda t: mpisgd.all_reduce_coalesced([t]),
    "recv": lambda t: (
        mpisgd.isend(t.detach().clone(), mpisgd.rank()),
        mpisgd.irecv(t, mpisgd.rank()).wait(),
    ),
}


@pytest.mark.parametrize("name", OVERWRITING)
@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.t()], ids=["contiguous", "transposed"])
def test_autograd_notices_that_a_saved_tensor_was_overwritten(name, view):
    """torch's own in-place operations are noticed; a write through an address must be told."""
    if mpisgd.size() == 1 and name == "broadcast":
        pytest.skip("nobody receives")
    x = torch.ones(24, 24, requires_grad=True)
    saved = view(x * 2)
    y = (saved * saved).sum()
    OVERWRITING[name](saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_inputs_are_not_marked_as_overwritten():
    x = torch.ones(24, requires_grad=True)
    saved = x * 2
    y = (saved * saved).sum()
    size, out = mpisgd.size(), torch.zeros(24 * mpisgd.size())
    mpisgd.all_gather_into_tensor(out, saved)
    mpisgd.gather(saved, list(out.view(size, 24)) if mpisgd.rank() == 0 else None)
    mpisgd.reduce_scatter_tensor(torch.zeros(24 // size), saved[: 24 // size * size])
    mpisgd.all_to_all([torch.zeros(24) for _ in range(size)], [saved] * size)
    mpisgd.isend(saved, mpisgd.rank())
    mpisgd.irecv(out[:24], mpisgd.rank()).wait()
    y.backward()


def test_storage_can_still_be_resized_afterwards():
    """`tensor.numpy()` would freeze it, and code that frees and refills storages would break."""
    tensors = [torch.ones(mpisgd.size() * 4) for _ in range(2)]
    mpisgd.all_reduce(tensors[0])
    mpisgd.broadcast(tensors[0], 0)
    mpisgd.all_gather_into_tensor(tensors[0], tensors[1][:4])
    mpisgd.reduce_scatter_tensor(tensors[1][:4], tensors[0])
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


class Wrapper(torch.Tensor):
    """As DTensor is: its elements lie in another tensor, and its own address is 0."""

    @staticmethod
    def __new__(cls, local: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, local.shape, dtype=local.dtype)

    def __init__(self, local: torch.Tensor) -> None:
        self.local = local

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["local"], None

    def to_local(self) -> torch.Tensor:
        return self.local

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


def without_storage() -> torch.Tensor:
    """As FSDP leaves parameters behind."""
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


# The last two had address 0, and the processes ended by SIGSEGV.
REFUSED = {
    "sparse": (lambda: torch.eye(4).to_sparse(), "indices"),
    "on another device": (lambda: torch.zeros(4, device="meta"), "meta"),
    "a list": (lambda: [1.0, 2.0], "list"),
    "a tensor whose elements lie elsewhere": (lambda: Wrapper(torch.zeros(4)), r"Wrapper.*to_local\(\)"),
    "a tensor whose storage was freed": (without_storage, "without memory of its own"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_tensors_that_cannot_travel_are_refused_before_anything_is_sent(what, groups):
    make, said = REFUSED[what]
    begun = groups["world"].queue.consistency.number
    for call in (
        lambda: mpisgd.all_reduce(make()),
        lambda: mpisgd.reduce(make(), 0),
        lambda: mpisgd.broadcast(make(), 0),
        lambda: mpisgd.gather(make()),
        lambda: mpisgd.scatter(make()),
        lambda: mpisgd.all_gather([torch.zeros(4)] * mpisgd.size(), make()),
        lambda: mpisgd.all_gather_into_tensor(make(), torch.zeros(4)),
        lambda: mpisgd.reduce_scatter(make(), [torch.zeros(4)] * mpisgd.size()),
        lambda: mpisgd.reduce_scatter_tensor(torch.zeros(4), make()),
        lambda: mpisgd.all_to_all([make()] * mpisgd.size(), [torch.zeros(4)] * mpisgd.size()),
        lambda: mpisgd.all_to_all_single(torch.zeros(4), make()),
        lambda: mpisgd.all_reduce_coalesced([make()]),
        lambda: mpisgd.isend(make(), 0),
        lambda: mpisgd.irecv(make(), 0),
    ):
        with pytest.raises(mpisgd.UnsupportedTensor, match=said):
            call()
    everyone(groups["world"].queue.consistency.number == begun, "something was sent")


def test_expanded_tensors_travel_but_do_not_receive(ranks):
    expanded = torch.tensor([mpisgd.rank() + 1.0]).expand(5)
    with raises_everywhere(mpisgd.UnsupportedTensor) as caught:
        mpisgd.all_reduce(expanded)
    assert "clone()" in caught.text
    out = torch.zeros(len(ranks), 5)
    mpisgd.all_gather_into_tensor(out, expanded)
    assert_equal(out, torch.tensor([[rank + 1.0] for rank in ranks]).expand(-1, 5))


def test_sparse_tensors_of_other_shapes_are_told_apart():
    """(4, 3) and (4, 5) were merged into results that differ by rank."""
    columns = 5 if mpisgd.rank() == mpisgd.size() - 1 else 3
    differs = torch.ones(4, columns).to_sparse()
    with raises_everywhere(mpisgd.CollectiveMismatch) if mpisgd.size() > 1 else contextlib.nullcontext():
        all_reduce_sparse(differs)
    op = mpisgd.ReduceOp.SUM if mpisgd.rank() == 0 else mpisgd.ReduceOp.AVG
    with raises_everywhere(mpisgd.CollectiveMismatch) if mpisgd.size() > 1 else contextlib.nullcontext():
        all_reduce_sparse(torch.ones(4, 3).to_sparse(), op)
    mine = torch.diag(torch.arange(4.0) + mpisgd.rank()).to_sparse()
    total = all_reduce_sparse(mine).to_dense()
    wanted = sum(torch.diag(torch.arange(4.0) + rank) for rank in range(mpisgd.size()))
    everyone(torch.equal(total, wanted))


def test_split_sizes_may_be_numbers_of_numpy_and_torch():
    """They were refused, with a text that named the sizes asked for."""
    size = mpisgd.size()
    source = torch.arange(2.0 * size) + 10 * mpisgd.rank()
    out, again = torch.empty(2 * size), torch.empty(2 * size)
    mpisgd.all_to_all_single(out, source, np.full(size, 2), [np.int64(2)] * size)
    mpisgd.all_to_all_single(again, source, torch.full((size,), 2), [2] * size)
    wanted = torch.cat([torch.arange(2.0) + 2 * mpisgd.rank() + 10 * rank for rank in range(size)])
    everyone(torch.equal(out, wanted) and torch.equal(again, wanted))
    with raises_everywhere(mpisgd.ShapeMismatch):
        mpisgd.all_to_all_single(out, source, [2.0] * size, [2] * size)
