"""`run_ranks`: a job whose ranks are threads of this process, for tests of what does not depend on MPI.

    results = run_ranks(3, program, seed=7)     # program() on each rank, as under mpirun -n 3

All above the communicator is what runs under MPI: groups, queues, shared memory, hosts, optimizers.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument, MpisgdError
from mpisgd.job.group_factory import make_group
from mpisgd.job.job_of_thread import job_of_this_thread
from mpisgd.job.lifecycle import shutdown
from mpisgd.job.world import Job
from mpisgd.threads import scheduling, waiting
from mpisgd.transport.loopback.communicator import LoopbackCommunicator
from mpisgd.transport.loopback.network import Network
from mpisgd.transport.loopback.scheduler import SeededScheduler

__all__ = ["RankFailed", "run_ranks"]

T = TypeVar("T")


class RankFailed(MpisgdError):
    """A rank of `run_ranks` has raised; its error is the cause of this one.

    Attributes:
        rank: which was the first.
        errors: of all ranks that have raised by themselves.
    """

    def __init__(self, rank: int, errors: dict[int, BaseException], seed: int) -> None:
        super().__init__(f"rank {rank} has raised (seed {seed}): {errors[rank]!r}")
        self.rank = rank
        self.errors = errors


def run_ranks(
    size: int,
    program: Callable[[], T],
    *,
    seed: int = 0,
    ranks_per_host: Sequence[int] = (),
    timeout_s: float = 60.0,
    limit_s: float = 120.0,
) -> list[T]:
    """Run a program on ranks that are threads of this process; return what it returns, by rank.

    Inside, `mpisgd.rank()`, groups, collectives, optimizers and so on are those of the rank whose thread
    calls them. What belongs to the process is shared: torch's default generator, the number of threads, the
    environment. The program must not call `init()` with other ranks, use torch's NCCL, or wait in a way of
    its own for what another rank does.

    Args:
        size: number of ranks.
        program: called by each.
        seed: decides in which order the ranks run, and how long messages take.
        ranks_per_host: how many ranks each host has, in order; default: all are on one.
        timeout_s: simulated seconds that an operation waits for the other ranks.
        limit_s: real seconds that the run may take.

    Raises:
        RankFailed: some rank has raised.
        InvalidArgument: `ranks_per_host` is for another number of ranks.
        TimeoutError: a thread computes or blocks for longer than `limit_s`.
    """
    hosts = [host for host, count in enumerate(ranks_per_host or (size,)) for _ in range(count)]
    if len(hosts) != size:
        raise InvalidArgument(f"run_ranks: ranks_per_host={list(ranks_per_host)} are not {size} ranks")
    return _Run(program, Network(SeededScheduler(seed), hosts, timeout_s), seed, timeout_s).results(limit_s)


class _Run(Generic[T]):
    """One run."""

    def __init__(self, program: Callable[[], T], network: Network, seed: int, timeout_s: float) -> None:
        self._program = program
        self._network = network
        self._seed = seed
        self._timeout_s = timeout_s
        self._returned: dict[int, T] = {}
        self._errors: dict[int, BaseException] = {}

    def results(self, limit_s: float) -> list[T]:
        """Run it."""
        scheduler, size = self._network.scheduler, len(self._network.hosts)
        scheduling.install(scheduler)
        before = waiting.is_oversubscribed()
        waiting.set_oversubscribed(False)  # else waits sleep, and only who wakes looks after messages
        try:
            for rank in range(size):
                thread = threading.Thread(target=self._be, args=(rank,), name=f"rank {rank}", daemon=True)
                scheduler.start(thread, thread.start)
            if not scheduler.run(limit_s):
                raise TimeoutError(
                    f"run_ranks: not over after {limit_s:g} s (seed {self._seed}): {scheduler.names}"
                )
        finally:
            scheduling.install(None)
            waiting.set_oversubscribed(before)
        if self._errors:
            rank = next(iter(self._errors))
            raise RankFailed(rank, self._errors, self._seed) from self._errors[rank]
        return [self._returned[rank] for rank in range(size)]

    def _be(self, rank: int) -> None:
        """Be a rank: what its thread does."""
        try:
            communicator = LoopbackCommunicator(self._network.world, rank)
            world = self._make_world(communicator)
            job = Job(communicator, world, self._timeout_s, True, "mpi")
            with job_of_this_thread(job):
                self._returned[rank] = self._program()
                shutdown()
        except Exception as exc:
            self._errors[rank] = exc
            self._network.scheduler.stop()

    def _make_world(self, communicator: LoopbackCommunicator) -> Group:
        return make_group(
            "world",
            range(communicator.size),
            communicator.duplicate(),
            timeout_s=self._timeout_s,
            threads_allowed=True,
        )
