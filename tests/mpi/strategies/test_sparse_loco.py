"""`SparseLoCo`: what travels, what is kept, what may be inside, and whose state it is."""

from __future__ import annotations

import functools

import pytest
import torch
from methods import Net, adam, sgd, targets, train, values
from test_state import apart, folder, through_a_file
from torch import nn
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd import DiLoCo, SparseLoCo, checkpoint, compress, config
from mpisgd.errors import InvalidArgument
from mpisgd.methods.compression_kit import of_chunks
from mpisgd.methods.cost_kit import World
from mpisgd.methods.costs import cost_of, wire_of
from mpisgd.methods.sizes import parameter, sizes_of
from mpisgd.methods.wire_bytes import sent_bytes

EVERY, KEEP, CHUNK, BITS, DECAY, RATE = 3, 2, 9, 3, 0.75, 0.5
METHOD = SparseLoCo(EVERY, KEEP, CHUNK, BITS, DECAY, RATE)
COMPOSED = {
    "strategy": DiLoCo(EVERY, outer_options={"lr": RATE}),
    "compression": compress.ChunkTopK(KEEP, CHUNK, BITS, DECAY),
}


def wrapped(model: nn.Module, inner=adam, **options):
    options = options or {"strategy": METHOD}
    return mpisgd.DistributedOptimizer(
        inner(model.parameters()), named_parameters=model.named_parameters(), **options
    )


def residuals(optimizer) -> dict[str, torch.Tensor]:
    """What this rank keeps of each parameter."""
    kept = optimizer.state_dict()["mpisgd"]["own"]["compression"]["own"]
    return {key: entry["residual"].clone() for key, entry in kept.items()}


@pytest.mark.mpi(min_size=2)
def test_an_outer_step_is_that_of_the_paper():
    """By hand, from the parameters of the ranks just before; the error of each rank is its own."""
    model, twin = Net(), Net()
    optimizer, alone = wrapped(model), adam(twin.parameters())
    outer, errors = values(model), [torch.zeros_like(param) for param in values(model)]
    for first in range(0, 4 * EVERY, EVERY):
        train(model, optimizer, first, first + EVERY)
        train(twin, alone, first, first + EVERY)
        for place, param in enumerate(twin.parameters()):
            meant = DECAY * errors[place] + (outer[place] - param.detach())
            sent = of_chunks(meant, KEEP, CHUNK, 2 ** (BITS - 1) - 1)
            errors[place] = meant - sent
            mpisgd.all_reduce(sent, mpisgd.ReduceOp.AVG)
            outer[place] = outer[place] - RATE * sent
            with torch.no_grad():
                param.copy_(outer[place])
        off = apart(values(model), outer)
        everyone(off < 1e-14, f"after {first + EVERY} steps: {off}")
        same_on_all_ranks([param.tolist() for param in values(model)])
    kept = residuals(optimizer)
    off = apart([kept[str(place)] for place in range(3)], [error.flatten() for error in errors])
    everyone(off < 1e-14 and all(error.any() for error in errors), f"errors: {off}")


def test_a_state_is_that_of_the_composition():
    """Each loads what the other one has saved, and goes on to the last bit."""
    pairs = (({"strategy": METHOD}, COMPOSED), (COMPOSED, {"strategy": METHOD}))
    for saves, loads in pairs:
        model, again = Net(), Net(seed=1)
        optimizer, resumed = wrapped(model, **saves), wrapped(again, **loads)
        train(model, optimizer, 0, EVERY + 2)
        again.load_state_dict(through_a_file(model.state_dict()))
        resumed.load_state_dict(through_a_file(optimizer.state_dict()))
        train(model, optimizer, EVERY + 2, 4 * EVERY)
        train(again, resumed, EVERY + 2, 4 * EVERY)
        off = apart(values(again), values(model))
        everyone(off == 0, f"{off}")
    everyone(optimizer.compression == METHOD.own_compression, f"{optimizer.compression}")


@pytest.mark.mpi(min_size=2)
def test_a_resumed_run_depends_on_the_error_of_each_rank():
    """A checkpoint has it; without it another run comes out."""
    model, again, bare = Net(), Net(seed=1), Net(seed=2)
    optimizer, resumed, forgetful = (wrapped(net) for net in (model, again, bare))
    train(model, optimizer, 0, 2 * EVERY + 1)
    path = checkpoint.save(folder(), 1, model=model, optimizer=optimizer)
    checkpoint.load(path, model=again, optimizer=resumed)
    without = through_a_file(optimizer.state_dict())
    del without["mpisgd"]["own"]["compression"]
    bare.load_state_dict(model.state_dict())
    forgetful.load_state_dict(without)
    for net, opt in ((model, optimizer), (again, resumed), (bare, forgetful)):
        train(net, opt, 2 * EVERY + 1, 4 * EVERY)
    everyone(apart(values(again), values(model)) == 0, "not the uninterrupted run")
    everyone(apart(values(bare), values(model)) > 1e-6, "the error makes no difference")


@pytest.mark.mpi(min_size=2)
def test_the_error_of_a_parameter_outlives_that_it_is_frozen():
    """It goes on to be sent, by the parameter's name, and fades; then the parameter trains on with it."""
    model = Net()
    optimizer = wrapped(model)
    train(model, optimizer, 0, EVERY)
    before = residuals(optimizer)["0"]
    frozen = model.weights[0]
    frozen.requires_grad_(False)
    frozen.grad = None
    train(model, optimizer, EVERY, 2 * EVERY)
    meant = DECAY * before
    expected = meant - of_chunks(meant, KEEP, CHUNK, 2 ** (BITS - 1) - 1)
    off = (residuals(optimizer)["0"] - expected).abs().max().item()
    everyone(off < 1e-14 and bool(expected.any()), f"{off}")
    frozen.requires_grad_(True)
    train(model, optimizer, 2 * EVERY, 3 * EVERY)
    everyone(not torch.equal(residuals(optimizer)["0"], DECAY * expected))
    same_on_all_ranks([param.tolist() for param in values(model)])


@pytest.mark.mpi(min_size=2)
def test_what_an_outer_step_sends_is_what_the_cost_says(monkeypatch):
    """Of parameters of more than a chunk and of less, where the ranks have nothing but messages."""
    monkeypatch.setattr(config, "shared_memory", lambda: False)
    group = mpisgd.new_group()
    shapes = ((100, 300), (64, 70), (17,))
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    method = SparseLoCo(4)
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(params, lr=0.1), strategy=method, check_start=False, group=group
    )
    communicator = group.queue.communicator
    found = []
    for _ in range(8):
        sent, given = communicator.sent_bytes, communicator.given_bytes["Allgather"]
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
        gathered = communicator.given_bytes["Allgather"] - given
        found.append(communicator.sent_bytes - sent + (group.size - 1) * gathered)
    sizes = sizes_of([parameter(i, shape, 4, 0) for i, shape in enumerate(shapes)], 2**25)
    world = World(group.size, 1, wire_of(mpisgd.Compression.none))
    cost = cost_of(method)
    said = [sent_bytes(cost.cost(sizes, world, step), world)["all"] for step in range(1, 9)]
    # 8 chunks of 30,000 elements, 2 of 4,480, of which the last ones are of 1,328 and 384, and one of 17.
    count = 7 * 64 + 21 + 64 + 6 + 1
    outer_step = (group.size - 1) * (count + -(-count * 4 // 8) + -(-count * 2 // 8) + 11 * 8)
    expected = [0, 0, 0, outer_step] * 2
    off = [abs(a - b) for a, b in zip(said, expected, strict=True)]
    everyone(found == expected and max(off) < 1e-6, f"sent {found}, said {said}, expected {expected}")


class WithMatrices(nn.Module):
    """Matrices for Muon, and a vector for AdamW, which are pulled to targets of each rank."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        shapes = ((8, 6), (6, 12), (5,))
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes)

    def loss(self, rank: int, step: int) -> torch.Tensor:
        pulls = zip(self.weights, targets(rank, step % 2, *(w.shape for w in self.weights)), strict=True)
        return sum((w - t.to(w.dtype)).square().mean() for w, t in pulls)

    def excess(self) -> float:
        """How much the loss of all ranks is above the least that one model can have."""
        shapes = [weight.shape for weight in self.weights]
        drawn = [targets(rank, step, *shapes) for rank in range(mpisgd.size()) for step in (0, 1)]
        means = [torch.stack(each).mean(0) for each in zip(*drawn, strict=True)]
        with torch.no_grad():
            return sum((w - mean).square().mean().item() for w, mean in zip(self.weights, means, strict=True))


@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
@pytest.mark.parametrize("kind", ["muon", "with adamw"])
def test_muon_may_be_inside(kind):
    """As the inner optimizer of matrices, beside another optimizer for the rest, or of both: it trains."""
    model, twin = WithMatrices(), WithMatrices()
    strategy = SparseLoCo(EVERY, keep=4, chunk=16)
    start = model.excess()

    def optimizers(net: nn.Module, wrap):
        if kind == "with adamw":
            return [wrap(mpisgd.MuonWithAdamW(net.named_parameters(), lr=0.2))]
        muon = torch.optim.Muon(list(net.weights)[:2], lr=0.2, adjust_lr_fn="match_rms_adamw")
        return [wrap(muon), wrap(torch.optim.AdamW(list(net.weights)[2:], lr=0.2))]

    ours = optimizers(model, functools.partial(mpisgd.DistributedOptimizer, strategy=strategy))
    alone = optimizers(twin, lambda optimizer: optimizer)
    outer = values(twin)
    errors = [torch.zeros_like(param) for param in outer]
    off = []
    for step in range(10 * EVERY):
        for net, some in ((model, ours), (twin, alone)):
            for optimizer in some:
                optimizer.zero_grad()
            net.loss(mpisgd.rank(), step).backward()
            for optimizer in some:
                optimizer.step()
        if (step + 1) % EVERY == 0:
            for place, param in enumerate(twin.weights):
                meant = 0.95 * errors[place] + (outer[place] - param.detach())
                sent = of_chunks(meant, 4, 16, 1)
                errors[place] = meant - sent
                mpisgd.all_reduce(sent, mpisgd.ReduceOp.AVG)
                outer[place] = outer[place] - sent
                with torch.no_grad():
                    param.copy_(outer[place])
            same_on_all_ranks([param.tolist() for param in values(model)])
        off.append(apart(values(model), values(twin)))
    everyone(max(off) < 1e-6, f"{off}")
    end = model.excess()
    everyone(end < 0.5 * start, f"what is left of the loss went from {start} to {end}")


def test_a_compression_beside_its_own_is_refused():
    for compression in (compress.TopK(0.1), mpisgd.Compression.bf16, METHOD.own_compression):
        with raises_everywhere(InvalidArgument) as caught:
            wrapped(Net(), sgd, strategy=METHOD, compression=compression)
        everyone("compression=" in caught.text and "SparseLoCo" in caught.text, caught.text)


def test_what_diloco_does_not_go_with_is_refused_by_name():
    for option in ({"op": "sum"}, {"share_parameters": True}, {"check_in_sync_every": 2}):
        with raises_everywhere(InvalidArgument) as caught:
            wrapped(Net(), sgd, strategy=METHOD, **option)
        (name,) = option
        everyone(name in caught.text and "SparseLoCo" in caught.text, caught.text)
