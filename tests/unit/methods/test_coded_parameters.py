"""`Sharded(parameters=BlockQuantized(...))`: codes of parameters between hosts, equal to the paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from coded_programs import FOUR, assert_resumes, coded_row, in_turn, on_hosts
from paper_programs import assert_equal, assert_same, by_mpisgd, momentum, sgd
from torch import nn

import mpisgd
from mpisgd import Sharded
from mpisgd.compress import BlockQuantized
from mpisgd.sharding.piece import Piece
from mpisgd.tools.verification.method_matrix import Row, try_in
from mpisgd.tools.verification.programs.threads_backend import ThreadsBackend
from mpisgd.tools.verification.situations import SITUATIONS as HAPPENS

PARAMETERS = BlockQuantized(bits=8, block=5)
BACKEND = ThreadsBackend()
SITUATIONS = {
    "one rank": replace(FOUR, size=1, hosts=()),
    "one host": replace(FOUR, size=3, hosts=()),
    "two hosts of one rank": replace(FOUR, size=2, hosts=(1, 1)),
    "uneven hosts": replace(FOUR, size=3, hosts=(2, 1)),
    "three hosts": replace(FOUR, size=3, hosts=(1, 1, 1)),
    "two hosts of two": FOUR,
    "no state": replace(FOUR, make=sgd),
    "clipped": replace(FOUR, dyadic=False, max_norm=0.5),
    "Adam": replace(FOUR, dyadic=False, make=lambda p: torch.optim.Adam(p, lr=0.1)),
    "frozen": replace(FOUR, frozen=("bias",)),
    "unused on all": replace(FOUR, unused=lambda rank, step: ["bias"] if step in (2, 3) else []),
    "sent ahead": replace(FOUR, options={"overlap": True}),
}


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_equal_to_the_paper(situation, both):
    gradients = BlockQuantized(bits=4, block=5) if both else None
    assert_equal(SITUATIONS[situation], strategy=Sharded(2, gradients=gradients, parameters=PARAMETERS))


def test_on_one_host_no_bit_differs():
    one = replace(FOUR, hosts=(), dyadic=False)
    coded = by_mpisgd(one, strategy=Sharded(2, parameters=PARAMETERS))
    assert_same(coded, by_mpisgd(one, strategy=Sharded(2)), 0.0)


def test_one_copy_for_each_host():
    strategy = Sharded(2, parameters=PARAMETERS)
    assert_same(
        by_mpisgd(FOUR, strategy=strategy, share_parameters=True), by_mpisgd(FOUR, strategy=strategy), 0.0
    )


def wrapped(params: dict[str, nn.Parameter]) -> mpisgd.DistributedOptimizer:
    return mpisgd.DistributedOptimizer(
        momentum(list(params.values())), params.items(), strategy=Sharded(2, parameters=PARAMETERS)
    )


@pytest.mark.parametrize("model_first", [False, True])
def test_a_resumed_run_goes_on_as_if_it_had_not_ended(model_first):
    """The masters are in the state, whether the model is loaded before or after it."""
    assert_resumes(wrapped, model_first=model_first)


def test_what_the_program_writes_reaches_the_masters():
    def train() -> list[dict[str, torch.Tensor]]:
        params = {"w": nn.Parameter(torch.linspace(0, 1, 100, dtype=torch.float64))}
        optimizer = mpisgd.DistributedOptimizer(
            torch.optim.SGD(params.values(), lr=0.25),
            params.items(),
            strategy=Sharded(2, parameters=PARAMETERS),
        )
        for step in range(4):
            if step == 2:
                with torch.no_grad():
                    params["w"][10:20] = 7.0
            optimizer.zero_grad()
            (params["w"] * 0.0).sum().backward()
            optimizer.step()
        return [{"w": params["w"].detach().clone()}]

    for (row,) in on_hosts(train):
        assert float((row["w"][10:20] - 7.0).abs().max()) < 1e-12
        assert (
            float((row["w"][20:] - torch.linspace(0, 1, 100, dtype=torch.float64)[20:]).abs().max()) < 0.005
        )


def test_what_is_written_after_a_load_reaches_the_masters_too():
    def train() -> list[dict[str, torch.Tensor]]:
        params = FOUR.start(mpisgd.rank())
        optimizer = wrapped(params)
        for step in range(3):
            optimizer.zero_grad()
            for term in FOUR.terms(mpisgd.rank(), step):
                FOUR.loss(params, mpisgd.rank(), term).backward()
            optimizer.step()
        state = optimizer.state_dict()
        params = {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}
        optimizer = wrapped(params)
        optimizer.load_state_dict(state)
        with torch.no_grad():
            params["bias"].fill_(3.0)
        optimizer.param_groups[0]["lr"] = 0.0
        for term in FOUR.terms(mpisgd.rank(), 3):
            FOUR.loss(params, mpisgd.rank(), term).backward()
        optimizer.step()
        return [{"bias": params["bias"].detach().clone()}]

    for (row,) in on_hosts(train):
        assert float((row["bias"] - 3.0).abs().max()) < 1e-12


def coded() -> Row:
    return coded_row(
        " parameters=", "mpisgd.Sharded(2, parameters=mpisgd.compress.BlockQuantized(bits=8, block=3))"
    )


HAPPENING = (
    "shared parameters",
    "small buckets",
    "used in turns",
    "clipped",
    "frozen and thawed",
    "a group is added",
    "broadcast",
    "resumed",
    "a rank fewer",
    "a rank fewer, then as before",
    "uneven data",
    "a rank is lost",
    "a rank is lost while it waits",
)
DIVISIONS = ((4, 2), (2, 1), (3, 2))


@pytest.mark.parametrize(("name", "division"), in_turn(HAPPENING, DIVISIONS))
def test_codes_are_those_of_the_paper_whatever_happens(name, division):
    tried = try_in(coded(), [HAPPENS[name]], 0, BACKEND.run, [division])
    assert (tried.kind, tried.has_reference) == ("ok", True), tried


def test_masters_that_are_not_saved_are_found(monkeypatch):
    monkeypatch.setattr(Piece, "with_master", lambda self, entries: entries)
    for name in ("resumed", "a rank is lost"):
        assert try_in(coded(), [HAPPENS[name]], 0, BACKEND.run, [(4, 2)]).is_fault


def test_what_is_no_code_of_parameters_is_refused():
    with pytest.raises(mpisgd.InvalidArgument, match=r"parameters=.*expected None or mpisgd\.compress"):
        Sharded(parameters=mpisgd.Compression.bf16)
    with pytest.raises(mpisgd.InvalidArgument, match="error_feedback"):
        Sharded(parameters=BlockQuantized(error_feedback=True))
    with pytest.raises(mpisgd.InvalidArgument, match="does not go with master_dtype"):
        Sharded(parameters=PARAMETERS, master_dtype=torch.float64)


def test_what_has_no_code_cannot_be_added():
    def train() -> list[dict[str, torch.Tensor]]:
        optimizer = wrapped(FOUR.start(mpisgd.rank()))
        half = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        with pytest.raises(mpisgd.InvalidArgument, match=r"do not go with .*, torch\.bfloat16 on cpu"):
            optimizer.add_param_group({"params": [half]})
        return []

    on_hosts(train)


def test_a_second_partition_is_refused_with_what_there_is_instead():
    with pytest.raises(mpisgd.InvalidArgument, match=r"share_parameters=True"):
        Sharded(2, parameters=PARAMETERS, secondary="host")
