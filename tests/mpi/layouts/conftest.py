"""torch's default process group for the tests of this folder; those of torch_backend make their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module", autouse=True)
def default_group() -> Iterator[None]:
    """Layouts make it themselves; here it is destroyed again."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
