"""Options that several commands have, and how a list in one is read."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import mpisgd
from mpisgd.arguments import shown
from mpisgd.config import is_launched
from mpisgd.tools.bench import cases

if TYPE_CHECKING:
    from mpisgd.tools.bench.measure import Pace

__all__ = [
    "ALL_PEERS",
    "MODELS",
    "Batch",
    "BestThreads",
    "Budget",
    "DdpBuckets",
    "Device",
    "Frameworks",
    "Json",
    "Launcher",
    "Models",
    "Plot",
    "Quick",
    "Rounds",
    "Threads",
    "TimeLimit",
    "choice_of",
    "counts_of",
    "device_of",
    "pace_of_steps",
    "peers_of",
    "refuse_under_mpirun",
]

# An option is called like its parameter unless it has a name here.
Json = Annotated[
    Path | None,
    typer.Option(
        "--json", readable=False, help="Write all results into this JSON file, with machine and versions."
    ),
]
Plot = Annotated[
    Path | None, typer.Option("--plot", readable=False, help="Draw the results into this PNG file.")
]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="A run of a few seconds, to see that it works; its numbers mean little."),
]
Frameworks = Annotated[
    str,
    typer.Option(
        help="Other libraries to measure beside: gloo,horovod,nccl; those not installed are left out. auto: "
        "Horovod and gloo, on a GPU Horovod and NCCL."
    ),
]
Device = Annotated[str, typer.Option(help="Device of the tensors: cpu or gpu.")]
Rounds = Annotated[int, typer.Option(min=1, help="Number of measured rounds; --budget may end them earlier.")]
Budget = Annotated[float, typer.Option("--budget", min=0.0, help="Seconds for each measured case.")]
TimeLimit = Annotated[
    float, typer.Option("--time-limit", min=1.0, help="Seconds after which a job is ended.")
]
Models = Annotated[str, typer.Option(help="mlp, deep, transformer, separated by commas.")]
Batch = Annotated[int, typer.Option(min=0, help="Examples of one rank; 0: each model's own.")]
Threads = Annotated[int, typer.Option(min=0, help="torch threads of each rank; 0: mpisgd's default.")]
BestThreads = Annotated[
    int, typer.Option(min=0, help="torch threads of each rank; 0: the fastest, found by a short trial.")
]
DdpBuckets = Annotated[str, typer.Option("--ddp-buckets", help="Bucket sizes to try with DDP.")]
Launcher = Annotated[
    str, typer.Option(help='Command that starts the ranks, such as "mpirun -hostfile hosts".')
]
ALL_PEERS = "auto"
MODELS = tuple(cases.BATCHES)


def choice_of(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Return the names of a list, each known; `all` is all of them."""
    if text == "all":
        return list(known)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise mpisgd.JobError(f"{option}: {name!r} is none of {', '.join(known)}")
    return list(dict.fromkeys(names))


def counts_of(option: str, text: str) -> list[int]:
    """Return the positive numbers of a list such as `1,2,4`."""
    if not all(re.fullmatch(r"\s*0*[1-9][0-9]{0,17}\s*", part) for part in text.split(",")):
        raise mpisgd.JobError(f"{option}: {shown(text)}; expected for example 1,2,4")
    return [int(part) for part in text.split(",")]


def device_of(text: str) -> str:
    """Return torch's name of the device of `--device`."""
    from mpisgd.accelerator.runtime import runtime

    (name,) = choice_of("--device", text, ("cpu", "gpu"))
    if name == "gpu" and not runtime().module.is_available():
        raise mpisgd.JobError("--device gpu: torch sees no GPU")
    return "cpu" if name == "cpu" else runtime().kind


def peers_of(text: str, device: str = "cpu") -> list[str]:
    """Return the names of `--peers`, by default those that are measured on a device."""
    from mpisgd.tools.bench.peers.framework import FRAMEWORKS

    if text == ALL_PEERS:
        return ["gloo", "horovod"] if device == "cpu" else ["nccl", "horovod"]
    return [] if text in ("", "none") else choice_of("--peers", text, tuple(FRAMEWORKS))


def pace_of_steps(rounds: int, budget_s: float, quick: bool) -> "Pace":
    """Return how often steps are timed."""
    from mpisgd.tools.bench.measure import Pace

    if quick:
        return Pace(min(rounds, 2), 1, budget_s, turn_s=0.01, max_calls=5)
    return Pace(rounds, min(rounds, 3), budget_s, turn_s=0.25, max_calls=20)


def refuse_under_mpirun(command: str) -> None:
    """Raise JobError if mpirun has started this process."""
    if is_launched():
        raise mpisgd.JobError(f"bench {command} starts mpirun itself; run it without")
