"""`scripts/uneven-data`: random divisions of data, trained inside `join()` and compared with one process.

Ranks are threads of this process; under mpirun, which starts as many as there are, those divisions are tried
that have this many.
"""

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

import mpisgd
from mpisgd.job.threads_as_ranks import run_ranks
from uneven.division import METHODS, Division, drawn
from uneven.training import in_one_process, train


def differing(division: Division, rank: int, mine: Sequence[Tensor]) -> str:
    """Return where a rank has other bits than one process, "" if nowhere."""
    for place, (got, right) in enumerate(zip(mine, in_one_process(division)[rank], strict=True)):
        if not torch.equal(got, right):
            apart = float((got - right).abs().max())
            return f"{division}: rank {rank} differs in parameter {place} by {apart}"
    return ""


def try_division(seed: int) -> str:
    """Train the division of a seed on threads; return where it differs from one process, "" if nowhere."""
    division = drawn(seed)
    try:
        ends = run_ranks(
            division.size, lambda: train(division), seed=seed, ranks_per_host=division.ranks_per_host
        )
    except Exception as exc:
        return f"{division}: {exc!r} from {exc.__cause__!r}"
    return next(filter(None, (differing(division, rank, end) for rank, end in enumerate(ends))), "")


def _under_mpirun(seeds: range) -> list[str]:
    found = []
    for seed in seeds:
        division = drawn(seed)
        if division.size == mpisgd.size():
            mine = differing(division, mpisgd.rank(), train(division))
            everyones: list[str] = [""] * mpisgd.size()
            mpisgd.all_gather_object(everyones, mine)
            found += filter(None, everyones)
    return found


def main() -> None:
    """Try divisions; exit with 1 where one differs."""
    parser = argparse.ArgumentParser(prog="scripts/uneven-data", description=__doc__)
    parser.add_argument("--divisions", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--mpi", action="store_true", help="on the ranks that mpirun has started")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + given.divisions)
    torch.set_num_threads(1)
    if given.mpi:
        mpisgd.init()
        found = _under_mpirun(seeds)
        says = mpisgd.rank() == 0
    else:
        found, says = [why for seed in seeds if (why := try_division(seed))], True
    if says:
        print(*found, sep="\n", end="\n" if found else "")
        print(f"{len(seeds)} divisions, {len(METHODS)} methods: {len(found)} differ from one process")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
