"""Predicted beside measured: `python -m mpisgd plan` on emulated hosts of this machine.

    cd scripts/planning
    python validate_plan.py all                     # each portion in turn; benchmarks/plan-*
    python validate_plan.py all --minutes 20        # as many as there is time for; goes on later
    python validate_plan.py run 1,1 1gbit out.json  # one portion: hosts, rate of a link
    python validate_plan.py report                  # tables and pictures of all portions so far

A portion is one job. In it everything that a prediction is made of is measured: links, memory and cores by
plan_inputs.py, a rank's step without communication by `tools.plan.recorder`, and what a compressor takes on
one rank. Steps of each method are timed, all of them in turns with steps without communication. A portion
keeps inputs and times; `report` predicts from the inputs, with the code as it is then. No number of a
prediction is from a step of the method that is predicted.
"""

import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs_site"))
from measurements import Measurement, Table
from plan_inputs import all_reduce_seconds, broadcast_numbers, compression_seconds, measure_cluster
from prediction_errors import (
    COLUMNS,
    METHODS,
    MORE_METHODS,
    cells,
    draw,
    errors,
    notes,
    profile_of,
    table,
    with_predictions,
)

import mpisgd
from mpisgd.tools.bench.measure import slowest
from mpisgd.tools.bench.training import MODELS as BENCH_MODELS
from mpisgd.tools.bench.training import StepTask, Training, mlp
from mpisgd.tools.cli.provenance import provenance
from mpisgd.tools.plan.checked import kind_of
from mpisgd.tools.plan.methods import Overlap, planned_methods
from mpisgd.tools.plan.recorder import StepRecorder

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
PARTS = FOLDER / "plan-parts"

KINDS = {"usual": METHODS, "more": MORE_METHODS}
PERIOD = 4  # of the methods above that have one; of others a block is two steps
MODELS = {"wide": 16, "deep": 32, "transformer": 4}  # and examples of a rank
KINDS_OF_PLAN = ROOT / "mpisgd" / "tools" / "plan" / "measured_kinds.py"
LONGEST_KIND = 103  # on a line of its own
TEXT = "gpt"  # in layouts of tensor and pipeline parallelism; see plan_layouts.py
# Hosts and their ranks, and the rate of a host's link. None: one host, without a link.
PORTIONS = [
    ("1", "none"),
    ("2", "none"),
    ("4", "none"),
    *itertools.product(("1,1", "1,1,1,1"), ("200mbit", "500mbit", "1gbit")),
    *itertools.product(("2,2",), ("500mbit", "1gbit")),
    ("2,2,2,2", "1gbit"),
]
THREE_HOSTS = [("1,1,1", "500mbit"), ("1,1,1", "1gbit")]
MORE_PORTIONS = [("1,1", "1gbit"), ("2,2", "1gbit"), *THREE_HOSTS]
TEXT_PORTIONS = [("2", "none"), ("1,1", "1gbit")]
FOUR_RANKS = [("4", "none"), ("1,1,1,1", "1gbit"), ("2,2", "1gbit")]  # on which there are tp with pp
# Hosts, rate, models, kind of methods, end of the file name: each is a job, and has a file when it is done.
ALL_PORTIONS = [
    *((*portion, ",".join(MODELS), "usual", "") for portion in [*PORTIONS, *THREE_HOSTS]),
    *((*portion, ",".join(MODELS), "more", "-more") for portion in MORE_PORTIONS),
    *((*portion, TEXT, "usual", f"-{TEXT}") for portion in [*TEXT_PORTIONS, *FOUR_RANKS]),
]
ROUNDS = 40
CALIBRATION = 7  # of how inputs are measured; portions of another one do not belong beside each other
LIMIT_S = float(os.environ.get("PLAN_LIMIT_S", "170"))  # of a portion

app = typer.Typer(add_completion=False)


# -- in a job ------------------------------------------------------------------------------------------


def add_models() -> None:
    """Let `bench` know a model between its own ones in size."""
    BENCH_MODELS["wide"] = lambda small: mlp(512, 1536)


def sent_bytes() -> int:
    """The bytes that this rank has handed to MPI so far, in all its groups: those of layouts, too."""
    from mpisgd.core.group import _groups

    mine = [group for group in _groups if group.rank >= 0]
    ends = [end for group in mine for end in (group.queue, group.point_to_point)]
    return sum(end.communicator.sent_bytes for end in ends)


class Contest:
    """The methods on one model, timed in turns."""

    def __init__(self, model: str, cluster: Any, kind: str) -> None:
        from plan_layouts import DIVIDED, ONE_EXAMPLE, text_trainings

        self.model, self.cluster = model, cluster
        self.recorder = StepRecorder(10**9, lambda: None)
        self.seconds: dict[str, list[float]] = {}
        self.sent: dict[str, float] = {}
        self.alone, self.trainings = text_trainings() if model == TEXT else self._trainings(KINDS[kind])
        own = {"none", ONE_EXAMPLE, DIVIDED}
        self.methods = planned_methods(";".join(name for name in self.trainings if name not in own))

    def _trainings(self, methods: Sequence[str]) -> tuple[Any, dict[str, Any]]:
        """A rank's own training, and those of all ranks by the method's name. Collective."""
        task = StepTask(self.model, MODELS[self.model], mpisgd.size(), optimizer="momentum")
        trainings = {}
        for method in planned_methods(";".join(methods)):
            if not self._makes_sense(method.name):
                continue
            trainings[method.name] = training = Training(task, mpisgd.rank())
            options: dict[str, Any] = {"compression": method.compression}
            if isinstance(method.strategy, Overlap):
                options["overlap"] = method.strategy.overlap
            else:
                options["strategy"] = method.strategy
            training.distribute(mpisgd.DistributedOptimizer, **options)
        return Training(replace(task, communicates=False), mpisgd.rank()), trainings

    def _makes_sense(self, name: str) -> bool:
        if self.cluster.size == 1:
            return name == "Synchronous"
        return self.cluster.hosts > 1 or name != "Overlap(False)"  # as on one host by itself

    def run(self, deadline: float) -> None:
        """Time blocks of steps, all methods in turns, until there are enough or the time is up."""
        for number in range(ROUNDS + 1):
            begun = time.perf_counter()
            self._block(None, self.alone, number)
            for name, training in self.trainings.items():
                self._block(name, training, number)
            took = time.perf_counter() - begun
            (left,) = broadcast_numbers([deadline - time.perf_counter()])
            if number and left < took:
                break

    def _block(self, name: str | None, training: Any, number: int) -> None:
        """Take the steps of a block; the first block of each is a warm-up."""
        steps = PERIOD if name is None or "4)" in name.partition("+")[0] else 2
        mpisgd.barrier()
        sent = sent_bytes()
        start = time.perf_counter()
        if name is None:
            with self.recorder:
                for _ in range(steps):
                    training.step()
        else:
            for _ in range(steps):
                training.step()
        took = slowest(time.perf_counter() - start) / steps
        if number:
            self.seconds.setdefault(name or "none", []).append(took)
            mine = torch.tensor((sent_bytes() - sent) / steps, dtype=torch.float64)
            mpisgd.all_reduce(mine)
            self.sent[name or "none"] = float(mine)

    def profile(self) -> Any:
        """The step without communication: its parts as on rank 0, its length as on the slowest rank."""
        from plan_layouts import EXAMPLES

        mine = self.recorder.profile(self.model, MODELS.get(self.model, EXAMPLES), warmup=PERIOD)
        (first,) = [mpisgd.broadcast_object(mine)]
        factor = min(self.seconds["none"]) / (first.compute_s + first.optimizer_s)
        found = replace(first.slower(factor), optimizer_s=first.optimizer_s * factor)
        return self._with_blocks(found) if self.model == TEXT else found

    def _with_blocks(self, profile: Any) -> Any:
        """The step with its blocks; t(n) = fixed + n c for n examples."""
        from plan_layouts import DIVIDED, EXAMPLES, ONE_EXAMPLE, text_sizes

        whole, one, divided = (min(self.seconds[name]) for name in ("none", ONE_EXAMPLE, DIVIDED))
        # The optimizer's part is the same in both.
        rest_s = profile.optimizer_s
        fixed_s = (EXAMPLES * (one - rest_s) - (whole - rest_s)) / (EXAMPLES - 1)
        fixed_s = min(max(0.0, fixed_s), profile.compute_s)
        return profile.with_blocks_of(text_sizes(), fixed_s, max(0.0, divided - whole))

    def rows(self) -> list[dict[str, Any]]:
        """A row for each method: what was measured."""
        return [
            {
                "model": self.model,
                "method": method.name,
                "measured_s": min(self.seconds[method.name]),
                "all_s": self.seconds[method.name],
                "alone_s": min(self.seconds["none"]),
                "measured_sent": self.sent[method.name],
            }
            for method in self.methods
        ]


@app.command()
def rank(rate: str, out: Path, models: str = ",".join(MODELS), kind: str = "usual") -> None:
    """What each rank of a portion does."""
    deadline = time.perf_counter() + LIMIT_S - 15
    add_models()
    mpisgd.init()
    cluster, curve = measure_cluster(), all_reduce_seconds()
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    wanted = models.split(",")
    for number, model in enumerate(wanted):
        share = (deadline - time.perf_counter()) / (len(wanted) - number)
        begun = time.perf_counter()
        contest = Contest(model, cluster, kind)
        contest.run(begun + share)
        profile = contest.profile()
        seconds = compressors_seconds(contest.methods, cluster, profile)
        steps.append({**asdict(profile), "compression_s": seconds})
        rows += contest.rows()
        # What else the machine was doing: 2 cores and a load of 20 say how much to believe.
        page = {
            **provenance(),
            "calibration": CALIBRATION,
            "counts_all_groups": True,
            "load": os.getloadavg()[1],
            "rate": rate,
            "hosts": cluster.hosts,
            "ranks_per_host": cluster.ranks_per_host,
            "cluster": asdict(cluster),
            "all_reduce_s": curve,
            "steps": steps,
            "rows": rows,
        }
        if mpisgd.rank() == 0:
            print(*table(with_predictions(page))[-len(contest.methods) :], sep="\n", flush=True)
            out.write_text(json.dumps(page, indent=1) + "\n")


def compressors_seconds(methods: Sequence[Any], cluster: Any, profile: Any) -> dict[str, float]:
    """What the compressors of methods take for an element, by what they print as. Collective."""
    return {
        repr(method.compression): compression_seconds(method, cluster, profile)
        for method in methods
        if method.compression.changes(torch.float32)
    }


@app.command()
def rank_inputs(part: Path, compressors: bool = True) -> None:
    """What each rank does to measure the inputs of a portion again."""
    mpisgd.init()
    page = json.loads(part.read_text())
    cluster = measure_cluster()
    for step in page["steps"] if compressors else []:
        names = [row["method"] for row in page["rows"] if row["model"] == step["name"]]
        methods = planned_methods(";".join(names))
        step["compression_s"] = compressors_seconds(methods, cluster, profile_of(step)[0])
    page |= {"calibration": CALIBRATION, "cluster": asdict(cluster), "inputs": "measured again"}
    if mpisgd.rank() == 0:
        print(*table(with_predictions(page)), sep="\n", flush=True)
        part.write_text(json.dumps(page, indent=1) + "\n")


# -- outside -------------------------------------------------------------------------------------------


@app.command()
def run(hosts: str, rate: str, out: Path, models: str = ",".join(MODELS), kind: str = "usual") -> None:
    """Measure one portion: ranks of each host such as 2,2, and the rate of a link or none."""
    raise typer.Exit(job(hosts, rate, "rank", rate, str(out.resolve()), "--models", models, "--kind", kind))


@app.command()
def inputs(
    part: Path, compressors: bool = typer.Option(True, help="Also what compressors take on one rank.")
) -> None:
    """Measure the inputs of a portion again, in a job of their own: where the way to do so has changed."""
    page = json.loads(part.read_text())
    ranks = ",".join([str(page["ranks_per_host"])] * page["hosts"])
    option = "--compressors" if compressors else "--no-compressors"
    raise typer.Exit(job(ranks, page["rate"], "rank-inputs", str(part.resolve()), option))


def job(hosts: str, rate: str, *words: str) -> int:
    """The exit code of a job of this program."""
    program = [sys.executable, str(Path(__file__).resolve()), *words]
    if "," in hosts:
        cluster = [sys.executable, str(ROOT / "scripts/emulation/virtual_cluster.py"), "--hosts", hosts]
        command = [*cluster, "--rate", rate, "--time-limit", str(LIMIT_S), "--", *program]
    else:
        command = ["timeout", str(LIMIT_S), "mpirun", "-n", hosts, *program]
    return subprocess.run(command).returncode


@app.command(name="all")
def all_portions(
    prefix: str = typer.Option("", help="Command before each portion."),
    minutes: float = typer.Option(math.inf, help="Begin no portion that would not be done by then."),
    load: float = typer.Option(math.inf, help="Begin none while the machine's load is above this."),
) -> None:
    """Measure all portions that are not there yet, then report. Goes on where it has ended before."""
    PARTS.mkdir(exist_ok=True)
    end = time.monotonic() + 60 * minutes - LIMIT_S
    missing = [portion for portion in ALL_PORTIONS if not part_of(*portion).exists()]
    for number, (hosts, rate, models, kind, suffix) in enumerate(missing):
        now = os.getloadavg()[0]
        if time.monotonic() > end or now > load:
            why = "no time is left" if time.monotonic() > end else f"the load is {now:.1f}"
            print(f"{len(missing) - number} portions are left: {why}", flush=True)
            break
        out = part_of(hosts, rate, models, kind, suffix)
        draft = out.with_suffix(".draft")  # each model is written when it is done, and a part has all of them
        words = [*prefix.split(), sys.executable, __file__, "run", hosts, rate, str(draft)]
        code = subprocess.run([*words, "--models", models, "--kind", kind]).returncode
        if code == 0:
            draft.rename(out)
        print(hosts, rate, models, kind, code, flush=True)
    report()


def part_of(hosts: str, rate: str, models: str, kind: str, suffix: str) -> Path:
    """Return the file of a portion."""
    return PARTS / f"{hosts.replace(',', '+')}-{rate}{suffix}.json"


@app.command()
def report() -> None:
    """Write benchmarks/plan-validation.md and .png from all portions so far."""
    parts = [json.loads(path.read_text()) for path in sorted(PARTS.glob("*.json"))]
    rows = [row for part in parts for row in with_predictions(part)]
    machines = {f"{part['machine']['processor']}, {part['machine']['cores']} cores" for part in parts}
    versions = {f"torch {part['versions']['torch']}" for part in parts}
    dates = sorted({part["when"][:10] for part in parts})
    facts = [
        ("command", "`python scripts/planning/validate_plan.py all`"),
        ("machine", "; ".join(sorted(machines))),
        ("versions", "; ".join(sorted(versions))),
        *(("date", date) for date in dates),
        *(("note", note) for note in notes(rows)),
    ]
    tables = [
        Table("errors", ["method", "median error", "worst error", "within 10 %"], errors(rows)),
        Table("cases", COLUMNS, [cells(row) for row in rows]),
    ]
    (FOLDER / "plan-validation.md").write_text(Measurement("Predictions", facts, tables).text)
    draw(rows, FOLDER / "plan-validation.png")
    KINDS_OF_PLAN.write_text(measured_kinds((FOLDER / "plan-validation.md").read_text()))
    print(*table(rows), "", *map(", ".join, errors(rows)), *notes(rows), sep="\n")


def measured_kinds(text: str) -> str:
    """Return the module of the kinds that were measured, from the table of all cases."""
    cases = re.findall(r"^\| (\d+) x (\d+)[^|]*\|[^|]*\| ([^|]+) \|", text, re.MULTILINE)
    names = sorted({method for _, _, method in cases})
    kinds = sorted({kind_of(method) for method in planned_methods(";".join(names))})
    ranks = [int(hosts) * int(k) for hosts, k, _ in cases]
    lines = [
        '"""What was measured beside the plan; `validate_plan.py report` writes this file."""',
        "",
        '__all__ = ["MEASURED", "MOST_RANKS"]',
        "",
        f"MOST_RANKS = {max(ranks)}",
        "MEASURED = (",
        *(f"    {json.dumps(kind)},{'  # noqa: E501' if len(kind) > LONGEST_KIND else ''}" for kind in kinds),
        ")",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    app()
