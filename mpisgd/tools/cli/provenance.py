"""Where a measurement comes from: command, time, machine and versions, as its file tells them."""

import contextlib
import datetime
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

__all__ = ["machine", "provenance"]


def machine() -> dict[str, Any]:
    """Return the architecture, the processor and the number of cores."""
    return {"architecture": platform.machine(), "processor": _processor(), "cores": os.cpu_count()}


def provenance() -> dict[str, Any]:
    """Return the header of a record: command line, time (UTC), machine, versions; MPI's if it is loaded."""
    from mpisgd.tools.cli.collect_env import mpi_info, versions

    known = versions()
    if "mpi4py.MPI" in sys.modules:
        known["MPI"] = mpi_info().library.split(",")[0]
    program = Path(sys.argv[0]).resolve()
    name = "-m mpisgd" if program.name in ("__main__.py", "mpisgd") else _in_repository(program)
    command = f"python {name} {shlex.join(sys.argv[1:])}".strip()
    when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"command": command, "when": when, "machine": machine(), "versions": known}


def _in_repository(program: Path) -> str:
    """Return the path of one of the repository's programs as one calls it there; of others the name."""
    parts = program.parts
    return "/".join(parts[parts.index("scripts") :]) if "scripts" in parts else program.name


def _processor() -> str:
    """Return the processor's name as Linux knows it; psutil does not tell it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
