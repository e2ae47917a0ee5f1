"""The strategy of docs/how-to/extending.md in random programs, against the paper that stands beside it."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from fuzzing.draw import draw
from fuzzing.serial_definition import definition_of
from fuzzing.threads_backend import ThreadsBackend

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "extending.md"
SEEDS = range(25)


@pytest.fixture
def page(monkeypatch):
    """What the page defines, as a module: without its training."""
    block = PAGE.read_text().partition("<!-- test: state -->\n```python\n")[2].partition("mpisgd.init()")[0]
    module = types.ModuleType("extending_page")
    monkeypatch.setitem(sys.modules, "extending_page", module)  # dataclasses look there
    exec(compile(block, PAGE.name, "exec"), module.__dict__)
    return module


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
