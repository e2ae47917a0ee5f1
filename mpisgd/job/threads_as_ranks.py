"""`run_ranks`: a job whose ranks are threads of this process, for tests of what does not depend on MPI.

    results = run_ranks(3, program, seed=7)     # program() on each rank, as under mpirun -n 3

All above the communicator is what runs under MPI: groups, queues, shared memory, hosts, optimizers.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument, MpisgdError, PeerLost
from mpisgd.job.group_factory import make_group
from mpisgd.job.job_of_thread import job_of_this_thread
from mpisgd.job.lifecycle import abandon, current_job, is_initialized, shutdown
from mpisgd.job.world import Job
from mpisgd.monitor.failure_detector import FailureDetector
from mpisgd.threads import scheduling, waiting
from mpisgd.transport.loopback.communicator import LoopbackCommunicator
from mpisgd.transport.loopback.draws import Draws
from mpisgd.transport.loopback.fault_tolerance import LoopbackFaultTolerance
from mpisgd.transport.loopback.faults import Fault, Loss
from mpisgd.transport.loopback.links import Links
from mpisgd.transport.loopback.network import Network
from mpisgd.transport.loopback.scheduler import Place, SeededScheduler, Stopped

__all__ = ["LOST", "Fault", "Loss", "RankFailed", "lose_ranks", "run_ranks"]

T = TypeVar("T")


class _Lost:
    def __repr__(self) -> str:
        return "LOST"


LOST: Any = _Lost()  # stands for the result of a rank that was lost


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
    losses: Sequence[Loss] | None = None,
    faults: Sequence[Fault] = (),
    num_draws: int | None = None,
    links: Links | None = None,
) -> list[T]:
    """Run a program on ranks that are threads of this process; return what it returns, by rank.

    Inside, `mpisgd.rank()`, groups, collectives, optimizers and so on are those of the rank whose thread
    calls them. What belongs to the process is shared: torch's default generator, the number of threads, the
    environment. Messages between GPUs go through host memory. The program must not call `init()` with other
    ranks, use torch's NCCL, or wait in a way of its own for what another rank does.

    With `losses` the job outlives lost ranks, as under `mpirun --with-ft ulfm`: each rank has its failure
    detector, and `mpisgd.elastic.run` goes on with those that are left. Without, nobody is lost.

    Args:
        size: number of ranks.
        program: called by each.
        seed: decides in which order the ranks run, and how long messages take.
        ranks_per_host: how many ranks each host has, in order; default: all are on one.
        timeout_s: simulated seconds that an operation waits for the other ranks.
        limit_s: real seconds that the run may take.
        losses: which ranks are lost, and when; more by `lose_ranks`.
        faults: which allocations of shared memory and which writes of checkpoints fail.
        num_draws: how much the seed decides; from then on whoever has waited longest runs, and messages take
            no time.
        links: between the hosts; messages then take the time of these, and nothing else takes any.

    Returns:
        What `program` returns. With `losses` also LOST for a rank that was lost, and the `PeerLost` that one
        has raised since another was.

    Raises:
        RankFailed: some rank has raised.
        InvalidArgument: `ranks_per_host` is for another number of ranks.
        TimeoutError: a thread computes or blocks for longer than `limit_s`.
        MpisgdError: threads were left that serve nobody.
    """
    hosts = [host for host, count in enumerate(ranks_per_host or (size,)) for _ in range(count)]
    if len(hosts) != size:
        raise InvalidArgument(f"run_ranks: ranks_per_host={list(ranks_per_host)} are not {size} ranks")
    scheduler = SeededScheduler(Draws(seed, num_draws), faults)
    network = Network(scheduler, hosts, timeout_s, losses or (), links)
    return _Run(program, network, seed, timeout_s, losses is not None).results(limit_s)


def lose_ranks(*ranks: int, waits: int = 0) -> None:
    """Lose ranks of the job, all at once. Does not return where this rank is one of them and `waits` is 0.

    Their threads stop where they are, and what they would do on their way out is not done.

    Args:
        ranks: of the job.
        waits: how many waits and messages of this rank come before; 0: they are lost now.
    """
    communicator = current_job().communicator
    context = communicator.context
    gone = [context.ranks[rank] for rank in ranks]
    if waits:
        context.network.lose_later(gone, communicator.process, waits)
    else:
        context.network.lose(gone)


class _Run(Generic[T]):
    """One run."""

    def __init__(
        self, program: Callable[[], T], network: Network, seed: int, timeout_s: float, survives: bool
    ) -> None:
        self._program = program
        self._network = network
        self._seed = seed
        self._timeout_s = timeout_s
        self._survives = survives
        self._returned: dict[int, Any] = {}
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
                scheduler.start(thread, thread.start, Place(rank, self._network.hosts[rank]))
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
        if scheduler.left_over:
            raise MpisgdError(f"run_ranks: threads were left over (seed {self._seed}): {scheduler.left_over}")
        return [self._returned.get(rank, LOST) for rank in range(size)]

    def _be(self, rank: int) -> None:
        """Be a rank: what its thread does."""
        communicator = LoopbackCommunicator(self._network.world, rank)
        # Otherwise a backward of what lies on a GPU runs on a thread of torch's, and not on this rank's.
        own_backward = torch.autograd.set_multithreading_enabled(False)
        try:
            with own_backward, job_of_this_thread(self._make_job(communicator)):
                self._returned[rank] = self._run_and_leave()
        except Stopped:
            raise
        except BaseException as exc:  # also SystemExit, and what pytest fails with
            if rank in self._network.lost:
                return  # on its way out, which nobody sees
            if self._survives and isinstance(exc, PeerLost):  # before there was a job
                self._returned[rank] = exc
                return
            self._errors[rank] = exc
            self._network.scheduler.stop()

    def _run_and_leave(self) -> Any:
        """Run the program and leave its job, which after a loss does nothing together any more."""
        returned: Any
        try:
            returned = self._program()
            if not waiting.cancelled_by_loss():
                shutdown()
        except PeerLost as exc:
            if not self._survives:
                raise
            returned = exc
        if is_initialized():
            for callback in current_job().leaving:
                callback()
            detector = abandon("a rank of the job was lost").failure_detector
            if detector is not None:
                detector.stop()
        return returned

    def _make_job(self, communicator: LoopbackCommunicator) -> Job:
        """Make the job of the ranks of a communicator. Collective over them."""
        detector = fault_tolerance = None
        if self._survives:
            fault_tolerance = LoopbackFaultTolerance(self._network, communicator.process)
            detector = FailureDetector(communicator, fault_tolerance)
        try:
            world = self._make_world(communicator)
        except BaseException:
            if detector is not None:
                detector.stop()
            raise
        job = Job(communicator, world, self._timeout_s, True, "mpi")
        job.failure_detector, job.fault_tolerance = detector, fault_tolerance
        job.make_next = self._make_job
        return job

    def _make_world(self, communicator: LoopbackCommunicator) -> Group:
        return make_group(
            "world",
            range(communicator.size),
            communicator.duplicate(),
            timeout_s=self._timeout_s,
            threads_allowed=True,
        )
