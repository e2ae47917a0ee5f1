"""Horovod, in a process of its own beside each rank.

As the ranks of a second job they use MPI; otherwise they meet through Horovod's own gloo. Either lies below
Horovod's negotiation and fusion.
"""

import importlib
import itertools
import os
from collections.abc import Callable
from typing import Any

from mpisgd.config import launcher_rank
from mpisgd.job.mpi_settings import set_mpi_defaults
from mpisgd.tools.bench.measure import Timed, Unavailable, Variant
from mpisgd.tools.bench.network import interface_to
from mpisgd.tools.bench.payload import Payload
from mpisgd.tools.bench.peers.framework import Rendezvous
from mpisgd.tools.bench.training import StepTask, Training

__all__ = ["Horovod"]

PORT = "horovod's port"


class Horovod:
    """See `Framework`."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        hvd: Any = importlib.import_module("horovod.torch")
        library = "gloo" if launcher_rank() is None else "MPI"
        if not (hvd.gloo_built() if library == "gloo" else hvd.mpi_built()):
            raise Unavailable(f"this Horovod is built without {library}")
        self.version = f"horovod {importlib.import_module('horovod').__version__}, over {library}"
        self._hvd, self._names = hvd, itertools.count()
        settings = {"CONTROLLER": library.lower(), "CPU_OPERATIONS": library.lower()}
        if library == "MPI":
            set_mpi_defaults()  # those that mpisgd gives itself
        else:
            settings.update(_gloo_settings(rendezvous, self._server_port(rendezvous)))
        os.environ.update({f"HOROVOD_{name}": value for name, value in settings.items()})
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (rendezvous.topology.rank, rendezvous.topology.size)

    def _server_port(self, rendezvous: Rendezvous) -> str:
        """Return the port at which rank 0 runs Horovod's server; the store tells it the others."""
        store = rendezvous.store()
        if rendezvous.topology.rank == 0:
            self._server = importlib.import_module("horovod.runner.http.http_server").RendezvousServer(0)
            store.set(PORT, str(self._server.start()))
            self._server.init([])
        return bytes(store.get(PORT)).decode()

    def make(self, task: Any) -> Variant:
        """See `Framework`."""
        if isinstance(task, StepTask):
            training = _HorovodTraining(task, self._hvd.rank())
            training.distribute(self._hvd.DistributedOptimizer)
            return Timed("Horovod", training.step, training, start=self._hvd.barrier)
        payload = Payload(task, self._hvd.rank())
        calls = self._calls(payload)
        if task.collective not in calls:
            raise Unavailable(f"Horovod has no {task.collective}")
        return Timed("Horovod", calls[task.collective], payload, start=self._hvd.barrier)

    def _calls(self, payload: Payload) -> dict[str, Callable[[], Any]]:
        """Return functions that run each collective on `payload`; names are kept for Horovod's cache."""
        hvd, given, name = self._hvd, payload.input, f"bench {next(self._names)}"

        def into_output(result: Any) -> None:
            payload.output = result[0] if isinstance(result, tuple) else result

        return {
            "all_reduce": lambda: hvd.allreduce_(payload.output, name=name, op=hvd.Sum),
            "broadcast": lambda: hvd.broadcast_(payload.output, payload.next_root(), name=name),
            "reduce_scatter": lambda: into_output(hvd.reducescatter(given, name=name, op=hvd.Sum)),
            "all_gather": lambda: into_output(hvd.allgather(given, name=name)),
            "all_to_all": lambda: into_output(hvd.alltoall(given, name=name)),
        }


class _HorovodTraining(Training):
    """One whose optimizer may be an older Horovod's, which takes no `set_to_none`."""

    def zero_grad(self) -> None:
        """See `Training`."""
        self.model.zero_grad(set_to_none=True)


def _gloo_settings(rendezvous: Rendezvous, port: str) -> dict[str, str]:
    """Return the variables that Horovod's launcher sets, without the prefix of their names."""
    here = rendezvous.topology
    settings = {
        "GLOO_RENDEZVOUS_ADDR": rendezvous.address,
        "GLOO_RENDEZVOUS_PORT": port,
        "GLOO_IFACE": interface_to(rendezvous.address).name,
        "HOSTNAME": f"host-{here.node_rank}",
        "RANK": here.rank,
        "SIZE": here.size,
        "LOCAL_RANK": here.local_rank,
        "LOCAL_SIZE": here.local_size,
        "CROSS_RANK": here.node_rank,
        "CROSS_SIZE": here.num_nodes,
    }
    return {name: str(value) for name, value in settings.items()}
