"""The mixing of `Gossip`: messages to neighbours, and their weighted sum."""

from mpisgd.compress.compressor import wire_dtype_of
from mpisgd.errors import InvalidArgument
from mpisgd.gossip.graph import Graph
from mpisgd.gossip.graphs import Exponential, OnePeerExponential, Ring
from mpisgd.methods.cast.cast import Cast
from mpisgd.plan.simulation.collectives import Cost, cost_of_rounds, link_bytes
from mpisgd.plan.simulation.messages import Round, neighbours, shift
from mpisgd.plan.steps.graph import StepGraph
from mpisgd.plan.steps.job import PlannedJob
from mpisgd.plan.steps.wire import dtype_of

__all__ = ["add_mixing", "rounds_of_graph"]

# Of larger ones the neighbours of every rank are not listed, unless all have theirs at the same distances.
MAX_RANKS = 1024


def rounds_of_graph(graph: Graph, size: int) -> list[tuple[float, Round]]:
    """Return the rounds of a step, of one byte each, and which share of the steps has each of them.

    Raises:
        InvalidArgument: the graph is no regular one, and there are too many ranks.
    """
    bits = range((size - 1).bit_length())
    if isinstance(graph, Ring):
        return [(1.0, shift(size, distance, 1.0)) for distance in {1, size - 1}]
    if isinstance(graph, (Exponential, OnePeerExponential)):
        share = 1.0 if isinstance(graph, Exponential) else 1.0 / len(bits)
        return [(share, shift(size, 1 << bit, 1.0)) for bit in bits]
    if size > MAX_RANKS:
        raise InvalidArgument(
            f"plan: {graph} of {size} ranks; expected at most {MAX_RANKS}, or a ring or exponential"
        )
    graph.check(size)
    phases = min(graph.num_phases(size) or 8, 8)
    steps = [neighbours([list(to) for to in graph.destinations(size, step)], 1.0) for step in range(phases)]
    return [(1.0 / phases, each) for rounds in steps for each in rounds]


def add_mixing(job: PlannedJob, graph: StepGraph, topology: Graph) -> None:
    """Add a mean with the neighbours: everyone sends all parameters to each of them."""
    rounds = rounds_of_graph(topology, job.cluster.size)
    degree = sum(share for share, _ in rounds)
    wire = _wire_ratio(job)
    copied = graph.move("copy", 2 * job.small_bytes(), tensors=len(job.profile.gradients))
    graph.begin_operation([copied])
    costs = [(share, cost_of_rounds(job.cluster, [each])) for share, each in rounds]
    alpha_s = sum(share * each.alpha_s for share, each in costs)
    cost = Cost(alpha_s, sum(share * each.beta_s_per_byte for share, each in costs))
    for nbytes in job.messages():
        graph.communicate("exchange", cost, nbytes * wire)
    nbytes = job.profile.nbytes * wire
    graph.sent_bytes += degree * nbytes
    for share, each in rounds:
        for level, (most, _) in link_bytes(job.cluster, [each]).items():
            graph.carry(level, most * share * nbytes)
    graph.wait()
    # The first term is scaled, each further one added to it, and the result copied.
    graph.move("weighted sum", (2 + 3 * degree + 2) * job.profile.nbytes)


def _wire_ratio(job: PlannedJob) -> float:
    """Return what travels of each byte: casts are all that `Gossip` takes."""
    if not isinstance(job.compression, Cast):
        raise InvalidArgument(f"plan: Gossip with {job.compression}; it takes casts")
    itemsize = job.profile.gradients[0].itemsize
    dtype = wire_dtype_of(job.compression, dtype_of(itemsize))
    return 1.0 if dtype is None else dtype.itemsize / itemsize
