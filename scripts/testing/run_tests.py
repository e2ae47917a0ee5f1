"""Run the test suite stage by stage and count what ran: the work behind `./scripts/test`.

Under mpirun every rank is a pytest of its own, and eight reports interleaved on one terminal cannot be
read. So each rank writes a log and a JUnit file; a stage that passes is one line here, one that fails
shows the logs that say something new. A test counts as failed when it failed on any rank.
"""

import argparse
import concurrent.futures
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from preloaded_python import preloaded_python
from progress import Hung, stop, wait
from suite_stages import EXTRAS, FRESH, ROOT, Stage, can_simulate_gpus, plan, sees_gpu

OUTPUT = ROOT / "runs" / "tests"
LOG_LINES = 100  # of a log, at its end

# What tests import beside torch, and takes as long; none of it loads MPI.
PRELOADED = ("torch._dynamo", "pytest", "mpisgd.checkpoint", "mpisgd.optim.distributed")

# A stage of several processes waits for them to start and for each other; another one uses the cores
# meanwhile, and so does one of a single process. That one would get the least of a core, and be the last.
SIDE_BY_SIDE, ALONE = 2, 1
NICE = ("nice", "-n", "5")  # those of several

# What each rank runs, by the stage's Python: the launcher's variable tells the rank before MPI has started.
RANK_COMMAND = """
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}
exec "$0" -m pytest "$@" --junitxml="$MPISGD_TEST_OUTPUT/rank-$rank.xml" \
    >"$MPISGD_TEST_OUTPUT/rank-$rank.log" 2>&1
"""


# Ranks share no cache, and of what tests log nothing is read.
WITHOUT = ("-p", "no:cacheprovider", "-p", "no:logging")


def output_of(stage: Stage) -> Path:
    """Where the logs and reports of a stage's ranks go."""
    return OUTPUT / stage.name.replace(" ", "-")


def command(stage: Stage) -> list[str]:
    """The command line of a stage."""
    shell = ["sh", "-c", RANK_COMMAND, stage.python, *WITHOUT, *stage.options, *stage.paths]
    return ["mpirun", "-n", str(stage.size), *shell, "--with-mpi"] if stage.size else shell


def forked(stages: list[Stage]) -> list[Stage]:
    """The stages of the short form, whose processes are forked where they can be; see preloaded.py."""
    python = preloaded_python(PRELOADED, executable=sys.executable)
    return [
        stage if stage.name == FRESH or stage.venv != ".venv" else replace(stage, python=python)
        for stage in stages
    ]


def environment(stage: Stage) -> dict[str, str]:
    """The environment of a stage: its own MPI first, more ranks than cores allowed (Open MPI 5, 4).

    Compiled files are kept: a stage starts hundreds of processes, and each would compile all again. Ranks
    that wait leave their core to the stage beside them.
    """
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        **({"OMPI_MCA_mpi_yield_when_idle": "1"} if stage.size else {}),
        **dict(stage.settings),
        "PATH": f"{ROOT / stage.venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "MPISGD_TEST_OUTPUT": str(output_of(stage)),
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }


running: dict[str, subprocess.Popen[bytes]] = {}
interrupted = threading.Event()


def show_running() -> None:
    """Say on a terminal what runs; the line of the next stage that ends takes its place."""
    if sys.stdout.isatty():
        print(f"{', '.join(running)} ...", end="\r", flush=True)


def execute(stage: Stage) -> str | None:
    """Run a stage; what went wrong with the run as a whole, if anything did."""
    shutil.rmtree(output_of(stage), ignore_errors=True)
    output_of(stage).mkdir(parents=True)
    with (output_of(stage) / "launcher.log").open("wb") as log:
        process = subprocess.Popen(
            [*([] if stage.is_one_process else NICE), *command(stage)],
            cwd=ROOT,
            env=environment(stage),
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        running[stage.name] = process
        if interrupted.is_set():
            stop(process)
        show_running()
        try:
            status = wait(process, [output_of(stage)], stage.quiet_s)
        except Hung as hung:
            return str(hung)
        finally:
            del running[stage.name]
    return f"exit code {status}" if status else None


def outcomes(report: Path) -> dict[str, str]:
    """Test name to "passed", "failed" or "skipped", from one rank's JUnit file."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def worst(reports: Iterable[dict[str, str]]) -> dict[str, str]:
    """Join the ranks' outcomes: failed on one rank is failed, passed on one is not skipped."""
    severity = ["skipped", "passed", "failed"]
    joined: dict[str, str] = {}
    for report in reports:
        for name, outcome in report.items():
            joined[name] = max(joined.get(name, "skipped"), outcome, key=severity.index)
    return joined


def failures(report: Path) -> set[str]:
    """The tests that failed on a rank; "no report" where it left none."""
    if not report.exists():
        return {"no report"}
    return {name for name, outcome in outcomes(report).items() if outcome == "failed"}


def show_logs(stage: Stage) -> None:
    """Print the ends of the logs that say something new: rank 0's, and of ranks that failed otherwise."""
    known: set[str] = set()
    for rank in range(stage.num_reports):
        found = failures(output_of(stage) / f"rank-{rank}.xml")
        if rank == 0 or not found <= known:
            show_log(output_of(stage) / f"rank-{rank}.log")
        known |= found
    show_log(output_of(stage) / "launcher.log")


def show_log(log: Path) -> None:
    """Print the end of a log, if it has anything to say."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    if lines:
        print(f"--- {log.relative_to(OUTPUT.parent)}", *lines[-LOG_LINES:], sep="\n")


class Turns:
    """Which stage is next: as many side by side as the cores are good for."""

    def __init__(self, stages: list[Stage]) -> None:
        self._waiting, self._running = list(stages), list[Stage]()
        self._changed = threading.Condition()

    def begin(self) -> Stage | None:
        """The next stage, as soon as it may run; None after the last one."""
        with self._changed:
            while self._waiting:
                if (stage := next(filter(self._may_run, self._waiting), None)) is not None:
                    self._waiting.remove(stage)
                    self._running.append(stage)
                    return stage
                self._changed.wait()
        return None

    def end(self, stage: Stage) -> None:
        """Note that a stage has ended."""
        with self._changed:
            self._running.remove(stage)
            self._changed.notify_all()

    def _may_run(self, stage: Stage) -> bool:
        alike = sum(other.is_one_process == stage.is_one_process for other in self._running)
        others = any(other.is_one_process != stage.is_one_process for other in self._waiting + self._running)
        return alike < (ALONE if stage.is_one_process and others else SIDE_BY_SIDE)


def run_stages(stages: list[Stage]) -> list[tuple[Stage, dict[str, str]]]:
    """Run all stages, some side by side; where that is interrupted, what runs is stopped."""
    turns, found = Turns(stages), dict[str, dict[str, str]]()

    def work() -> None:
        while (stage := turns.begin()) is not None:
            try:
                found[stage.name] = run_stage(stage)
            finally:
                turns.end(stage)

    with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE + ALONE) as pool:
        try:
            for worker in [pool.submit(work) for _ in range(SIDE_BY_SIDE + ALONE)]:
                worker.result()
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # nobody need ask twice
            interrupted.set()
            for process in list(running.values()):
                stop(process)
            sys.exit("interrupted")
    return [(stage, found[stage.name]) for stage in stages]


def run_stage(stage: Stage) -> dict[str, str]:
    """Run one stage and print its line; the outcome of each of its tests."""
    if interrupted.is_set():
        return {}
    start = time.monotonic()
    problem = execute(stage)
    reports = sorted(output_of(stage).glob("rank-*.xml"))
    joined = worst(map(outcomes, reports))
    if len(reports) < stage.num_reports:
        problem = f"{problem or 'exit code 0'}, {stage.num_reports - len(reports)} rank(s) left no report"
    failed = "failed" in joined.values()
    if problem and not failed:
        joined[f"{stage.name}: {problem}"] = "failed"
    took_s = time.monotonic() - start
    print(f"{stage.name:<14}{count(joined)}  {took_s:6.1f} s" + f"  ({problem})" * bool(problem), flush=True)
    if problem and not interrupted.is_set():
        show_logs(stage)
    show_running()
    return joined


def count(found: dict[str, str]) -> str:
    """For example: 12 passed, 0 failed, 3 skipped."""
    return ", ".join(
        f"{list(found.values()).count(kind):>4} {kind}" for kind in ("passed", "failed", "skipped")
    )


def totals(results: list[tuple[Stage, dict[str, str]]]) -> tuple[int, int, int]:
    """Runs that passed, runs that failed, and tests that were skipped wherever they stood.

    A test that needs three ranks is skipped at two: that alone is no gap in what was tested.
    """
    runs = [(name, outcome) for _, found in results for name, outcome in found.items()]
    ran = {name for name, outcome in runs if outcome != "skipped"}
    num_passed = sum(outcome == "passed" for _, outcome in runs)
    num_failed = sum(outcome == "failed" for _, outcome in runs)
    return num_passed, num_failed, len({name for name, _ in runs} - ran)


def ran_under_mpi(results: list[tuple[Stage, dict[str, str]]]) -> bool:
    """Whether a test passed on more than one rank: without one, green would mean nothing."""
    return any(stage.size > 1 and "passed" in found.values() for stage, found in results)


def main() -> int:
    """Run the stages; the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/test", description="Run the test suite stage by stage.")
    parser.add_argument("--quick", action="store_true", help="one process, and two and three ranks")
    parser.add_argument(
        "--mpi",
        choices=["mpich", "impi", "none"],
        default="mpich",
        help="the second MPI library, for a shorter set in an environment of its own (default: mpich)",
    )
    parser.add_argument("--long", action="store_true", help="also what takes long and says little more")
    parser.add_argument("--big", action="store_true", help="also the tests that need many gigabytes")
    options = parser.parse_args()
    gpu = sees_gpu()
    stages = plan(quick=options.quick, mpi=options.mpi, big=options.big, long=options.long, gpu=gpu)
    if any(stage.venv != ".venv" for stage in stages):
        subprocess.run([ROOT / "scripts" / "setup", EXTRAS, options.mpi], check=True)

    if not gpu:
        how = "on simulated GPUs" if can_simulate_gpus() else "left out: no C++ compiler to simulate one"
        print(f"gpu           {how}; torch sees none on this machine")
    results = run_stages(stages if options.long else forked(stages))
    num_passed, num_failed, num_skipped = totals(results)
    if not ran_under_mpi(results):
        print("no test ran under MPI")
    print(f"{num_passed} passed, {num_failed} failed, {num_skipped} skipped")
    return 0 if num_failed == 0 and ran_under_mpi(results) else 1


if __name__ == "__main__":
    sys.exit(main())
