"""What a user gains: examples per second and time to accuracy, beside one process, DDP and Horovod.

    python scripts/bench/bench_overview.py --json runs/overview.json --plot docs/images/overview.png

Two ranks train digits on one host, on two emulated hosts with a link of 1 Gbit/s, and with one of
100 Mbit/s; each library is a job of its own, and in each round every library has one turn. One process with
all cores has no link. Horovod is left out where it cannot be imported.
"""

import importlib.metadata
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from overview_job import LIBRARIES

from mpisgd.tools.cli.program import run_program
from mpisgd.tools.cli.provenance import provenance

app = typer.Typer(add_completion=False)

HERE = Path(__file__).resolve().parent
JOB = HERE / "overview_job.py"
CLUSTER = HERE.parent / "emulation" / "virtual_cluster.py"
NETWORKS = {"one host": None, "2 hosts, 1 Gbit/s": "1gbit", "2 hosts, 100 Mbit/s": "100mbit"}
ALONE = "one process"
WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # so that no line goes through a number
NUM_RANKS = 2
COLOURS = {
    "mpisgd": "#0b6e4f",
    "mpisgd, LocalSGD(8)": "#5fb292",
    "DDP on gloo": "#3d6fb4",
    "Horovod": "#8a5a9e",
    ALONE: "#c8553d",
}


def command(network: str, library: str) -> list[str]:
    """The start of a job, up to its program."""
    if library == ALONE:
        return [sys.executable]
    rate = NETWORKS[network]
    if rate is None:
        return ["mpirun", "-n", str(NUM_RANKS), sys.executable]
    return [sys.executable, str(CLUSTER), "--hosts", "1,1", "--rate", rate, "--", sys.executable]


def run(network: str, library: str, settings: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """Train once; what rank 0 has printed."""
    with tempfile.TemporaryDirectory() as folder:
        given = json.dumps({**settings, "threads": threads, "store": f"{folder}/store"})
        words = [*command(network, library), str(JOB), library, given]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != 1:
        raise RuntimeError(f"{library}, {network}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return json.loads(lines[0])


def trainings(
    rounds: int, libraries: Sequence[str], settings: dict[str, Any]
) -> Iterator[tuple[str, str, Any]]:
    """Network, library and result of every training, a round after the other."""
    cores = len(os.sched_getaffinity(0))
    for seed in range(rounds):
        for network in NETWORKS:
            turn = seed % len(libraries)
            for library in (*libraries[turn:], *libraries[:turn]):
                if library == ALONE and NETWORKS[network] is not None:
                    continue
                counts = (1, cores) if library == ALONE else (max(1, cores // NUM_RANKS),)
                for threads in counts:
                    result = run(network, library, {**settings, "seed": seed}, threads)
                    yield network, f"{library}, {threads} threads" if library == ALONE else library, result


def spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """None where a training has not reached the accuracy."""
    reached = [value for value in values if value is not None]
    if len(reached) < len(values):
        return {"median": None, "min": min(reached, default=None), "max": None}
    return {"median": statistics.median(reached), "min": min(reached), "max": max(reached)}


def row(network: str, variant: str, curves: Sequence[Any], per_epoch: int, target: float) -> dict[str, Any]:
    """Over rounds: examples per second after the first epoch, and seconds to the accuracy."""
    return {
        "network": network,
        "variant": variant,
        "examples_per_s": spread([per_epoch * (len(c) - 1) / (c[-1][0] - c[0][0]) for c in curves]),
        "seconds_to_target": spread(
            [next((s for s, reached in c if reached >= target), None) for c in curves]
        ),
        "accuracy": spread([c[-1][1] for c in curves]),
    }


def rows_of(
    found: Mapping[tuple[str, str], Sequence[Any]], per_epoch: int, target: float
) -> list[dict[str, Any]]:
    """The faster of one process's numbers of threads stands for it."""
    rows = [row(*key, curves, per_epoch, target) for key, curves in found.items()]
    processes = [one for one in rows if one["variant"].startswith(ALONE)]
    best = max(processes, key=lambda one: one["examples_per_s"]["median"])
    return [one for one in rows if one not in processes or one is best]


def plot(path: Path, record: Mapping[str, Any]) -> None:
    """Two panels: rate, and time to accuracy, in groups of bars by network."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = record["rows"]
    alone = next(one for one in rows if one["variant"].startswith(ALONE))
    names = [name for name in COLOURS if name != ALONE and any(one["variant"] == name for one in rows)]
    what = {
        "examples_per_s": "examples per second, logarithmic (longer is better)",
        "seconds_to_target": f"seconds to {record['target']:.0%} accuracy, logarithmic (shorter is better)",
    }
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for ax, (field, label) in zip(axes, what.items(), strict=True):
        for place, network in enumerate(NETWORKS):
            for number, name in enumerate(names):
                at = place + (number - (len(names) - 1) / 2) * 0.8 / len(names)
                value = next(
                    o[field]["median"] for o in rows if (o["network"], o["variant"]) == (network, name)
                )
                height = 0.8 / len(names)
                ax.barh(at, value or 0.0, height, color=COLOURS[name], label=name if place == 0 else None)
                text = "not reached" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
                ax.text(value or 0.0, at, f" {text}", va="center", fontsize=8, bbox=WHITE)
        if (value := alone[field]["median"]) is not None:
            ax.axvline(value, color=COLOURS[ALONE], linestyle="--", label="one process, all cores")
        ax.set(yticks=range(len(NETWORKS)), xlabel=label, xscale="log")
        ax.set_yticklabels([name.replace(", ", "\n") for name in NETWORKS])
        ax.invert_yaxis()
        ax.margins(x=0.15)
        ax.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=130)


@app.command()
def main(
    rounds: Annotated[
        int, typer.Option(min=1, help="trainings of each kind, each with a seed of its own")
    ] = 3,
    epochs: Annotated[int, typer.Option(min=2)] = 8,
    batch: Annotated[int, typer.Option(min=1, help="examples of a step, over all ranks")] = 128,
    width: Annotated[int, typer.Option(min=1, help="of the two hidden layers")] = 1024,
    target: Annotated[float, typer.Option(help="accuracy on the test set")] = 0.96,
    json_file: Annotated[Path | None, typer.Option("--json", readable=False)] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", readable=False)] = None,
    drawn_from: Annotated[
        Path | None, typer.Option("--from", help="draw this record, measure nothing")
    ] = None,
) -> None:
    """Measure all libraries in all networks."""
    if drawn_from is not None:
        plot(plot_file or Path("overview.png"), json.loads(drawn_from.read_text()))
        return
    left_out = {} if importlib.util.find_spec("horovod") else {"Horovod": "it cannot be imported"}
    libraries = [name for name in LIBRARIES if name not in left_out]
    settings = {"epochs": epochs, "batch": batch, "width": width}
    found: dict[tuple[str, str], list[Any]] = {}
    for network, variant, result in trainings(rounds, libraries, settings):
        found.setdefault((network, variant), []).append(result["curve"])
        seconds, accuracy = result["curve"][-1]
        print(f"{network:<20} {variant:<24} {seconds:7.2f} s  {accuracy:.2%}", flush=True)
    from sklearn import datasets

    count = len(datasets.load_digits().target)
    per_epoch = (count - count // 5) // batch * batch
    record = {
        "kind": "overview",
        **provenance(),
        "title": f"Digits, batch {batch} in all, {NUM_RANKS} ranks",
        "target": target,
        "peers": {} if left_out else {"Horovod": f"Horovod {importlib.metadata.version('horovod')}"},
        "peers_left_out": left_out,
        "rows": rows_of(found, per_epoch, target),
    }
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(record, indent=2) + "\n")
    if plot_file is not None:
        plot(plot_file, record)


if __name__ == "__main__":
    run_program(app)
