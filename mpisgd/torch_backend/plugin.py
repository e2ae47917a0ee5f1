"""What torch learns of mpisgd at its own import: a backend's name, rendezvous handlers, a barrier, the rank.

An error here would be an error of `import torch`, in programs that never heard of mpisgd: nothing is raised.
"""

import gc
import os
import warnings
from collections.abc import Iterator, MutableMapping
from typing import Any

from mpisgd import config
from mpisgd.config import BACKEND

__all__ = ["BACKEND", "publish_rank", "register"]


def register() -> None:
    """Make `init_process_group("mpisgd")` and `init_method="mpi://"` known; the entry point calls this.

    Under mpirun it also sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE where they are not set, as
    torchrun does, for programs that read them, and keeps torch's own objects from the garbage collector.
    Starts no MPI. A second call does nothing.
    """
    try:
        publish_rank(os.environ)
        _register()
        if config.is_launched():
            _freeze_modules()
    except Exception as exc:
        warnings.warn(f"mpisgd could not register its torch.distributed backend: {exc!r}", RuntimeWarning, 2)


def publish_rank(env: MutableMapping[str, str]) -> None:
    """Put the launcher's ranks where torchrun puts its own; where torchrun has been, they stay."""
    found = config.torchrun_variables(env)
    if all(env.get(name, value) == value for name, value in found.items()):
        env.update(found)


def _freeze_modules() -> None:
    """Exempt what exists by now, torch's modules, from garbage collection.

    These 160,000 objects live as long as the process. The collector would go through them in the middle of
    training, and several times at the end of the process: 0.4 s on every rank.
    """
    if not gc.get_freeze_count():
        gc.freeze()


def _register() -> None:
    import torch.distributed as dist

    if not dist.is_available() or BACKEND in dist.Backend.backend_list:
        return
    from torch.distributed.rendezvous import register_rendezvous_handler

    from mpisgd.torch_backend.compat import (
        opt_out_of_flight_recorder,
        take_over_monitored_barrier,
        take_over_rendezvous,
    )

    dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    register_rendezvous_handler("mpi", _rendezvous)  # type: ignore[no-untyped-call]
    opt_out_of_flight_recorder(BACKEND)
    take_over_rendezvous("env", BACKEND, _rendezvous)
    take_over_monitored_barrier(lambda group: hasattr(group, "mpisgd_group"), _monitored_barrier)


def _create(options: Any, pg_options: Any) -> Any:
    """Make a process group; torch calls this."""
    from mpisgd.torch_backend.creation import create

    return create(options, pg_options)


def _monitored_barrier(*args: Any, **kwargs: Any) -> None:
    """Wait for every rank of one of our groups; `torch.distributed.monitored_barrier` calls this."""
    from mpisgd.torch_backend.barrier import monitored_barrier

    monitored_barrier(*args, **kwargs)


def _rendezvous(url: str, **_: Any) -> "Iterator[tuple[Any, int, int]]":
    """Find the other ranks: yield (store, rank, world size); torch calls this."""
    from mpisgd.torch_backend.creation import mpi_rendezvous

    yield mpi_rendezvous(url)
