"""The faults that `./scripts/mutate` puts into a file."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from mutating.by_hand import EDITS, by_hand  # noqa: E402
from mutating.main import by_room, draw, not_found, score  # noqa: E402
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
        ("def coding(self):\n    return self.x + 1\n", set()),
        ("def cost(self):\n    return self.x + 1\n", set()),
        ("def examples(cls):\n    return (cls(1),)\n", set()),
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


def test_faults_by_hand_can_still_be_put_in():
    found = list(by_hand(ROOT / "mpisgd"))  # which raises where a text is not there once
    assert len(found) == len(EDITS)
    for mutant in found:
        source = (ROOT / "mpisgd" / mutant.path).read_text()
        assert mutant.applied(source) != source
        ast.parse(mutant.applied(source))


def test_a_seed_draws_the_same_faults():
    first, again, other = (draw(["gossip"], 20, seed=seed) for seed in (1, 1, 2))
    assert len(first) == 20
    assert first == again
    assert first != other


def test_which_lines_say_that_a_fault_is_executed():
    source = """\
LIMIT = 3

class A:
    WIDTH = 4

    def f(self, x):
        if (
            x > 1
        ):
            self.y = g(
                x + 2,
            )

    @cache
    def h(self):
        return 5
"""
    found = {mutant.before: mutant.executed for mutant in mutants_of("a.py", source)}
    assert found["x > 1"] == (7, 9)
    assert found["x + 2"] == found["2"] == (10, 12)
    assert found["3"] is found["4"] is found["5"] is None


def test_the_score_tells_arithmetic_and_engine_apart_and_what_counts_from_what_does_not():
    entry = {"name": "n", "before": "a", "after": "b", "is_executed": True}
    text = score(
        [
            {**entry, "path": "gradients/a.py", "check": "matrix"},
            {**entry, "path": "gradients/a.py", "check": "fuzz"},
            {**entry, "path": "gradients/b.py", "check": ""},
            {**entry, "path": "gradients/b.py", "check": "unit"},
            {**entry, "path": "core/c.py", "check": "unit"},
            {**entry, "path": "core/d.py", "check": "", "is_executed": False},
        ]
    )
    assert "arithmetic, of 4: 1 found by verify --quick (25%: 1 by matrix); " in text
    assert "; 2 found by verify and fuzz (50%: 1 by fuzz); 1 by unit besides; 4 are executed by" in text
    assert "engine, of 2: 1 found by all tests (50%: 1 by unit); none besides; 1 are executed by" in text
    assert text.count("survives: ") == text.count("not executed: ") == 1


def test_the_tables_count_by_room_and_name_what_no_check_finds():
    entry = {"line": 7, "kind": "swapped sign", "before": "a + b", "after": "((a) - (b))"}
    entries = [
        {**entry, "path": "gradients/a.py", "check": "fuzz", "is_executed": True},
        {**entry, "path": "gradients/b.py", "check": "", "is_executed": True},
        {**entry, "path": "core/c.py", "check": "", "is_executed": False},
    ]
    table = by_room(entries)
    rows = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    assert list(rows) == ["gradients", "core", "all"]
    assert (rows["gradients"]["faults"], rows["gradients"]["fuzz"], rows["gradients"]["not found"]) == (
        "2",
        "1",
        "1",
    )
    assert (rows["core"]["executed"], rows["all"]["executed"], rows["all"]["not found"]) == ("0", "2", "2")
    assert not_found(entries)["rows"] == [
        ["gradients/b.py:7", "swapped sign", "a + b", "((a) - (b))", "yes"],
        ["core/c.py:7", "swapped sign", "a + b", "((a) - (b))", "no"],
    ]
