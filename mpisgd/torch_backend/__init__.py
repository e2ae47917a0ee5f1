"""torch.distributed over MPI, with torch's stock wheels: `dist.init_process_group("mpisgd")` under mpirun.

Where mpisgd is installed, its `torch.backends` entry point imports this package at the end of every
`import torch` on the machine, so it stays light: it registers the names, and everything else is imported
when a process group is made.
"""

from typing import TYPE_CHECKING, Any

from mpisgd.torch_backend.plugin import register

if TYPE_CHECKING:
    from mpisgd.torch_backend.barrier import monitored_barrier
    from mpisgd.torch_backend.comm_hooks import bf16_compress
    from mpisgd.torch_backend.process_group import ProcessGroupMpisgd

__all__ = ["ProcessGroupMpisgd", "bf16_compress", "monitored_barrier", "register"]

_HOME_OF = {
    "ProcessGroupMpisgd": "process_group",
    "bf16_compress": "comm_hooks",
    "monitored_barrier": "barrier",
}

register()


def __getattr__(name: str) -> Any:
    """Look up a public name on first use."""
    import importlib

    if name not in _HOME_OF:
        raise AttributeError(f"module 'mpisgd.torch_backend' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mpisgd.torch_backend.{_HOME_OF[name]}"), name)
