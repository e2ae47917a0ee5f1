"""What `import torch`, a job and its end change of the process: one line of JSON for each, from rank 0.

Started with torch's look-up of entry points turned off, so that what the entry point does can be seen alone.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import warnings
from typing import Any

import torch
import torch.distributed as dist

HOOKS = {
    "sys.excepthook": lambda: sys.excepthook,
    "threading.excepthook": lambda: threading.excepthook,
    "sys.exit": lambda: sys.exit,
    "torch threads": torch.get_num_threads,
    "frozen objects": lambda: gc.get_freeze_count() > 0,
    "gc.threshold": gc.get_threshold,
    "signals": lambda: tuple(map(signal.getsignal, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))),
    "faulthandler": faulthandler.is_enabled,
    "threads": lambda: sorted(thread.name for thread in threading.enumerate()),
}


def copied(value: Any) -> Any:
    """Something that stays as it is when `value` changes."""
    return type(value)(value) if type(value) in (dict, list, set) else value


def torchs_classes(module: Any) -> list[type]:
    """The classes that a module of torch defines."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]


def snapshot() -> dict[str, Any]:
    """Attributes of torch's modules, classes and functions, the environment, the interpreter's hooks."""
    found = {f"env {name}": value for name, value in os.environ.items()}
    found |= {name: look() for name, look in HOOKS.items()}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "torch" or not hasattr(module, "__dict__"):
            continue
        found[f"module {name}"] = True
        for attribute, value in list(vars(module).items()):
            found[f"{name}.{attribute}"] = copied(value)
        for cls in torchs_classes(module):
            for attribute, value in list(vars(cls).items()):
                found[f"{name}.{cls.__name__}.{attribute}"] = copied(value)
                wrapped = getattr(value, "__wrapped__", value)
                for mark, kept in list(getattr(wrapped, "__dict__", {}).items()):
                    found[f"{name}.{cls.__name__}.{attribute}: {mark}"] = kept
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The names of what is not the same."""
    names = before.keys() | after.keys()
    return sorted(name for name in names if not same(before.get(name), after.get(name)))


def same(one: Any, other: Any) -> bool:
    return one is other or (
        type(one) is type(other) and isinstance(one, dict | list | set | str | int | tuple) and one == other
    )


torch.manual_seed(0)
warnings.simplefilter(
    "ignore", FutureWarning
)  # torch warns of some of its attributes when they are looked at
bare = snapshot()
import mpisgd.torch_backend  # noqa: E402

mpisgd.torch_backend.register()
imported = snapshot()
import mpisgd  # noqa: E402

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # what torch changes of itself
dist.destroy_process_group()
before = snapshot()
mpisgd.init()
dist.init_process_group("mpisgd")
during = snapshot()
rank = mpisgd.rank()
dist.destroy_process_group()
mpisgd.shutdown()
after = snapshot()
if rank == 0:
    for one, other in ((bare, imported), (before, during), (before, after)):
        print(json.dumps(differences(one, other)))
