"""Recovery from a loss for `elastic.run`: with joiners where the program wants them, and a line on rank 0."""

import functools
import sys

from mpisgd.arguments import ranks_text
from mpisgd.elastic.joining import ElasticOptions, grow
from mpisgd.job import rank_info, recovery
from mpisgd.job.recovery import Recovered

__all__ = ["recover", "report"]


def recover(reason: str, options: ElasticOptions) -> Recovered:
    """Leave a world that has lost ranks for one of the survivors; see `mpisgd.job.recovery.recover`.

    Args:
        reason: the error of the groups of the old world from now on.
        options: how many ranks there may be, and whether joiners are started.
    """
    with_joiners = functools.partial(grow, options=options)
    return recovery.recover(reason, min_ranks=options.min_ranks, grow=with_joiners)


def report(recovered: Recovered, prefix: str = "mpisgd") -> None:
    """Print the result of a recovery, on rank 0.

    Args:
        recovered: see `recover`.
        prefix: of the line.
    """
    if rank_info.rank() == 0:
        gone = f"{ranks_text(recovered.lost)} {'is' if len(recovered.lost) == 1 else 'are'}"
        joined = f", {recovered.num_joiners} of them new" if recovered.num_joiners else ""
        print(
            f"{prefix}: elastic: {gone} lost; {rank_info.size()} ranks go on from the last commit{joined} "
            f"(recovered in {recovered.took_s:.2f} s)",
            file=sys.stderr,
            flush=True,
        )
