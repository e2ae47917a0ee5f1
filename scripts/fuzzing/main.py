"""The command: draw programs, run each, print how many and what is wrong.

./scripts/fuzz --programs 1000 --seed 0
./scripts/fuzz --only 731 --ranks 3
"""

import argparse
import collections
import contextlib
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from fuzzing.draw import draw
from fuzzing.draw_losses import loses, with_losses
from fuzzing.schedules import run_schedules
from fuzzing.shrink import shrink
from mpisgd.tools.verification.hosts import find_cluster
from mpisgd.tools.verification.programs.both_backends import BothBackends
from mpisgd.tools.verification.programs.compare import Verdict
from mpisgd.tools.verification.programs.mpirun_backend import MpirunBackend
from mpisgd.tools.verification.programs.program import Program, parse
from mpisgd.tools.verification.programs.python_text import python_text
from mpisgd.tools.verification.programs.threads_backend import ThreadsBackend

MOST_DRAWN = 1000  # for each that is wanted


class Backend(Protocol):
    """Runs programs on ranks."""

    def run(self, program: Program) -> Verdict:
        """Return what became of a program."""


class Fault(NamedTuple):
    """A program that failed.

    Attributes:
        program: as drawn.
        verdict: what was wrong.
        shrunk: the smallest one that fails in the same way.
    """

    program: Program
    verdict: Verdict
    shrunk: Program


class Report(NamedTuple):
    """What came out of many programs.

    Attributes:
        num_programs: how many were run.
        refused: how often each reason was given.
        faults: the programs that failed.
        seconds: how long it took, without shrinking.
    """

    num_programs: int
    refused: collections.Counter[str]
    faults: list[Fault]
    seconds: float

    @property
    def text(self) -> str:
        """A line of figures."""
        rate = self.num_programs / max(self.seconds, 1e-9)
        refused = sum(self.refused.values())
        return (
            f"{self.num_programs} programs in {self.seconds:.1f} s, {rate:.1f} per second; "
            f"{refused} refused, {len(self.faults)} failed"
        )


def fuzz(
    programs: Sequence[Program], backend: Backend, *, max_faults: int = 20, shrink_runs: int = 150
) -> Report:
    """Run programs, those of equal divisions into ranks together, and shrink what fails.

    Args:
        programs: what is run.
        backend: where.
        max_faults: after which nothing more is run.
        shrink_runs: how many programs are tried at most to shrink one.
    """
    refused: collections.Counter[str] = collections.Counter()
    faults: list[Fault] = []
    num_programs, seconds = 0, 0.0
    for program in sorted(programs, key=lambda p: (p.ranks, p.ranks_per_host)):
        begun = time.monotonic()
        verdict = backend.run(program)
        seconds += time.monotonic() - begun
        num_programs += 1
        if verdict.kind == "refused":
            refused[verdict.text[:150]] += 1
        if verdict.is_fault:
            print(f"seed {program.seed} on {program.ranks} ranks: {verdict.kind}: {verdict.text}", flush=True)
            shrunk = shrink(program, verdict.kind, lambda each: backend.run(each).kind, max_runs=shrink_runs)
            faults.append(Fault(program, verdict, shrunk))
            print(f"{_mark('shrunk')}\n{python_text(shrunk)}\n# {shrunk!r}\n", flush=True)
            if len(faults) >= max_faults:
                break
    return Report(num_programs, refused, faults, seconds)


def _mark(word: str) -> str:
    return f"# ---- {word} ".ljust(80, "-")


@contextlib.contextmanager
def _backend(name: str, *, emulated: bool) -> Iterator[Backend]:
    """Open the backend of a name."""
    if name == "threads":
        yield ThreadsBackend()
        return
    with MpirunBackend(cluster=find_cluster("") if emulated else ()) as opened:
        yield BothBackends(opened) if name == "both" else opened


def main(words: Sequence[str] | None = None) -> int:
    """Return the exit code: 1 if a program failed."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=100, help="how many (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first one; the next ones count on")
    parser.add_argument("--schedules", type=int, help="instead, so many of the engine; see schedules.py")
    parser.add_argument(
        "--disk-faults", action="store_true", help="in each of the schedules; by default in some"
    )
    parser.add_argument(
        "--containing", default="", help="draw on until so many have this in their text: 'gradients='"
    )
    parser.add_argument("--only", type=int, help="run the program of this seed alone")
    parser.add_argument("--text", help="run the program of this text, as it is printed after a shrunk one")
    parser.add_argument("--ranks", type=int, help="of every program; by default 1 to 4, drawn")
    parser.add_argument("--ranks-per-host", type=int, help="that count as those of one host; 0: all")
    parser.add_argument(
        "--strategy", default="", help='of every program: "my_module:MyStrategy(2)", with a method paper()'
    )
    parser.add_argument(
        "--losses",
        type=float,
        default=0.1,
        help="share of the programs on threads in which ranks are lost (%(default)s)",
    )
    parser.add_argument(
        "--backend",
        choices=("mpirun", "threads", "both"),
        default="mpirun",
        help="what runs the ranks; both: the same bits are expected",
    )
    parser.add_argument(
        "--emulated", action="store_true", help="start the jobs of several hosts on emulated ones"
    )
    parser.add_argument("--max-faults", type=int, default=20, help="after which nothing more is run")
    parser.add_argument("--shrink-runs", type=int, default=150, help="programs that shrinking one may take")
    parser.add_argument(
        "--refusals", action="store_true", help="print for what reasons programs were refused"
    )
    chosen = parser.parse_args(words)
    if chosen.schedules:
        scheduled = range(chosen.seed, chosen.seed + chosen.schedules)
        limits = {"max_faults": chosen.max_faults, "shrink_runs": chosen.shrink_runs}
        return int(run_schedules(scheduled, writes=chosen.disk_faults, **limits) > 0)
    seeds = range(chosen.seed, chosen.seed + chosen.programs * (MOST_DRAWN if chosen.containing else 1))
    if chosen.only is not None:
        seeds = range(chosen.only, chosen.only + 1)
    strategy = chosen.strategy.replace(":", ".", 1)
    drawn = (draw(seed, chosen.ranks, chosen.ranks_per_host, strategy) for seed in seeds)
    found = (program for program in drawn if chosen.containing in repr(program))
    programs = list(itertools.islice(found, chosen.programs))
    if chosen.backend == "threads":
        programs = [with_losses(each) if loses(each.seed, chosen.losses) else each for each in programs]
    if chosen.text:
        programs = [parse(chosen.text)]
    if chosen.backend != "threads" and any(program.loses for program in programs):
        parser.error("ranks are lost where they are threads alone: --backend threads")
    with _backend(chosen.backend, emulated=chosen.emulated) as backend:
        report = fuzz(programs, backend, max_faults=chosen.max_faults, shrink_runs=chosen.shrink_runs)
    for reason, count in report.refused.most_common() if chosen.refusals else ():
        print(f"refused {count} times: {reason}")
    print(report.text)
    for fault in report.faults:
        print(f"failed: --only {fault.program.seed} --ranks {fault.program.ranks}: {fault.verdict.kind}")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
