"""One backward, several optimizers: each gradient is reduced once, in the right one, on all ranks."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import nn
from verdicts import everyone, raises_everywhere

import mpisgd

several = pytest.mark.mpi(min_size=2)


def weights(*values):
    return [nn.Parameter(torch.full((2,), float(value), dtype=torch.float64)) for value in values]


def wrap(params, lr=1.0, **options):
    listed = list(params)
    return mpisgd.DistributedOptimizer(torch.optim.SGD(listed, lr=lr), **options)


def check(param, expected, what=""):
    everyone(bool((param - expected).abs().max() < 1e-12), f"{what}: {param.tolist()}, not {expected}")


# Two optimizers of equal shapes, of which the loss of each rank uses one: the gradient of the first was added
# to that of the second (0.75 and 0.0 where 0.5 and 0.5 are right), and nothing was said.


@several
@pytest.mark.parametrize("backward", ["on all ranks", "not on the last rank"])
@pytest.mark.parametrize("options", [{}, {"strategy": mpisgd.Sharded()}], ids=["plain", "sharded"])
def test_a_backward_that_reaches_another_optimizer_on_each_rank(backward, options):
    a, b = weights(0, 0)
    opts = [wrap([a], overlap=False, **options), wrap([b], overlap=False, **options)]
    size, rank = mpisgd.size(), mpisgd.rank()
    has_backward = backward == "on all ranks" or rank < size - 1
    users = [
        [r for r in range(size) if r % 2 == k and (r < size - 1 or has_backward is None)] for k in (0, 1)
    ]
    users = [[r for r in range(size) if r % 2 == k] for k in (0, 1)]
    if backward != "on all ranks":
        users = [[r for r in ranks if r < size - 1] for ranks in users]
    for step in range(1, 4):
        for opt in opts:
            opt.zero_grad()
        if has_backward:
            ((a, b)[rank % 2] * (rank + step)).sum().backward()
        for opt in opts:
            opt.step()
        for param, ranks in zip((a, b), users, strict=True):
            expected = -sum((r + s) / size for r in ranks for s in range(1, step + 1))
            check(param.detach(), expected, f"step {step}")


@several
def test_windows_of_two_passes_whose_backwards_reach_other_optimizers():
    a, b = weights(0, 0)
    opts = [wrap([a], overlap=False, backward_passes_per_step=2), wrap([b], overlap=False)]
    rank, size = mpisgd.rank(), mpisgd.size()
    for micro in range(2):
        (((a, b)[(rank + micro) % 2]) * (rank + 1)).sum().backward()
        opts[1].step()
        opts[1].zero_grad()
    opts[0].step()
    total = sum(r + 1 for r in range(size)) / size
    check(a.detach(), -total)
    check(b.detach(), -total)


@several
def test_no_sync_of_one_of_two_optimizers():
    a, b = weights(0, 0)
    first, second = wrap([a], overlap=False), wrap([b], overlap=False)
    rank, size = mpisgd.rank(), mpisgd.size()
    with first.no_sync():
        (((a, b)[rank % 2]) * (rank + 1)).sum().backward()
    (((b, a)[rank % 2]) * (rank + 1)).sum().backward()
    first.step(), second.step()
    total = sum(r + 1 for r in range(size)) / size
    check(a.detach(), -total)
    check(b.detach(), -total)


@several
def test_steps_in_another_order_with_partial_windows_are_told():
    a, b = weights(0, 0)
    opts = [wrap([p], overlap=False, backward_passes_per_step=2) for p in (a, b)]
    (a + b).sum().backward()
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        opts[mpisgd.rank() == 0].step()
    everyone(caught.text.count("(SGD, 1 parameter") == 2, caught.text)


@several
def test_an_optimizer_that_a_rank_has_no_more_is_named():
    a, b, c = weights(0, 0, 0)
    opts = [wrap([p], overlap=False) for p in (a, b, c)]
    if mpisgd.rank() == 0:
        del opts[1]
        gc.collect()
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        (a + b + c).sum().backward()
    everyone("another rank has this optimizer no more" in caught.text, caught.text)


# -- parameters in common -----------------------------------------------------------------------------


# A second optimizer over the same parameters removed the hooks of the first one: after it was deleted nothing
# was reduced at the end of backward any more. A sum was summed once for each of them.


@several
@pytest.mark.parametrize("op", [mpisgd.ReduceOp.AVG, mpisgd.ReduceOp.SUM], ids=str)
@pytest.mark.parametrize("kept", [True, False], ids=["both", "second deleted"])
def test_two_optimizers_over_the_same_parameters_reduce_each_gradient_once(op, kept):
    (a,) = weights(0)
    first = wrap([a], op=op, overlap=False)
    second = wrap([a], lr=10.0, op=op, overlap=False)
    if not kept:
        del second
        gc.collect()
    rank, size = mpisgd.rank(), mpisgd.size()
    total = sum(r + 1 for r in range(size)) / (1 if op is mpisgd.ReduceOp.SUM else size)
    expected = 0.0
    for step in range(3):
        first.zero_grad()
        if rank or step != 1:  # a rank without a backward
            (a * (rank + 1)).sum().backward()
            check_locally = bool((a.grad == total - (step == 1) * total / sum(range(1, size + 1))).all())
        else:
            check_locally = True
        first.step()
        if kept:
            second.step()
        everyone(check_locally, f"step {step}: {a.grad}")
        expected -= (total - (step == 1) * total / sum(range(1, size + 1))) * (11 if kept else 1)
        check(a.detach(), expected, f"step {step}")


@several
def test_optimizers_that_combine_common_parameters_in_two_ways_are_refused():
    (a,) = weights(0)
    first = wrap([a], overlap=False)
    second = wrap([a], op=mpisgd.ReduceOp.SUM, overlap=False)
    a.sum().backward()
    second.step()
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        first.step()
    everyone("op=SUM" in caught.text and "op=AVG" in caught.text, caught.text)


@several
def test_an_optimizer_whose_parameters_a_local_one_has_taken_takes_them_back():
    (a,) = weights(0)
    first = wrap([a], overlap=False)
    second = wrap([a], strategy=mpisgd.LocalSGD(sync_every=100))
    rank, size = mpisgd.rank(), mpisgd.size()
    a.grad = torch.full_like(a, rank + 1.0)
    first.step()
    check(a.detach(), -sum(range(1, size + 1)) / size)
    first.zero_grad()
    (a * (rank + 1)).sum().backward()
    check(a.grad, sum(range(1, size + 1)) / size, "at the end of backward")
    del second


# -- what may be reduced only once --------------------------------------------------------------------


@several
@pytest.mark.parametrize(
    "options",
    [
        {"op": mpisgd.ReduceOp.SUM},
        {"compression": mpisgd.compress.SignSGD()},
        {"op": mpisgd.Adasum},
        {"compression": mpisgd.compress.DeepGradient(ratio=0.5)},
    ],
    ids=str,
)
@pytest.mark.parametrize("between", ["nothing", "clipping"])
def test_what_is_not_additive_is_not_reduced_twice(options, between):
    """The signs of the first backward came back in those of the second one; clipping counted as a reset."""
    params = weights(0, 0)
    opt = wrap(params, overlap=False, **options)
    loss = sum((p * (mpisgd.rank() + 1)).sum() for p in params)
    loss.backward(retain_graph=True)
    if between == "clipping":
        nn.utils.clip_grad_norm_(params, 0.1)
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        loss.backward()
    everyone("reduced once more" in caught.text, caught.text)
    for param in params:  # another reset than the optimizer's
        param.grad.zero_()
    sum((p * (mpisgd.rank() + 1)).sum() for p in params).backward()
    opt.step()


@several
def test_a_sum_of_sparse_gradients_only_is_not_summed_twice():
    embedding = nn.Embedding(4, 2, sparse=True)
    opt = wrap(embedding.parameters(), op=mpisgd.ReduceOp.SUM, overlap=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        embedding(torch.tensor([mpisgd.rank() % 4])).sum().backward()
        with raises_everywhere(mpisgd.InvalidArgument):
            embedding(torch.tensor([1])).sum().backward()
        opt.zero_grad()
        embedding(torch.tensor([1])).sum().backward()
    everyone(bool(embedding.weight.grad.to_dense()[1, 0] == mpisgd.size()))


# -- a rank without a backward ------------------------------------------------------------------------


# It got the mean in step(), unclipped, while the other ranks had clipped it: models went apart in silence.


@several
@pytest.mark.parametrize("way_to_clip", ["torch", "optimizer", "synchronize", "none"])
def test_a_rank_without_a_backward_that_clips(way_to_clip):
    (a,) = weights(0)
    opt = wrap([a], overlap=False)
    rank, size = mpisgd.rank(), mpisgd.size()
    if rank:
        (a * 4.0 * size).sum().backward()
    mean = 4.0 * (size - 1)
    if way_to_clip == "torch":
        with raises_everywhere(mpisgd.InvalidArgument) as caught:
            nn.utils.clip_grad_norm_([a], 1.0)
            opt.step()
        everyone("synchronize()" in caught.text, caught.text)
        return
    if way_to_clip == "synchronize":
        opt.synchronize()
        nn.utils.clip_grad_norm_([a], 1.0)
    if way_to_clip == "optimizer":
        opt.clip_grad_norm_(1.0)
    opt.step()
    norm = mean * 2**0.5
    factor = 1.0 if way_to_clip == "none" else 1.0 / (norm + 1e-6)
    check(a.detach(), -mean * factor)


@several
@pytest.mark.parametrize("ours", [False, True], ids=["step", "clip"])
def test_a_rank_without_a_backward_after_a_reset_by_the_model(ours):
    """`model.zero_grad()` tells no optimizer: that rank took the former gradients for those of this step."""
    (a,) = weights(0)
    opt = wrap([a], overlap=False)
    (a * 5).sum().backward()  # not used
    a.grad = None
    for step in (1, 2):
        if mpisgd.rank() > 0:
            (a * mpisgd.size()).sum().backward()
        if ours:
            opt.clip_grad_norm_(1e9)
        opt.step()
        a.grad = None
        check(a.detach(), -step * (mpisgd.size() - 1))


# -- a backward that raised ---------------------------------------------------------------------------


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("in backward")


@several
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("muted", [False, True])
def test_what_an_exception_in_backward_has_left_is_reset(overlap, muted):
    """What it had sent counted for the next reduction, and what came since was lost."""
    a, b = weights(0, 0)
    opt = wrap([a, b], overlap=overlap, bucket_cap_bytes=16, gradient_predivide_factor=2.0)
    rank, size = mpisgd.rank(), mpisgd.size()
    mean = sum(range(1, size + 1)) / size
    for _ in range(2):  # the second plan follows the observed order
        opt.zero_grad()
        (a * b.detach() + b * (rank + 1) + a * (rank + 1)).sum().backward()
    opt.zero_grad()
    with pytest.raises(RuntimeError, match="in backward"):
        (Raises.apply(a * (rank + 1)) + b * (rank + 1)).sum().backward()
    if muted:
        with opt.no_sync():
            ((a + b) * (rank + 1)).sum().backward()
        opt.synchronize()
    else:
        ((a + b) * (rank + 1)).sum().backward()
    check(a.grad, mean)
    check(b.grad, 2 * mean)  # as in one process: what the first backward had reached stays


@several
def test_what_a_backward_that_raised_has_summed_may_have_a_sparse_gradient():
    """Where it lies was asked of the sparse one, which has no memory: the next backward raised that."""
    torch.manual_seed(3)
    table, (a,) = nn.Embedding(4, 2, sparse=True).double(), weights(0)
    opt = wrap([a, table.weight], op=mpisgd.ReduceOp.SUM, overlap=True)
    (a * 1).sum().backward()  # the plan takes the table for dense
    opt.zero_grad()
    used = torch.tensor([1, 2])
    with pytest.raises(RuntimeError, match="in backward"):
        ((Raises.apply(a.detach().requires_grad_()) * a).sum() + table(used).sum()).backward()
    (a.sum() + table(used).sum()).backward()
    check(a.grad, mpisgd.size())
    check(table.weight.grad.to_dense()[1:3], 2 * mpisgd.size())


@several
def test_when_a_forgotten_optimizer_is_collected_changes_nothing():
    """In a reference cycle that is each rank's own affair."""
    a, b, c = weights(0, 0, 0)
    forgotten = wrap([c], overlap=False)
    forgotten.itself = forgotten
    again = wrap([a], overlap=False)  # over parameters that the next one takes
    again.itself = again
    opts = [wrap([p], overlap=False) for p in (a, b)]
    del forgotten, again
    rank, size = mpisgd.rank(), mpisgd.size()
    mean = sum(range(1, size + 1)) / size
    for step in range(1, 4):
        if step == 2 and rank == 0:
            gc.collect()
        for opt in opts:
            opt.zero_grad()
        with opts[0].no_sync(), opts[1].no_sync():
            (a * (rank + 1)).sum().backward()
        (b * (rank + 1)).sum().backward()
        for opt in opts:
            opt.step()
        check(a.detach(), -mean * step)
        check(b.detach(), -mean * step)
