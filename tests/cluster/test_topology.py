"""Who is where, and that only ranks of one host share memory.

The hosts here are one machine: memory could be shared between them, /proc and /dev/shm are common to all.
mpisgd must not notice.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import pytest
from clusters import run_code, run_on
from launcher import python

REPORT = """
    import json, socket
    import mpisgd
    from mpisgd.job.lifecycle import world
    mpisgd.init()
    node = world().topology.nodes[mpisgd.node_rank()]
    groups = {"world": world()}
    for ranks in world().topology.nodes:
        group = mpisgd.new_group(ranks)
        groups.update({"node": group} if mpisgd.rank() in ranks else {})
    every_rank = {
        "host": socket.gethostname(), "local_rank": mpisgd.local_rank(), "local_size": mpisgd.local_size(),
        "node_rank": mpisgd.node_rank(), "num_nodes": mpisgd.num_nodes(),
        "shared_memory": [name for name, group in groups.items() if group.shared_memory is not None],
    }
    everyone = [None] * mpisgd.size()
    mpisgd.all_gather_object(everyone, every_rank)
    if mpisgd.rank() == 0:
        print(json.dumps([everyone, world().topology.hostnames]))
"""


LONG = pytest.mark.long


@lru_cache
def reported(hosts: str) -> tuple[list[dict[str, Any]], list[str]]:
    """What the ranks know, and the names of the hosts."""
    done = run_code(hosts, REPORT)
    assert done.returncode == 0, done.stderr
    ranks, hostnames = json.loads(done.stdout)
    return ranks, hostnames


@pytest.mark.parametrize(
    "slots",
    [[2, 1], *(pytest.param(slots, marks=LONG) for slots in ([2, 2], [1, 1, 1], [1, 2]))],
    ids=str,
)
def test_every_rank_knows_its_place(slots):
    ranks, hostnames = reported(",".join(map(str, slots)))
    places = [(node, local) for node, size in enumerate(slots) for local in range(size)]
    assert [(rank["node_rank"], rank["local_rank"]) for rank in ranks] == places
    assert [rank["local_size"] for rank in ranks] == [slots[node] for node, _ in places]
    assert [rank["host"] for rank in ranks] == [f"node{node + 1}" for node, _ in places]
    assert {rank["num_nodes"] for rank in ranks} == {len(slots)}
    assert hostnames == [f"node{node + 1}" for node in range(len(slots))]


@pytest.mark.parametrize("hosts", [pytest.param("2,2", marks=LONG), "2,1"])
def test_only_ranks_of_one_host_share_memory(hosts):
    for rank in reported(hosts)[0]:
        assert rank["shared_memory"] == (["node"] if rank["local_size"] > 1 else [])


@LONG
def test_info_tells_the_hosts():
    done = run_on("2,2", python(), "-m", "mpisgd", "info")
    assert done.returncode == 0, done.stderr
    assert "Job: 4 ranks on 2 hosts" in done.stdout
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert sum(line.startswith("host node1") and "ranks 0-1;" in line for line in lines) == 1
    assert sum(line.startswith("host node2") and "ranks 2-3;" in line for line in lines) == 1
