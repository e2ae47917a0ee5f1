"""`LocalSGD` and its paper where a rank was alone for a while, and where optimizers' state is averaged."""

from __future__ import annotations

import pytest

from mpisgd.tools.verification.method_matrix import Row, rows, try_in
from mpisgd.tools.verification.programs.threads_backend import ThreadsBackend
from mpisgd.tools.verification.situations import SITUATIONS

BACKEND = ThreadsBackend()
AVERAGED = "LocalSGD(sync_every=2, average_state=True)"


def row(name: str) -> Row:
    return next(each for each in rows() if each.name == name)


@pytest.mark.parametrize("compressor", ["TopK(ratio=0.3)", "Natural()", "PowerSGD(rank=1)"])
def test_changes_are_counted_from_what_a_rank_had_when_it_was_alone(compressor):
    """What it has done alone all ranks begin with: it does not travel, and nothing of it is left out."""
    method = row(f"LocalSGD(sync_every=2), compress.{compressor}")
    tried = try_in(method, [SITUATIONS["a rank fewer, then as before"]], 0, BACKEND.run, [(2, 0)])
    assert (tried.kind, tried.has_reference) == ("ok", True), tried


@pytest.mark.parametrize("name", ["used in turns", "Adam", "uneven data", "resumed", "a group is added"])
def test_averaged_state_is_that_of_the_paper(name):
    """Also of ranks that have no state of a parameter yet, and that count differently."""
    tried = try_in(row(AVERAGED), [SITUATIONS[name]], 0, BACKEND.run)
    assert (tried.kind, tried.has_reference) == ("ok", True), tried


def test_state_that_is_not_averaged_is_found(monkeypatch):
    monkeypatch.setattr("mpisgd.methods.local_sgd.local_sgd.complete_states", lambda *_: [])
    assert try_in(row(AVERAGED), [], 0, BACKEND.run).kind == "values"
