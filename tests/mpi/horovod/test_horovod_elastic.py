"""`hvd.elastic` on ranks that stay: commits, failures of operations, changed hosts, who gets which data."""

from __future__ import annotations

import pytest
import torch
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd.horovod as hvd

ElasticSampler, TorchState = hvd.elastic.ElasticSampler, hvd.elastic.TorchState
STEPS = 6


def make_model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()


def make_training(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = make_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def take_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + hvd.rank())
    inputs = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def train(failures: dict[int, int] | None = None) -> tuple[torch.Tensor, TorchState, list[int]]:
    """Train; `failures`: how often to fail in the middle of which step. Parameters, state, steps begun."""
    model, optimizer = make_training(seed=hvd.rank())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    state = TorchState(model, optimizer, scheduler=scheduler, step=0, seen=[])
    left = dict(failures or {})
    begun = []

    @hvd.elastic.run
    def run(state):
        while state.step < STEPS:
            begun.append(state.step)
            state.seen.append(state.step)
            if left.get(state.step, 0) > 0:
                left[state.step] -= 1
                model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()  # gradients are under way
                hvd.allreduce(torch.ones(1 + hvd.rank()), name="shapes differ")
            take_step(state.model, state.optimizer, state.step)
            state.scheduler.step()
            state.step += 1
            if state.step % 2 == 0:
                state.commit()

    run(state)
    return flat(model), state, begun


@pytest.mark.mpi(min_size=2)
def test_training_with_failures_ends_where_training_without_them_does(capfd):
    undisturbed, _, _ = train()
    recovered, state, begun = train({1: 1, 3: 2, 4: 1})
    everyone(torch.equal(undisturbed, recovered), "bitwise")
    assert begun == [0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 4, 4, 5]
    assert state.seen == list(range(STEPS))
    assert state.scheduler.get_last_lr() == [0.1 * 0.5**3]
    same_on_all_ranks(recovered.tolist())
    said = capfd.readouterr().err.count("back to the last commit, since an operation failed")
    assert said == (4 if hvd.rank() == 0 else 0)


@pytest.mark.mpi(min_size=2)
def test_a_failure_that_comes_for_ever_is_raised_on_every_rank(capfd):
    with raises_everywhere(hvd.HorovodInternalError) as caught:
        train({1: 10**9})
    everyone("'shapes differ'" in caught.text, caught.text)
    capfd.readouterr()


@pytest.mark.mpi(min_size=2)
def test_restoring_something_else_would_be_noticed():
    """What the first test compares depends on what is put back."""
    model, optimizer = make_training()
    for step in range(3):
        take_step(model, optimizer, step)
    once = flat(model)
    take_step(model, optimizer, 2)
    everyone(not torch.equal(flat(model), once))


def test_everything_becomes_rank_zeros():
    model = make_model(seed=hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(hvd.rank() + 1):
        model(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1.0 + hvd.rank()
    sampler = ElasticSampler(range(20), seed=3)
    sampler.record_batch(0, hvd.rank() + 1)
    state = TorchState(model, optimizer, sampler=sampler, epoch=7 + hvd.rank(), names=[hvd.rank()])
    state.sync()
    assert (state.epoch, state.names) == (7, [0])
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert sampler.processed_num == hvd.size()
    momenta = [entry["momentum_buffer"] for entry in optimizer.state_dict()["state"].values()]
    same_on_all_ranks([flat(model).tolist(), [momentum.tolist() for momentum in momenta]])

    synced = flat(model)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    state.epoch, optimizer.param_groups[0]["lr"] = 70, 5.0
    state.names.append("more")
    state.restore()
    assert torch.equal(flat(model), synced)
    assert (state.epoch, state.names, optimizer.param_groups[0]["lr"]) == (7, [0], 1.0)


def test_an_attribute_that_is_replaced_is_looked_after():
    state = TorchState(model=make_model(0))
    other = make_model(1)
    state.model = other
    kept = flat(other)
    with torch.no_grad():
        next(other.parameters()).zero_()
    state.restore()
    assert state.model is other
    assert torch.equal(flat(other), kept)


@pytest.mark.parametrize(("result", "synced"), [(1, False), (2, True)], ids=["removed", "added"])
def test_what_rank_zero_is_told_interrupts_everyone_at_a_commit(result, synced):
    state = TorchState(round=0)
    callbacks, rounds, own = [], [], []
    state.register_reset_callbacks([lambda: callbacks.append(hvd.size())])

    @hvd.elastic.run
    def run(state):
        rounds.append(state.round)
        own.append(getattr(state, "mine", None))
        if state.round == 0:
            state.round = 1 + hvd.rank()  # differs until the next sync
            if hvd.rank() == 0:
                state.on_hosts_updated(1, result)
            state.commit()
            raise AssertionError("no interrupt")
        return state.round

    last = run(state)
    assert callbacks == [hvd.size()]
    assert rounds == [0, last]
    assert last == (1 if synced else 1 + hvd.rank())
    assert hvd.is_initialized()


def test_own_types_have_handlers():
    class Counter:
        def __init__(self, number):
            self.number = number

    class CounterHandler(hvd.elastic.state.StateHandler):
        def __init__(self, value):
            super().__init__(value)
            self.save()

        def save(self):
            self.saved = self.value.number

        def restore(self):
            self.value.number = self.saved

        def sync(self):
            self.value.number = hvd.broadcast_object(self.value.number)

    before = hvd.elastic.state.get_handler_registry()
    try:
        hvd.elastic.state.set_handler_registry([(Counter, CounterHandler), *before])
        state = TorchState(counter=Counter(hvd.rank()))
        state.sync()
        assert state.counter.number == 0
        state.counter.number = 5
        state.restore()
        assert state.counter.number == 0
    finally:
        hvd.elastic.state.set_handler_registry(before)


# --- who gets which data ------------------------------------------------------------------------------


def everyones(sampler: ElasticSampler) -> list[list[int]]:
    return hvd.allgather_object(list(sampler))


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_all_indices(shuffle):
    sampler = ElasticSampler(range(10 * hvd.size() + 1), shuffle, seed=1)
    shares = everyones(sampler)
    assert {len(share) for share in shares} == {len(sampler)} == {11}
    assert set().union(*shares) == set(range(10 * hvd.size() + 1))
    first = list(sampler)
    sampler.set_epoch(1)
    everyone((list(sampler) != first) is shuffle)


def test_what_is_recorded_does_not_come_again():
    sampler = ElasticSampler(range(6 * hvd.size()), seed=2)
    whole = everyones(sampler)
    for batch in range(2):
        sampler.record_batch(batch, 2)
    elsewhere = ElasticSampler(range(6 * hvd.size()), seed=2)
    elsewhere.load_state_dict(sampler.state_dict())
    seen = {index for share in whole for index in share[:4]}
    rest = set().union(*everyones(elsewhere))
    assert len(elsewhere) == 2
    assert rest == set(range(6 * hvd.size())) - seen
    sampler.set_epoch(1)
    assert len(sampler) == 6


def test_fewer_left_than_ranks_go_round_and_none_left_is_none():
    length = 2 * hvd.size()
    sampler = ElasticSampler(range(length), shuffle=False)
    sampler.load_state_dict({"epoch": 0, "processed_num": length - 1})
    assert everyones(sampler) == [[length - 1]] * hvd.size()
    sampler.load_state_dict({"epoch": 0, "processed_num": length + 3})
    assert (list(sampler), len(sampler)) == ([], 0)
