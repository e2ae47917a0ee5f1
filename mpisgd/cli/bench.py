"""`python -m mpisgd bench`: how fast collectives and training steps are, beside what else there is.

mpirun -np 2 python -m mpisgd bench collectives --json all.json --plot all.png
mpirun -np 2 python -m mpisgd bench step
python -m mpisgd bench scaling --ranks 1,2,4          # starts mpirun itself
"""

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import mpisgd
from mpisgd.config import launcher_rank

if TYPE_CHECKING:
    from mpisgd.bench.peers import Peers

__all__ = ["bench"]

bench = typer.Typer(add_completion=False, help="Measure collectives and training steps beside their peers.")

JSON = typer.Option(None, "--json", help="Write everything measured here, with machine and versions.")
PLOT = typer.Option(None, "--plot", help="Draw it into this PNG file.")
QUICK = typer.Option(False, "--quick", help="A few seconds, to see that it works; the numbers mean little.")
PEERS = typer.Option(
    "gloo,horovod", "--peers", help="Other frameworks to measure beside; those not there are left out."
)
ROUNDS = typer.Option(20, "--rounds", min=1, help="Rounds that count, unless the budget ends them before.")
LIMIT = typer.Option(3600.0, "--time-limit", min=1.0, help="Seconds after which the whole job is ended.")


@bench.command()
def collectives(
    only: str = typer.Option("all", "--only", help="Collectives, separated by commas."),
    sizes: str = typer.Option("4-256MiB", "--sizes", help="A range (times 4), or a list: 4,64KiB,1MiB."),
    dtypes: str = typer.Option("float32", "--dtypes", help="Separated by commas."),
    algorithms: str = typer.Option("auto", "--algorithms", help="Of mpisgd.all_reduce: auto,mpi,ring,..."),
    peers: str = PEERS,
    rounds: int = ROUNDS,
    budget_s: float = typer.Option(4.0, "--budget", min=0.0, help="Seconds for each size of a collective."),
    json_file: Path | None = JSON,
    plot_file: Path | None = PLOT,
    quick: bool = QUICK,
    time_limit_s: float = LIMIT,
) -> None:
    """Time each collective beside MPI's own, gloo's, Horovod's, and what memory or link allow."""
    from mpisgd.bench import cases, tables
    from mpisgd.bench.collectives import CollectivesPlan, run_collectives
    from mpisgd.bench.peers import open_peers
    from mpisgd.bench.schedule import Pace
    from mpisgd.bench.summary import as_bytes
    from mpisgd.comm.collectives.all_reduce import CHOICES

    _check_files(json_file, plot_file)
    if quick:
        only, sizes, rounds = "all_reduce,broadcast" if only == "all" else only, "4,64KiB", min(rounds, 3)
    plan = CollectivesPlan(
        _choice("--only", only, cases.COLLECTIVES),
        cases.sizes(sizes),
        _choice("--dtypes", dtypes, tuple(cases.ITEM_BYTES)),
        _choice("--algorithms", algorithms, CHOICES),
        Pace(rounds, min(rounds, 3), budget_s, turn_s=0.004, max_calls=100),
    )

    def tell(case: cases.Case, rows: list[dict[str, Any]]) -> None:
        _tell(f"{case.collective} {case.dtype} {as_bytes(case.nbytes)}", rows)

    with _job(time_limit_s), open_peers(_peers(peers)) as others:
        record = {**_header("collectives", others), **run_collectives(plan, others, tell)}
        if mpisgd.rank() == 0:
            tables.show(tables.collective_tables(record["rows"]), _notes(record))
        _write(record, json_file, plot_file)


@bench.command()
def step(
    models: str = typer.Option("all", "--models", help="mlp, deep, transformer, separated by commas."),
    batch: int = typer.Option(0, "--batch", min=0, help="Examples of one rank; 0: each model's own."),
    threads: int = typer.Option(0, "--threads", min=0, help="Of torch on each rank; 0: mpisgd's choice."),
    buckets: str = typer.Option("25MiB,100MiB", "--ddp-buckets", help="Bucket sizes to try with DDP."),
    peers: str = PEERS,
    rounds: int = ROUNDS,
    budget_s: float = typer.Option(60.0, "--budget", min=0.0, help="Seconds for each model."),
    json_file: Path | None = JSON,
    plot_file: Path | None = PLOT,
    quick: bool = QUICK,
    time_limit_s: float = LIMIT,
) -> None:
    """Time training steps beside the same step without communication, DDP, MPI by hand and Horovod."""
    from mpisgd.bench import tables
    from mpisgd.bench.cases import sizes
    from mpisgd.bench.peers import open_peers
    from mpisgd.bench.schedule import Pace
    from mpisgd.bench.step import StepPlan, run_steps
    from mpisgd.bench.training import MODELS

    _check_files(json_file, plot_file)
    pace = Pace(rounds, min(rounds, 3), budget_s, turn_s=0.25, max_calls=20)
    if quick:
        pace = Pace(min(rounds, 2), 1, budget_s, turn_s=0.01, max_calls=5)
    plan = StepPlan(_choice("--models", models, tuple(MODELS)), batch or None, sizes(buckets), quick, pace)
    with _job(time_limit_s, threads), open_peers(_peers(peers)) as others:
        record = {**_header("step", others), **run_steps(plan, others, _tell)}
        if mpisgd.rank() == 0:
            tables.show([tables.step_table(record["rows"])], _notes(record))
        _write(record, json_file, plot_file)


@bench.command()
def scaling(
    ranks: str = typer.Option("1,2,4", "--ranks", help="Rank counts; 1 is always among them."),
    models: str = typer.Option("all", "--models", help="mlp, deep, transformer, separated by commas."),
    batch: int = typer.Option(0, "--batch", min=0, help="Examples of one rank; 0: each model's own."),
    threads: int = typer.Option(1, "--threads", min=1, help="Of torch on each rank, at every count."),
    launcher: str = typer.Option("", "--launcher", help='For example "mpirun -hostfile hosts".'),
    repeats: int = typer.Option(2, "--repeats", min=1, help="Times to go through all rank counts."),
    rounds: int = ROUNDS,
    budget_s: float = typer.Option(20.0, "--budget", min=0.0, help="Seconds for each model of each job."),
    json_file: Path | None = JSON,
    plot_file: Path | None = PLOT,
    quick: bool = QUICK,
    time_limit_s: float = typer.Option(1200.0, "--time-limit", min=1.0, help="Seconds for each job."),
) -> None:
    """Time training steps over rank counts. Run it without mpirun: it starts one for each count."""
    from mpisgd.bench import tables
    from mpisgd.bench.scaling import launch, mpirun, scaling_rows
    from mpisgd.bench.training import MODELS

    if launcher_rank() is not None:
        raise mpisgd.JobError("bench scaling starts mpirun itself; run it without")
    _check_files(json_file, plot_file)
    counts = sorted({1, *_counts(ranks)})
    chosen = ",".join(_choice("--models", models, tuple(MODELS)))
    arguments = [
        "step",
        "--models",
        chosen,
        "--batch",
        str(batch),
        "--peers",
        "none",
        "--rounds",
        str(rounds),
    ]
    arguments += [
        "--threads",
        str(threads),
        "--budget",
        str(budget_s),
        "--time-limit",
        str(time_limit_s),
        *(["--quick"] * quick),
    ]
    records = []
    for _ in range(1 if quick else repeats):
        for count in counts:
            records.append(launch(mpirun(launcher), count, arguments, time_limit_s))
            _say(f"{_ranks(count)} measured")
    record = {
        **records[-1],
        "kind": "scaling",
        "command": _command(),
        "title": _title("scaling", records[-1]),
        "rows": scaling_rows(records),
        "jobs": records,
    }
    tables.show([tables.scaling_table(record["rows"])], [])
    _write_files(record, json_file, plot_file)


# -- what was asked for --------------------------------------------------------------------------------


def _choice(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Return the names of a list, each known; `all` is all of them."""
    if text == "all":
        return list(known)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise mpisgd.JobError(f"{option}: {name!r} is none of {', '.join(known)}")
    return list(dict.fromkeys(names))


def _counts(text: str) -> list[int]:
    if not all(part.strip().isdigit() and int(part) > 0 for part in text.split(",")):
        raise mpisgd.JobError(f"--ranks: {text!r}; expected for example 1,2,4")
    return [int(part) for part in text.split(",")]


def _peers(text: str) -> list[str]:
    from mpisgd.bench.peers import FRAMEWORKS

    return [] if text in ("", "none") else _choice("--peers", text, FRAMEWORKS)


def _check_files(json_file: Path | None, plot_file: Path | None) -> None:
    """Raise now rather than after minutes of measuring."""
    from mpisgd.bench.plots import need_matplotlib

    for path in (json_file, plot_file):
        if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            raise mpisgd.JobError(f"cannot write {path}: {path.parent} is no folder that can be written to")
    if plot_file is not None:
        need_matplotlib()


# -- the job -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _job(limit_s: float, threads: int = 0) -> Iterator[None]:
    """Begin the job, and see that it ends: a peer, or MPI itself, might wait for ever."""
    mpisgd.init(num_threads=threads or None)
    timer = threading.Timer(limit_s, _give_up, [limit_s])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(limit_s: float) -> None:
    if launcher_rank() in (None, 0):
        _say(f"bench: no end within {limit_s:.0f} s (--time-limit); the job ends")
    os._exit(124)


def _header(kind: str, others: "Peers") -> dict[str, Any]:
    """Return what one must know to repeat a measurement. Collective."""
    from mpisgd.cli.facts import mpi_facts, rank_facts, settings

    mine = dataclasses.asdict(rank_facts(settings(), mpi_facts()))
    mine["mpi"]["libmpi"] = Path(mine["mpi"]["libmpi"]).name  # where it lies concerns nobody else
    facts: list[Any] = [None] * mpisgd.size()
    mpisgd.all_gather_object(facts, mine)
    header = {
        "kind": kind,
        "command": _command(),
        "when": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "size": mpisgd.size(),
        "hosts": mpisgd.num_nodes(),
        "machine": {"architecture": platform.machine(), "processor": _processor(), "cores": os.cpu_count()},
        "peers": others.versions,
        "peers_left_out": others.left_out,  # grows while measuring
        "ranks": facts,
    }
    return {**header, "title": _title(kind, header)}


def _command() -> str:
    """Return the command line, as one would type it under mpirun."""
    return " ".join(["python -m mpisgd", *sys.argv[1:]])


def _title(kind: str, header: dict[str, Any]) -> str:
    """Return one line for tables and plots."""
    first = header["ranks"][0]
    return (
        f"{kind}: {_ranks(header['size'])} on {header['hosts']} host(s), {header['machine']['cores']} cores "
        f"({header['machine']['processor']}), {first['num_threads']} torch thread(s) each, "
        f"torch {first['versions']['torch']}, {first['mpi']['library'].split(',')[0]}"
    )


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def _processor() -> str:
    """Return the processor's name as Linux knows it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


# -- what came out -------------------------------------------------------------------------------------


def _tell(what: str, rows: list[dict[str, Any]]) -> None:
    from mpisgd.bench.tables import one_line

    if mpisgd.rank() == 0:
        _say(one_line(what, rows))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _notes(record: dict[str, Any]) -> list[str]:
    """Return the lines below the tables."""
    from mpisgd.bench.summary import as_bytes

    absent = [f"left out: {name}: {why}" for name, why in record["peers_left_out"].items()]
    where: dict[str, list[str]] = {}
    for entry in record["left_out"]:
        what = entry.get("model") or f"{entry['collective']} {entry['dtype']} {as_bytes(entry['bytes'])}"
        where.setdefault(f"{entry['variant']}: {entry['reason']}", []).append(what)
    absent += [f"left out: {why} ({', '.join(what)})" for why, what in where.items()]
    return [record["title"], *absent]


def _write(record: dict[str, Any], json_file: Path | None, plot_file: Path | None) -> None:
    if mpisgd.rank() == 0:
        _write_files(record, json_file, plot_file)


def _write_files(record: dict[str, Any], json_file: Path | None, plot_file: Path | None) -> None:
    from mpisgd.bench import plots

    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=1) + "\n")
    if plot_file is not None:
        draw = {
            "collectives": plots.plot_collectives,
            "step": plots.plot_steps,
            "scaling": plots.plot_scaling,
        }
        draw[record["kind"]](plot_file, record)
