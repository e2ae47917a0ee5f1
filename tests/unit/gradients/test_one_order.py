"""`reproducible="ranks"`: any power of two of ranks gives the bits of one tree over all micro-batches."""

from __future__ import annotations

import copy
import importlib
import itertools

import one_order_programs as program
import pytest
import torch
from torch import nn

import mpisgd
from mpisgd.errors import CollectiveMismatch, InvalidArgument, MpisgdError, UnsupportedTensor
from mpisgd.gradients import bucket_plan
from mpisgd.job.lifecycle import world
from mpisgd.job.threads_as_ranks import run_ranks

HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("name", "num_micro_batches", "dtype", "options"),
    [
        ("Adam", 8, torch.float32, {}),
        ("SGD", 8, HALF, {"bucket_cap_bytes": 32, "num_optimizers": 2}),
        ("SGD", 24, torch.float32, {"bucket_cap_bytes": 1, "scales": True}),
        ("AdamW", 16, torch.float16, {"op": "sum", "clips": True, "error_if_nonfinite": True}),
    ],
)
def test_every_number_of_ranks_gives_the_bits_of_one_process(
    monkeypatch, name, num_micro_batches, dtype, options
):
    monkeypatch.setattr(bucket_plan, "ALONE_BYTES", 64)  # the matrix travels from where it lies
    algorithm = importlib.import_module("mpisgd.collectives.algorithms.halving_doubling")
    monkeypatch.setattr(algorithm, "frames", lambda tensor: tensor.split(5))
    serial = {key: value for key, value in options.items() if key in ("clips", "scales")}
    wanted = program.in_one_process(name, num_micro_batches, dtype, divides="op" not in options, **serial)
    for size, hosts in [(1, ()), (2, (1, 1)), (4, ()), (4, (1, 3)), (8, (3, 5))]:
        for mine in run_ranks(
            size,
            lambda: program.by_ranks(name, num_micro_batches, dtype, reproducible="ranks", **options),
            ranks_per_host=hosts,
            seed=size,
        ):
            assert program.are_equal(mine, wanted), (size, hosts)


def test_without_it_the_bits_depend_on_the_number_of_ranks():
    runs = [run_ranks(size, lambda: program.by_ranks("SGD", 8, torch.float32))[0] for size in (1, 2, 4)]
    assert not any(program.are_equal(*pair) for pair in itertools.pairwise(runs))


def resumed(size: int, first: int, steps: int, state: object) -> object:
    """Train from a state on, and return the next one."""

    def train() -> object:
        params = program.parameters()
        optimizer = mpisgd.DistributedOptimizer(
            program.optimizer_of("Adam", params), backward_passes_per_step=8 // size, reproducible="ranks"
        )
        if state is not None:
            values, loaded = copy.deepcopy(state)
            optimizer.load_state_dict(loaded)
            torch._foreach_copy_([param.detach() for param in params], values)
        for step in range(first, first + steps):
            optimizer.zero_grad()
            for i in range(8 // size):
                program.loss_of(params, step, mpisgd.rank() * (8 // size) + i).backward()
            optimizer.step()
        return copy.deepcopy(([param.detach() for param in params], optimizer.state_dict()))

    return run_ranks(size, train)[0]


def test_a_run_may_be_resumed_by_other_numbers_of_ranks():
    state = None
    for first, size in enumerate((1, 4, 2, 8)):
        state = resumed(size, first, 1, state)
    values, _ = state
    whole, _ = resumed(2, 0, 4, None)
    assert all(map(torch.equal, values, whole))


def refused(body, kind: type[MpisgdError], *said: str, size: int = 2, **options) -> None:
    """Every rank raises the same kind of error with these words."""

    def attempt() -> tuple[type[BaseException], str]:
        params = program.parameters()
        model = nn.ParameterList(params)
        chosen = {"reproducible": "ranks", "backward_passes_per_step": 2} | options
        with pytest.raises(MpisgdError) as caught:
            body(params, mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), **chosen))
        return type(caught.value), str(caught.value)

    for raised, text in run_ranks(size, attempt):
        assert raised is kind, text
        assert all(word in text for word in said), text


def passes(params, count: int, step: int = 0) -> None:
    for i in range(count):
        program.loss_of(params, step, i).backward()


def test_other_numbers_of_micro_batches_are_refused():
    def uneven(params, optimizer):
        passes(params, 2 - mpisgd.rank())
        optimizer.step()

    def partial(params, optimizer):
        passes(params, 1)
        optimizer.step()

    def skipped(params, optimizer):
        passes(params, 1)
        with optimizer.skip_synchronize():
            optimizer.step()

    def again(params, optimizer):
        passes(params, 2)
        optimizer.step()
        passes(params, 2)

    def none(params, optimizer):
        optimizer.step()

    refused(uneven, CollectiveMismatch, "1 of 2 micro-batches", "2 of 2 micro-batches")
    for size in (1, 2):
        refused(partial, InvalidArgument, "1 of 2 micro-batches", size=size)
        refused(none, InvalidArgument, "0 of 2 micro-batches", size=size)
        refused(skipped, InvalidArgument, "skip_synchronize()", size=size)
        refused(again, InvalidArgument, "zero_grad()", size=size)


def test_what_adds_in_another_order_is_refused():
    def nothing(params, optimizer):
        raise AssertionError("it was made")

    def closure(params, optimizer):
        optimizer.step(lambda: passes(params, 2))

    def muted(params, optimizer):
        with optimizer.no_sync():
            passes(params, 1)

    def joined(params, optimizer):
        with optimizer.join():
            pass

    def rebuilt(params, optimizer):
        optimizer.rebuild(mpisgd.new_group())

    def complex_group(params, optimizer):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, dtype=torch.complex64))]})

    def divided_sequences(params, optimizer):
        with mpisgd.context_parallel(world()):
            nn.functional.linear(torch.ones(1, 5), params[0])

    def shared(params, optimizer):
        later = mpisgd.DistributedOptimizer(
            torch.optim.SGD(params[:1], lr=1e-3), backward_passes_per_step=2, reproducible="ranks"
        )
        passes(params, 2)
        later.step()
        optimizer.step()

    refused(closure, InvalidArgument, "step(closure)")
    refused(muted, InvalidArgument, "no_sync()")
    refused(joined, InvalidArgument, "reproducible='ranks'", "equally many micro-batches")
    refused(rebuilt, InvalidArgument, "reproducible='ranks'", "the ranks change")
    refused(complex_group, UnsupportedTensor, "complex64")
    refused(divided_sequences, InvalidArgument, "context_parallel", "whole micro-batches")
    refused(shared, InvalidArgument, "in common")
    refused(nothing, InvalidArgument, "power of two", size=3)
    for options, said in [
        ({"reproducible": "always"}, "expected 'ranks'"),
        ({"compression": mpisgd.Compression.fp16}, "compression=Compression.fp16"),
        ({"op": mpisgd.Adasum}, "Adasum"),
        ({"overlap": True}, "overlap=True"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor=2.0"),
        ({"share_parameters": True}, "share_parameters=True"),
        ({"strategy": mpisgd.LocalSGD(2)}, "LocalSGD"),
    ]:
        refused(nothing, InvalidArgument, "reproducible=", said, **options)


@pytest.mark.parametrize("size", [1, 2])
def test_sparse_gradients_are_refused_on_every_rank(size):
    def on_one_rank(params, optimizer):
        weight = params[0]
        for is_first in (True, False):
            places = torch.tensor([1])
            is_sparse = is_first and mpisgd.rank() == 0
            used = nn.functional.embedding(places, weight, sparse=True) if is_sparse else weight
            used.sum().backward()
        optimizer.step()

    refused(on_one_rank, UnsupportedTensor, "sparse", size=size)


def test_its_bytes_are_those_of_any_all_reduce():
    def count() -> tuple[int, int, int]:
        param = nn.Parameter(torch.zeros(64))
        optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), reproducible="ranks")
        sender = world().queue.communicator
        taken = []
        for _ in range(2):
            before = sender.sent_bytes, sender.sent_messages
            optimizer.zero_grad()
            param.sum().backward()
            taken = [
                now - was for now, was in zip((sender.sent_bytes, sender.sent_messages), before, strict=True)
            ]
        return taken

    for size in (2, 4, 8):
        wanted = [2 * (size - 1) * 64 * 4 // size, 2 * (size.bit_length() - 1)]
        assert all(taken == wanted for taken in run_ranks(size, count)), size
