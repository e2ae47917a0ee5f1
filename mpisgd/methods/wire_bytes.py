"""`sent_bytes`: what a rank sends, on average over the ranks, by the operations of a cost.

Of n bytes an all-reduce among p ranks sends 2 (p - 1) / p n from each, a reduce-scatter, an all-gather, an
all-to-all and a rotation half of that: the least by any algorithm. Headers, and what the checks send, are not
counted.
"""

from collections.abc import Iterable

from mpisgd.methods.cost_kit import ALL, HOST, LEADERS, Collective, Op, Send, World

__all__ = ["sent_bytes"]

TIMES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1, "rotate": 1}


def sent_bytes(ops: Iterable[Op], world: World) -> dict[str, float]:
    """Return the bytes by group; of ALL, HOST and LEADERS also where there are none."""
    found = dict.fromkeys((ALL, HOST, LEADERS), 0.0)
    for op in ops:
        if isinstance(op, Collective):
            found[op.group] = found.get(op.group, 0.0) + _sent(op, world)
        elif isinstance(op, Send):
            found[ALL] += op.nbytes
    return found


def _sent(op: Collective, world: World) -> float:
    if op.kind == "exchange":
        mean, _ = op.graph.degrees(world.size, op.phase)
        return float(mean * op.nbytes)
    if op.kind == "pairs":
        return op.nbytes
    if op.kind == "access":  # what is in the memory of this host is read where it lies
        return op.nbytes * (world.hosts - 1) / world.hosts
    size = op.num_ranks or world.size_of(op.group)
    return TIMES[op.kind] * (size - 1) * op.nbytes / size
