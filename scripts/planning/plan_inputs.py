"""What a prediction of `validate_plan.py` is made of, measured in the job: links, memory, cores, compressors.

None of it is a step of a method that is predicted.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import mpisgd
from mpisgd.compress.compressor import BucketLayout
from mpisgd.dtypes import ReduceOp
from mpisgd.gossip.graphs import Ring
from mpisgd.job.rank_info import topology
from mpisgd.methods.cast.cast import Cast
from mpisgd.tools.bench.measure import slowest
from mpisgd.tools.plan.cluster import Cluster
from mpisgd.tools.plan.files import link_from_times
from mpisgd.tools.plan.steps.job import PlannedJob
from mpisgd.tools.plan.steps.step_time import rounds_of_graph

SMALL, LARGE = 64, 2**20  # elements of the all-reduces that are timed
OUT_OF_CACHE, OUT_OF_ALL_CACHES = 2**23, 2**26
BETWEEN_SIZES = [2**power for power in range(8, 20, 2)]  # elements, of all-reduces that are noted besides
NUM_MEETINGS = 20
NUM_EXCHANGES = 12  # TCP takes some until it has found a link's rate again
NUM_TINY = 200  # gradients, of as many elements


def seconds_of(
    action: Callable[[], object], times: int, before: Callable[[], object] = lambda: None
) -> float:
    """The shortest time of an action on the slowest rank, after one that does not count. Collective.

    Not the median: this machine does other things, too, and the fastest of some turns is what disturbs least.
    """
    action()
    found = []
    for _ in range(times):
        before()
        mpisgd.barrier()
        start = time.perf_counter()
        action()
        found.append(slowest(time.perf_counter() - start))
    return min(found)


def evict() -> None:
    """Read so much that no cache has anything else, as a step does."""
    torch.zeros(OUT_OF_ALL_CACHES).add_(1.0)


def all_reduce_seconds() -> dict[int, float]:
    """What all-reduces between the smallest and the largest take, by their bytes. Collective."""
    tensors = [torch.zeros(numel) for numel in BETWEEN_SIZES]
    return {each.nbytes: seconds_of(lambda each=each: mpisgd.all_reduce(each), 6) for each in tensors}


def measure_cluster() -> Any:
    """What links and memory of this job do, as a `Cluster`. Collective."""
    # Within a host what counts is memory, and more than caches have.
    small, large = torch.zeros(SMALL), torch.zeros(LARGE * (1 if mpisgd.num_nodes() > 1 else 4))
    small_s = seconds_of(lambda: mpisgd.all_reduce(small), 30)
    hosts, k = mpisgd.num_nodes(), mpisgd.local_size()
    # In a step backward has been through the caches before; a link is slower than all of them.
    large_s = seconds_of(lambda: mpisgd.all_reduce(large), 5, before=evict if hosts == 1 else lambda: None)
    vector, other = torch.zeros(OUT_OF_CACHE), torch.zeros(OUT_OF_CACHE)
    memory = 3 * vector.nbytes / seconds_of(lambda: vector.add_(other), 5)
    fresh = fresh_seconds(vector) / vector.nbytes
    within, between, operation_s = link_from_times(hosts, k, small_s, large_s, large.nbytes)
    if hosts > 1:
        leaves = 2 * (hosts - 1) / hosts * large.nbytes
        across = [[host * k + place for host in range(hosts)] for place in range(k)]
        both_ways = exchange_share(across, k, between.bytes_per_s, memory)
        cpu_s = core_seconds(large, large_s) / leaves
        cpu_s, both_ways = broadcast_numbers([cpu_s, both_ways])
        between = replace(between, cpu_s_per_byte=cpu_s, both_ways=min(1.0, both_ways))
        if k > 1:
            within = host_link()
    half = half_factor(large, large_s) if hosts == 1 and k > 1 else 1.0
    if k > 1:
        on_hosts = [[host * k + place for place in range(k)] for host in range(hosts)]
        both_ways = exchange_share(on_hosts, k, within.bytes_per_s, memory)
        within = replace(within, both_ways=min(1.0, broadcast_numbers([both_ways])[0]))
    meeting_s = meeting_seconds(small, small_s) if hosts * k > 1 else 0.0
    busy_s = busy_meeting_seconds(small, small_s) if hosts > 1 else 0.0
    memory, fresh, half, meeting_s, busy_s = broadcast_numbers([memory, fresh, half, meeting_s, busy_s])
    tensor_s = tensor_seconds(small_s) if hosts * k > 1 else 0.0
    others = {"memory_bytes_per_s": memory, "tensor_s": tensor_s, "operation_s": operation_s}
    others |= {"fresh_s_per_byte": fresh, "half_factor": half}
    others |= {"meeting_s": meeting_s, "busy_meeting_s": busy_s}
    return Cluster(hosts, k, between, within, **others)


def broadcast_numbers(numbers: Sequence[float]) -> list[float]:
    """Rank 0's, to all."""
    return list(mpisgd.broadcast_object(list(numbers)))


def meeting_seconds(small: torch.Tensor, small_s: float) -> float:
    """What a small all-reduce takes longer where the ranks have computed before. Collective."""
    more_s = seconds_of(lambda: meet(small), 8) - seconds_of(lambda: meet(None), 8)
    return max(0.0, more_s / NUM_MEETINGS - small_s)


def busy_meeting_seconds(small: torch.Tensor, small_s: float) -> float:
    """The same in a thread, while the program computes. Collective."""

    def steps(tensor: torch.Tensor | None) -> None:
        thread = threading.Thread(target=meet, args=(tensor,))
        thread.start()
        while thread.is_alive():
            compute(5)

    more_s = seconds_of(lambda: steps(small), 8) - seconds_of(lambda: steps(None), 8)
    return max(0.0, more_s / NUM_MEETINGS - small_s)


def meet(tensor: torch.Tensor | None) -> None:
    """Compute, and reduce a tensor if there is one, in turns."""
    for _ in range(NUM_MEETINGS):
        compute(5)
        if tensor is not None:
            mpisgd.all_reduce(tensor)


def core_seconds(large: torch.Tensor, large_s: float) -> float:
    """What an all-reduce in the background takes of the core of a program that computes. Collective.

    A computation as long as the all-reduce itself, beside it: what both take longer than one of them.
    """
    count = computations(large_s)

    def both() -> None:
        work = mpisgd.all_reduce(large, async_op=True)
        compute(count)
        work.wait()

    return min(large_s, max(0.0, seconds_of(both, 5) - large_s))


def fresh_seconds(vector: torch.Tensor) -> float:
    """What a copy takes longer where its memory was allocated for it. Collective."""
    into = torch.empty_like(vector)
    return max(0.0, seconds_of(vector.clone, 5) - seconds_of(lambda: into.copy_(vector), 5))


def half_factor(large: torch.Tensor, large_s: float) -> float:
    """By what an all-reduce of 16-bit floats takes longer for each byte. Collective."""
    half = torch.zeros(2 * large.numel(), dtype=torch.bfloat16)
    return max(1.0, seconds_of(lambda: mpisgd.all_reduce(half), 5, before=evict) / large_s)


def exchange_share(
    groups: Sequence[Sequence[int]], at_a_link: int, bytes_per_s: float, memory_bytes_per_s: float
) -> float:
    """The share of a link's rate that exchanges with neighbours have in each direction. Collective.

    Args:
        groups: ranks that exchange with each other, all groups at the same time.
        at_a_link: how many messages that leave at the same time share a link.
        bytes_per_s: its rate.
        memory_bytes_per_s: of a rank; what arrives is added up.
    """
    made = [mpisgd.new_group(list(ranks)) for ranks in groups]
    (mine,) = [group for group in made if group.rank >= 0]
    whole = torch.zeros(2 * LARGE)
    num_rounds = len(rounds_of_graph(Ring(), mine.size))
    whole_s = seconds_of(lambda: mpisgd.neighbor_all_reduce(whole, "ring", mine), NUM_EXCHANGES)
    added_s = (4 + 3 * num_rounds) * whole.nbytes / memory_bytes_per_s
    seconds = max(1e-9, whole_s - added_s)
    return num_rounds * at_a_link * whole.nbytes / seconds / bytes_per_s


def tensor_seconds(operation_s: float) -> float:
    """What the program takes for each gradient besides its bytes: of many that have few. Collective."""

    def step_s(*, together: bool) -> float:
        params = [nn.Parameter(torch.ones(NUM_TINY)) for _ in range(NUM_TINY)]
        optimizer: torch.optim.Optimizer = torch.optim.SGD(params, lr=0.0)
        if together:
            optimizer = mpisgd.DistributedOptimizer(optimizer, overlap=False)

        def step() -> None:
            optimizer.zero_grad()
            sum(param.sum() for param in params).backward()
            optimizer.step()

        step()  # the first one makes the plan
        return seconds_of(step, 30)

    more_s = step_s(together=True) - step_s(together=False) - operation_s
    return broadcast_numbers([max(0.0, more_s / NUM_TINY)])[0]


def host_link() -> Any:
    """The memory that the ranks of a host share, of a group of them. Collective."""
    groups = [mpisgd.new_group(ranks) for ranks in topology().nodes]
    group = groups[mpisgd.node_rank()]
    small, large = torch.zeros(SMALL), torch.zeros(LARGE)
    small_s = seconds_of(lambda: mpisgd.all_reduce(small, group=group), 30)
    large_s = seconds_of(lambda: mpisgd.all_reduce(large, group=group), 9)
    return link_from_times(1, mpisgd.local_size(), small_s, large_s, large.nbytes)[0]


def compression_seconds(method: Any, cluster: Any, profile: Any) -> float:
    """What a compressor takes for an element of a step's buckets, on a rank by itself. Collective.

    As in a step, where so much else has been touched since the last time that no cache has any of it.
    """
    me = [mpisgd.new_group([rank]) for rank in range(mpisgd.size())][mpisgd.rank()]
    compression = method.compression
    job = PlannedJob(cluster, profile, compression)
    layouts = [
        BucketLayout(tuple(torch.Size(each.shape) for each in bucket.parameters), torch.float32)
        for bucket in job.sizes.buckets
    ]
    reducers = [compression.reducer(layout) for layout in layouts]
    buckets = [torch.randn(layout.numel) for layout in layouts]

    def compress() -> None:
        for reducer, bucket in zip(reducers, buckets, strict=True):
            if isinstance(compression, Cast):  # among one rank it would be cast for MPI, too
                compression.decompress(compression.compress(bucket), bucket)
            else:
                reducer.reduce(bucket, me, ReduceOp.AVG)

    seconds = seconds_of(compress, 4, before=evict)
    if cluster.hosts > 1 and len(buckets) > 1:  # in the background, while backward goes on
        seconds = max(seconds, background_seconds(compress, seconds))
    return broadcast_numbers([seconds / profile.numel])[0]


def background_seconds(action: Callable[[], object], alone_s: float) -> float:
    """What an action of a thread takes of the core of a program that computes as long. Collective."""
    count = computations(alone_s)

    def both() -> None:
        thread = threading.Thread(target=action)
        thread.start()
        compute(count)
        thread.join()

    compute_s = seconds_of(lambda: compute(count), 4)
    return seconds_of(both, 4, before=evict) - compute_s


def compute(count: int) -> None:
    """Multiply matrices that fit into the cache."""
    matrix = torch.rand(192, 192)
    for _ in range(count):
        matrix @ matrix


def computations(seconds: float) -> int:
    """How many computations take so long. Collective."""
    return int(broadcast_numbers([1 + 100 * seconds / seconds_of(lambda: compute(100), 5)])[0])
