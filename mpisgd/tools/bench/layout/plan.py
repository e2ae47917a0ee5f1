"""Which numbers of ranks and threads are tried, and with which command.

What is compared is the time for the same work. Usually each rank brings a batch of its own, so that a step of
n ranks does n times the work: `--batch rank`. A program that divides one batch among its ranks does the same
work in a step of any number of ranks: `--batch total`. And a program that is told the batch of a rank can be
told its share of a joined one: `--batch 64`, with `{batch}` in the command.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mpisgd.errors import JobError
from mpisgd.tools.bench.report.rows import as_number

__all__ = ["LayoutPlan", "ProcessLayout", "layouts_of", "typed"]

OF_RANK, TOTAL = "rank", "total"
SHARE = "{batch}"  # in the program's words


class ProcessLayout(NamedTuple):
    """How many ranks, and torch threads of each."""

    ranks: int
    threads: int

    def __str__(self) -> str:
        return f"{as_number(self.ranks, 'rank')} x {as_number(self.threads, 'thread')}"


@dataclass(frozen=True)
class LayoutPlan:
    """What to measure.

    Attributes:
        program: its words.
        layouts: the program must work in the first one.
        launcher: words of mpirun.
        is_open_mpi: whether it is Open MPI's, which binds ranks to cores.
        batch: `rank`, `total`, or the examples of all ranks together.
        warmup: steps that do not count.
        steps: those that do.
        rounds: of all layouts.
        limit_s: for each start of the program.
    """

    program: Sequence[str]
    layouts: Sequence[ProcessLayout]
    launcher: Sequence[str]
    is_open_mpi: bool
    batch: str
    warmup: int
    steps: int
    rounds: int
    limit_s: float

    def __post_init__(self) -> None:
        """Raise JobError where the batch makes no sense."""
        is_number = self.batch.isdecimal() and int(self.batch) > 0
        if not is_number and self.batch not in (OF_RANK, TOTAL):
            raise JobError(f"--batch {self.batch}: expected {OF_RANK}, {TOTAL}, or a number of examples")
        if is_number != any(SHARE in word for word in self.program):
            raise JobError(f"--batch with a number and {SHARE} in the program's arguments go together")
        if not self.layouts:
            raise JobError("no number of ranks and threads fits the cores of this host and the batch")

    @property
    def joined_batch(self) -> int | None:
        """Examples of all ranks together, where that is known."""
        return int(self.batch) if self.batch.isdecimal() else None

    @property
    def needed_steps(self) -> int:
        """Steps that the program has to take."""
        return self.warmup + self.steps

    def command(self, layout: ProcessLayout, launcher: Sequence[str] | None = None) -> list[str]:
        """Return the command that starts the program in a layout; one rank needs no launcher."""
        words = list(self.program)
        if self.joined_batch is not None:
            share = str(self.joined_batch // layout.ranks)
            words = [word.replace(SHARE, share) for word in words]
        return words if layout.ranks == 1 else [*(launcher or self.launcher), "-n", str(layout.ranks), *words]

    def batches_per_step(self, layout: ProcessLayout) -> int:
        """Return on how many batches all ranks together train in a step."""
        return layout.ranks if self.batch == OF_RANK else 1

    def work(self) -> str:
        """Describe a batch."""
        if self.batch == OF_RANK:
            return "a step of n ranks trains on n batches: each rank brings its own (--batch rank)"
        size = "" if self.joined_batch is None else f" of {self.joined_batch}"
        return f"a step trains on one batch{size}, which the ranks divide (--batch {self.batch})"


def typed(words: Sequence[str]) -> str:
    """Return a command as a user types it."""
    return shlex.join("python" if word == sys.executable else word for word in words)


def layouts_of(
    cores: int, ranks: Sequence[int] = (), threads: Sequence[int] = (), joined_batch: int | None = None
) -> list[ProcessLayout]:
    """Return the layouts to try, those of few ranks and many threads first.

    Args:
        cores: of this host.
        ranks: numbers of ranks; default: those that divide the cores.
        threads: of each rank, as far as the cores suffice; default: all that a rank can have, half of them,
            and for one rank a single one.
        joined_batch: must divide by the ranks.
    """
    found: list[ProcessLayout] = []
    for count in ranks or [number for number in range(1, cores + 1) if cores % number == 0]:
        most = max(1, cores // count)
        wanted = threads or [most, most // 2, *([1] if count == 1 else [])]
        fitting = {number for number in wanted if 0 < number <= most}
        found += [ProcessLayout(count, number) for number in sorted(fitting, reverse=True)]
    return [layout for layout in found if joined_batch is None or joined_batch % layout.ranks == 0]
