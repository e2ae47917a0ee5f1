"""How often to write a checkpoint, and what failures leave of the time: restarts, and elastic training.

With delta the time to write a checkpoint, M the mean time between failures of the job, R the time to restart,
tau the time of work from one checkpoint to the next, and failures that come at any time alike:

    Young 1974    tau = sqrt(2 delta M)
    Daly 2006     tau = sqrt(2 delta M) (1 + sqrt(delta / 2 M) / 3 + (delta / 2 M) / 9) - delta
                  tau = M from delta = 2 M on
    share of the time that is work (Daly's complete model)
                  tau / (M e^(R / M) (e^((tau + delta) / M) - 1))

A job of h hosts has the h-th part of a host's mean time between failures. Elastic training goes on from the
last step with the hosts that are left: a failure costs the recovery, and a host's work until it is replaced.

What waiting for the slowest costs: the expected maximum of the times of many ranks.

Of p independent times, normally distributed with mean m and standard deviation s, the largest is on average

    m + s e(p),   e(p) = integral of x d(Phi(x)^p)

Steps that all ranks wait for take that. Ranks that meet every k steps wait for the largest of p sums of k
times, whose deviation is s sqrt(k): 1 / sqrt(k) of it for each step.
"""

import math
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

from mpisgd.arguments import check_positive
from mpisgd.tools.plan.cluster import Failures

__all__ = [
    "Interruptions",
    "daly_interval",
    "elastic_share",
    "expected_maximum",
    "interruptions",
    "straggler_factor",
    "work_share",
    "young_interval",
]

NORMAL = NormalDist()
STEPS = 4000
REACH = 9.0  # standard deviations, beyond which nothing counts


@lru_cache(maxsize=256)
def expected_maximum(size: int) -> float:
    """Return e(size): 0 of one, 0.56 of two, 1.03 of four, 2.5 of a hundred, 4.4 of 100,000."""
    width = 2 * REACH / STEPS
    # E[max] = integral of 1 - Phi(x)^p over x > 0, less that of Phi(x)^p over x < 0.
    total = 0.0
    for step in range(STEPS):
        x = -REACH + (step + 0.5) * width
        below = NORMAL.cdf(x) ** size
        total += (1.0 - below if x > 0 else -below) * width
    return total


def straggler_factor(spread: float, size: int, period: float = 1.0) -> float:
    """Return the factor of the mean compute time where ranks wait for each other.

    Args:
        spread: standard deviation, as a share of the mean.
        size: of the ranks that wait for each other.
        period: steps from one meeting to the next.
    """
    return 1.0 + spread * expected_maximum(size) / math.sqrt(period) if spread and size > 1 else 1.0


HOUR_S = 3600.0


def young_interval(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between checkpoints by Young's formula."""
    check_positive("young_interval", "mtbf_s", mtbf_s)
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly_interval(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the same by Daly's, which is nearer to the optimum where checkpoints are not short."""
    check_positive("daly_interval", "mtbf_s", mtbf_s)
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    return young_interval(checkpoint_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def work_share(interval_s: float, checkpoint_s: float, mtbf_s: float, restart_s: float) -> float:
    """Return which share of the time is work that counts, with a checkpoint after `interval_s` of it."""
    if interval_s <= 0:  # where checkpoints take no time there is one at every moment, and only restarts cost
        return 0.0 if checkpoint_s else math.exp(-restart_s / mtbf_s)
    period = (interval_s + checkpoint_s) / mtbf_s
    if period + restart_s / mtbf_s > 700:  # no period is ever finished
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(period))


def elastic_share(failures: Failures, hosts: int) -> float:
    """Return the same for elastic training: nothing is lost but recoveries, and lost hosts' work."""
    mtbf_s = failures.mtbf_hours * HOUR_S / hosts
    absent = failures.repair_hours / (failures.mtbf_hours + failures.repair_hours)
    return (1 - absent) / (1 + failures.recovery_s / mtbf_s) if hosts > 1 else 0.0


class Interruptions(NamedTuple):
    """What failures mean for a job.

    Attributes:
        mtbf_s: mean time between failures of the job.
        young_s: seconds of work between checkpoints.
        daly_s: the same.
        restart_share: share of the time that is work, with restarts from checkpoints at Daly's interval.
        elastic_share: the same for elastic training; 0 where a single host is all there is.
    """

    mtbf_s: float
    young_s: float
    daly_s: float
    restart_share: float
    elastic_share: float


def interruptions(failures: Failures, hosts: int) -> Interruptions:
    """Predict the effect of failures on a job on so many hosts."""
    mtbf_s = failures.mtbf_hours * HOUR_S / hosts
    daly = daly_interval(failures.checkpoint_s, mtbf_s)
    return Interruptions(
        mtbf_s,
        young_interval(failures.checkpoint_s, mtbf_s),
        daly,
        work_share(daly, failures.checkpoint_s, mtbf_s, failures.restart_s),
        elastic_share(failures, hosts),
    )
