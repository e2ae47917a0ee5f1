"""`LateRanks`: what a collective takes where ranks come to a link in different rounds.

Halving and doubling on a number of ranks p that is no power of two. The ranks beyond the power hand all they
have to a partner first, and those who serve nobody have begun to halve by then:

    p = 5    rank 4   >0                     n bytes, as many as all halvings together
             rank 0   |  fold  | 1 | 2 |     is late in each round, and with it those that it meets
             rank 3   | 1 | . . . .  | 2 |   early: its messages pass the links of the fold, or do not

Which messages share a link depends on all of the rounds, and on the number of bytes. Rounds that are counted
as if all began together are off by up to 30 %, either way. So their messages are simulated, at few sizes; the
closed form is multiplied by what was found there, and between two sizes by a mean of both.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from mpisgd.tools.plan.cluster import Cluster
from mpisgd.tools.plan.simulation.by_message import simulate_messages
from mpisgd.tools.plan.simulation.costs import Cost, Costs
from mpisgd.tools.plan.simulation.messages import collective_rounds

__all__ = ["LateRanks", "are_late"]

MOST_RANKS = 512  # of which messages are simulated: some tenths of a second
STEP = 4.0  # from one simulated size to the next
SAME = 1e-3  # see `simulate_messages`


def are_late(cluster: Cluster, algorithm: str) -> bool:
    """Return whether ranks of a collective come to links in different rounds, and can be simulated."""
    size = cluster.size
    return algorithm == "halving_doubling" and size & (size - 1) != 0 and size <= MOST_RANKS


@dataclass(frozen=True)
class LateRanks:
    """What a collective takes by its size.

    Attributes:
        cluster: of the ranks.
        algorithm: of the collective.
        collective: its name.
        form: its rounds, as if all ranks began each of them together.
    """

    cluster: Cluster
    algorithm: str
    collective: str
    form: Costs

    def at(self, nbytes: float) -> Cost:
        """Return the line that counts for so many bytes."""
        number = math.log(max(1.0, nbytes), STEP)
        low, share = math.floor(number), number % 1.0
        factor = (1 - share) * self._factor(low) + (share * self._factor(low + 1) if share else 0.0)
        line = self.form.at(nbytes)
        return Cost(line.alpha_s * factor, line.beta_s_per_byte * factor)

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of `nbytes`; 0 for none."""
        return self.at(nbytes).seconds(nbytes)

    def _factor(self, number: int) -> float:
        nbytes = STEP**number
        return _simulated_s(self.cluster, self.algorithm, self.collective, nbytes) / self.form.seconds(nbytes)


@lru_cache(maxsize=4096)
def _simulated_s(cluster: Cluster, algorithm: str, collective: str, nbytes: float) -> float:
    rounds = collective_rounds(collective, algorithm, cluster.placement, nbytes)
    return simulate_messages(cluster, rounds, SAME)
