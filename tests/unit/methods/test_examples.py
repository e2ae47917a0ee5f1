"""What `verify` tries: methods with each of their options at another value than its default."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import Any

import pytest

from mpisgd.methods import catalogue

# Options that no example has, and where they are verified.
ELSEWHERE = {
    "DiLoCo": {
        "outer_optimizer": "SGD is that of the paper",
        "quorum": "rows of verify",
        "grace_s": "time: replays of events",
        "weights": "rows of verify",
        "learners": "rows of verify",
    },
    "ParameterServer": dict.fromkeys(
        ("servers", "push_every", "pull_every", "locked"), "nobody waits: modes of verify, replays of events"
    ),
    "Sharded": {
        "master_dtype": "rows of verify",
        "offload": "rows of verify",
        "secondary": "None is all that there is",
    },
    "Dion": {
        "adamw": "as of MuonWithAdamW: tests/unit/optim",
        "adamw_lr": "groups of programs have their own",
    },
}
METHODS = [*catalogue.strategies(), *catalogue.compressors()]


def lacking(kind: type, defaults: dict[str, Any], examples: list[dict[str, Any]]) -> set[str]:
    """The options that have their default in each example."""
    return {
        name
        for name, default in defaults.items()
        if all(example.get(name, default) == default for example in examples)
    }


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_each_option_of_a_method_is_tried(kind):
    options = {each.name: each for each in fields(kind) if each.init}
    examples = [{name: getattr(example, name) for name in options} for example in kind.examples()]
    if not examples:
        pytest.skip("it chooses among methods")
    defaults = {
        name: each.default if each.default_factory is MISSING else each.default_factory()
        for name, each in options.items()
    }
    assert lacking(kind, defaults, examples) == set(ELSEWHERE.get(kind.__name__, {}))


@pytest.mark.parametrize("kind", [*catalogue.optimizers()], ids=lambda kind: kind.__name__)
def test_each_option_of_an_optimizer_is_tried(kind):
    parameters = inspect.signature(kind).parameters
    defaults = {name: each.default for name, each in parameters.items()}
    defaults = {name: each for name, each in defaults.items() if name not in ("params", "lr", "group")}
    examples = [dict(example) for example in kind.examples()]
    assert lacking(kind, defaults, examples) == set(ELSEWHERE.get(kind.__name__, {}))
