"""Everything here needs namespaces, and is skipped with the reason where there can be none."""

from __future__ import annotations

import pytest
from clusters import obstacle


@pytest.fixture(scope="session", autouse=True)
def cluster() -> None:
    if obstacle():
        pytest.skip(obstacle())
