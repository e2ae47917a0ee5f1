"""Nothing is lost: what was meant is what arrived and what is kept."""

from __future__ import annotations

import tempfile

import pytest
import torch
from fixed_gradients import (
    NUMELS,
    TWO_BUCKETS,
    Trained,
    gradient,
    largest_difference,
    mean_over_ranks,
)
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
import mpisgd.checkpoint
from mpisgd.compress import (
    QSGD,
    ChunkTopK,
    DeepGradient,
    Natural,
    PowerSGD,
    RandomK,
    TernGrad,
    Threshold,
    TopK,
)
from mpisgd.errors import InvalidArgument
from mpisgd.job.lifecycle import current_job

pytestmark = pytest.mark.mpi(min_size=2)

WITH_RESIDUAL = (
    TopK(0.2),
    RandomK(0.2),
    Threshold(1.0),
    PowerSGD(1),
    PowerSGD(2, warmup_steps=2),
    QSGD(5, error_feedback=True),
    Natural(error_feedback=True),
    ChunkTopK(keep=2, chunk=9, error_decay=1.0),
)
FADING = ChunkTopK(keep=2, chunk=9)
WITH_MOMENTUM = DeepGradient(0.1, warmup_steps=3)
METHODS = (*WITH_RESIDUAL, FADING, WITH_MOMENTUM, TernGrad(), QSGD(3), RandomK(0.3, False))


def with_residual(function):
    return pytest.mark.parametrize("compression", WITH_RESIDUAL, ids=repr)(function)


def my_gradients(step: int) -> list[torch.Tensor]:
    return [gradient(mpisgd.rank(), step, which).flatten() for which in range(len(NUMELS))]


@with_residual
@pytest.mark.parametrize("op", [mpisgd.ReduceOp.AVG, mpisgd.ReduceOp.SUM])
def test_what_was_meant_is_what_arrived_and_the_residual(compression, op):
    """Of all steps together, from the first on, in two buckets that are planned anew on the way."""
    trained = Trained(compression=compression, bucket_cap_bytes=TWO_BUCKETS, op=op)
    meant = [torch.zeros(numel, dtype=torch.float64) for numel in NUMELS]
    arrived = [torch.zeros(numel, dtype=torch.float64) for numel in NUMELS]
    scale = mpisgd.size() if op is mpisgd.ReduceOp.SUM else 1
    off = []
    for step in range(6):
        if step == 2:  # in another order from now on, in other buckets
            trained.opt.add_param_group({"params": torch.nn.Parameter(torch.zeros(3).double())})
        for total, part in zip(arrived, trained.step(step, order=-1 if step else 1), strict=True):
            total += part.flatten() / scale
        for total, part in zip(meant, mean_over_ranks(my_gradients(step)), strict=True):
            total += part
        left = mean_over_ranks(trained.kept())
        off.append(largest_difference(meant, [a + b for a, b in zip(arrived, left, strict=True)]))
    everyone(max(off) < 1e-12, f"{off}")
    everyone(any(part.any() for part in trained.kept()), "nothing was left out at all")


@pytest.mark.parametrize(
    "compression",
    [
        TopK(1.0),
        RandomK(1.0),
        RandomK(1.0, error_feedback=False),
        Threshold(1e-300),
        DeepGradient(1.0),
        PowerSGD(9),
        PowerSGD(9, min_compression_rate=0.1),
        PowerSGD(1, warmup_steps=99),
        ChunkTopK(keep=1, chunk=1),
    ],
    ids=repr,
)
def test_without_any_compression_it_is_the_plain_average(compression):
    trained, plain = Trained(compression=compression), Trained()
    off = [largest_difference(trained.step(step), plain.step(step)) for step in range(4)]
    everyone(max(off) < 1e-14, f"{off}")


@pytest.mark.parametrize("compression", METHODS, ids=repr)
def test_a_run_that_is_resumed_goes_on_as_if_nothing_had_happened(compression):
    """In other buckets, where the random numbers do not depend on these."""
    trained = Trained(compression=compression)
    for step in range(3):
        trained.step(step)
    saved = trained.opt.state_dict()
    random = isinstance(compression, (QSGD, TernGrad, Natural, RandomK))
    resumed = Trained(compression=compression, **({} if random else {"bucket_cap_bytes": TWO_BUCKETS}))
    resumed.opt.load_state_dict(saved)
    off = [largest_difference(trained.step(step), resumed.step(step)) for step in range(3, 6)]
    anew = Trained(compression=compression)
    everyone(max(off) == 0 if random else max(off) < 1e-13, f"{off}")
    everyone(largest_difference(trained.step(6), anew.step(6)) > 1e-6, "the state makes no difference")


def test_another_ranks_residual_is_not_taken_over_and_what_is_alike_is():
    """Everyone loads what rank 0 has saved: rank 0 goes on, the others begin without a residual."""
    trained = Trained(compression=PowerSGD(2))
    trained.step(0)
    saved = mpisgd.broadcast_object(trained.opt.state_dict())
    resumed = Trained(compression=PowerSGD(2))
    resumed.opt.load_state_dict(saved)
    arrived, kept, meant = resumed.step(1), resumed.kept(), my_gradients(1)
    off = []
    for which in (0, 2):  # the matrices; what travels as it is leaves nothing here
        if mpisgd.rank() == 0:
            meant[which] += saved["mpisgd"]["own"]["compression"]["own"][str(which)]["residual"]
        off.append((meant[which] - arrived[which].flatten() - kept[which]).abs().max().item())
    everyone(max(off) < 1e-12, f"{off}")
    steps = resumed.opt.state_dict()["mpisgd"]["alike"]["compression"]["0"]["steps"]
    everyone(steps == 2, f"{steps}")


@pytest.mark.parametrize("compression", [TopK(0.2), PowerSGD(2), DeepGradient(0.1), FADING], ids=repr)
def test_a_checkpoint_has_what_each_rank_kept_and_a_broadcast_what_all_have_alike(compression):
    trained = Trained(compression=compression)
    for step in range(2):
        trained.step(step)
    loaded, told = Trained(compression=compression), Trained(compression=compression)
    with tempfile.TemporaryDirectory() as mine:
        path = mpisgd.checkpoint.save(mpisgd.broadcast_object(mine), 2, optimizer=trained.opt)
        mpisgd.checkpoint.load(path, optimizer=loaded.opt)
    told.opt.load_state_dict(trained.opt.state_dict())
    mpisgd.broadcast_optimizer_state(told.opt)
    alike = [run.opt.state_dict()["mpisgd"]["alike"]["compression"] for run in (trained, told)]
    everyone(str(alike[0]) == str(alike[1]), "what is alike")
    everyone(not told.opt.state_dict()["mpisgd"]["own"], "rank 0 has kept its own")
    got, expected = loaded.step(2), trained.step(2)
    everyone(largest_difference(got, expected) == 0, "not the same after a checkpoint")
    everyone(largest_difference(loaded.kept(), trained.kept()) == 0, "nor what is kept then")
    everyone(largest_difference(told.step(2), expected) > 1e-6, "the residual makes no difference")


def test_a_loaded_state_replaces_what_there_was():
    """Also one from before the first step, as after the loss of a rank."""
    trained = Trained(compression=TopK(0.2))
    saved = trained.opt.state_dict()
    first = trained.step(0)
    trained.opt.load_state_dict(saved)
    everyone(largest_difference(first, trained.step(0)) == 0)


def test_a_rank_that_goes_on_with_others_keeps_its_own():
    size = mpisgd.size()
    trained = Trained(compression=TopK(0.2))
    trained.step(0)
    kept = trained.kept()
    group = mpisgd.new_group(range(size)[::-1], name="those that are left")
    trained.opt.rebuild(group)
    everyone(all(map(torch.equal, kept, trained.kept())), "before the next step")
    arrived = trained.step(1)
    meant = mean_over_ranks([a + b for a, b in zip(kept, my_gradients(1), strict=True)])
    got = [a + b.flatten() for a, b in zip(mean_over_ranks(trained.kept()), arrived, strict=True)]
    everyone(largest_difference(meant, got) < 1e-12)
    current_job().groups.remove(group)


@with_residual
def test_the_residual_of_a_parameter_that_nobody_used_waits(compression):
    """Such a parameter keeps grad=None, as in one process."""
    trained = Trained({1: {0, 2}, 2: {1} if mpisgd.rank() else set()}, compression=compression)
    meant = [torch.zeros(numel, dtype=torch.float64) for numel in NUMELS]
    arrived = [torch.zeros(numel, dtype=torch.float64) for numel in NUMELS]
    for step in range(4):
        got = trained.step(step)
        everyone([part is None for part in got] == [step == 1, False, step == 1, False], f"{got}")
        for which, part in enumerate(my_gradients(step)):
            meant[which] += 0 if which in trained.unused.get(step, ()) else part
            arrived[which] += 0 if got[which] is None else got[which].flatten()
    total = [a + b for a, b in zip(arrived, mean_over_ranks(trained.kept()), strict=True)]
    off = largest_difference(mean_over_ranks(meant), total)
    everyone(off < 1e-12, f"{off}")


@pytest.mark.parametrize("compression", [TopK(0.2), PowerSGD(2), QSGD(4)], ids=repr)
def test_accumulated_gradients_are_compressed_once(compression):
    """Two passes a step equal one pass with the sum; a window that step() flushes, too."""
    trained = Trained(compression=compression, backward_passes_per_step=2)
    whole = Trained(compression=compression)
    for step in range(3):
        trained.opt.zero_grad()
        whole.opt.zero_grad()
        for _ in range(2 if step < 2 else 1):
            trained.backward(step)
        whole_loss = sum(
            ((2 if step < 2 else 1) * param * gradient(mpisgd.rank(), step, which)).sum()
            for which, param in enumerate(whole.params)
        )
        whole_loss.backward()
        trained.opt.step()
        whole.opt.step()
        off = largest_difference(trained.params, whole.params)
        everyone(off < 1e-12, f"step {step}: {off}")


def test_two_optimizers_keep_apart_what_is_theirs():
    one, other = Trained(compression=TopK(0.2)), Trained(compression=PowerSGD(2))
    alone, alone_too = Trained(compression=TopK(0.2)), Trained(compression=PowerSGD(2))
    together, apart = [], []
    for step in range(4):
        for each in (one, other):
            each.opt.zero_grad()
            each.backward(step)
        together.append([*one.params, *other.params])
        apart.append([*alone.step(step), *alone_too.step(step)])
        off = largest_difference([param.grad for param in together[-1]], apart[-1])
        everyone(off == 0, f"step {step}: {off}")
        one.opt.step()
        other.opt.step()


@pytest.mark.parametrize("compression", [TopK(0.2), PowerSGD(2)], ids=repr)
def test_ranks_that_share_parameters_compress_as_others_do(compression):
    shared, apart = Trained(compression=compression, share_parameters=True), Trained(compression=compression)
    for step in range(4):
        for each in (shared, apart):
            each.opt.zero_grad()
            each.backward(step)
            each.opt.step()
        off = largest_difference(shared.params, apart.params)
        everyone(off < 1e-12, f"step {step}: {off}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compression", [TopK(0.2), PowerSGD(1), QSGD(5, error_feedback=True)], ids=repr)
def test_16_bit_gradients_are_rounded_when_all_is_done(compression, dtype):
    """They become what float32 gradients of the same values become, rounded; residuals are the same."""
    narrow, wide = [], []
    for kind, results in ((dtype, narrow), (torch.float32, wide)):
        param = torch.nn.Parameter(torch.zeros(6, 5, dtype=kind))
        optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD([param], lr=1), compression=compression)
        for step in range(3):
            param.grad = gradient(mpisgd.rank(), step, 0).to(dtype).to(kind)
            optimizer.synchronize()
            results.append(param.grad.clone())
            optimizer.step()
        results.append(optimizer.state_dict()["mpisgd"]["own"]["compression"]["own"]["0"]["residual"])
    everyone(all(torch.equal(a, b.to(a.dtype)) for a, b in zip(narrow, wide, strict=True)))


def test_two_groups_of_ranks_compress_by_themselves(groups):
    """Nothing is kept, or waited for, in the name of all ranks."""
    half = groups["half"]
    if half.size < 2:
        everyone(True)
        return
    trained = Trained(compression=TopK(0.3), group=half)
    got = trained.step(0)
    residuals = trained.kept()
    for tensor in residuals:
        mpisgd.all_reduce(tensor, mpisgd.ReduceOp.AVG, half)
    meant = my_gradients(0)
    for tensor in meant:
        mpisgd.all_reduce(tensor, mpisgd.ReduceOp.AVG, half)
    off = largest_difference(meant, [a.flatten() + b for a, b in zip(got, residuals, strict=True)])
    everyone(off < 1e-12, f"{off}")


@pytest.mark.parametrize("compression", [*WITH_RESIDUAL, DeepGradient(0.2), TernGrad()], ids=repr)
def test_a_step_that_overflowed_shows_on_all_ranks_and_leaves_nothing_behind(compression):
    """As GradScaler needs it: what arrives is not finite where that is looked at, later steps are."""
    trained = Trained(compression=compression)
    trained.step(0)
    trained.opt.zero_grad()
    for which, param in enumerate(trained.params):
        bad = gradient(mpisgd.rank(), 1, which)
        param.grad = bad.fill_(torch.inf) if mpisgd.rank() == 1 else bad
    trained.opt.synchronize()
    seen = all(param.grad.isfinite().all() for param in trained.params)
    everyone(not seen, "the overflow is hidden")
    later = [trained.step(step) for step in range(2, 5)]
    everyone(all(part.isfinite().all() for parts in later for part in parts), "later steps")
    same_on_all_ranks([part.tolist() for part in later[-1]])


def test_a_momentum_that_would_act_twice_is_refused():
    def wrapped(strategy, momentum, compression=WITH_MOMENTUM):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1, momentum=momentum)
        mpisgd.DistributedOptimizer(optimizer, strategy=strategy, compression=compression)

    with raises_everywhere(InvalidArgument) as caught:
        wrapped(mpisgd.Synchronous(), 0.9)
    everyone("so has the optimizer, 0.9" in caught.text, caught.text)
    for strategy in (mpisgd.LocalSGD(2), mpisgd.ElasticAveraging(every=2)):
        with raises_everywhere(InvalidArgument) as caught:
            wrapped(strategy, 0.0)
        everyone("beyond their mean" in caught.text, caught.text)
    wrapped(mpisgd.Synchronous(), 0.9, DeepGradient(0.1, momentum=0))
