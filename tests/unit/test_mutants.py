"""The faults that `./scripts/mutate` puts into a file."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from mutating.main import draw, score  # noqa: E402
from mutating.operators import mutants_of  # noqa: E402


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("def f(x):\n    g(x)\n", {"pass"}),
        ("def f(x):\n    x.y = 70\n", {"pass"}),
        ("def f(x):\n    return x[0] < 70\n", {"(x[0] <= 70)"}),
        ("def f(x, n):\n    return x / n\n", {"((x) * (n))"}),
        ("def f(x, n):\n    return x if n else -x\n", {"(not (n))", "(x)"}),
        ("def f(x, n):\n    return x and n\n", {"((x) or (n))"}),
        ("def f(x):\n    return sorted(x)\n", {"list(x)"}),
        ('def f(x):\n    raise ValueError(f"{x + 1}")\n', set()),
        ("def __repr__(self):\n    return self.x + 1\n", set()),
        ("x: int\n", set()),
    ],
)
def test_what_becomes_of_a_statement(source, faults):
    found = mutants_of("a.py", source)
    assert {mutant.after for mutant in found} == faults
    for mutant in found:
        assert mutant.applied(source) != source
        ast.parse(mutant.applied(source))


def test_what_is_applied_to_a_file_that_has_changed_is_an_error():
    (mutant,) = mutants_of("a.py", "def f(x, n):\n    return x * n\n")
    with pytest.raises(ValueError, match="has changed"):
        mutant.applied("def f(x, m):\n    return m * x\n")


def test_a_seed_draws_the_same_faults():
    first, again, other = (draw(["gossip"], 20, seed=seed) for seed in (1, 1, 2))
    assert len(first) == 20
    assert first == again
    assert first != other


def test_the_score_tells_arithmetic_and_engine_apart():
    entry = {"name": "n", "before": "a", "after": "b"}
    text = score(
        [
            {**entry, "path": "gradients/a.py", "found": "fuzz"},
            {**entry, "path": "gradients/b.py", "found": ""},
            {**entry, "path": "core/c.py", "found": "unit tests"},
        ]
    )
    assert "arithmetic: 1 of 2 found (50%): 1 by fuzz" in text
    assert "engine: 1 of 1 found (100%): 1 by unit tests" in text
    assert text.count("survives") == 1
