"""Jobs under mpirun that may hang or be ended by a signal: each has a limit, and its end is a finding.

A check, tests/gpu, or `bench collectives` and `bench step` beside torch's NCCL in the same run.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import run_tests
from progress import stop
from suite_stages import Stage

from gpu_checks.catalog import NCCL, Check, Setting
from gpu_checks.gpu import FAILS, HOLDS, Finding, joined
from gpu_checks.trainings import MAX_RATIO
from mpisgd.tools.bench.jobs import ERROR, job_environment, mpirun
from mpisgd.tools.bench.report.rows import OURS, as_bytes, as_time

SCRIPTS = Path(__file__).resolve().parent.parent
RANK: tuple[str, ...] = ("-m", "gpu_checks.rank")  # the program of each rank
LOG = "log.txt"
NOTE_LINES = 15  # of a log, in the report
# What Open MPI says of any job that fails.
NOISE = ("----", "Primary job", "MPI_ABORT", "with errorcode", "You may or may not", "exactly when Open MPI")
# Of a signal: its backtraces, which push everything else out, and sentences with the name of the host.
BACKTRACE = re.compile(
    r"\[[\w.-]+:\d+\] |(prterun|mpirun|mpiexec) noticed|signal \d+ \(|(Current thread|Thread) 0x"
    r'|Extension modules:|  File "[^"]*", line \d+ in '
)


def environment(size: int, transport: str | None = None) -> dict[str, str]:
    """The environment of a job: this Python's programs first, mpisgd of this clone, nothing of a network."""
    paths = [
        str(SCRIPTS.parent),
        str(SCRIPTS),
        str(SCRIPTS / "testing"),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
    return {
        **job_environment(size),
        "OMPI_MCA_mpi_yield_when_idle": "1",  # simulated GPUs need the cores on which ranks wait
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(paths),
        **({} if transport is None else {"MPISGD_GPU": transport}),
    }


def launch(command: Sequence[str], env: Mapping[str, str], log: Path, limit_s: float) -> str:
    """Run a command, with all that it says in a file; what went wrong with it, "" if nothing."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=dict(env),
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            stop(process)
            return f"no end within {limit_s:.0f} s"
        except BaseException:
            stop(process)
            raise
    return "" if code == 0 else _named(code)


def _named(code: int) -> str:
    """An exit code, with the signal that it stands for."""
    number = -code if code < 0 else code - 128
    try:
        return f"ended by {signal.Signals(number).name}" if number > 0 else f"exit code {code}"
    except ValueError:
        return f"exit code {code}"


def _run(
    command: Sequence[str], setting: Setting, folder: Path, limit_s: float, **further: str
) -> tuple[str, float]:
    """Run the ranks of a job, with their log in a folder; what went wrong, and the seconds it took.

    Args:
        command: the options of the launcher, and the program.
        setting: how many ranks, by what transport.
        folder: new, of this job.
        limit_s: of the job.
        further: for its environment.
    """
    env, begun = {**environment(setting.size, setting.transport), **further}, time.monotonic()
    problem = launch([*mpirun(), *command], env, folder / LOG, limit_s)
    return problem, time.monotonic() - begun


def run_check(
    check: Check, setting: Setting, folder: Path, limit_s: float, options: Sequence[str]
) -> tuple[Finding, float]:
    """Run a check in a job of its own; what it found, and the seconds it took."""
    folder.mkdir(parents=True)
    survive = ["--with-ft", "ulfm"] if check.ends_a_rank and "openmpi" in _library() else []
    command = [*survive, "-n", str(setting.size), sys.executable, *RANK, check.name, str(folder), *options]
    problem, took_s = _run(command, setting, folder, limit_s)
    log = folder / LOG
    missing_ok = int(check.ends_a_rank)
    reports = sorted(folder.glob("rank-*.json"))
    findings = [Finding(**json.loads(path.read_text())) for path in reports]
    if len(findings) < max(1, setting.size - missing_ok):
        failed = [each for each in findings if each.verdict == FAILS]
        seen = failed[0].seen if failed else problem or "exit code 0"
        text = f"{seen}; {setting.size - len(findings)} of {setting.size} ranks left no finding"
        return Finding(FAILS, "every process comes to its end", f"{text}{_last_words(log)}"), took_s
    found = joined(findings)
    if problem and found.verdict == HOLDS and not check.ends_a_rank:
        return Finding(FAILS, found.expected, f"{found.seen}; then {problem}{_last_words(log)}"), took_s
    return found, took_s


def _library() -> str:
    """The words of the launcher that tell Open MPI from others."""
    done = subprocess.run([*mpirun(), "--version"], capture_output=True, text=True, check=False)
    return done.stdout.lower().replace(" ", "")


def tail(log: Path) -> list[str]:
    """The last lines of a log that say something."""
    if not log.exists():
        return []
    lines = [line.rstrip() for line in log.read_text(errors="replace").splitlines()]
    kept = [
        line for line in lines if line and not line.lstrip().startswith(NOISE) and not BACKTRACE.match(line)
    ]
    return kept[-NOTE_LINES:]


def _last_words(log: Path) -> str:
    lines = tail(log)
    said = next(filter(ERROR.match, lines), lines[-1] if lines else "")
    return f": {said.strip()}" if said else ""


SUITE_LIMIT_S = 300.0
NAMED = 5  # failed tests, in the report


def run_suite(setting: Setting, folder: Path, limit_s: float) -> tuple[Finding, float]:
    """Run the tests; what they have found, and the seconds it took."""
    folder.mkdir(parents=True)
    # Nothing is captured: what ends a job in the middle of a test says why.
    options = ("-m", "not long", "-s")
    stage = Stage(f"gpu {setting}", (str(SCRIPTS.parent / "tests" / "gpu"),), setting.size, options=options)
    words = run_tests.command(stage)
    # pytest cuts its summary at COLUMNS, and with it what each failed test says.
    further = {"MPISGD_TEST_OUTPUT": str(folder), "COLUMNS": "250"}
    of_clone = ["--rootdir", str(SCRIPTS.parent), "-c", str(SCRIPTS.parent / "pyproject.toml")]
    problem, took_s = _run([*words[1:], *of_clone], setting, folder, limit_s, **further)
    if (said := folder / "rank-0.log").exists():  # the ranks have the same outcomes
        with (folder / LOG).open("a") as log:
            log.write(said.read_text(errors="replace"))
    reports = sorted(folder.glob("rank-*.xml"))
    found = run_tests.worst(map(run_tests.outcomes, reports))
    failed = [name.rpartition(".")[2] for name, outcome in found.items() if outcome == "failed"]
    expected = "all tests pass"
    if len(reports) < setting.size:
        missing = f"{setting.size - len(reports)} of {setting.size} ranks left no report"
        return Finding(FAILS, expected, f"{problem or 'exit code 0'}; {missing}"), took_s
    seen = " ".join(run_tests.count(found).split())
    if failed:
        seen += f": {', '.join(failed[:NAMED])}" + f" and {len(failed) - NAMED} more" * (len(failed) > NAMED)
    elif problem:
        seen += f"; then {problem}"
    return Finding.of(not failed and not problem, expected, seen), took_s


BENCH_LIMIT_S = 240.0
COLLECTIVES = "all_reduce,reduce_scatter,all_gather,broadcast,all_to_all"
Row = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """A command of `python -m mpisgd bench`.

    Attributes:
        what: it measures.
        options: of the command.
        judge: what its rows say; given whether the ratio to the step without mpisgd counts.
    """

    what: str
    options: Sequence[str]
    judge: Callable[[Sequence[Row], bool], Finding]


def _of_steps(rows: Sequence[Row], counts: bool) -> Finding:
    """How a step compares with that without communication, and with DDP on NCCL."""
    figures, told = {}, []
    for row in (row for row in rows if row["variant"] == OURS):
        model, ratio = row["model"], row["ratio_to_no_communication"]
        figures[f"{model}: ratio to none"] = ratio
        told.append(f"{model}: {ratio:.3f} times the step without communication")
        beside = [r["median_s"] for r in rows if r["model"] == model and r["variant"].startswith("DDP nccl")]
        if beside:
            figures[f"{model}: ratio to DDP on NCCL"] = row["median_s"] / min(beside)
            told.append(f"{row['median_s'] / min(beside):.3f} times DDP on NCCL")
    ratios = [ratio for name, ratio in figures.items() if name.endswith("to none")]
    expected = f"at most {MAX_RATIO:g} times the step without communication" if counts else "figures only"
    holds = bool(ratios) and (not counts or max(ratios) <= MAX_RATIO)
    return Finding(Finding.of(holds, "", "").verdict, expected, "; ".join(told), figures)


def _of_collectives(rows: Sequence[Row], counts: bool) -> Finding:
    """How the longest calls compare with torch's."""
    longest = max(row["bytes"] for row in rows)
    told = []
    for name in dict.fromkeys(row["collective"] for row in rows):
        medians = {
            r["variant"]: r["median_s"] for r in rows if (r["collective"], r["bytes"]) == (name, longest)
        }
        told += [f"{name}: " + ", ".join(f"{variant} {as_time(s)}" for variant, s in medians.items())] * bool(
            medians
        )
    return Finding.of(True, "figures only", f"{as_bytes(longest)}: {'; '.join(told)}")


BENCHES = {
    "bench-collectives": Bench(
        "collectives beside torch's on NCCL",
        ("collectives", "--only", COLLECTIVES, "--sizes", "4KiB,256KiB,16MiB,256MiB", "--budget", "1"),
        _of_collectives,
    ),
    "bench-step": Bench(
        "training steps beside DDP on NCCL",
        ("step", "--models", "mlp,transformer", "--budget", "20"),
        _of_steps,
    ),
}


def run_bench(
    bench: Bench, setting: Setting, folder: Path, limit_s: float, *, simulated: bool, quick: bool
) -> tuple[Finding, float, dict[str, Any] | None]:
    """Run a bench; what it says, the seconds it took, and its record."""
    folder.mkdir(parents=True)
    module = "gpu_checks.simulated_command" if simulated else "mpisgd"
    command = ["-n", str(setting.size), sys.executable, "-m", module, "bench", *bench.options]
    command += ["--device", "gpu", "--json", str(folder / "record.json"), "--peers", "nccl"]
    command += ["--quick"] * (simulated or quick)
    problem, took_s = _run(command, setting, folder, limit_s)
    file = folder / "record.json"
    if problem or not file.exists():
        last = tail(folder / LOG)[-1:]
        text = "; ".join([problem or "no record", *last])
        return Finding(FAILS, "a record", text), took_s, None
    record = json.loads(file.read_text())
    record.pop("ranks")  # with names of hosts
    record.pop("command")
    counts = setting == Setting(1, NCCL) and not simulated and not quick
    return bench.judge(record["rows"], counts), took_s, record
