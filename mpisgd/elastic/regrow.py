"""New ranks in the place of lost ones: processes that run the same program and join at `elastic.run`.

A newcomer is spawned into an MPI world of newcomers only. It makes models, optimizers and samplers there, as
a job of its own, and meets the others when its program comes to `run`:

    left        shrink | spawn ........... | "ready"? ............... | "come" | merge | begin
    newcomer             starts Python, MPI | init, model, optimizer  | "come"? | merge | begin

MPI's merge waits for ever, so nobody begins it who does not know that the others do. If a newcomer does not
come to `run`, or does so too late, the others go on without new ranks, and these end.
"""

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import torch
from torch import Tensor

from mpisgd import config
from mpisgd.core.waiting import Backoff
from mpisgd.errors import MpisgdError, PeerLost
from mpisgd.job import lifecycle as jobs
from mpisgd.job.forced_exit import exit_after_loss
from mpisgd.monitor.startup_timeout import within

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpisgd.transport.mpi import Communicator

__all__ = ["Terms", "grow", "is_newcomer", "join"]

TO_JOIN, JOINED = "1", "0"  # the environment says so to the program, and to the processes that it starts
READY, COME = 7, 8  # tags
COME_WITHIN_S = 120.0  # for a program to start and to make its model


class Terms(NamedTuple):
    """On which terms a job goes on after a loss.

    Attributes:
        min_ranks: fewer than these do not go on.
        wanted: how many there should be.
        regrow: whether new ones come in the place of lost ones.
    """

    min_ranks: int
    wanted: int
    regrow: bool


def is_newcomer() -> bool:
    """Return whether this process was started to join a job, and has not joined it yet."""
    return os.environ.get(config.NEWCOMER_VARIABLE) == TO_JOIN


def grow(left: "Communicator", terms: Terms) -> tuple["Communicator", int]:
    """Return a wire over those that are left and newcomers, and the number of these. Collective over `left`.

    Where no process can be started, or not all come, the job goes on without, and rank 0 says so. The next
    loss is another occasion.
    """
    missing = terms.wanted - left.size
    if not terms.regrow or missing <= 0:
        return left, 0
    try:
        newcomers = left.spawn(_this_program(), missing, {config.NEWCOMER_VARIABLE: TO_JOIN})
    except PeerLost:
        raise
    except MpisgdError as exc:
        _say_none_come(left, str(exc))
        return left, 0
    if trouble := left.broadcast_object(_trouble(newcomers, missing) if left.rank == 0 else "", 0):
        _say_none_come(left, trouble)
        newcomers.revoke()
        return left, 0
    if left.rank == 0:
        _exchange_words(lambda word, dst: newcomers.isend(word, dst, COME), newcomers, missing)
    return newcomers.merge(behind=False), missing


def _this_program() -> list[str]:
    return [sys.executable, *sys.orig_argv[1:]]


def _trouble(newcomers: "Communicator", number: int) -> str:
    """Wait until all newcomers have come to `run`; return why they do not, "" when they are there."""
    try:
        came = _exchange_words(lambda word, src: newcomers.irecv(word, src, READY), newcomers, number)
    except MpisgdError as exc:
        return f"one has ended before it came to elastic.run ({exc})"
    return "" if came else f"they have not come to elastic.run within {COME_WITHIN_S:g} s"


def _exchange_words(
    start: Callable[[Tensor, int], "MPI.Request"], way: "Communicator", number: int = 1
) -> bool:
    """Send a word to, or receive one from, the first ranks of the other side; return whether in time."""
    words = [torch.zeros(1, dtype=torch.int64) for _ in range(number)]
    requests = [start(word, other) for other, word in enumerate(words)]
    through = Backoff(COME_WITHIN_S, quiet=True).wait_for(lambda: way.poll(requests))
    if not through:
        way.abandon(requests, words)
    return through


def _say_none_come(left: "Communicator", why: str) -> None:
    if left.rank == 0:
        print(f"mpisgd: elastic: no new ranks: {why}", file=sys.stderr, flush=True)


def join() -> None:
    """Leave the world of newcomers for that of the job. Collective over the newcomers and those who wait.

    Ends the process where they have gone on without it.
    """
    os.environ[config.NEWCOMER_VARIABLE] = JOINED
    way = jobs.parent_wire()
    assert way is not None
    alone = jobs.current_job()
    jobs.shutdown()
    try:
        with within(3 * COME_WITHIN_S, "its coming to a job that may have ended"):  # then MPI may block
            _exchange_words(lambda word, dst: way.isend(word, dst, READY), way)
            if not _exchange_words(lambda word, src: way.irecv(word, src, COME), way):
                raise PeerLost("the others have gone on")
        with within(alone.timeout_s, "its joining of the job"):
            jobs.begin(way.merge(behind=True), None, alone.timeout_s, alone.gpu)
    except MpisgdError:
        _end_unmet()
    jobs.current_job().lost_ranks = True


def _end_unmet() -> NoReturn:
    """End the program of a process that the others do not need any more, which is no failure of the job."""
    print(
        "mpisgd: elastic: a new rank ends: the others have gone on without it, or are gone (from its start "
        f"on they wait {COME_WITHIN_S:g} s for it to come to elastic.run)",
        file=sys.stderr,
        flush=True,
    )
    exit_after_loss()
    raise SystemExit(0)
