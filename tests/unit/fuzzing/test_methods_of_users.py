"""The strategy of docs/how-to/extending.md in random programs, against the paper that stands beside it."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from fuzzing.draw import draw

import mpisgd
from mpisgd.methods.cost_kit import World
from mpisgd.methods.costs import cost_of, wire_of
from mpisgd.methods.from_text import strategy_from_text
from mpisgd.methods.peak_memory import peak_memory
from mpisgd.methods.sizes import parameter, sizes_of
from mpisgd.methods.wire_bytes import sent_bytes
from mpisgd.tools.plan.methods import planned_methods
from mpisgd.tools.verification.programs.serial_definition import definition_of
from mpisgd.tools.verification.programs.threads_backend import ThreadsBackend

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "extending.md"
SEEDS = range(25)


def defined(block: str, monkeypatch):
    """What a block of the page defines, as a module."""
    text = PAGE.read_text().partition(f"<!-- test: {block} -->\n```python\n")[2].partition("```")[0]
    module = types.ModuleType("extending_page")
    monkeypatch.setitem(sys.modules, "extending_page", module)  # dataclasses look there
    exec(compile(text.partition("mpisgd.init()")[0], PAGE.name, "exec"), module.__dict__)
    return module


@pytest.fixture
def page(monkeypatch):
    return defined("state", monkeypatch)


def test_programs_are_those_of_its_paper(page):
    backend, compared = ThreadsBackend(), 0
    for seed in SEEDS:
        program = draw(seed, strategy="extending_page.BlockMomentum(steps=2)")
        compared += definition_of(program) is not None
        verdict = backend.run(program)
        assert not verdict.is_fault, f"seed {seed}: {verdict}"
    assert compared > len(SEEDS) // 2


def test_a_fault_of_it_is_found(page, monkeypatch):
    def halved(self, size, lengths=()):
        return page.BlockPaper(self.steps, self.beta / 2)

    monkeypatch.setattr(page.BlockMomentum, "paper", halved)
    backend = ThreadsBackend()
    programs = (draw(seed, strategy="extending_page.BlockMomentum(steps=2)") for seed in SEEDS)
    assert any(backend.run(program).kind == "values" for program in programs)


def test_a_residual_that_its_compressor_makes_in_the_first_step_is_counted(monkeypatch):
    wire = wire_of(defined("compressor", monkeypatch).Signs())
    (bucket,) = sizes_of([parameter(0, (64, 32), 4, 0), parameter(1, (64,), 4, 0)], 2**20).packed
    assert wire.kept_bytes(bucket, World(2, 2, wire)) == bucket.nbytes


def test_its_cost_is_read_as_that_of_any_method(page):
    names = "extending_page:BlockMomentum(steps=2); LocalSGD(2)"
    own, local = (cost_of(each.strategy) for each in planned_methods(names))
    sizes = sizes_of([parameter(0, (64, 32), 4, 0), parameter(1, (64,), 4, 0)], 2**20)
    world = World(1, 4, wire_of(mpisgd.Compression.none))
    assert own.cycle(world).length == local.cycle(world).length == 2
    for step in (1, 2):
        sent, expected = (sent_bytes(each.cost(sizes, world, step), world) for each in (own, local))
        assert sent == expected
        assert any(expected.values()) == (step == 2)
    kept = peak_memory(own, sizes, world).strategy - peak_memory(local, sizes, world).strategy
    assert kept == 2 * sizes.nbytes


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(mpisgd.InvalidArgument, match="nowhere"):
        strategy_from_text("nowhere:BlockMomentum(steps=2)")
    with pytest.raises(mpisgd.InvalidArgument, match="Nothing is no strategy"):
        strategy_from_text("mpisgd.methods.gossip.gossip:Nothing(2)")
