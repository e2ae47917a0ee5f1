"""Who sends what to whom between hosts: every part reaches every host once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mpisgd.core.topology import arrange
from mpisgd.sharding.owners import Owners

HOSTS = [[0, 0, 0, 3, 3], [0, 1, 1, 1], [0, 1, 2], [0, 1, 0, 1], [0, 0]]


def owners_of(leaders: list[int], rank: int, shares: bool = True) -> Owners:
    topology = arrange(rank, leaders, [str(leader) for leader in leaders])
    group = SimpleNamespace(
        rank=rank,
        size=len(leaders),
        known_topology=topology,
        host_memory="memory" if topology.local_size > 1 and shares else None,
        shares_memory=shares,
    )
    return Owners(group, of_host=False)  # type: ignore[arg-type]


@pytest.mark.parametrize("leaders", HOSTS, ids=str)
def test_every_part_comes_to_every_host_once(leaders):
    everyones = [owners_of(leaders, rank) for rank in range(len(leaders))]
    for node, ranks in enumerate(everyones[0].nodes):
        represented = sorted(owner for rank in ranks for owner in everyones[rank].mine)
        assert represented == list(range(len(leaders)))
        for rank in ranks:
            assert everyones[rank].mine[0] == rank
            assert all(everyones[rank].counterpart(owner, node) == rank for owner in everyones[rank].mine)


@pytest.mark.parametrize("leaders", HOSTS, ids=str)
def test_all_ranks_say_the_same(leaders):
    everyones = [owners_of(leaders, rank) for rank in range(len(leaders))]
    for owner in range(len(leaders)):
        for host in range(len(everyones[0].nodes)):
            assert len({owners.counterpart(owner, host) for owners in everyones}) == 1


def test_the_example_of_the_module():
    owners = owners_of([0, 0, 0, 3, 3], 0)
    assert [owners.counterpart(owner, 1) for owner in (0, 1, 2)] == [3, 4, 3]
    assert [owners.counterpart(owner, 0) for owner in (3, 4)] == [0, 1]


def test_without_shared_memory_each_rank_is_a_host():
    owners = owners_of([0, 0, 0], 1, shares=False)
    assert owners.nodes == ((0,), (1,), (2,))
    assert (owners.host, owners.here, owners.mine) == (1, (1,), [1, 0, 2])
