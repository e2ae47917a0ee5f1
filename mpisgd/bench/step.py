"""`bench step`: training steps with and without communication."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import mpisgd
import mpisgd.horovod as hvd
from mpisgd.bench.cases import BATCHES
from mpisgd.bench.measure import Pace, Variant, measure
from mpisgd.bench.peers.remote import Peers
from mpisgd.bench.report.rows import OURS, SHARED, step_rows
from mpisgd.bench.torch_parallel import group_on_mpisgd, torch_step
from mpisgd.bench.training import MIB, StepTask, Training, build
from mpisgd.job.lifecycle import world

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["StepPlan", "ours", "remote", "run_steps", "wrapped"]

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
    """Measure the models of `plan`; return rows, the models, and what was left out. Collective.

    Args:
        plan: the same on every rank.
        peers: other frameworks.
        report: called with each model and its rows.
    """
    communicator = world().queue.communicator.duplicate()
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
            models[model] = _describe(task)
            left_out += found.left_out_of(model=model)
    communicator.free()
    return {"rows": rows, "models": models, "left_out": left_out}


def _describe(task: StepTask) -> dict[str, Any]:
    params = list(build(task).parameters())
    return {
        "parameters": sum(param.numel() for param in params),
        "tensors": len(params),
        "batch_per_rank": task.batch,
    }


def _in_ranks(task: StepTask, communicator: "Communicator") -> list[Variant]:
    """Return the variants that run in the ranks themselves."""
    return [
        *(
            _alone(name, replace(task, set_to_none=to_none, communicates=False))
            for name, to_none in BASELINES.items()
        ),
        ours(task),
        ours(task, SHARED, share_parameters=True),
        _as_horovod(task),
        _by_hand(task, communicator),
    ]


def _alone(name: str, task: StepTask) -> Variant:
    return Training(task, mpisgd.rank()).timed(name, start=mpisgd.barrier)


def ours(task: StepTask, name: str = OURS, *, share_parameters: bool = False) -> Variant:
    """Return the step with mpisgd's optimizer."""
    training = wrapped(task, share_parameters=share_parameters)
    return training.timed(name, start=mpisgd.barrier, ours=True)


def wrapped(task: StepTask, *, share_parameters: bool = False) -> Training:
    """Return a training with mpisgd's optimizer."""
    training = Training(task, mpisgd.rank())
    training.optimizer = mpisgd.DistributedOptimizer(
        training.optimizer,
        named_parameters=training.model.named_parameters(),
        share_parameters=share_parameters,
    )
    return training


def _as_horovod(task: StepTask) -> Variant:
    """Return the step of a program written for Horovod, on mpisgd."""
    hvd.init()
    training = Training(task, hvd.rank())
    training.optimizer = hvd.DistributedOptimizer(
        training.optimizer, named_parameters=training.model.named_parameters()
    )
    return training.timed("mpisgd.horovod", start=mpisgd.barrier, ours=True)


def _by_hand(task: StepTask, communicator: "Communicator") -> Variant:
    """Return what people write who have mpi4py only: one call for each tensor."""
    from mpisgd.transport.mpi import MPI

    training = Training(task, mpisgd.rank())
    params, size = list(training.model.parameters()), mpisgd.size()

    def average() -> None:
        for param in params:
            assert param.grad is not None
            communicator.comm.Allreduce(MPI.IN_PLACE, param.grad)
            param.grad.div_(size)

    return training.timed("MPI, a call per tensor", start=mpisgd.barrier, average=average)


def _in_torch(task: StepTask, bucket_bytes: Sequence[int]) -> list[Variant]:
    """Return torch's own ways over mpisgd."""
    return [
        *(
            torch_step(_ddp("mpisgd", nbytes), replace(task, bucket_bytes=nbytes), ours=True)
            for nbytes in bucket_bytes
        ),
        torch_step("FSDP2 mpisgd", replace(task, sharded=True), ours=True),
    ]


def _ddp(backend: str, nbytes: int) -> str:
    return f"DDP {backend}, {nbytes / MIB:g} MiB buckets"


def remote(task: StepTask, bucket_bytes: Sequence[int], peers: Peers) -> list[Variant]:
    """Return the trainings that run beside the ranks."""
    ddp = {_ddp("gloo", nbytes): replace(task, bucket_bytes=nbytes) for nbytes in bucket_bytes}
    return [*peers.variants("gloo", ddp), *peers.variants("horovod", {"Horovod": task})]
