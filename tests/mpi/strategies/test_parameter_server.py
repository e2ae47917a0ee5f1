"""`ParameterServer` against its paper; its counters; what it refuses."""

from __future__ import annotations

import random
import time

import pytest
import torch
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd import InvalidArgument, ParameterServer, config
from mpisgd.methods.paper_kit import Event, Vec
from mpisgd.methods.parameter_server.paper import ParameterServer as PaperOfServer
from mpisgd.tools.verification.paper_run import Definition, PaperRun

LR, MOMENTUM, STEPS = 0.1, 0.9, 20


def batch(rank: int, step: int) -> torch.Tensor:
    """[4, 8], different for every rank and step."""
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def fresh_model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(8, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()


def gradient(params: list[torch.Tensor], rank: int, step: int) -> list[torch.Tensor]:
    """By hand: of the mean of squares of the model's outputs."""
    w1, b1, w2, b2 = params
    x = batch(rank, step)
    hidden = torch.tanh(x @ w1.T + b1)
    above = 2 * (hidden @ w2.T + b2) / len(x)
    below = (above @ w2) * (1 - hidden**2)
    return [below.T @ x, below.sum(0), above.T @ hidden, above.sum(0)]


def start() -> list[torch.Tensor]:
    return [param.detach().clone() for param in fresh_model().parameters()]


def train(strategy, steps: int = STEPS, *, wrap=None, in_turn: bool = False, seen=None, **options):
    """Train on this rank; return the optimizer and the parameters after `finish`.

    Where ranks step in turn, `seen` is called with the optimizer after each of their rounds.
    """
    model = fresh_model()
    made = (wrap or (lambda params: torch.optim.SGD(params, lr=LR)))(model.parameters())
    optimizer = mpisgd.DistributedOptimizer(made, model.named_parameters(), strategy=strategy, **options)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(mpisgd.rank(), step)).square().mean().backward()
        if not in_turn:
            optimizer.step()
            continue
        mpisgd.barrier()  # all have computed, at what they read
        for rank in range(mpisgd.size()):
            if rank == mpisgd.rank():
                optimizer.step()
            elif step == 0 and rank == 0:
                optimizer.synchronizer.pull()  # the first values are exchanged by all together
            mpisgd.barrier()
        if seen is not None:
            seen(optimizer)
    return optimizer, [param.detach() for param in model.parameters()]


def assert_near(params, expected, tolerance=1e-12) -> None:
    worst = max((a - b).abs().max().item() for a, b in zip(params, expected, strict=True))
    everyone(worst <= tolerance, f"differs by {worst}")


def by_paper(push_every: int, pull_every: int, momentum: float) -> list[torch.Tensor]:
    """Downpour SGD where ranks push one after another; the parameters of this worker."""
    size, names = mpisgd.size(), ("w1", "b1", "w2", "b2")
    params = {rank: dict(zip(names, start(), strict=True)) for rank in range(size)}
    optimizers = {0: torch.optim.SGD(params[0].values(), lr=LR, momentum=momentum)}
    run = PaperRun(Definition(PaperOfServer(share=1 / size, lr=LR)), params, optimizers)
    for step in range(STEPS):
        g = {rank: gradient(list(run.x[rank].values()), rank, step) for rank in range(size)}
        for rank in range(size):
            run.event(Event("step", (rank,), Vec(zip(names, g[rank], strict=True))))
            if (step + 1) % push_every == 0:
                run.event(Event("push", (rank,)))
            if (step + 1) % pull_every == 0:
                run.event(Event("fetch", (rank,)))
    return list(run.x[mpisgd.rank()].values())


@pytest.mark.parametrize("momentum", [0.0, MOMENTUM])
@pytest.mark.parametrize(("push_every", "pull_every"), [(1, 1), (2, 4)])
def test_pushes_in_a_known_order_equal_downpour_sgd(push_every, pull_every, momentum):
    strategy = ParameterServer("async", push_every=push_every, pull_every=pull_every)
    _, params = train(
        strategy, in_turn=True, wrap=lambda params: torch.optim.SGD(params, lr=LR, momentum=momentum)
    )
    assert_near(params, by_paper(push_every, pull_every, momentum))


def test_the_end_pushes_what_was_accrued():
    """Gradients of a period that is not over were dropped by `finish()`, and by `add_param_group`."""
    size, rank = mpisgd.size(), mpisgd.rank()
    param, added = (torch.nn.Parameter(torch.arange(3, dtype=torch.float64)) for _ in range(2))
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD([param], lr=0.5), strategy=ParameterServer("async", push_every=4, pull_every=2)
    )
    for step in range(7):
        if step == 3:
            optimizer.add_param_group({"params": [added]})
        param.grad = torch.full_like(param, rank + 1.0)
        optimizer.step()
    optimizer.synchronizer.finish()
    expected = torch.arange(3, dtype=torch.float64) - 0.5 * 7 * sum(range(1, size + 1)) / size
    everyone(torch.allclose(param.detach(), expected, rtol=0, atol=1e-12), f"{param}, {expected}")


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("locked", [True, False])
def test_a_step_that_a_grad_scaler_would_leave_out_is_one_without_an_update(locked, unscales):
    """Its worker would be behind in the clocks for ever, and in the first step all meet."""
    needs_shared_memory(locked)
    if not locked and mpisgd.size() > 1:
        pytest.skip("updates without a lock may be lost")
    rank, size = mpisgd.rank(), mpisgd.size()
    param = torch.nn.Parameter(torch.arange(3, dtype=torch.float64))
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD([param], lr=0.5), strategy=ParameterServer("ssp", staleness_steps=0, locked=locked)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    expected = torch.arange(3, dtype=torch.float64)
    for step in range(4):
        overflows = [step == 2 or (step == 0 and r == size - 1) for r in range(size)]
        optimizer.zero_grad()
        scaler.scale(param.sum() * (rank + 1)).backward()
        if overflows[rank]:
            param.grad.fill_(float("inf"))
        if unscales:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        expected -= 0.5 * sum(r + 1.0 for r in range(size) if not overflows[r]) / size
    optimizer.synchronizer.finish()
    everyone(torch.allclose(param.detach(), expected, rtol=0, atol=1e-12), f"{param}, {expected}")
    counters = optimizer.synchronizer.counters()
    everyone(counters.finished == [4] * size and max(counters.lead) == 0, f"{counters}")
    everyone(scaler.get_scale() == (256.0 if rank == size - 1 else 512.0), f"{scaler.get_scale()}")


def needs_shared_memory(locked: bool) -> None:
    if not locked and mpisgd.num_nodes() > 1:
        pytest.skip("without a lock the ranks need the memory of one host")


def test_updates_without_a_lock_in_a_known_order_equal_hogwild():
    needs_shared_memory(False)
    size, shared = mpisgd.size(), start()
    for step in range(STEPS):
        grads = [gradient(shared, rank, step) for rank in range(size)]
        for rank in range(size):
            shared = [x - LR * g / size for x, g in zip(shared, grads[rank], strict=True)]
    _, params = train(ParameterServer("async", locked=False), in_turn=True)
    assert_near(params, shared)
    same_on_all_ranks([param.tolist() for param in params])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_one_worker_equals_serial_sgd_exactly(kind):
    groups = [mpisgd.new_group([rank]) for rank in range(mpisgd.size())]
    _, params = train(
        ParameterServer("async"), wrap=lambda params: kind(params, lr=LR), group=groups[mpisgd.rank()]
    )
    model = fresh_model()
    alone = kind(model.parameters(), lr=LR)
    for step in range(STEPS):
        alone.zero_grad()
        model(batch(mpisgd.rank(), step)).square().mean().backward()
        alone.step()
    assert_near(params, [param.detach() for param in model.parameters()], 0.0)


@pytest.mark.parametrize("locked", [True, False])
def test_staleness_zero_equals_synchronous_sgd(locked):
    if not locked and mpisgd.size() > 1:
        pytest.skip("updates without a lock may be lost")
    optimizer, params = train(ParameterServer("ssp", staleness_steps=0, locked=locked))
    optimizer.synchronizer.finish()
    _, expected = train(mpisgd.Synchronous())
    assert_near(params, expected)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_sync_equals_synchronous_sgd_to_the_last_bit(kind):
    _, params = train(ParameterServer(), wrap=lambda params: kind(params, lr=LR))
    _, expected = train(mpisgd.Synchronous(), wrap=lambda params: kind(params, lr=LR))
    assert_near(params, expected, 0.0)


@pytest.mark.parametrize("locked", [True, False])
def test_nobody_is_further_ahead_than_the_staleness_allows(locked):
    needs_shared_memory(locked)
    bound, dice = 2, random.Random(mpisgd.rank())
    model = fresh_model()
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR),
        strategy=ParameterServer("ssp", staleness_steps=bound, locked=locked),
    )
    worst = 0
    for step in range(STEPS):
        time.sleep(dice.choice([0, 0, 0, 0.02]) if mpisgd.rank() else 0)
        optimizer.zero_grad()
        model(batch(mpisgd.rank(), step)).square().mean().backward()
        optimizer.step()
        seen = optimizer.synchronizer.counters()
        worst = max(worst, max(seen.clock) - min(seen.finished))
    optimizer.synchronizer.finish()
    lead = optimizer.synchronizer.counters().lead[mpisgd.rank()]
    everyone(worst <= bound and lead <= bound, f"{worst}, {lead}")


@pytest.mark.parametrize("servers", [None, (0,)])
def test_every_push_is_applied_once_to_every_shard(servers):
    if servers and mpisgd.size() == 1:
        pytest.skip("a server needs a worker")
    model, me = fresh_model(), mpisgd.rank()
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), strategy=ParameterServer("async", servers=servers)
    )
    steps = [0 if servers and rank in servers else 10 + 5 * rank for rank in range(mpisgd.size())]
    for step in range(steps[me]):
        optimizer.zero_grad()
        model(batch(me, step)).square().mean().backward()
        optimizer.step()
    synchronizer = optimizer.synchronizer
    synchronizer.serve() if synchronizer.is_server else synchronizer.finish()
    same_on_all_ranks([param.tolist() for param in model.parameters()])
    counters = synchronizer.counters()
    everyone(counters.pushed == counters.begun == counters.finished == steps, f"{counters}")
    everyone(all(applied == steps for applied in counters.applied), f"{counters}")
    state = optimizer.state_dict()["state"]
    everyone(all(entry["step"] == sum(steps) for entry in state.values()) and len(state) == 4, f"{state}")
    mpisgd.barrier()


@pytest.mark.mpi(min_size=2)
def test_a_server_makes_no_steps():
    model = fresh_model()
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR), strategy=ParameterServer("async", servers=(1,))
    )
    error = ""
    if mpisgd.rank() == 1:
        try:
            optimizer.step()
        except InvalidArgument as exc:
            error = str(exc)
        optimizer.synchronizer.serve()
    else:
        optimizer.synchronizer.finish()
    everyone(mpisgd.rank() != 1 or "synchronizer.serve()" in error, error)


def test_a_state_that_is_loaded_goes_on_as_if_nothing_had_been():
    groups = [mpisgd.new_group([rank]) for rank in range(mpisgd.size())]
    group = groups[mpisgd.rank()]

    def wrap(params):
        return torch.optim.Adam(params, lr=0.01)

    _, whole = train(ParameterServer("async"), 6, wrap=wrap, group=group)
    first, params = train(ParameterServer("async"), 3, wrap=wrap, group=group)
    model = fresh_model()
    with torch.no_grad():
        for param, value in zip(model.parameters(), params, strict=True):
            param.copy_(value)
    second = mpisgd.DistributedOptimizer(
        wrap(model.parameters()), strategy=ParameterServer("async"), group=group
    )
    second.load_state_dict(first.state_dict())
    for step in range(3, 6):
        second.zero_grad()
        model(batch(mpisgd.rank(), step)).square().mean().backward()
        second.step()
    assert_near([param.detach() for param in model.parameters()], whole, 0.0)


@pytest.mark.parametrize("locked", [True, False])
def test_other_ranks_and_more_parameters_go_on_from_what_there_was(locked):
    needs_shared_memory(locked)
    groups = [mpisgd.new_group([rank]) for rank in range(mpisgd.size()) for _ in range(2)]
    mine = groups[2 * mpisgd.rank() : 2 * mpisgd.rank() + 2]
    model, alone = fresh_model(), fresh_model()
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(model[0].parameters(), lr=LR, momentum=MOMENTUM),
        strategy=ParameterServer("async", locked=locked),
        group=mine[0],
    )
    expected = torch.optim.SGD(alone[0].parameters(), lr=LR, momentum=MOMENTUM)
    for step in range(9):
        if step == 3:
            optimizer.rebuild(mine[1])
        if step == 6:
            optimizer.add_param_group({"params": list(model[2].parameters())})
            expected.add_param_group({"params": list(alone[2].parameters())})
        for this, made in ((model, optimizer), (alone, expected)):
            made.zero_grad()
            this(batch(mpisgd.rank(), step)).square().mean().backward()
            made.step()
    assert_near(
        [param.detach() for param in model.parameters()], [p.detach() for p in alone.parameters()], 0.0
    )


@pytest.mark.mpi(min_size=2)
def test_between_hosts_a_step_moves_every_shard_three_times(monkeypatch):
    """To the worker that updates it, back, and again to be read; the number of the version four times."""
    monkeypatch.setattr(config, "shared_memory", lambda: False)
    group, sent = mpisgd.new_group(), []

    def look(optimizer):
        sent.append(optimizer.synchronizer._memory.window._memory._window.sent_bytes)

    train(ParameterServer("async"), 5, in_turn=True, group=group, seen=look)
    num_shards = min(4, mpisgd.size())  # the model has four parameters; each fills up lines of 64 bytes
    shards = (
        sum(-(-8 * numel // 64) * 64 for numel in (40, 5, 5, 1)) + 64 * num_shards
    )  # and counts of pushes
    expected = 3 * (3 * shards + 4 * 8 * num_shards)
    # In the first round ranks read while others write, and may have to read once more.
    everyone(sent[4] - sent[1] == expected, f"{sent}; expected {expected}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mode": "fast"}, "mode='fast'"),
        ({"mode": "ssp"}, "staleness_steps=None"),
        ({"mode": "ssp", "staleness_steps": -1}, "staleness_steps=-1"),
        ({"mode": "async", "staleness_steps": 1}, "staleness_steps=1"),
        ({"mode": "async", "push_every": 0}, "push_every=0"),
        ({"mode": "ssp", "staleness_steps": 1, "push_every": 2}, "push_every and pull_every"),
        ({"locked": False}, "locked=False"),
        ({"mode": "async", "servers": (0, 0)}, "servers=(0, 0)"),
        ({"servers": (0,)}, "no dedicated servers"),
    ],
)
def test_arguments_that_make_no_sense_are_named(arguments, said):
    with raises_everywhere(InvalidArgument) as caught:
        ParameterServer(**arguments)
    everyone(said in caught.text, caught.text)


def test_what_does_not_go_together_is_refused_at_construction():
    def wrapped(strategy, optimizer=None, **options):
        params = list(fresh_model().parameters())
        mpisgd.DistributedOptimizer(
            (optimizer or torch.optim.SGD)(params, lr=LR), strategy=strategy, **options
        )

    for options in (
        {"compression": mpisgd.Compression.fp16},
        {"share_parameters": True},
        {"error_if_nonfinite": True},
        {"optimizer": torch.optim.LBFGS},
    ):
        with raises_everywhere(InvalidArgument):
            wrapped(ParameterServer("async"), **options)
    with raises_everywhere(InvalidArgument) as caught:
        wrapped(ParameterServer("async", servers=tuple(range(mpisgd.size()))))
    everyone("at least one left to train" in caught.text, caught.text)
