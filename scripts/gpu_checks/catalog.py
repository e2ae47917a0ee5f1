"""The checks: what each shows, and on how many ranks and by what transport it is run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpu_checks import endings, streams, trainings
from gpu_checks.gpu import Finding, Gpu

NCCL, MPI = "nccl", "mpi"  # as MPISGD_GPU has them; MPI is host memory, or a CUDA-aware MPI


@dataclass(frozen=True)
class Setting:
    """How many ranks a check is run on, and what carries their tensors."""

    size: int
    transport: str

    def __str__(self) -> str:
        return f"{self.size} {self.transport}"


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: for `--only`.
        what: the property that holds, where it does.
        run: called on every rank.
        limit_s: when its job is ended.
        min_size: ranks that it takes.
        by: the transports that it concerns.
        ends_a_rank: whether a rank does not come to the end, which its MPI has to survive.
    """

    name: str
    what: str
    run: Callable[[Gpu], Finding]
    limit_s: float = 90.0
    min_size: int = 1
    by: Sequence[str] = (NCCL, MPI)
    ends_a_rank: bool = False


CHECKS = {
    check.name: check
    for check in (
        Check("future", "a future is used on another stream than that of its operation", streams.by_mpisgd),
        Check("future-backend", 'the same, by the backend "mpisgd"', streams.by_backend),
        Check(
            "future-nccl", "the same, by torch's own NCCL: a control", streams.by_nccl_of_torch, by=(NCCL,)
        ),
        Check("hook", "the same, by bf16_compress", streams.by_hook),
        Check("ddp-hook", "DDP with bf16_compress in a side stream", streams.by_ddp_hook),
        Check(
            "packed-memory",
            "packed tensors of one stream, unpacked on another, are not overwritten",
            streams.of_packed_tensors,
        ),
        Check(
            "horovod-memory",
            "inputs and results of Horovod in side streams are not overwritten",
            streams.of_horovod,
            limit_s=180.0,
        ),
        Check(
            "cpu-and-gpu",
            "an embedding on the CPU below layers on a GPU, tiny buckets",
            trainings.embedding_below_gpu,
            limit_s=180.0,
        ),
        Check("wait-again", "a wait that ends early can be repeated", endings.limit_of_a_wait),
        Check(
            "group-timeout", "a busy GPU past the group's timeout ends no process", endings.limit_of_a_group
        ),
        Check(
            "reopen",
            "after an abort the group goes on; closed groups leave nothing",
            endings.abort_and_reopen,
        ),
        Check("messages", "late messages of several tags that cross", streams.crossing, min_size=2),
        Check("contexts", "a rank uses its own GPU only", streams.own_gpu_only, min_size=2, by=(NCCL,)),
        Check(
            "scaler", "Offload with GradScaler and an overflow on one rank", trainings.overflow_with_offload
        ),
        Check("graph", "an operation in a CUDA graph", trainings.operation_in_a_graph),
        Check(
            "compile",
            "a compiled model, and an operation in a compiled function",
            trainings.compiled_model,
            limit_s=180.0,
        ),
        Check("profile", "a step of a model of 1 GiB", trainings.large_model, limit_s=180.0),
        Check(
            "lost-rank",
            "survivors of a lost rank get an error, also in .item()",
            endings.survivors_get_an_error,
            min_size=2,
            by=(NCCL,),
            ends_a_rank=True,
        ),
    )
}


def settings(num_gpus: int, *, quick: bool) -> list[Setting]:
    """How to run checks: by NCCL alone and on as many GPUs as there are, through host memory on two ranks.

    Args:
        num_gpus: that can be used.
        quick: only on the largest number of ranks by NCCL, and through host memory.
    """
    sizes = list(dict.fromkeys(size for size in (1, 2, num_gpus) if size <= num_gpus))
    by_nccl = [Setting(size, NCCL) for size in sizes]
    return [*(by_nccl[-1:] if quick else by_nccl), Setting(2, MPI)]


def _obstacle(check: Check, setting: Setting) -> str | None:
    """Why a check is not run so: "" where that is no gap, None where it is run."""
    if setting.transport not in check.by:
        return ""
    if setting.size < check.min_size:
        return f"needs {check.min_size} GPUs"
    return None


def planned(checks: Sequence[Check], found: Sequence[Setting]) -> Iterator[tuple[Check, Setting, str]]:
    """Every check with its settings; the reason where it cannot be run in any of them, else ""."""
    for check in checks:
        possible = [setting for setting in found if _obstacle(check, setting) is None]
        for setting in possible:
            yield check, setting, ""
        if not possible:
            reasons = [reason for setting in found if (reason := _obstacle(check, setting))]
            yield check, Setting(check.min_size, check.by[0]), reasons[0] if reasons else "not in this form"
