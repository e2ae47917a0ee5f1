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

from __future__ import annotations

import itertools
import json
import math
import os
import re
import statistics
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

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
COLUMNS = ("hosts x ranks", "model", "method", "alone, ms", "measured, ms", "predicted, ms", "error")
PARTS = FOLDER / "plan-parts"

METHODS = (
    "Synchronous",
    "Overlap(False)",
    "Synchronous + bf16",
    "Synchronous + PowerSGD(rank=4)",
    "LocalSGD(4)",
    "DiLoCo(4)",
    "ElasticAveraging(every=4)",
    "Gossip('ring')",
)
# Of the second kind of portions, which no page has figures of yet.
MORE_METHODS = (
    "Sharded(stage=1)",
    "Sharded(stage=2)",
    "ParameterServer('sync')",
    "Synchronous + TopK(ratio=0.01)",
    "Synchronous + OneBit(two_step=True)",
)
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
    from mpisgd.tools.bench.training import MODELS as known
    from mpisgd.tools.bench.training import mlp

    known["wide"] = lambda small: mlp(512, 1536)


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

        from mpisgd.tools.plan.methods import planned_methods
        from mpisgd.tools.plan.recorder import StepRecorder

        self.model, self.cluster = model, cluster
        self.recorder = StepRecorder(10**9, lambda: None)
        self.seconds: dict[str, list[float]] = {}
        self.sent: dict[str, float] = {}
        self.alone, self.trainings = text_trainings() if model == TEXT else self._trainings(KINDS[kind])
        own = {"none", ONE_EXAMPLE, DIVIDED}
        self.methods = planned_methods(";".join(name for name in self.trainings if name not in own))

    def _trainings(self, methods: Sequence[str]) -> tuple[Any, dict[str, Any]]:
        """A rank's own training, and those of all ranks by the method's name. Collective."""
        import mpisgd
        from mpisgd.tools.bench.training import StepTask, Training
        from mpisgd.tools.plan.methods import Overlap, planned_methods

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
        import mpisgd
        from mpisgd.tools.bench.measure import slowest

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

        import mpisgd

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
    import mpisgd
    from mpisgd.tools.cli.provenance import provenance

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
    import mpisgd
    from mpisgd.tools.plan.methods import planned_methods

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


def with_predictions(part: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a portion beside what is predicted from its inputs."""
    from mpisgd.tools.plan.cluster import Cluster, Link
    from mpisgd.tools.plan.methods import planned_methods
    from mpisgd.tools.plan.network import Switch
    from mpisgd.tools.plan.prediction import Options, predict

    links = {name: Link(**part["cluster"][name]) for name in ("between", "within")}
    cluster = Cluster(**{**part["cluster"], **links, "network": Switch()})
    where = {"where": where_of(part), "load": part["load"], "calibration": part["calibration"]}
    counts_all = part.get("counts_all_groups", False)  # older portions have counted the world's group alone
    steps = {step["name"]: profile_of(step) for step in part["steps"]}
    found = []
    for row in part["rows"]:
        profile, seconds = steps[row["model"]]
        (method,) = planned_methods(row["method"])
        planned = predict(cluster, profile, method, Options(compression_s=seconds))
        predicted = {
            "predicted_s": planned.step_s,
            "predicted_sent": messages_of(planned),
            "counts_bytes": counts_bytes(planned, counts_all),
            "bound": planned.bound,
        }
        found.append({**row, **where, **predicted})
    return found


def profile_of(step: dict[str, Any]) -> tuple[Any, dict[str, float]]:
    """A step without communication, and what compressors take in it."""
    from mpisgd.tools.plan.models.blocks import Block
    from mpisgd.tools.plan.models.model import Gradient, StepProfile

    fields = {name: value for name, value in step.items() if name != "compression_s"}
    fields["gradients"] = tuple(
        Gradient(name, place, tuple(shape), *rest) for name, place, shape, *rest in fields["gradients"]
    )
    fields["blocks"] = tuple(
        Block(**{**block, "shapes": tuple(map(tuple, block["shapes"]))}) for block in fields["blocks"]
    )
    return StepProfile(**fields), step["compression_s"]


def counts_bytes(planned: Any, counts_all_groups: bool) -> bool:
    """Whether all messages of a method were counted: those of layouts are in groups of their own.

    On hosts of several ranks some of theirs are copies in shared memory, of which the plan knows no number.
    """
    is_layout = planned.method.startswith("Parallel")
    return not is_layout or (counts_all_groups and planned.cluster.ranks_per_host == 1)


def messages_of(planned: Any) -> float:
    """The bytes of messages of all ranks: between hosts, and of exchanges within hosts, too."""
    cluster = planned.cluster
    if cluster.hosts > 1 and planned.method.startswith(("Gossip", "Parallel")):
        return planned.step.sent_bytes * cluster.size
    return planned.step.traffic.get("host out", 0.0) * cluster.hosts


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
    from mpisgd.tools.plan.checked import kind_of
    from mpisgd.tools.plan.methods import planned_methods

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


def where_of(part: dict[str, Any]) -> str:
    """Hosts, ranks and rate of a portion."""
    ranks = f"{part['hosts']} x {part['ranks_per_host']}"
    return ranks if part["rate"] == "none" else f"{ranks}, {part['rate']}"


def error_of(row: dict[str, Any]) -> float:
    """How far the prediction is off, as a share of what was measured."""
    return row["predicted_s"] / row["measured_s"] - 1


def cells(row: dict[str, Any]) -> list[str]:
    """A case as a row of a table, under COLUMNS."""
    times = [f"{1e3 * row[name]:.1f}" for name in ("alone_s", "measured_s", "predicted_s")]
    return [row["where"], row["model"], row["method"], *times, f"{error_of(row):+.1%}"]


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each case."""
    form = "{:18}{:13}{:32}{:>9}{:>10}{:>10}{:>8}"
    return [
        form.format(*(name.split(",")[0] for name in COLUMNS)),
        *(form.format(*cells(row)) for row in rows),
    ]


def place_of(method: str) -> tuple[int, str]:
    """Where a method is in tables: those of METHODS first, in their order."""
    known = (*METHODS, *MORE_METHODS)
    return known.index(method) if method in known else len(known), method


def errors(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Errors of all cases and of each method: the median, the worst, and how many are within 10 %."""
    methods = sorted({row["method"] for row in rows}, key=place_of)
    found = []
    for name, kept in [("all", rows), *((m, [r for r in rows if r["method"] == m]) for m in methods)]:
        sizes = [abs(error_of(row)) for row in kept]
        near = f"{sum(size <= 0.1 for size in sizes)} of {len(sizes)}"
        found.append([name, f"{statistics.median(sizes):.1%}", f"{max(sizes):.1%}", near])
    return found


def notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How busy the machine was, how far bytes are off, and how good the first choice is."""
    loads = [row["load"] for row in rows if row.get("load")]
    busy = f"; load of the machine {min(loads):.0f} to {max(loads):.0f}" if loads else ""
    lines = [f"a step is the fastest of some blocks; {len(rows)} cases{busy}"]
    with_bytes = [row for row in rows if max(row["measured_sent"], row["predicted_sent"]) > 1e5]
    counted = [row for row in with_bytes if row["counts_bytes"]]
    if len(counted) < len(with_bytes):
        lines.append(f"bytes were not counted in {len(with_bytes) - len(counted)} cases of layouts")
    if counted:
        more = max(row["measured_sent"] - row["predicted_sent"] for row in counted)
        less = min(row["measured_sent"] - row["predicted_sent"] for row in counted)
        share = max(abs(row["predicted_sent"] / row["measured_sent"] - 1) for row in counted)
        lines.append(
            f"bytes of messages of all ranks in a step: {less:,.0f} to {more:,.0f} more than predicted, "
            f"the headers of checks; at most {share:.2%}, in {len(counted)} cases"
        )
    contests: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        contests.setdefault((row["where"], row["model"]), []).append(row)
    several = [kept for kept in contests.values() if len(kept) > 1]
    good = 0
    for kept in several:
        first = min(kept, key=lambda row: row["predicted_s"])
        good += first["measured_s"] <= 1.1 * min(row["measured_s"] for row in kept)
    lines.append(
        f"the first choice is within 10 % of the best measured one in {good} of {len(several)} settings"
    )
    return lines


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Predicted over measured, a colour for each method."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    from mpisgd.tools.bench.report.colours import colours_and_styles

    figure, ax = pyplot.subplots(figsize=(7, 6), layout="constrained")
    methods = sorted({row["method"] for row in rows}, key=place_of)
    for method, (colour, number) in colours_and_styles(methods).items():
        kept = [row for row in rows if row["method"] == method]
        x, y = ([1e3 * row[name] for row in kept] for name in ("measured_s", "predicted_s"))
        ax.plot(x, y, "os^"[number], color=colour, markersize=4, label=method)
    ends = [min(1e3 * row["measured_s"] for row in rows), max(1e3 * row["measured_s"] for row in rows)]
    ax.plot(ends, ends, color="black", linewidth=1)
    for factor in (0.9, 1.1):
        ax.plot(ends, [factor * end for end in ends], ":", color="black", linewidth=0.8)
    ax.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted step, ms")
    ax.set_title("plan: predicted and measured, dotted: 10 %", fontsize=10)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    app()
