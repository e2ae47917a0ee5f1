"""Compression between hosts: the ranks of a host average as they are, and one of them sends for all.

As in the hierarchical all-reduce of Jia et al. 2018, "Highly Scalable Deep Learning Training System", with a
compressor in its second step. p ranks on h hosts, of which host j has p_j.

    G_j = mean of g_i of the ranks of host j, times p_j h / p
    g   = mean of G_j, by the compressor, between the first ranks of the hosts
"""

from dataclasses import dataclass
from typing import Any

from mpisgd.methods.paper_kit import Paper, Vecs, World, filled, mean

__all__ = ["PerHost"]


@dataclass(frozen=True)
class PerHost(Paper[Any]):
    """What is kept is what the compressor keeps, of the first ranks of hosts; one host keeps nothing."""

    compressor: Paper[Any]

    @property
    def feedback(self) -> bool:
        """Whether the compressor adds what it did not send to what comes next."""
        return getattr(self.compressor, "feedback", False)

    def start(self, x: Vecs, w: World) -> Any:
        between = _between_hosts(w)
        return self.compressor.start({i: x[i] for i in between.ranks}, between)

    def reduce(self, s: Any, g: Vecs, w: World) -> tuple[Any, Vecs]:
        g, h, p = filled(g), len(w.hosts), len(w.ranks)
        if h == 1:
            return s, dict.fromkeys(w.ranks, mean(g, w))
        G = {host[0]: len(host) * h / p * mean({i: g[i] for i in host}, w) for host in w.hosts}
        s, taken = self.compressor.reduce(s, G, _between_hosts(w))
        return s, {i: taken[host[0]] for host in w.hosts for i in host}


def _between_hosts(w: World) -> World:
    first = tuple(host[0] for host in w.hosts)
    return w._replace(ranks=first, hosts=tuple((i,) for i in first))
