"""Tensors of more than 2^31 elements, beyond what an int counts."""

from __future__ import annotations

import pytest
import torch
from verdicts import everyone

import mpisgd.horovod as hvd

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.big, pytest.mark.timeout(300)]

LONG = 2**31 + 7


def long(value: int) -> torch.Tensor:
    """Zeros, with other numbers where a counter that is too short would lose its way."""
    tensor = torch.zeros(LONG, dtype=torch.uint8)
    tensor[:3], tensor[2**31 - 1 : 2**31 + 2], tensor[-2:] = value, 2 * value, 3 * value
    return tensor


def is_long(tensor: torch.Tensor, value: int) -> bool:
    ends = [tensor[:3].tolist(), tensor[2**31 - 1 : 2**31 + 2].tolist(), tensor[-2:].tolist()]
    right = ends == [[value] * 3, [2 * value] * 3, [3 * value] * 2]
    return right and tensor.count_nonzero().item() == 8


def total() -> int:
    return hvd.size() * (hvd.size() + 1) // 2


def test_allreduce():
    tensor = long(1 + hvd.rank())
    everyone(is_long(hvd.allreduce_(tensor, op=hvd.Sum), total()))


def test_broadcast():
    tensor = long(1 + hvd.rank())
    everyone(is_long(hvd.broadcast_(tensor, 1), 2))


def test_allgather():
    rows = LONG // hvd.size() + 1
    gathered = hvd.allgather(torch.full((rows,), 1 + hvd.rank(), dtype=torch.uint8))
    counts = torch.bincount(gathered[rows - 3 : rows + 3]).tolist()
    everyone(gathered.numel() == rows * hvd.size() > 2**31)
    everyone(counts == [0, 3, 3], f"{counts}")
    everyone(gathered[-1].item() == hvd.size())


def test_reducescatter():
    own = hvd.reducescatter(long(1 + hvd.rank()), op=hvd.Sum)
    share = LONG // hvd.size() + (hvd.rank() < LONG % hvd.size())
    everyone(own.numel() == share, f"{own.numel()}")
    ends = (own[0].item(), own[-1].item())
    everyone(hvd.rank() != 0 or ends[0] == total(), f"{ends}")
    everyone(hvd.rank() != hvd.size() - 1 or ends[1] == 3 * total(), f"{ends}")


def test_alltoall():
    mine = torch.zeros(LONG, dtype=torch.uint8)
    mine[0], mine[-1] = 1 + hvd.rank(), 10 + hvd.rank()
    splits = [LONG - 5, *[0] * (hvd.size() - 2), 5]
    received, counts = hvd.alltoall(mine, splits)
    if hvd.rank() == 0:
        assert received.numel() == hvd.size() * (LONG - 5)
        firsts = [received[rank * (LONG - 5)].item() for rank in range(hvd.size())]
    else:
        firsts = [received[5 * rank + 4].item() - 9 for rank in range(len(counts) if len(received) else 0)]
    everyone(firsts in ([], [1 + rank for rank in range(hvd.size())]), f"{firsts}")
