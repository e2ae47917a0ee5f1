"""docs/concepts/strategies.md says of every option and strategy whether they go together, as in the code."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpisgd
from mpisgd.methods.parameter_server.parameter_server import NOT_AT_OWN_PACE
from mpisgd.methods.strategy.compatibility import OPTIONS

TEXT = (Path(__file__).parents[3] / "docs" / "concepts" / "strategies.md").read_text()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def documented() -> dict[tuple[str, str], str]:
    """What the table says, by option and strategy."""
    table = TEXT.split("## What goes with what")[1].split("## Measured")[0]
    head, _, *rows = [cells(line) for line in table.splitlines() if line.startswith("|")]
    return {
        (row[0].split()[0].strip("`"), strategy): said
        for row in rows
        for strategy, said in zip(head[1:], row[1:], strict=True)
    }


@pytest.mark.parametrize("strategy", ["Synchronous", "LocalSGD", "DiLoCo", "ElasticAveraging", "Gossip"])
@pytest.mark.parametrize("option", OPTIONS)
def test_the_table_is_true(strategy, option):
    excluded = option in getattr(mpisgd, strategy).excludes
    assert (documented()[option, strategy] == "no") == excluded


@pytest.mark.parametrize("option", OPTIONS)
def test_the_table_is_true_of_servers_at_each_ranks_own_pace(option):
    excluded = option in NOT_AT_OWN_PACE | mpisgd.ParameterServer.excludes
    assert (documented()[option, "ParameterServer(async, ssp)"] == "no") == excluded
