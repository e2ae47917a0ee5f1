"""Faults of parameters and states that ranks divide; each test tells what broke."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from test_offload import FEATURES, batch, offload_in, same_folder
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute
from verdicts import everyone, raises_everywhere, referee, same_on_all_ranks

import mpisgd
from mpisgd import checkpoint
from mpisgd.sharding.offload.private_file import PrivateFile
from mpisgd.sharding.owners import Owners


def layers(seed=3, width=FEATURES, count=3):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count))).double()


def adam(model, **options):
    return mpisgd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), **options)


def train(model, optimizer, step):
    optimizer.zero_grad()
    model(batch(step)).square().sum().backward()
    optimizer.step()


def values(model):
    return [param.detach().clone() for param in model.parameters()]


def are_equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- parameters that arrive during the next forward ----------------------------------------------------


@pytest.fixture
def slow(monkeypatch):
    """Parameters take their time."""
    exchange = Owners.exchange_in_turn

    def exchange_slowly(self, *args, **options):
        time.sleep(0.02)
        return exchange(self, *args, **options)

    monkeypatch.setattr(Owners, "exchange_in_turn", exchange_slowly)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("how", ["state_dict", "layer", "save", "broadcast", "in_sync", "average"])
def test_parameters_are_whole_after_the_first_step_with_overlap_forward(how, tmp_path):
    # The hook that waits was only there from the second forward on: what was saved after the first step had
    # old values.
    models = [layers(), layers()]
    strategies = mpisgd.Sharded(overlap_forward=True), mpisgd.Synchronous()
    for model, strategy in zip(models, strategies, strict=True):
        optimizer = adam(model, strategy=strategy, bucket_cap_bytes=1)
        train(model, optimizer, 0)
        if strategy.__class__ is mpisgd.Sharded:
            seen = read(model, how, tmp_path)
    pairs = zip(seen, values(models[1]), strict=True)  # a mean of three equal values is rounded
    everyone(all(torch.allclose(a, b, rtol=1e-14, atol=0) for a, b in pairs), "old values")


def read(model, how, tmp_path):
    """Return the values of a model, as somebody finds them who reads it in one of several ways."""
    if how == "layer":
        found = {}
        for layer in model:
            layer.register_forward_hook(lambda layer, *_: found.update({layer: values(layer)}))
        with torch.no_grad():
            model[2](model[1](model[0](batch(0))))
        return [value for layer in model for value in found[layer]]
    if how == "state_dict":
        return [value.clone() for value in model.state_dict().values()]
    if how == "save":
        path = checkpoint.save(same_folder(tmp_path), 1, model=model)
        other = layers(seed=4)
        checkpoint.load(path, model=other)
        return values(other)
    ask = {
        "broadcast": mpisgd.broadcast_parameters,
        "in_sync": mpisgd.check_in_sync,
        "average": mpisgd.average_parameters,
    }
    ask[how](model)
    return values(model)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))

    def forward(self, x, k):
        return self.heads[k](x)


def test_a_parameter_that_another_rank_uses_may_be_unused_here(tmp_path):
    # Its gradient exists on all ranks after backward, and that was taken for a use here, without a wait.
    runs = []
    for strategy in (mpisgd.Sharded(overlap_forward=True), mpisgd.Synchronous()):
        torch.manual_seed(1)
        model = TwoHeads().double()
        optimizer = adam(model, strategy=strategy, bucket_cap_bytes=1)
        for step in range(5):
            optimizer.zero_grad()
            model(batch(step), (mpisgd.rank() + step) % 2).square().sum().backward()
            optimizer.step()
        runs.append([value.clone() for value in model.state_dict().values()])
    everyone(are_equal(*runs), "other values")


# -- a backward that raises, or runs inside another one ------------------------------------------------


def streamed(model, tmp_path, **options):
    """Return a model in files, and its optimizer."""
    offload = offload_in(tmp_path, what="optimizer,parameters", prefetch=1, **options)
    mpisgd.offload_parameters(model, offload)
    return model, adam(model, strategy=mpisgd.Sharded(2, offload=offload))


class Fails(Exception):
    pass


def failing_step(model, optimizer, place):
    """Leave a backward when the gradient of a layer's output is there."""
    optimizer.zero_grad()
    x = batch(9)
    for k, layer in enumerate(model):
        x = layer(x)
        if k == place:
            x.register_hook(fail)
    with pytest.raises(Fails):
        x.square().sum().backward()


def fail(_):
    raise Fails


STRATEGIES = {
    "files": None,
    "stage 1": mpisgd.Sharded(1),
    "stage 2": mpisgd.Sharded(2),
    "overlapped": mpisgd.Sharded(2),
    "forward": mpisgd.Sharded(1, overlap_forward=True),
    "shared": mpisgd.Synchronous(),
}


def start(kind, tmp_path):
    if kind == "files":
        return streamed(layers(), tmp_path)
    model, options = layers(), {"bucket_cap_bytes": 1}
    if kind == "overlapped":
        options["overlap"] = True
    if kind == "shared":
        options["share_parameters"] = True
    return model, adam(model, strategy=STRATEGIES[kind], **options)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_backward_that_raised_leaves_nothing(kind, place, tmp_path):
    # With parameters in files all later gradients were wrong: the pass had never ended.
    ours, theirs = start(kind, tmp_path), (layers(), None)
    theirs = theirs[0], adam(theirs[0])
    for model, optimizer in (ours, theirs):
        train(model, optimizer, 0)
        failing_step(model, optimizer, place)
        for step in range(1, 3):
            train(model, optimizer, step)
    everyone(are_equal(ours[0].state_dict().values(), theirs[0].state_dict().values()), "other values")


@pytest.mark.parametrize("head", [True, False])
def test_the_gradients_of_nested_backward_passes_add_up(head, tmp_path):
    # A layer's parameters were looked at once in a backward; reentrant checkpointing brings a gradient for
    # each time that it is used.
    def step(model, optimizer):
        optimizer.zero_grad()
        x = batch(0).requires_grad_()
        for layer in (model[0], model[1], model[0], model[1], model[0]):
            x = recompute(layer, torch.tanh(x), use_reentrant=True)
        x = model[2](x) if head else x
        x.square().sum().backward()
        optimizer.step()

    ours, theirs = streamed(layers(), tmp_path), (layers(), None)
    theirs = theirs[0], adam(theirs[0])
    for run in (ours, theirs):
        for _ in range(2):
            step(*run)
    pairs = zip(ours[0].state_dict().values(), theirs[0].state_dict().values(), strict=True)
    everyone(all(torch.allclose(a, b, rtol=1e-11, atol=1e-13) for a, b in pairs), "other values")


# -- parameters without memory ---------------------------------------------------------------------------


def test_parameters_in_files_are_broadcast_compared_and_averaged(tmp_path):
    # A parameter in a file has no memory: whoever read it got a segmentation fault.
    model, optimizer = streamed(layers(), tmp_path)
    plain = layers()
    other = adam(plain)
    for step in range(2):
        train(model, optimizer, step)
        train(plain, other, step)
        mpisgd.broadcast_parameters(model)
        mpisgd.average_parameters(model.named_parameters())
        mpisgd.check_in_sync(model)
        mpisgd.check_in_sync(optimizer)
        mpisgd.average_gradients(model)
    everyone(not any(param.untyped_storage().nbytes() for param in model.parameters()), "in memory")
    everyone(are_equal(model.state_dict().values(), plain.state_dict().values()), "other values")


def test_what_others_send_is_written_to_the_files(tmp_path):
    src = mpisgd.size() - 1
    model, optimizer = streamed(layers(), tmp_path)
    state = {name: value + 1 for name, value in model.state_dict().items()}
    mpisgd.broadcast_parameters({"x": torch.zeros(1)})
    model.load_state_dict(state)
    mpisgd.broadcast_parameters(model.named_parameters(), src=src)
    everyone(are_equal(model.state_dict().values(), state.values()), "other values")
    train(model, optimizer, 0)
    plain = layers()
    plain.load_state_dict(state)
    train(plain, adam(plain), 0)
    everyone(are_equal(model.state_dict().values(), plain.state_dict().values()), "other values")


def test_an_optimizer_that_expects_memory_is_refused(tmp_path):
    model = layers()
    mpisgd.offload_parameters(model, offload_in(tmp_path, what="optimizer,parameters"))
    for strategy in (None, mpisgd.Sharded(), mpisgd.LocalSGD(sync_every=2)):
        with raises_everywhere(mpisgd.InvalidArgument) as caught:
            adam(model, strategy=strategy)
        everyone("Sharded(offload=" in caught.text, caught.text)


def test_other_memory_is_refused_and_not_ignored(tmp_path):
    model, optimizer = streamed(layers(), tmp_path)
    train(model, optimizer, 0)
    model[1].weight.data = torch.ones(FEATURES, FEATURES, dtype=torch.float64)
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        model(batch(0))
    everyone("1.weight" in caught.text, caught.text)


# -- parameters that are added, states that are sent -------------------------------------------------------


def test_a_group_may_be_added_to_a_state_in_files(tmp_path):
    # The names of the pieces in the file's header were those of construction: IndexError.
    ours, theirs = layers(), layers()
    strategies = mpisgd.Sharded(offload=offload_in(tmp_path)), mpisgd.Sharded()
    for model, strategy in zip((ours, theirs), strategies, strict=True):
        more = layers(seed=8, count=1)
        optimizer = adam(model, strategy=strategy)
        train(model, optimizer, 0)
        optimizer.add_param_group({"params": more.parameters()})
        for step in range(1, 3):
            train(nn.Sequential(model, more), optimizer, step)
        model.append(more)
    everyone(are_equal(values(ours), values(theirs)), "other values")


def test_a_group_that_is_refused_is_not_added(tmp_path):
    model, optimizer = streamed(layers(), tmp_path)
    with raises_everywhere(mpisgd.InvalidArgument):
        optimizer.add_param_group({"params": layers(count=1).parameters()})
    everyone(len(optimizer.param_groups) == 1, "added")
    train(model, optimizer, 0)


@pytest.mark.parametrize("kind", ["memory", "state", "parameters", "masters"])
def test_a_state_may_be_whole_on_some_ranks_only(kind, tmp_path):
    # After it was loaded on some ranks, these took part in other collectives than the rest.
    def begin():
        model = layers()
        if kind == "parameters":
            return streamed(model, tmp_path)
        if kind == "masters":
            model.bfloat16()
            return model, adam(model, strategy=mpisgd.Sharded(master_dtype=torch.float32))
        offload = None if kind == "memory" else offload_in(tmp_path)
        return model, adam(model, strategy=mpisgd.Sharded(offload=offload))

    def step(model, optimizer, number):
        optimizer.zero_grad()
        model(batch(number).to(next(model.parameters()).dtype)).square().sum().backward()
        optimizer.step()

    ours, theirs = begin(), begin()
    for run in (ours, theirs):
        for number in range(2):
            step(*run, number)
    mpisgd.broadcast_optimizer_state(ours[1])
    first = copy.deepcopy(ours[1].state_dict())
    step(*ours, 2)
    step(*theirs, 2)
    second, expected = ours[1].state_dict(), theirs[1].state_dict()
    mpisgd.broadcast_optimizer_state(ours[1], src=mpisgd.size() - 1)
    mpisgd.check_in_sync(ours[1])
    everyone(first["state"].keys() == expected["state"].keys(), f"{first['state'].keys()}")
    for index, entries in expected["state"].items():
        for name, value in entries.items():
            everyone(torch.equal(second["state"][index][name], value), f"{index} {name}")
    everyone(are_equal(ours[0].state_dict().values(), theirs[0].state_dict().values()), "other values")


# -- disks -------------------------------------------------------------------------------------------------


class Parts(nn.Module):
    """Small layers whose pieces are split when one of them gets no gradient."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(4))

    def forward(self, x, used):
        for k in used:
            x = self.layers[k](x)
        return x


def all_used(model, optimizer):
    part_used(model, optimizer, used=range(4))


def part_used(model, optimizer, used=(0, 2, 3)):
    optimizer.zero_grad()
    model(batch(0), used).square().sum().backward()
    optimizer.step()


def clipped(model, optimizer):
    optimizer.zero_grad()
    model(batch(0), range(4)).square().sum().backward()
    optimizer.clip_grad_norm_(0.1)
    optimizer.step()


def load(model, optimizer):
    optimizer.load_state_dict(optimizer.state_dict())
    all_used(model, optimizer)


def added(model, optimizer):
    more = nn.Linear(FEATURES, FEATURES).double()
    optimizer.add_param_group({"params": more.parameters()})
    optimizer.zero_grad()
    model(more(batch(0)), range(4)).square().sum().backward()
    optimizer.step()


def reset(model, optimizer):
    optimizer.zero_grad()
    all_used(model, optimizer)


ACTIONS = [all_used, part_used, clipped, load, added, reset]


# Each two of a call, an action and what is in files meet in one that is not long.
DISK_ERRORS = [
    pytest.param(call, action, in_files, marks=() if (i + j + k) % 2 == 0 else pytest.mark.long)
    for i, call in enumerate(("write", "read", "allocate", "truncate"))
    for j, action in enumerate(ACTIONS)
    for k, in_files in enumerate(("optimizer", "optimizer,parameters"))
]


@pytest.mark.processes
@pytest.mark.parametrize(("call", "action", "in_files"), DISK_ERRORS)
def test_a_disk_error_on_one_rank_is_raised_on_every_rank(in_files, action, call, tmp_path, monkeypatch):
    # Where pieces were split, or a state was cut, the error was raised on its rank alone.
    torch.manual_seed(3)
    model = Parts().double()
    offload = offload_in(tmp_path, what=in_files, prefetch=1)
    if "parameters" in in_files:
        if action in (part_used, added):
            pytest.skip("not with parameters in files")
        mpisgd.offload_parameters(model, offload)
    optimizer = adam(model, strategy=mpisgd.Sharded(2, offload=offload))
    all_used(model, optimizer)
    method = getattr(PrivateFile, call)

    def broken(self, *args):
        with self._errors(call):
            raise OSError(5, "Input/output error")

    if mpisgd.rank() == mpisgd.size() - 1:
        monkeypatch.setattr(PrivateFile, call, broken)
    error = None
    try:
        for _ in range(3):
            action(model, optimizer)
    except mpisgd.OffloadError as caught:
        error = caught
    monkeypatch.undo()
    assert PrivateFile.__dict__[call] is method
    same_on_all_ranks(str(error))


# -- masters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["clamp", "broadcast", "load", "copy"])
@pytest.mark.parametrize("options", [{}, {"offload": True}, {"share": True}, {"foreach": False}])
def test_what_is_written_through_data_is_not_undone_by_the_next_step(how, options, tmp_path):
    # The master was taken over only where the version of the parameter had changed; `p.data` has its own.
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(FEATURES, 40), nn.Tanh(), nn.Linear(40, 8)).bfloat16()
    offload = offload_in(tmp_path) if options.get("offload") else None
    strategy = mpisgd.Sharded(2, master_dtype=torch.float32, offload=offload)
    opt = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, foreach=options.get("foreach"))
    opt = mpisgd.DistributedOptimizer(opt, strategy=strategy, share_parameters=options.get("share", False))

    def step():
        opt.zero_grad()
        model(batch(0).bfloat16()).square().sum().backward()
        opt.step()

    step()
    expected = [param.detach().clamp(-0.05, 0.05) for param in model.parameters()]
    write(model, how, expected)
    for _ in range(2):
        step()
        everyone(are_equal(values(model), expected), "undone")
    masters = [entries.get("master") for entries in opt.state_dict()["state"].values()]
    everyone(all(m is None or bool((m.abs() <= 0.0503).all()) for m in masters), "old masters")


def write(model, how, expected):
    pairs = list(zip(model.parameters(), expected, strict=True))
    if how == "load":
        model.load_state_dict(
            {name: e for (name, _), e in zip(model.named_parameters(), expected, strict=True)}
        )
    for param, value in pairs:
        if how == "clamp":
            param.data.clamp_(-0.05, 0.05)
        elif how == "copy" or (how == "broadcast" and mpisgd.rank() == 0):
            param.data[:] = value
    if how == "broadcast":
        mpisgd.broadcast_parameters({name: param.data for name, param in model.named_parameters()})
    referee().barrier()


def test_elements_that_were_not_written_keep_their_precision():
    torch.manual_seed(3)
    model = nn.Linear(FEATURES, 8, bias=False).bfloat16()
    strategy = mpisgd.Sharded(master_dtype=torch.float32)
    opt = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-4), strategy=strategy)
    for number in range(4):
        if number == 2:
            before = opt.state_dict()["state"][0]["master"].clone()
            model.weight.data[0, 0] = 3.0
            after = opt.state_dict()["state"][0]["master"].clone()
            everyone(
                after[0, 0] == 3 and torch.equal(after.flatten()[1:], before.flatten()[1:]), "others, too"
            )
        opt.zero_grad()
        model(torch.ones(1, FEATURES, dtype=torch.bfloat16)).sum().backward()
        opt.step()
    everyone(bool(model.weight[0, 0] > 2.9), f"{model.weight[0, 0]}")


# -- stage 2, whose buckets take turns in one memory ---------------------------------------------------


class WithSparse(nn.Module):
    """Its table and the bias of `neighbour` are in one bucket, and the rest in another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.rest, self.neighbour = nn.Linear(3, 4), nn.Linear(3, 4)
        self.table = nn.Embedding(6, 3, sparse=True)
        self.double()

    def forward(self, x):
        dense = (self.rest(x) + self.neighbour(x).sin()).sum()
        return dense + self.table(torch.tensor([0, 2])).sum()


def test_what_is_in_a_bucket_with_a_sparse_gradient_is_reduced_by_stage_2():
    # Found out by the first backward only, that bucket stays for every rank. The next one took its memory,
    # so what else was in it became local gradients of other parameters.
    model, reference = WithSparse(), WithSparse()
    options = {"strategy": mpisgd.Sharded(2), "bucket_cap_bytes": 300}
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    inputs = [
        torch.arange(6, dtype=torch.float64).reshape(2, 3) * (rank + 1) for rank in range(mpisgd.size())
    ]
    model(inputs[mpisgd.rank()]).backward()
    optimizer.step()
    (sum(map(reference, inputs)) / mpisgd.size()).backward()
    alone.step()
    differing = [
        name
        for (name, mine), expected in zip(model.named_parameters(), reference.parameters(), strict=True)
        if not torch.allclose(mine, expected)
    ]
    everyone(not differing, f"{differing}")


def test_stage_2_has_memory_for_two_buckets_when_earlier_optimizers_are_gone():
    # It was made before that was known, for one bucket at a time. From the first backward on two were on
    # their way, in the same memory: gradients of one arrived as those of the other.
    options = {"strategy": mpisgd.Sharded(2), "overlap": True, "bucket_cap_bytes": 100}
    earlier = [adam(layers(), **options) for _ in range(2)]
    del earlier
    models = [layers(), layers()]
    for model, given in zip(models, (options, {}), strict=True):
        optimizer = adam(model, **given)
        for step in range(3):
            train(model, optimizer, step)
        del optimizer
    pairs = zip(*map(values, models), strict=True)
    everyone(all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in pairs), "other gradients")
