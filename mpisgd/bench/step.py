"""`bench step`: training steps with and without communication."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

import mpisgd
import mpisgd.horovod as hvd
from mpisgd.bench.cases import BATCHES
from mpisgd.bench.measure import Pace, Timed, Variant, measure
from mpisgd.bench.peers.remote import Peers
from mpisgd.bench.report.rows import OURS, SHARED, step_rows
from mpisgd.bench.torch_parallel import group_on_mpisgd, torch_step
from mpisgd.bench.training import MIB, StepTask, Training, build
from mpisgd.job.lifecycle import world

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["StepPlan", "ours", "remote", "run_steps"]

# Both, since it depends on the model which is faster; the faster one is the reference.
BASELINES = {"none, gradients dropped": True, "none, gradients zeroed": False}
# The same in the processes of another framework: shows whether these compute as fast as the ranks do.
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
    """

    models: Sequence[str]
    batch: int | None
    bucket_bytes: Sequence[int]
    small: bool
    pace: Pace

    def task(self, model: str) -> StepTask:
        """Return what to train on the ranks of this job."""
        return StepTask(model, self.batch or BATCHES[model], mpisgd.size(), self.small)


def run_steps(plan: StepPlan, peers: Peers, report: Callable[[str, Any], None]) -> dict[str, Any]:
    """Measure the models of `plan`; return rows, the models, and what was left out. Collective."""
    communicator = world().queue.communicator.duplicate()
    hvd.init()
    rows: list[dict[str, Any]] = []
    models: dict[str, Any] = {}
    left_out: list[dict[str, str]] = []
    with group_on_mpisgd(wanted="gloo" in {*peers.running, *peers.left_out}) as reason:
        for model in plan.models:
            task = plan.task(model)
            variants = [
                *_in_ranks(task, communicator),
                *([] if reason else _in_torch(task, plan.bucket_bytes)),
                *peers.variants("gloo", {CONTROL: replace(task, communicates=False)}),
                *remote(task, plan.bucket_bytes, peers),
                *peers.variants("gloo", {"FSDP2 gloo": replace(task, sharded=True)}),
            ]
            found = measure(variants, plan.pace)
            peers.drop_broken()
            new = step_rows(model, found.seconds, list(BASELINES), [CONTROL], task.batch * task.size)
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
    return {"rows": rows, "models": models, "left_out": left_out}


def _in_ranks(task: StepTask, communicator: "Communicator") -> list[Variant]:
    """Return the variants that run in the ranks themselves."""
    alone = [
        Training(replace(task, set_to_none=to_none, communicates=False), mpisgd.rank())
        for to_none in BASELINES.values()
    ]
    by_hand = ByHand(task, communicator)
    return [
        *(Timed(name, training.step, training) for name, training in zip(BASELINES, alone, strict=True)),
        ours(task),
        ours(task, SHARED, share_parameters=True),
        ours(task, "mpisgd.horovod", hvd.DistributedOptimizer),
        Timed("MPI, a call per tensor", by_hand.step, by_hand),
    ]


def ours(
    task: StepTask,
    name: str = OURS,
    wrapper: Callable[..., torch.optim.Optimizer] = mpisgd.DistributedOptimizer,
    **options: Any,
) -> Variant:
    """Return the step with mpisgd's optimizer, or another of its wrappers."""
    training = Training(task, mpisgd.rank())
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
    ddp = [
        torch_step(_ddp("mpisgd", nbytes), replace(task, bucket_bytes=nbytes), ours=True)
        for nbytes in bucket_bytes
    ]
    return [*ddp, torch_step("FSDP2 mpisgd", replace(task, sharded=True), ours=True)]


def _ddp(backend: str, nbytes: int) -> str:
    return f"DDP {backend}, {nbytes / MIB:g} MiB buckets"


def remote(task: StepTask, bucket_bytes: Sequence[int], peers: Peers) -> list[Variant]:
    """Return the trainings that run beside the ranks."""
    ddp = {_ddp("gloo", nbytes): replace(task, bucket_bytes=nbytes) for nbytes in bucket_bytes}
    return [*peers.variants("gloo", ddp), *peers.variants("horovod", {"Horovod": task})]
