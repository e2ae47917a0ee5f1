"""What holds for every test: the `mpi` mark takes only what pytest-mpi understands."""

from __future__ import annotations

import pytest


def check_mpi_mark(item: pytest.Item, mark: pytest.Mark) -> None:
    """pytest-mpi reads `min_size` and ignores the rest in silence: a misspelt one would never skip."""
    unknown = sorted(set(mark.kwargs) - {"min_size"})
    if mark.args or unknown:
        given = ", ".join([*map(repr, mark.args), *unknown])
        raise pytest.UsageError(f"{item.nodeid}: pytest.mark.mpi takes min_size=, not {given}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("mpi"):
            check_mpi_mark(item, mark)
