"""Predictions beside what was measured: how far they are off, as tables and a picture."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpisgd.tools.bench.report.plots import colours_and_styles
from mpisgd.tools.plan.cluster import Cluster, Link
from mpisgd.tools.plan.methods import planned_methods
from mpisgd.tools.plan.models.blocks import Block
from mpisgd.tools.plan.models.model import Gradient, StepProfile
from mpisgd.tools.plan.network import Switch
from mpisgd.tools.plan.prediction import Options, predict

COLUMNS = ("hosts x ranks", "model", "method", "alone, ms", "measured, ms", "predicted, ms", "error")
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


def with_predictions(part: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a portion beside what is predicted from its inputs."""
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
