"""The internode transport on emulated hosts: groups whose ranks are told that they live on several hosts.

tests/cluster runs it on real ones.
"""

from __future__ import annotations

import zlib

import pytest
import torch
from closed_form import DTYPES, assert_near, combined, given, ops_of
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd import ReduceOp, config
from mpisgd.core.group import Group
from mpisgd.core.topology import arrange
from mpisgd.job.group_factory import make_group
from mpisgd.job.lifecycle import world
from mpisgd.transport.internode.leader_exchange import PAYLOAD_BYTES
from mpisgd.transport.internode.schedule import CHUNK_BYTES
from mpisgd.transport.internode.transport import DEPTH

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(not config.shared_memory(), reason="several ranks of a host without shared memory"),
]

# For each number of ranks: the first rank of every rank's host.
ARRANGEMENTS = {
    2: {"each alone": [0, 1]},
    3: {"two and one": [0, 0, 2], "one and two": [0, 1, 1], "in turn": [0, 1, 0], "each alone": [0, 1, 2]},
    4: {
        "pairs": [0, 0, 2, 2],
        "in turn": [0, 1, 0, 1],
        "three and one": [0, 0, 0, 3],
        "each alone": [0, 1, 2, 3],
    },
}
NAMES = sorted({name for by_name in ARRANGEMENTS.values() for name in by_name})


@pytest.fixture(scope="module")
def emulated(job) -> dict[str, Group]:
    found = {}
    for name, leaders in ARRANGEMENTS.get(mpisgd.size(), {}).items():
        where = arrange(mpisgd.rank(), leaders, [f"host{leader}" for leader in leaders])
        communicator = world().queue.communicator.duplicate()
        found[name] = make_group(
            name, range(mpisgd.size()), communicator, timeout_s=30, threads_allowed=True, topology=where
        )
        found[name].job = world().job
    yield found
    for group in found.values():
        group.queue.drain()
        group.free()


@pytest.fixture(params=NAMES)
def hosts(request, emulated) -> Group:
    if request.param not in emulated:
        pytest.skip("for another number of ranks")
    return emulated[request.param]


def reduced(group: Group, inputs: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    mine = inputs[mpisgd.rank()].clone()
    mpisgd.all_reduce(mine, op, group, algorithm="hierarchical")
    same_on_all_ranks(zlib.crc32(mine.view(torch.uint8).numpy().tobytes() if mine.numel() else b""))
    return mine


# Each dtype with some of the divisions, and each division with some of the dtypes; the rest with --long.
DIVISIONS_AND_DTYPES = [
    pytest.param(name, dtype, marks=() if (i + j) % 3 == 0 or name == "each alone" else pytest.mark.long)
    for i, name in enumerate(NAMES)
    for j, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("hosts", "dtype"), DIVISIONS_AND_DTYPES, indirect=["hosts"], ids=str)
def test_every_dtype_and_op(hosts, dtype):
    for op in ops_of(dtype):
        for length in (0, 1, 3, 131, PAYLOAD_BYTES // 4 + 1, PAYLOAD_BYTES + 7):
            inputs = [given(rank, dtype, (length,)) for rank in range(hosts.size)]
            assert_near(reduced(hosts, inputs, op), combined(inputs, op))


@pytest.mark.parametrize("num_leaders", [1, 2])
def test_chunks_fill_the_pipeline_and_run_over(hosts, num_leaders, monkeypatch):
    (transport,) = hosts.transports
    if num_leaders > transport.max_num_leaders:
        pytest.skip("a host has a single rank")
    monkeypatch.setattr(transport, "_best_num_leaders", lambda nbytes, half: num_leaders)
    chunk = CHUNK_BYTES // 4
    for length in (chunk - 1, chunk + 1, DEPTH * chunk, (DEPTH + 3) * chunk + 17):
        for dtype in (torch.float32, torch.bfloat16):
            inputs = [given(rank, dtype, (length,)) for rank in range(hosts.size)]
            assert_near(reduced(hosts, inputs, ReduceOp.AVG), combined(inputs, ReduceOp.AVG))


@pytest.mark.parametrize("algorithm", ["node", "direct"])
def test_algorithms_of_one_host_are_the_hierarchical_one_between_hosts(hosts, algorithm):
    inputs = [given(rank, torch.float32, (100,)) for rank in range(hosts.size)]
    mine = inputs[hosts.rank].clone()
    mpisgd.all_reduce(mine, ReduceOp.SUM, hosts, algorithm=algorithm)
    assert_near(mine, combined(inputs, ReduceOp.SUM))
    used = {known.operation.extra for known in hosts.known_calls.values()}
    everyone(used == {"algorithm=hierarchical"}, f"{used}")


def test_operations_follow_each_other_without_a_race(hosts):
    """Slots and messages are used again and again: many sizes, no pause, late ranks."""
    for round_ in range(40):
        length = (5, CHUNK_BYTES // 8 + 3, PAYLOAD_BYTES // 4, 2 * CHUNK_BYTES // 4 + 1)[round_ % 4]
        inputs = [given(rank + round_, torch.float32, (length,)) for rank in range(hosts.size)]
        mine = inputs[hosts.rank].clone()
        if round_ % hosts.size == hosts.rank:
            torch.randn(200, 200) @ torch.randn(200, 200)
        mpisgd.all_reduce(mine, ReduceOp.SUM, hosts, algorithm="hierarchical")
        assert_near(mine, combined(inputs, ReduceOp.SUM))


def test_in_the_queues_thread(hosts):
    inputs = [
        [given(rank + i, torch.float32, (CHUNK_BYTES * i // 8 + 3,)) for rank in range(hosts.size)]
        for i in range(4)
    ]
    mine = [tensors[hosts.rank].clone() for tensors in inputs]
    works = [mpisgd.all_reduce(tensor, ReduceOp.SUM, hosts, async_op=True) for tensor in mine]
    for work, tensor, tensors in zip(works, mine, inputs, strict=True):
        assert work is not None
        work.wait()
        assert_near(tensor, combined(tensors, ReduceOp.SUM))


def test_views_are_reduced_where_they_lie(hosts):
    inputs = [given(rank, torch.float32, (60, 7)) for rank in range(hosts.size)]
    mine = inputs[hosts.rank].t().contiguous().t()
    mpisgd.all_reduce(mine, ReduceOp.SUM, hosts)
    assert_near(mine.contiguous(), combined(inputs, ReduceOp.SUM))


@pytest.mark.parametrize("odd", [0, -1])
def test_disagreement_is_seen_on_every_rank_and_survived(hosts, odd):
    """Whoever differs, the first rank of a host or not, and whatever lies in the small messages."""
    length = 10 if hosts.rank == odd % hosts.size else 11
    for wrong in (length, length + PAYLOAD_BYTES):
        with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
            mpisgd.all_reduce(torch.ones(wrong), group=hosts)
        everyone(f"[{wrong}]" in caught.text)
    mine = torch.full((3,), float(hosts.rank))
    mpisgd.all_reduce(mine, group=hosts)
    everyone(mine.tolist() == [sum(range(hosts.size))] * 3, str(mine))


def test_bytes_between_hosts_are_the_fewest_possible(hosts):
    """2 (h - 1) / h of the message leave each host, whatever rank sends them, and the check's few bytes."""
    length = 3 * CHUNK_BYTES // 4 + 24
    communicator = hosts.queue.communicator
    before = communicator.sent_bytes
    mpisgd.all_reduce(torch.ones(length), group=hosts, algorithm="hierarchical")
    h = hosts.topology.num_nodes
    total = torch.zeros(h)
    total[hosts.topology.node_rank] = communicator.sent_bytes - before
    mpisgd.all_reduce(total)
    limit = 2 * (h - 1) / h * length * 4
    everyone(bool((total >= limit * 0.99).all() and (total <= limit + 64 * 16 * h).all()), f"{total} {limit}")
