"""The command: let jobs do one thing very often, and see whether what they hold stays as it is.

./scripts/soak --json runs/soak.json
python scripts/bench/record_table.py runs/soak.json benchmarks/soak.md --title "Long jobs"
./scripts/soak --ranks 2 --share 0.01        # a hundredth of the counts

What the ranks hold may grow in the first half of a job: memory is kept for later, and modules are loaded. In
the second half, open files, threads, mapped shared memory and groups must not grow at all, and memory by no
more than `SLACK_BYTES`.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from mpisgd.errors import JobError
from mpisgd.tools.bench.jobs import job_environment, mpirun
from mpisgd.tools.cli.program import run_program
from mpisgd.tools.cli.record import Output
from soaking.program import REPORT

app = typer.Typer(add_completion=False)

PROGRAM = Path(__file__).resolve().with_name("program.py")
SCRIPTS = PROGRAM.parents[1]
COUNTS = {"steps": 100_000, "groups": 10_000, "optimizers": 1_000, "objects": 10_000}
QUANTITIES = ("memory, MB", "open files", "threads", "mapped files", "groups")
SLACK_BYTES = 2 * 2**20
LIMIT_S = 1800  # of one job


class Sample(NamedTuple):
    """What the ranks hold, each quantity on the rank that has most of it.

    Attributes:
        count: how often it was done by then.
        held: bytes of memory of a process alone, and the other `QUANTITIES`.
    """

    count: int
    held: tuple[int, ...]


def sampled(kind: str, count: int, ranks: int, launcher: str) -> list[Sample]:
    """Run a job; return its samples.

    Raises:
        JobError: it has failed, with what it said last; or did not end in time.
    """
    command = [*mpirun(launcher), "-n", str(ranks), sys.executable, str(PROGRAM), kind, str(count)]
    env = job_environment(ranks)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SCRIPTS), env.get("PYTHONPATH")]))
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as exc:
        raise JobError(f"{kind}, {ranks} ranks: not at its end after {LIMIT_S} s") from exc
    lines = [line for line in done.stdout.splitlines() if line.startswith(REPORT)]
    samples = [
        Sample(first, tuple(rest))
        for first, *rest in (json.loads(line.removeprefix(REPORT)) for line in lines)
    ]
    if done.returncode or not samples or samples[-1].count != count:
        said = "\n".join([*done.stdout.splitlines(), *done.stderr.splitlines()][-30:])
        raise JobError(f"{kind}, {ranks} ranks: exit code {done.returncode}\n{said}")
    return samples


def growing(samples: list[Sample]) -> list[str]:
    """Return the quantities that have grown in the second half."""
    half, last = samples[(len(samples) - 1) // 2].held, samples[-1].held
    slack = (SLACK_BYTES, *(0 for _ in QUANTITIES[1:]))
    return [
        name
        for name, before, after, most in zip(QUANTITIES, half, last, slack, strict=True)
        if after > before + most
    ]


def row_of(kind: str, ranks: int, samples: list[Sample], taken_s: float) -> list[str]:
    """Return the cells of a job: each quantity in the middle and at the end."""
    half, last = samples[(len(samples) - 1) // 2].held, samples[-1].held
    memory, *others = zip(half, last, strict=True)
    shown = [" / ".join(f"{nbytes / 1e6:.1f}" for nbytes in memory)]
    shown += [f"{before} / {after}" for before, after in others]
    verdict = ", ".join(growing(samples))
    return [
        kind,
        str(ranks),
        f"{samples[-1].count:,}",
        *shown,
        f"{taken_s:.0f}",
        f"grows: {verdict}" * bool(verdict) or "flat",
    ]


@app.command()
def main(
    kinds: Annotated[
        list[str] | None, typer.Argument(help="steps, groups, optimizers, objects; default: all")
    ] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="numbers of ranks; default: 2 and 3")] = None,
    share: Annotated[float, typer.Option(help="of the counts")] = 1.0,
    launcher: Annotated[str, typer.Option(help="mpirun and its options")] = "",
    to: Annotated[Path | None, typer.Option("--json", help="a file for the record")] = None,
) -> None:
    """Run the jobs, and print a table; exit code 1 if something grows."""
    output = Output(to)  # raises now rather than after minutes
    if unknown := [kind for kind in kinds or () if kind not in COUNTS]:
        raise JobError(f"no such kind: {', '.join(unknown)}; expected some of {', '.join(COUNTS)}")
    columns = ["what", "ranks", "times", *(f"{name}: middle / end" for name in QUANTITIES), "s", "verdict"]
    rows = []
    for kind in kinds or COUNTS:
        for number in ranks or (2, 3):
            began = time.monotonic()
            samples = sampled(kind, max(20, int(COUNTS[kind] * share)), number, launcher)
            rows.append(row_of(kind, number, samples, time.monotonic() - began))
            print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    notes = [
        "each quantity is that of the rank that has most of it; memory is what a process has alone (USS)"
    ]
    output.put_cells(columns, rows, notes, f"./scripts/soak {shlex.join(sys.argv[1:])}".strip())
    if any(row[-1] != "flat" for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    run_program(app)
