"""Joiners: processes started in the place of lost ranks, which join the job at `elastic.run`.

A joiner is spawned into an MPI world of joiners. There it makes models, optimizers and samplers, as a job of
its own, and waits for the survivors when its program comes to `run`:

    survivors   shrink | spawn ........... | "ready"? ............... | "come"  | merge | begin
    joiner               starts Python, MPI | init, model, optimizer  | "come"? | merge | begin

MPI's merge has no timeout, so a rank begins it only when it knows that the others do. If a joiner fails or
comes to `run` too late, the survivors continue without it, and it ends.
"""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mpisgd import config
from mpisgd.errors import MpisgdError, PeerLost
from mpisgd.interfaces.communicator import Request
from mpisgd.job import lifecycle as jobs
from mpisgd.job.forced_exit import exit_after_loss
from mpisgd.job.startup import load_mpi
from mpisgd.job.startup_timeout import within
from mpisgd.threads.waiting import Backoff

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["ElasticOptions", "grow", "is_joiner", "join"]

READY, COME = 7, 8  # tags
JOIN_TIMEOUT_S = 120.0  # for a program to start and to make its model


class ElasticOptions(NamedTuple):
    """How a job continues after a loss.

    Attributes:
        min_ranks: the job ends with fewer.
        wanted: how many there should be.
        regrow: whether to start joiners in the place of lost ranks.
    """

    min_ranks: int
    wanted: int
    regrow: bool


def is_joiner() -> bool:
    """Return whether this process was started to join a job, and has not joined it yet."""
    return config.waits_to_join()


def grow(left: "Communicator", options: ElasticOptions) -> tuple["Communicator", int]:
    """Return a communicator of survivors and joiners, and the number of joiners. Collective over `left`.

    If a process cannot be started, or does not come, the job continues without joiners and rank 0 prints why.
    The next loss tries again.
    """
    missing = options.wanted - left.size
    if not options.regrow or missing <= 0:
        return left, 0
    try:
        program = [sys.executable, *sys.orig_argv[1:]]
        joiners = left.spawn(program, missing, {config.JOINER_VARIABLE: config.TO_JOIN})
    except PeerLost:
        raise
    except MpisgdError as exc:
        return _without_joiners(left, str(exc))
    if problem := left.broadcast_object(_wait_for_joiners(joiners, missing) if left.rank == 0 else "", 0):
        joiners.revoke()
        return _without_joiners(left, problem)
    if left.rank == 0:
        _signal(lambda word, dst: joiners.isend(word, dst, COME), joiners, missing)
    return joiners.merge(behind=False), missing


def _wait_for_joiners(joiners: "Communicator", number: int) -> str:
    """Wait until all joiners have come to `run`; return why they do not, "" if they do."""
    try:
        came = _signal(lambda word, src: joiners.irecv(word, src, READY), joiners, number)
    except MpisgdError as exc:
        return f"one has ended before it came to elastic.run ({exc})"
    return "" if came else f"they have not come to elastic.run within {JOIN_TIMEOUT_S:g} s"


def _signal(start: Callable[[Tensor, int], Request], remote: "Communicator", number: int = 1) -> bool:
    """Send a word to, or receive one from, the first ranks of the remote group; return whether in time."""
    words = [torch.zeros(1, dtype=torch.int64) for _ in range(number)]
    requests = [start(word, other) for other, word in enumerate(words)]
    done = Backoff(JOIN_TIMEOUT_S, quiet=True).wait_for(lambda: remote.poll(requests))
    if not done:
        remote.abandon(requests, words)
    return done


def _without_joiners(left: "Communicator", why: str) -> tuple["Communicator", int]:
    if left.rank == 0:
        print(f"mpisgd: elastic: no new ranks: {why}", file=sys.stderr, flush=True)
    return left, 0


def join() -> None:
    """Leave the world of joiners for that of the job. Collective over joiners and survivors.

    Ends the process if the survivors have continued without it.
    """
    os.environ[config.JOINER_VARIABLE] = config.JOINED
    survivors = load_mpi().parent()
    assert survivors is not None
    alone = jobs.current_job()
    jobs.shutdown()
    try:
        with within(3 * JOIN_TIMEOUT_S, "its coming to a job that may have ended"):  # then MPI may block
            _signal(lambda word, dst: survivors.isend(word, dst, READY), survivors)
            if not _signal(lambda word, src: survivors.irecv(word, src, COME), survivors):
                raise PeerLost("the others have gone on")
        with within(alone.timeout_s, "its joining of the job"):
            job = jobs.begin(survivors.merge(behind=True), None, alone.timeout_s, alone.gpu)
    except MpisgdError:
        print(
            "mpisgd: elastic: a new rank ends: the others have gone on without it, or are gone (from its "
            f"start on they wait {JOIN_TIMEOUT_S:g} s for it to come to elastic.run)",
            file=sys.stderr,
            flush=True,
        )
        exit_after_loss()
        raise SystemExit(0) from None  # no failure of the job
    job.pg_options = alone.pg_options
    job.lost_ranks = True
