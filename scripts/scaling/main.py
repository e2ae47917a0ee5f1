"""The command: start jobs of several shapes on emulated hosts, and write what each took.

./scripts/scale --json runs/scale.json --plot benchmarks/scale.png
python scripts/bench/record_table.py runs/scale.json benchmarks/scale.md --title "Jobs of 8 to 64 ranks"
./scripts/scale --short
"""

import json
import math
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from growth.runs import Shape

from mpisgd.errors import JobError
from mpisgd.tools.cli.program import run_program
from mpisgd.tools.cli.record import Output
from scaling.program import IS_LATE, REPORT, STALL_WARNING_S

app = typer.Typer(add_completion=False)

SCRIPTS = Path(__file__).resolve().parents[1]
CLUSTER, PROGRAM = SCRIPTS / "emulation" / "virtual_cluster.py", SCRIPTS / "scaling" / "program.py"
LIMIT_S = 900  # of one job
STALLED = "waits for"  # in every report of a stall
# Of each quantity its unit, and what it is compared with.
QUANTITIES = {
    "start": ("s", "import torch"),
    "step": ("ms", "step: alone"),
    "all_reduce, 4 B": ("us", "all_reduce, 4 B: MPI"),
    "all_reduce, 4096 B": ("us", "all_reduce, 4096 B: MPI"),
    "all_reduce, 4194304 B": ("ms", "all_reduce, 4194304 B: MPI"),
    "barrier": ("us", "barrier: MPI"),
    "checkpoint": ("s", ""),
    "stall report": ("s", ""),
    "end after a kill": ("s", ""),
    "recovery": ("s", ""),
}
UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}


SHORT = (Shape(4, 4),)
FULL = tuple(
    Shape(hosts, size // hosts)
    for hosts, sizes in ((1, (8, 16, 32, 64)), (4, (8, 16, 32, 64)), (8, (8, 16, 32, 64)))
    for size in sizes
)


class Job:
    """A job of a shape, on emulated hosts, and the lines that it prints, each with its time.

    Args:
        shape: of the job.
        name: what `program` does.
        folder: for its files.
        mpirun: options of it.
    """

    def __init__(self, shape: Shape, name: str, folder: Path, mpirun: str = "") -> None:
        self._shape, self._name = shape, name
        settings = f"{mpirun} -x MPISGD_STALL_WARNING_S={STALL_WARNING_S}".strip()
        hosts = ",".join([str(shape.ranks_per_host)] * shape.hosts)
        command = [sys.executable, str(CLUSTER), "--hosts", hosts, "--time-limit", str(LIMIT_S)]
        command += ["--mpirun", settings, "--", sys.executable, str(PROGRAM), name, repr(time.time())]
        self._process = subprocess.Popen(
            [*command, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._lines: queue.Queue[tuple[float, str] | None] = queue.Queue()
        self.said: list[str] = []
        self._is_over = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as out:
            for line in out:
                self._lines.put((time.time(), line))
        self._lines.put(None)

    def lines(self) -> Iterator[tuple[float, str]]:
        """Yield what the job prints, until its end."""
        while not self._is_over:
            if (line := self._lines.get()) is None:
                self._is_over = True
            else:
                self.said.append(line[1])
                yield line

    def wait(self) -> int:
        """Wait for the end; return mpirun's exit code."""
        for _ in self.lines():
            pass
        return self._process.wait()

    def end(self, *, well: bool) -> float:
        """Wait for the end; return its time.

        Raises:
            JobError: it has ended well or not, unlike what was expected.
        """
        if ((code := self.wait()) == 0) != well:
            raise JobError(f"{self._shape}, {self._name}: exit code {code}:\n{''.join(self.said[-30:])}")
        return time.time()


def imports_of(shape: Shape, folder: Path) -> dict[str, float]:
    """Return how long it takes until all ranks have imported torch, in seconds."""
    Job(shape, "torch", folder).end(well=True)
    times = [float(file.read_text()) for file in folder.iterdir()]
    if len(times) != shape.size:
        raise JobError(f"{shape}, torch: {len(times)} ranks have imported it")
    return {"import torch": max(times)}


def measured(shape: Shape, folder: Path) -> dict[str, float]:
    """Return what a job measures, how late the report of a stall comes, and the end after a kill."""
    job, found, late, killed = Job(shape, "measure", folder), dict[str, float](), 0.0, 0.0
    for when, line in job.lines():
        if line.startswith(IS_LATE):
            late = when
        elif line.startswith(REPORT):
            result = json.loads(line.removeprefix(REPORT))
            killed = result.pop("killed", killed)
            found.update(result)
        elif late and STALLED in line and "stall report" not in found:
            found["stall report"] = when - late - STALL_WARNING_S
    end = job.end(well=False)
    if not killed or "stall report" not in found:
        raise JobError(
            f"{shape}, measure: no stall was reported, or no rank killed:\n{''.join(job.said[-30:])}"
        )
    return {**found, "end after a kill": end - killed}


def recovered(shape: Shape, folder: Path) -> dict[str, float]:
    """Return how long the other ranks take to go on after one has died."""
    job, found = Job(shape, "recover", folder, "--with-ft ulfm"), dict[str, float]()
    for _, line in job.lines():
        if line.startswith(REPORT):
            found.update(json.loads(line.removeprefix(REPORT)))
    job.wait()  # whatever its exit code is: a rank was killed
    if found.pop("ranks", 0) != shape.size - 1:
        raise JobError(f"{shape}, recover: the others have not gone on:\n{''.join(job.said[-30:])}")
    return found


def everything(shape: Shape) -> tuple[dict[str, float], list[str]]:
    """Return the quantities of a shape, in seconds, and what has failed, whose quantities are not there."""
    found, failures = dict[str, float](), []
    for part in (imports_of, measured, recovered):
        with tempfile.TemporaryDirectory(prefix="mpisgd-scale-") as folder:
            try:
                found.update(part(shape, Path(folder)))
            except JobError as failure:
                failures.append(str(failure))
    return found, failures


def cells_of(results: dict[Shape, dict[str, float]]) -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of a table: a column for each shape; after a slash, what it is beside."""
    rows = []
    for name, (unit, beside) in QUANTITIES.items():
        row = [f"{name}, {unit}" + (f" / {beside.rpartition(': ')[2]}" if beside else "")]
        for found in results.values():
            values = [found.get(each, math.nan) * UNITS[unit] for each in (name, beside) if each]
            row.append(" / ".join(map(_shown, values)))
        rows.append(row)
    return ["what", *map(str, results)], rows


def _shown(value: float) -> str:
    return "failed" if math.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def draw(path: Path, results: dict[Shape, dict[str, float]]) -> None:
    """Draw each quantity over the ranks, a line for each number of hosts; dashed: what it is beside."""
    from matplotlib import pyplot

    from mpisgd.tools.bench.report.plots import COLOURS

    figure, grid = pyplot.subplots(5, 2, figsize=(9, 15), layout="constrained")
    numbers = list(dict.fromkeys(shape.hosts for shape in results))
    for ax, (name, (unit, beside)) in zip(grid.flat, QUANTITIES.items(), strict=True):
        for hosts, colour in zip(numbers, COLOURS, strict=False):
            mine = [shape for shape in results if shape.hosts == hosts]
            sizes = [shape.size for shape in mine]
            for each, style in ((name, "-"), (beside, "--")):
                if each:
                    values = [results[shape].get(each, math.nan) * UNITS[unit] for shape in mine]
                    label = f"{hosts} host{'s' * (hosts > 1)}" if each == name else None
                    ax.plot(sizes, values, style, color=colour, marker="o", markersize=3, label=label)
        ax.set(xscale="log", yscale="log", title=name, ylabel=unit, xlabel="ranks")
        ax.set_xticks(sizes, map(str, sizes))
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(numbers))
    figure.suptitle("Jobs of several ranks on shared cores; dashed: MPI, a step alone, the import of torch")
    figure.savefig(path, dpi=110)


@app.command()
def main(
    short: Annotated[bool, typer.Option("--short", help="16 ranks on 4 hosts only")] = False,
    of: Annotated[list[str] | None, typer.Option("--shape", help="hosts x ranks of each, as 4x16")] = None,
    to: Annotated[Path | None, typer.Option("--json", help="a file for the record")] = None,
    plot: Annotated[Path | None, typer.Option(help="a file for the picture")] = None,
) -> None:
    """Measure each shape, and print a table."""
    output = Output(to, plot)  # raises now rather than after minutes
    results: dict[Shape, dict[str, float]] = {}
    failed = []
    for shape in [_shape(each) for each in of] if of else SHORT if short else FULL:
        began = time.monotonic()
        results[shape], failures = everything(shape)
        failed += failures
        print(f"{shape}: measured in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        for failure in failures:
            print(failure, file=sys.stderr, flush=True)
    columns, rows = cells_of(results)
    notes = [
        "shapes are hosts x ranks of each, on one machine; times of operations are the slowest rank's",
        f"a stall report: how long after the {STALL_WARNING_S:g} s of waiting after which it is due",
    ]
    output.put_cells(columns, rows, notes, f"./scripts/scale {shlex.join(sys.argv[1:])}")
    if plot is not None:
        draw(plot, results)
    if failed:
        raise JobError("; ".join(failure.partition(":\n")[0] for failure in failed))


def _shape(text: str) -> Shape:
    hosts, between, ranks = text.partition("x")
    if not (between and hosts.isdecimal() and ranks.isdecimal() and int(hosts) and int(ranks)):
        raise typer.BadParameter(f"{text}: expected hosts x ranks of each, as 4x16")
    return Shape(int(hosts), int(ranks))


if __name__ == "__main__":
    run_program(app)
