"""`Sharded(gradients=)` between hosts in programs in which something happens, beside its paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
from coded_programs import coded_row, in_turn

from mpisgd.methods.sharded.paper import CodedGradients
from mpisgd.tools.verification.method_matrix import Row, try_in
from mpisgd.tools.verification.programs.execute import has_reference
from mpisgd.tools.verification.programs.program import Layer, Optimizer
from mpisgd.tools.verification.programs.serial_definition import codes_between_hosts, why_undefined
from mpisgd.tools.verification.programs.threads_backend import ThreadsBackend
from mpisgd.tools.verification.situations import SITUATIONS

BACKEND = ThreadsBackend()
BETWEEN_HOSTS = ((4, 2), (3, 1), (2, 1), (3, 2))
COMPARED = (
    "two optimizers, a half each",
    "Adam",
    "two learning rates",
    "small buckets",
    "sum",
    "predivided",
    "shared parameters",
    "ranks reversed",
    "used in turns",
    "long",
    "no elements",
    "two passes a step",
    "clipped",
    "a rank without a backward",
    "scaled, with an overflow",
    "a backward that fails",
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


def coded() -> Row:
    return coded_row(
        "gradients=", "mpisgd.Sharded(2, gradients=mpisgd.compress.BlockQuantized(bits=4, block=3))"
    )


@pytest.mark.parametrize(("name", "division"), in_turn((None, *COMPARED), BETWEEN_HOSTS))
def test_codes_between_hosts_are_those_of_the_paper(name, division):
    situations = [] if name is None else [SITUATIONS[name]]
    tried = try_in(coded(), situations, 0, BACKEND.run, [division])
    assert (tried.kind, tried.has_reference) == ("ok", True), tried


def test_a_group_that_was_added_is_divided_with_the_others_once_it_was_loaded():
    """What is not interrupted rounds other shares, and is no variant of it."""
    both = [SITUATIONS["a group is added"], SITUATIONS["resumed beside the former"]]
    for division in BETWEEN_HOSTS:
        program = replace(coded().program(both, division), seed=0)  # of which variants are run, too
        assert has_reference(program)
        assert BACKEND.run(program).kind == "ok"


def test_what_is_frozen_is_divided_with_the_others_while_it_has_a_gradient():
    both = [SITUATIONS["frozen and thawed"], SITUATIONS["gradients kept as zeros"]]
    for division in BETWEEN_HOSTS:
        tried = try_in(coded(), both, 0, BACKEND.run, [division])
        assert (tried.kind, tried.has_reference) == ("ok", True), tried


def test_what_is_rounded_otherwise_is_found(monkeypatch):
    monkeypatch.setattr(CodedGradients, "of_host", lambda self, v, is_owners: v)
    for division in BETWEEN_HOSTS:
        assert try_in(coded(), [], 0, BACKEND.run, [division]).kind == "values"


def test_a_lost_rank_that_is_counted_is_found(monkeypatch):
    """The others divide among themselves; a paper that kept the shares of before would differ."""
    from mpisgd.tools.verification.programs import by_paper

    kept = by_paper.paper_among
    monkeypatch.setattr(
        by_paper, "paper_among", lambda program, size, place=0: kept(program, program.ranks, place)
    )
    lost = [SITUATIONS["a rank is lost"]]
    assert try_in(coded(), lost, 0, BACKEND.run, [(4, 2)]).is_fault


def test_on_one_host_there_is_nothing_but_the_joined_losses():
    for division in ((3, 0), (4, 0), (2, 2)):
        program = coded().program((), division)
        assert not codes_between_hosts(program)
        assert why_undefined(program)
        assert BACKEND.run(program).kind == "ok"


def test_what_has_no_paper_between_hosts_is_compared_with_itself_alone():
    program = coded().program((), (2, 1))
    table = Layer("sparse", (5, 2))
    sparse = replace(
        program, layers=(*program.layers, table), optimizers=(replace(sgd(program), layers=(0, 1, 2, 3)),)
    )
    assert "sparse gradients travel as they are" in why_undefined(sparse)
    assert BACKEND.run(sparse).kind == "ok"


def sgd(program) -> Optimizer:
    return replace(program.optimizers[0], settings=(("lr", 0.25),))
