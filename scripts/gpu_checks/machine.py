"""What machine this is: versions, driver, GPUs, MPI. It goes into an issue: no names of hosts or folders."""

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

import mpisgd
from mpisgd.tools.cli.collect_env import mpi_info, rank_info, settings

ROOT = Path(__file__).resolve().parents[2]
PRIVATE = ("host", "own_gpu", "affinity", "rank", "node", "launched", "planes")


def facts(*, simulated: bool) -> dict[str, Any]:
    """What one rank knows; it starts MPI."""
    before = settings()
    mpisgd.init()
    known = dataclasses.asdict(rank_info(before, mpi_info()))
    known["mpi"]["libmpi"] = Path(known["mpi"]["libmpi"]).name
    known["mpi"]["library"] = without_builder(known["mpi"]["library"])
    return {
        **{name: value for name, value in known.items() if name not in PRIVATE},
        "num_gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "gpu_list": _gpus(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": _driver(),
        "simulated": simulated,
    }


def without_builder(library: str) -> str:
    """What an MPI library says of itself, but for the user and the host that Open MPI was built by."""
    return re.sub(r", package: [^,]*", "", library)


def _gpus() -> list[dict[str, Any]]:
    """Name, memory and architecture of each GPU."""
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [
        {"name": each.name, "memory_bytes": each.total_memory, "capability": f"{each.major}.{each.minor}"}
        for each in found
    ]


def _driver() -> str:
    """The version of the driver, as its own tool tells it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown (no nvidia-smi)"
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.partition("\n")[0].strip() or f"unknown (nvidia-smi: exit code {done.returncode})"


def commit() -> str:
    """The commit of this clone, and whether something was changed since."""
    try:
        found = _git("rev-parse", "HEAD")
        return found + (", changed since" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown (no clone of git)"


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()
