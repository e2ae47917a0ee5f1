"""New ranks in the place of lost ones: processes that run the same program and join at `elastic.run`.

A newcomer is spawned into an MPI world of newcomers only. It makes models, optimizers and samplers there, as
a job of its own, and meets the others when its program comes to `run`:

    left        shrink | spawn ........... | "ready"? ............... | merge | begin
    newcomer             starts Python, MPI | init, model, optimizer  | merge | begin
"""

import os
import sys
from typing import TYPE_CHECKING, NamedTuple

import torch

from mpisgd.comm import job as jobs
from mpisgd.comm.waiting import Patience
from mpisgd.errors import MpisgdError, PeerLost

if TYPE_CHECKING:
    from mpisgd.comm.mpi import Wire

__all__ = ["Terms", "grow", "is_newcomer", "join"]

MARK = "MPISGD_ELASTIC_NEWCOMER"
TAG = 7
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
    return MARK in os.environ


def grow(left: "Wire", terms: Terms) -> tuple["Wire", int]:
    """Return a wire over those that are left and newcomers, and the number of these. Collective over `left`.

    Where no process can be started the job goes on without, and rank 0 says so.
    """
    missing = terms.wanted - left.size
    if not terms.regrow or missing <= 0:
        return left, 0
    try:
        newcomers = left.spawn(_this_program(), missing, {MARK: "1"})
    except PeerLost:
        raise
    except MpisgdError as exc:
        if left.rank == 0:
            print(f"mpisgd: elastic: no new ranks: {exc}", file=sys.stderr, flush=True)
        return left, 0
    _wait_until_ready(left, newcomers, missing)
    return newcomers.merge(behind=False), missing


def _this_program() -> list[str]:
    return [sys.executable, *sys.orig_argv[1:]]


def _wait_until_ready(left: "Wire", newcomers: "Wire", number: int) -> None:
    """Return when all newcomers are about to merge, which waits inside MPI."""
    if left.rank == 0:
        words = [torch.zeros(1, dtype=torch.int64) for _ in range(number)]
        requests = [newcomers.irecv(word, src, TAG) for src, word in enumerate(words)]
        if not Patience(COME_WITHIN_S).wait_for(lambda: newcomers.poll(requests)):
            raise PeerLost(f"new ranks have not come to elastic.run within {COME_WITHIN_S:g} s")
    left.broadcast_object(None, 0)


def join() -> None:
    """Leave the world of newcomers for that of the job. Collective over the newcomers and those who wait."""
    os.environ.pop(MARK)
    way = jobs.parent_wire()
    assert way is not None
    alone = jobs.current_job()
    jobs.shutdown()
    word = torch.zeros(1, dtype=torch.int64)
    request = way.isend(word, 0, TAG)
    Patience(COME_WITHIN_S).wait_for(lambda: way.poll([request]))
    jobs.begin(way.merge(behind=True), None, alone.timeout_s, alone.gpu)
    jobs.current_job().bereft = True
