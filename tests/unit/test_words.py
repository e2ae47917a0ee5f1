"""Phrases that readers did not understand are in no page and no docstring any more."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PHRASES = (
    "drawn together",
    "every step shall count for all",
    "buckets set out",
    "narrower contract",
    "contract is narrower",
    "in code of its own",
    "stand for together",
    "stood for together",
    "two jobs of one",
    "so manieth",
    "ranks' models relate",
    "those of no pipeline",
    "gradients of no pipeline",
    "not all ranks have alike",
)


@pytest.mark.parametrize("phrase", PHRASES)
def test_no_text_has_it(phrase):
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "mpisgd").rglob("*.py")]
    assert len(texts) > 100
    found = [str(path.relative_to(ROOT)) for path in texts if phrase in " ".join(path.read_text().split())]
    assert not found
