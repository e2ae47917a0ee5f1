"""The bugs that `scripts/mutating/verify_mutations.py` puts in can still be put in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts" / "mutating"))

from verify_mutations import MUTATIONS, mutated  # noqa: E402


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_what_it_changes_is_there_once(mutation):
    text = (ROOT / "mpisgd" / mutation.path).read_text()
    assert mutated(mutation, text) != text
