"""`Gossip` with the rest of the wrapper: accumulation, closures, GradScaler, saved state, other ranks."""

from __future__ import annotations

import pytest
import torch
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd import Compression, Gossip
from mpisgd.errors import CollectiveMismatch, InvalidArgument
from mpisgd.gossip import MixingMatrix, Ring


def skewed(size: int) -> torch.Tensor:
    """Column-stochastic; its rows sum to other numbers than 1."""
    w = torch.zeros(size, size, dtype=torch.float64)
    for j in range(size):
        w[j, j] += 0.5 if j else 0.25
        w[(j + 1) % size, j] += 0.5 if j else 0.75
    return w


def wrap(params, strategy, kind=torch.optim.SGD, lr=0.5, **options) -> torch.optim.Optimizer:
    return mpisgd.DistributedOptimizer(kind(params, lr=lr), strategy=strategy, **options)


def own_param(numel: int = 3) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(numel, dtype=torch.float64) + 10 * mpisgd.rank())


def all_params(numel: int = 3) -> torch.Tensor:
    rows = [torch.arange(numel, dtype=torch.float64) + 10 * rank for rank in range(mpisgd.size())]
    return torch.stack(rows)


def is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a.detach(), b.detach(), rtol=0, atol=1e-12)


def mix(x: torch.Tensor, num: int = 1) -> torch.Tensor:
    return torch.linalg.matrix_power(Ring().matrix(mpisgd.size()), num) @ x


def test_gradients_accumulate_and_are_clipped_on_their_rank():
    rank, size = mpisgd.rank(), mpisgd.size()
    param = own_param()
    optimizer = wrap([param], Gossip("ring"), backward_passes_per_step=2)
    with optimizer.no_sync():
        (param.sum() * (rank + 1)).backward()
    (param.sum() * (rank + 1)).backward()
    everyone(is_close(param.grad, torch.full((3,), 2.0 * (rank + 1), dtype=torch.float64)))
    norm = optimizer.clip_grad_norm_(1.0)
    everyone(norm.item() == pytest.approx(2 * (rank + 1) * 3**0.5))
    optimizer.step()
    norms = 2 * 3**0.5 * (torch.arange(size, dtype=torch.float64) + 1)
    grads = (norms / (norms + 1e-6) / 3**0.5)[:, None].expand(-1, 3)  # as torch clips
    everyone(is_close(param, mix(all_params() - 0.5 * grads)[rank]), f"{param}")


@pytest.mark.parametrize("style", ["adapt_then_combine", "combine_then_adapt", "push_sum"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_a_closure_computes_gradients_at_what_the_rule_says(style, kind):
    """Of SGD; LBFGS, which evaluates several times, has to come through."""
    rank, size = mpisgd.rank(), mpisgd.size()
    param = own_param()
    optimizer = wrap([param], Gossip("ring", style=style), kind)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = param.square().sum() / 2 * (rank + 1)
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    everyone(loss.item() == pytest.approx(all_params()[rank].square().sum().item() / 2 * (rank + 1)))
    if kind is torch.optim.SGD:
        grads = all_params() * (torch.arange(size) + 1.0)[:, None]
        combined = style == "combine_then_adapt"
        x = mix(all_params()) - 0.5 * grads if combined else mix(all_params() - 0.5 * grads)
        everyone(is_close(param, x[rank]), f"{param}, {x}")


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("style", ["adapt_then_combine", "combine_then_adapt", "push_sum"])
def test_a_rank_whose_gradients_overflow_mixes_all_the_same(style, unscales):
    """A GradScaler leaves out step() there, and the others would wait for it for ever."""
    rank, size = mpisgd.rank(), mpisgd.size()
    param = own_param()
    optimizer = wrap([param], Gossip("ring", style=style))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    expected = all_params()
    for step in range(4):
        optimizer.zero_grad()
        overflows = [(step == 1 and r == size - 1) or step == 2 for r in range(size)]
        scaler.scale(param.sum() * (rank + 1)).backward()
        if overflows[rank]:
            param.grad.fill_(float("inf"))
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        grads = torch.tensor([0.0 if overflows[r] else r + 1.0 for r in range(size)], dtype=torch.float64)
        expected = (
            mix(expected) - 0.5 * grads[:, None]
            if style == "combine_then_adapt"
            else mix(expected - 0.5 * grads[:, None])
        )
    everyone(is_close(param, expected[rank]), f"{param}, {expected}")
    everyone(scaler.get_scale() == (256.0 if rank == size - 1 else 512.0), f"{scaler.get_scale()}")


@pytest.mark.parametrize("style", ["adapt_then_combine", "push_sum"])
def test_a_saved_state_continues_as_if_nothing_had_been(style):
    topology = skewed(mpisgd.size()) if style == "push_sum" else "one_peer_exponential"
    strategy = Gossip(topology, style=style, every=2)

    def steps(param: torch.nn.Parameter, optimizer: torch.optim.Optimizer, num: int) -> None:
        for _ in range(num):
            param.grad = param.detach() * (mpisgd.rank() + 1)
            optimizer.step()

    through, stopped = own_param(), own_param()
    steps(through, wrap([through], strategy, lr=0.01), 7)
    first = wrap([stopped], strategy, lr=0.01)
    steps(stopped, first, 3)
    resumed = torch.nn.Parameter(stopped.detach().clone())
    second = wrap([resumed], strategy, lr=0.01)
    second.load_state_dict(first.state_dict())
    steps(resumed, second, 4)
    everyone(is_close(resumed, through), f"{resumed}, {through}")
    torch.optim.SGD([resumed], lr=0.1).load_state_dict(first.state_dict())  # others ignore the entry


def test_added_parameters_are_mixed_too():
    params = [own_param(3), own_param(2)]
    optimizer = wrap(params[:1], Gossip("ring"))
    optimizer.add_param_group({"params": params[1:]})
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    everyone(all(is_close(param, mix(all_params(len(param)))[mpisgd.rank()]) for param in params))


def test_frozen_parameters_and_integer_ones_stay():
    frozen, trained = own_param(), own_param()
    frozen.requires_grad_(False)
    optimizer = wrap([frozen, trained], Gossip("ring"))
    trained.grad = torch.zeros_like(trained)
    optimizer.step()
    everyone(is_close(frozen, all_params()[mpisgd.rank()]))
    everyone(is_close(trained, mix(all_params())[mpisgd.rank()]))


def test_buffers_are_mixed_too():
    param, counts = own_param(), torch.tensor([mpisgd.rank()])
    running = own_param(2).detach()
    buffers = [("running", running), ("counts", counts)]
    optimizer = wrap([param], Gossip("ring"), named_buffers=buffers)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    everyone(is_close(running, mix(all_params(2))[mpisgd.rank()]))
    everyone(counts.item() == mpisgd.rank())


def test_the_consensus_of_push_sum_is_the_exact_mean():
    size = mpisgd.size()
    param = own_param()
    optimizer = wrap([param], Gossip(skewed(size), style="push_sum"))
    for _ in range(2):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    own = param.detach().clone()
    with optimizer.consensus():
        everyone(is_close(param, all_params().mean(0)), f"{param}")
    everyone(torch.equal(param, own))


def test_of_local_sgd_too_a_rank_whose_gradients_overflow_comes_to_the_mean():
    param = own_param()
    optimizer = wrap([param], mpisgd.LocalSGD(sync_every=1), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(param.sum()).backward()
    if mpisgd.rank() == 0:
        param.grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    everyone(is_close(param, all_params().mean(0) - (mpisgd.size() - 1) / mpisgd.size()))


def test_sparse_gradients_are_applied_where_they_came_up():
    torch.manual_seed(1)
    table = torch.nn.Embedding(mpisgd.size() + 2, 2, sparse=True, dtype=torch.float64)
    before = table.weight.detach().clone()
    optimizer = wrap(table.parameters(), Gossip("complete"))
    table(torch.tensor([mpisgd.rank()])).sum().backward()
    everyone(table.weight.grad.is_sparse)
    optimizer.step()
    expected = before.clone()
    expected[: mpisgd.size()] -= 0.5 / mpisgd.size()
    everyone(is_close(table.weight, expected))


@pytest.mark.parametrize("style", ["combine_then_adapt", "push_sum"])
def test_other_ranks_begin_anew(style, groups):
    half = groups["half"]
    param = own_param()
    optimizer = wrap([param], Gossip("ring", style=style))
    param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.rebuild(half)
    mine = param.detach().clone()
    others = [torch.empty_like(mine) for _ in range(half.size)]
    mpisgd.all_gather(others, mine, half)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    expected = (Ring().matrix(half.size) @ torch.stack(others))[half.rank]
    everyone(is_close(param, expected))


@pytest.mark.mpi(min_size=2)
def test_a_matrix_does_not_fit_other_ranks(groups):
    size = mpisgd.size()
    optimizer = wrap([own_param()], Gossip(MixingMatrix([[1 / size] * size] * size)))
    with raises_everywhere(InvalidArgument):
        optimizer.rebuild(groups["half"])


@pytest.mark.parametrize(
    "options",
    [
        {"op": mpisgd.ReduceOp.SUM},
        {"gradient_predivide_factor": 2.0},
        {"error_if_nonfinite": True},
        {"share_parameters": True},
        {"check_in_sync_every": 2},
    ],
)
def test_options_about_the_reduction_of_gradients_are_refused(options):
    with raises_everywhere(InvalidArgument) as caught:
        wrap([own_param()], Gossip("ring"), **options)
    everyone(next(iter(options)) in caught.text, caught.text)
    optimizer = wrap([own_param()], Gossip("ring"), compression=Compression.fp16)  # the job goes on
    everyone(isinstance(optimizer.strategy, Gossip))


@pytest.mark.mpi(min_size=2)
def test_matrices_that_lose_the_mean_are_refused_on_every_rank():
    size = mpisgd.size()
    for topology in (skewed(size), torch.eye(size, dtype=torch.float64)):
        with raises_everywhere(InvalidArgument):
            wrap([own_param()], Gossip(topology))
    with raises_everywhere(InvalidArgument):
        wrap([own_param()], Gossip(skewed(size).T, style="push_sum"))
    with raises_everywhere(InvalidArgument):
        Gossip(torch.full((size, size), 1.0))


@pytest.mark.mpi(min_size=2)
def test_all_ranks_choose_the_same_graph():
    with raises_everywhere(CollectiveMismatch) as caught:
        wrap([own_param()], Gossip("ring" if mpisgd.rank() else "star"))
    everyone("Ring()" in caught.text, caught.text)


def test_the_spectral_gap_is_told_once(monkeypatch):
    from mpisgd.methods.gossip import gossip

    said: list[str] = []
    monkeypatch.setattr(gossip, "print_to_user", said.append)
    strategy = Gossip("ring", every=17)
    for _ in range(2):
        wrap([own_param()], strategy)
    expected = 1 if mpisgd.rank() == 0 and mpisgd.size() > 1 else 0
    everyone(len(said) == expected, f"{said}")
    everyone(all(f"spectral gap {strategy.spectral_gap(mpisgd.size()):.4g}" in text for text in said))
