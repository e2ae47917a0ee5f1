"""`Worker`: RPC on one rank, from its start to its end.

A start is a sequence of steps that all ranks take together; where one fails on some rank, all raise:

    listen      TensorPipe's agent starts, and its sockets admit nobody (`mpisgd.rpc.admission`)
    admit       ... but the addresses that the job's ranks come from, which may send nothing yet
    connect     every rank calls every rank, itself too, and tells by MPI which connections it has made
    close       nobody is admitted any more; connections that no rank has made are reset

What is unpickled is signed besides, by a key that rank 0 sends by MPI (`mpisgd.rpc.signatures`).
"""

import contextlib
import secrets
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from mpisgd.core.consistency import Operation
from mpisgd.errors import MpisgdError, Unreachable
from mpisgd.job.groups import close_group, open_group
from mpisgd.job.world import Job
from mpisgd.rpc.admission import Admission, listening_endpoints, made_connections
from mpisgd.rpc.agreement import Agreement
from mpisgd.rpc.quiesce import finish_calls
from mpisgd.rpc.signatures import KEY_BYTES, sign_messages
from mpisgd.rpc.tcp_sockets import Endpoint, choose_interface, preferred_interface, source_address
from mpisgd.rpc.tensorpipe import active_calls, available, is_running, start_agent
from mpisgd.threads import wait_registry

__all__ = ["Worker"]

T = TypeVar("T")

# Between two looks at which connections the ranks have made, at first and later. TCP sends again in 0.2 s.
LOOK_S, LONGEST_LOOK_S = 0.005, 0.02


class Worker:
    """RPC of one rank. Collective over the job.

    Args:
        job: that it belongs to.
        agreement: what the ranks have agreed on.

    Attributes:
        group: all ranks, in an order of their own: functions that are called may use the world meanwhile.
    """

    def __init__(self, job: Job, agreement: Agreement) -> None:
        self.job = job
        self.group = open_group(job, range(job.world.size), name="rpc")
        self._agreement = agreement
        self._admission = Admission(())
        self._signing = contextlib.ExitStack()

    def start(self, store: Store, number: int) -> None:
        """Take the steps that the module tells of. Collective.

        Args:
            store: that the ranks share.
            number: of this start, of those by this store.
        """
        try:
            interface = self._together("choose a network interface", lambda: choose_interface(store))
            self._store = PrefixStore(f"rpc {number}", store)
            key = self._gather(secrets.token_bytes(KEY_BYTES) if self.group.rank == 0 else b"")[0]
            self._signing.enter_context(sign_messages(key))
            self._together("listen", lambda: self._listen(interface))
            self._admit_hosts()
            self._connect(self._together("connect", self._call_everyone))
        except BaseException:
            self._close(graceful=False)
            raise
        # Calls that are under way can move ranks whose main threads wait for each other.
        wait_registry.workers[id(self)] = lambda: any(active_calls())

    def _listen(self, interface: str) -> None:
        agreement, rank = self._agreement, self.group.rank
        before = listening_endpoints()

        def shut() -> None:
            self._admission = Admission(listening_endpoints() - before)
            self._admission.shut()
            self._tell_of_strangers(self._admission.reset_strangers(frozenset()))

        with preferred_interface(interface):
            self._agent_store = start_agent(
                self._store, agreement.names, rank, agreement.options, agreement.devices, once_listening=shut
            )

    def _admit_hosts(self) -> None:
        """Admit the addresses from which the ranks come: each finds out its own by its way to the others."""
        listening = self._gather(self._admission.addresses)
        sources = self._together(
            "find the way to the others", lambda: [[*map(source_address, there)] for there in listening]
        )
        from_all = self._gather(sources)
        addresses = {address for to_rank in from_all for address in to_rank[self.group.rank]}
        self._together("admit the others", lambda: self._admission.admit(addresses))

    def _call_everyone(self) -> "list[torch.futures.Future[None]]":
        """Connect with every rank, this one too: TensorPipe does so when it first calls."""
        api = available()
        return [api.rpc_async(name, _answer, timeout=self.job.timeout_s) for name in self._agreement.names]

    def _connect(self, calls: "Sequence[torch.futures.Future[None]]") -> None:
        """Let the ranks' connections through until every call has its answer, and nobody else's. Collective.

        A call makes one connection, and when that has carried something makes others.
        """
        endpoints = frozenset[Endpoint]().union(*self._gather(self._admission.endpoints))
        made, known, look_s = set[Endpoint](), set[Endpoint](), LOOK_S
        while True:
            new = made_connections(endpoints, made)
            made |= new
            found = self._gather((new, all(call.done() for call in calls)))
            known.update(*(theirs for theirs, _ in found))
            self._admission.let_through(known)
            if all(done for _, done in found):
                break
            time.sleep(look_s)
            look_s = min(2 * look_s, LONGEST_LOOK_S)
        self._together("close to others", lambda: self._close_to_strangers(known))
        self._together("connect", lambda: self._check_answers(calls))

    def _close_to_strangers(self, known: set[Endpoint]) -> None:
        self._admission.shut()
        self._tell_of_strangers(self._admission.reset_strangers(known))

    def _check_answers(self, calls: "Sequence[torch.futures.Future[None]]") -> None:
        for name, call in zip(self._agreement.names, calls, strict=True):
            try:
                call.wait()
            except RuntimeError as exc:
                raise Unreachable(f"{name} does not answer: {str(exc).splitlines()[0]}") from exc

    def _tell_of_strangers(self, count: int) -> None:
        if count:
            rank = self.group.rank
            warnings.warn(
                f"rank {rank}: {count} connection(s) to RPC came from no rank of the job, and were closed",
                RuntimeWarning,
                stacklevel=2,
            )

    def _gather(self, value: T) -> list[T]:
        """Gather a value of each rank. Collective."""
        values: list[T] = []
        queue = self.group.queue
        queue.run(Operation("init_rpc"), lambda: values.extend(queue.communicator.all_gather_object(value)))
        return values

    def _together(self, what: str, action: Callable[[], T]) -> T:
        """Run `action` on all ranks; where it fails on some rank, raise on each. Collective."""
        results, error = [], ""
        try:
            results.append(action())
        except (MpisgdError, OSError, RuntimeError, ValueError) as exc:
            error = str(exc)
        errors = {rank: text for rank, text in enumerate(self._gather(error)) if text}
        if errors:
            told = "; ".join(f"rank {rank}: {text}" for rank, text in errors.items())
            raise Unreachable(f"init_rpc: cannot {what}: {told}")
        return results[0]

    def end(self, *, graceful: bool, timeout_s: float | None) -> None:
        """End RPC on this rank; see `mpisgd.rpc.shutdown`."""
        try:
            if graceful:
                finish_calls(self.group, self._store, self._admission, timeout_s or self.job.timeout_s)
        except MpisgdError as exc:
            self.group.queue.broken = self.group.queue.broken or exc  # the exit of this process ends the job
            graceful = False
            raise
        finally:
            self._close(graceful)

    def _close(self, graceful: bool) -> None:
        wait_registry.workers.pop(id(self), None)
        if is_running():
            available().shutdown(graceful=graceful)
        self._signing.close()
        if graceful:
            close_group(self.group)


def _answer() -> None:
    """Do nothing; called on every rank when RPC starts."""
