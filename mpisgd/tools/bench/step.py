"""`bench step`: training steps with and without communication, and what one process does in the time.

Each contender has the number of torch threads that is best for it, of those that its cores allow: a rank has
its share of the host's cores, one process has them all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

import mpisgd
import mpisgd.horovod as hvd
from mpisgd.cores import available_cores
from mpisgd.job.lifecycle import world
from mpisgd.tools.bench.cases import BATCHES, halvings
from mpisgd.tools.bench.collectives import device_notes
from mpisgd.tools.bench.measure import Pace, Timed, Variant, measure
from mpisgd.tools.bench.peers.framework import BESIDE
from mpisgd.tools.bench.peers.remote import Peers
from mpisgd.tools.bench.report.rows import (
    NONE,
    NONE_NOT_KEPT,
    ONE_PROCESS,
    OURS,
    SHARDED,
    SHARED,
    as_number,
    step_rows,
)
from mpisgd.tools.bench.torch_parallel import group_on_mpisgd, torch_step
from mpisgd.tools.bench.training import MIB, StepTask, Training, build

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["StepPlan", "ours", "remote", "run_steps"]

TO_NONE = (True, False)  # of NONE and NONE_NOT_KEPT
# Shows whether the processes of another framework compute as fast as those of NONE_NOT_KEPT do.
CONTROL = "none, in DDP's processes"


@dataclass(frozen=True)
class StepPlan:
    """What to measure.

    Attributes:
        models: some of MODELS.
        batch: examples of one rank; None: each model's own.
        bucket_bytes: bucket sizes to try with DDP.
        small: miniatures of the models.
        pace: for each model.
        threads: of torch on each rank; None: the fastest up to the number that the rank has.
        optimizer: one of OPTIMIZERS.
        device: what torch calls the kind of device that is trained on.
    """

    models: Sequence[str]
    batch: int | None
    bucket_bytes: Sequence[int]
    small: bool
    pace: Pace
    threads: int | None = None
    optimizer: str = "sgd"
    device: str = "cpu"

    @property
    def backend(self) -> str:
        """The backend of torch to compare with."""
        return "gloo" if self.device == "cpu" else "nccl"

    def task(self, model: str) -> StepTask:
        """Return the task of the ranks of this job."""
        batch = self.batch or BATCHES[model]
        kind, where = self.optimizer, self.device
        return StepTask(model, batch, mpisgd.size(), self.small, optimizer=kind, device=where)


def run_steps(plan: StepPlan, peers: Peers, report: Callable[[str, Any], None]) -> dict[str, Any]:
    """Measure the models of `plan`; return rows, the models, and what was left out. Collective."""
    from mpisgd.transport.mpi import as_mpi

    communicator = as_mpi(world().queue.communicator).duplicate()
    hvd.init()
    threads = [plan.threads] if plan.threads else halvings(torch.get_num_threads())
    if plan.device != "cpu":  # they wait for the GPU
        threads = threads[:1]
    rows: list[dict[str, Any]] = []
    models: dict[str, Any] = {}
    left_out: list[dict[str, str]] = []
    with group_on_mpisgd(wanted=plan.backend in {*peers.running, *peers.left_out}) as reason:
        for model in plan.models:
            task = plan.task(model)
            alone = _without_communication(task, peers)
            together = [
                *_with_communication(task, communicator),
                *([] if reason else _in_torch(task, plan.bucket_bytes)),
                *_in_frameworks(task, plan.bucket_bytes, peers, plan.backend),
            ]
            for variant in (*alone, *together):
                variant.threads = threads
            found = measure([*alone, *_in_one_process(task, peers), *together], plan.pace)
            torch.set_num_threads(max(threads))
            peers.drop_broken()
            new = step_rows(model, found.seconds, found.threads, [CONTROL], task.batch * task.size)
            report(model, new)
            rows += new
            params = list(build(task).parameters())
            models[model] = {
                "parameters": sum(param.numel() for param in params),
                "tensors": len(params),
                "batch_per_rank": task.batch,
            }
            left_out += found.left_out_of(model=model)
    communicator.free()
    notes = [*device_notes(plan.device), *_unused_cores(max(threads))]
    return {"rows": rows, "models": models, "left_out": left_out, "device": plan.device, "notes": notes}


def _unused_cores(num_threads: int) -> list[str]:
    """Return a note where ranks have fewer threads than cores, each of them at most `num_threads`."""
    share = available_cores() // mpisgd.local_size()
    if num_threads >= share:
        return []
    return [
        f"a rank has at most {as_number(num_threads, 'thread')}, though its share are {share} cores: mind "
        "--threads, OMP_NUM_THREADS, and mpirun --bind-to none"
    ]


def _without_communication(task: StepTask, peers: Peers) -> list[Variant]:
    """Return the steps of each rank by itself: in the ranks, and in processes that are as without mpisgd."""
    alone = [replace(task, set_to_none=to_none, communicates=False) for to_none in TO_NONE]
    trainings = [Training(task, mpisgd.rank()) for task in alone]
    return [
        *(Timed(name, training.step, training) for name, training in zip(NONE, trainings, strict=True)),
        *peers.variants(BESIDE, dict(zip(NONE_NOT_KEPT, alone, strict=True))),
    ]


def _in_one_process(task: StepTask, peers: Peers) -> list[Variant]:
    """Return the steps of one process, which a user would run instead of ranks on one host."""
    joined = replace(task, communicates=False, joined=True)
    variants = [variant for name in ONE_PROCESS for variant in peers.variants(name, {name: joined})]
    for variant in variants:
        variant.threads = halvings(available_cores()) if task.device == "cpu" else ()
    return variants


def _with_communication(task: StepTask, communicator: "Communicator") -> list[Variant]:
    variants = [
        ours(task),
        *(ours(task, name, strategy=mpisgd.Sharded(stage)) for stage, name in SHARDED.items()),
        ours(task, "mpisgd.horovod", hvd.DistributedOptimizer),
    ]
    if task.device == "cpu":  # both want host memory
        by_hand = ByHand(task, communicator)
        shared = ours(task, SHARED, share_parameters=True)
        variants = [
            variants[0],
            shared,
            *variants[1:],
            Timed("MPI, a call per tensor", by_hand.step, by_hand),
        ]
    return variants


def ours(
    task: StepTask,
    name: str = OURS,
    wrapper: Callable[..., torch.optim.Optimizer] = mpisgd.DistributedOptimizer,
    **options: Any,
) -> Variant:
    """Return the step with mpisgd's optimizer, or another of its wrappers.

    Each has a group of its own: several optimizers in one group have more to tell each other.
    """
    training = Training(task, mpisgd.rank())
    if wrapper is mpisgd.DistributedOptimizer:
        options["group"] = mpisgd.new_group()
    training.distribute(wrapper, **options)
    return Timed(name, training.step, training, ours=True)


class ByHand(Training):
    """What people write who have mpi4py only: one call for each tensor."""

    def __init__(self, task: StepTask, communicator: "Communicator") -> None:
        super().__init__(task, mpisgd.rank())
        self._comm, self._params = communicator.comm, list(self.model.parameters())

    def backward(self) -> None:
        """Average the gradients too."""
        from mpisgd.transport.mpi import MPI

        super().backward()
        for param in self._params:
            assert param.grad is not None
            self._comm.Allreduce(MPI.IN_PLACE, param.grad)
            param.grad.div_(self.task.size)


def _in_torch(task: StepTask, bucket_bytes: Sequence[int]) -> list[Variant]:
    """Return torch's own ways over mpisgd."""
    ddp: list[Variant] = [
        torch_step(_ddp("mpisgd", nbytes), replace(task, bucket_bytes=nbytes), ours=True)
        for nbytes in bucket_bytes
    ]
    if task.device != "cpu":  # FSDP2 on a GPU is measured nowhere yet
        return ddp
    return [*ddp, torch_step("FSDP2 mpisgd", replace(task, sharded=True), ours=True)]


def _ddp(backend: str, nbytes: int) -> str:
    return f"DDP {backend}, {nbytes / MIB:g} MiB buckets"


def _in_frameworks(task: StepTask, bucket_bytes: Sequence[int], peers: Peers, backend: str) -> list[Variant]:
    """Return the steps that run in the processes of other frameworks."""
    sharded = peers.variants("gloo", {"FSDP2 gloo": replace(task, sharded=True)}) if backend == "gloo" else []
    return [
        *peers.variants(backend, {CONTROL: replace(task, communicates=False)}),
        *remote(task, bucket_bytes, peers, backend),
        *sharded,
    ]


def remote(task: StepTask, bucket_bytes: Sequence[int], peers: Peers, backend: str = "gloo") -> list[Variant]:
    """Return the trainings that run beside the ranks, those of torch on a backend."""
    ddp = {_ddp(backend, nbytes): replace(task, bucket_bytes=nbytes) for nbytes in bucket_bytes}
    return [*peers.variants(backend, ddp), *peers.variants("horovod", {"Horovod": task})]
