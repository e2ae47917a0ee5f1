"""Messages that all ranks send before they receive, the last tag first: what is sent comes late.

    side     sleep | fill | (isend)
    current                 recv | read

A message that does not wait for the fill brings zeros. Beside it stands the control: a read of the tensor
that waits for nothing must see zeros, or the fill was not late and the check shows nothing.
"""

from __future__ import annotations

import mpisgd
from gpu_checks.finding import Finding, LeftOut
from gpu_checks.gpu import Gpu
from mpisgd.job.lifecycle import world

__all__ = ["crossing"]

N, TAGS = 100_000, 4


def crossing(gpu: Gpu) -> Finding:
    """To the next rank and from the one before, by NCCL where collectives go by it."""
    mpisgd.all_reduce(gpu.zeros(1))
    rank, size = mpisgd.rank(), mpisgd.size()
    before, after = (rank - 1) % size, (rank + 1) % size
    communicator = world().point_to_point.communicator
    sent_bytes = communicator.sent_bytes
    side, given, taken = gpu.stream(), gpu.zeros(TAGS, N), gpu.zeros(TAGS, N)
    with gpu.on(side):
        gpu.sleep()
        for tag in range(TAGS):
            given[tag].fill_(10.0 * rank + tag + 1)
    with gpu.on(gpu.stream()):
        was_late = bool((given.cpu() == 0).all())
    with gpu.on(side):
        sends = [mpisgd.isend(given[tag], after, tag=tag) for tag in range(TAGS)]
    for tag in reversed(range(TAGS)):
        mpisgd.recv(taken[tag], before, tag=tag)
    read = taken.cpu()
    with gpu.on(side):
        for work in sends:
            work.wait()
    if not was_late:
        raise LeftOut("the fill was not late")
    is_right = all(bool((read[tag] == 10.0 * before + tag + 1).all()) for tag in range(TAGS))
    by_mpi = communicator.sent_bytes - sent_bytes >= given.nbytes
    selected = world().device.selection.name
    values = "the values of the rank before" if is_right else "other values"
    return Finding.of(
        is_right and by_mpi == (selected != "nccl"),
        f"the values of the rank before, by {selected}",
        f"{values}, {'through the host' if by_mpi else 'by nccl'}",
    )
