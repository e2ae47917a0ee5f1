"""Object collectives of torch.distributed: anything that pickles, of another size on every rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from verdicts import everyone


def thing(rank: int) -> dict[str, object]:
    return {"rank": rank, "text": "x" * (1 + 5000 * rank), "tensor": torch.arange(rank + 1)}


def same(got: object, wanted: dict[str, object]) -> bool:
    return isinstance(got, dict) and all(
        torch.equal(got[key], value) if isinstance(value, torch.Tensor) else got[key] == value
        for key, value in wanted.items()
    )


def test_all_gather_object(pg):
    out = [None] * pg.size()
    dist.all_gather_object(out, thing(pg.rank()), pg)
    everyone(all(same(got, thing(rank)) for rank, got in enumerate(out)), f"{out}")


def test_gather_object_at_every_root(pg):
    for place, root in enumerate(dist.get_process_group_ranks(pg)):
        out = [None] * pg.size() if pg.rank() == place else None
        dist.gather_object(thing(pg.rank()), out, root, pg)
        assert out is None or all(same(got, thing(rank)) for rank, got in enumerate(out))


def test_broadcast_object_list_from_every_root(pg):
    for place, root in enumerate(dist.get_process_group_ranks(pg)):
        objects = [thing(place), "second", None] if pg.rank() == place else [None, None, None]
        dist.broadcast_object_list(objects, root, pg)
        assert same(objects[0], thing(place))
        assert objects[1:] == ["second", None]


def test_scatter_object_list_from_every_root(pg):
    for place, root in enumerate(dist.get_process_group_ranks(pg)):
        objects = [thing(rank) for rank in range(pg.size())] if pg.rank() == place else None
        out = [None]
        dist.scatter_object_list(out, objects, root, pg)
        assert same(out[0], thing(pg.rank()))


@pytest.mark.mpi(min_size=2)
def test_object_lists_between_two_ranks():
    rank = dist.get_rank()
    if rank == 0:
        dist.send_object_list([thing(3), "end"], 1)
        everyone(True)
        return
    objects = [None, None]
    source = dist.recv_object_list(objects, 0) if rank == 1 else 0
    everyone(rank != 1 or (source == 0 and same(objects[0], thing(3)) and objects[1] == "end"), f"{objects}")
