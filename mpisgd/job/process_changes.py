"""What a job changes of its process, each with what undoes it; `shutdown()` undoes all.

Importing changes nothing. MPI's settings stay in the environment, since MPI runs on until the process ends.
"""

import contextlib
import gc
import os
from collections.abc import MutableMapping

from mpisgd import config

__all__ = ["changes", "freeze_modules", "publish_rank"]

changes = contextlib.ExitStack()  # of this process; the last one is undone first


def publish_rank(env: MutableMapping[str, str] = os.environ) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE as torchrun does, for programs that read them.

    Without a launcher nothing is set. Where another launcher's numbers are set, these stay.
    """
    found = config.torchrun_variables(env)
    if any(env.get(name, value) != value for name, value in found.items()):
        return
    for name in found.keys() - env.keys():
        env[name] = found[name]
        changes.callback(_unset, env, name, found[name])


def _unset(env: MutableMapping[str, str], name: str, value: str) -> None:
    if env.get(name) == value:
        del env[name]


def freeze_modules() -> None:
    """Under a launcher, exempt what exists by now, torch's modules above all, from garbage collection.

    These 160,000 objects live as long as the process. The collector would go through them in the middle of
    training, and several times at the end of the process: 0.4 s on every rank. What is garbage already is
    collected first.
    """
    if config.is_launched() and not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
        changes.callback(gc.unfreeze)
