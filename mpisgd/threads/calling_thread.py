"""Which threads may call MPI: below thread level SERIALIZED the one alone that has started it.

torch computes the backward of what lies on a GPU in a thread of its own, and calls hooks there.
"""

import threading

from mpisgd.errors import MpiFailed

__all__ = ["check_calling_thread"]


def check_calling_thread(only_thread: int | None, what: str) -> None:
    """Raise where this thread may not call MPI; on every rank, if all of them do the same.

    Args:
        only_thread: the one that may; None: all may.
        what: is called.
    """
    if only_thread is not None and threading.get_ident() != only_thread:
        raise MpiFailed(
            f"{what}: MPI runs at a thread level below SERIALIZED, where only the thread that has started "
            f"MPI may call it, and this is thread '{threading.current_thread().name}'. Call from the main "
            "thread, or have MPI started at SERIALIZED or MULTIPLE. For a model on a GPU torch computes "
            "backward in a thread of its own: run it inside optimizer.no_sync(), and step() reduces the "
            "gradients"
        )
