"""The reference of environment variables, from the table in mpisgd/config.py."""

from __future__ import annotations

from mpisgd.config import VARIABLES

__all__ = ["page"]

FIRST = """# Environment variables

This page lists the environment variables that mpisgd reads, with their defaults. All ranks need the same
values, with two exceptions: only rank 0 reads the profile, and the timeline may be set on one rank only. An
invalid value raises [`InvalidArgument`](errors.md#invalid-argument) in `mpisgd.init()`.

Open MPI exports a variable to other hosts with `-x NAME`, MPICH with `-genv NAME VALUE`.
"""

# Where more is said, by variable.
MORE = {
    "MPISGD_TIMEOUT_S": "../how-to/hangs.md",
    "MPISGD_STALL_WARNING_S": "../how-to/hangs.md",
    "MPISGD_SHARED_MEMORY": "../concepts/transports.md",
    "MPISGD_CROSS_MEMORY": "../concepts/transports.md",
    "MPISGD_FULL_TRACEBACK": "../concepts/order-and-checks.md#different-calls",
    "MPISGD_CHECK_STAGING": "../internals/transports.md#transports-of-host-memory",
    "MPISGD_KEEP_MEMORY": "../how-to/performance.md#large-layers-on-cpus",
    "MPISGD_GPU": "../how-to/gpus.md",
    "MPISGD_PROFILE": "../concepts/transports.md#which-algorithm-auto-takes",
    "MPISGD_TIMELINE": "../how-to/timelines.md",
    "MPISGD_STEP_LOG": "../how-to/performance.md#ranks-or-threads-on-one-host",
    "MPISGD_STEP_LIMIT": "../how-to/performance.md#ranks-or-threads-on-one-host",
    "MPISGD_STALL_STACKS": "../how-to/timelines.md#stall-reports-of-horovods-api",
    "MPISGD_RESTART_COUNT": "../how-to/checkpoints.md#restarts-after-a-failure",
}
SECTIONS = {"MPISGD_": "mpisgd", "HOROVOD_": "Horovod's API", "": "Others"}


def page() -> str:
    """The text of the page."""
    text, left = FIRST, list(VARIABLES)
    for prefix, title in SECTIONS.items():
        chosen = [variable for variable in left if variable.name.startswith(prefix)]
        left = [variable for variable in left if variable not in chosen]
        text += f"\n## {title}\n\n| variable | default | meaning |\n| --- | --- | --- |\n"
        for name, default, meaning in chosen:
            shown = f"[`{name}`]({MORE[name]})" if name in MORE else f"`{name}`"
            text += f"| {shown} | {default} | {meaning} |\n"
    return text
