"""A log of a program's training steps, and their limit: how `python -m mpisgd bench layout` times programs.

MPISGD_STEP_LOG names a file. Rank 0 begins it in `init()` with the number of ranks, and appends a line for
each step of a torch optimizer: the optimizer's number, the time in seconds, and torch's threads.

    ranks 2
    step 0 1234.567 1

After MPISGD_STEP_LIMIT steps of one optimizer, every rank ends as with `sys.exit()`.
"""

import functools
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpisgd import config

__all__ = ["StepLog", "start_step_log"]


class StepLog:
    """Called after each step of any optimizer in this process; wrappers have finished theirs then.

    Args:
        path: of the file, None for none.
        limit: of the steps of one optimizer, 0 for none.
        num_ranks: of the job.
    """

    def __init__(self, path: Path | None, limit: int, num_ranks: int) -> None:
        self._limit = limit
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = None if path is None else os.open(path, flags, 0o644)  # as long as the process runs
        self._steps: dict[int, int] = {}  # by the optimizer's id, in the order of their first steps
        self._write(f"ranks {num_ranks}")

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Note a step; raise SystemExit after the last one."""
        now_s, key = time.perf_counter(), id(optimizer)
        self._steps[key] = self._steps.get(key, 0) + 1
        self._write(f"step {list(self._steps).index(key)} {now_s} {torch.get_num_threads()}")
        if self._steps[key] == self._limit:
            raise SystemExit(0)

    def _write(self, line: str) -> None:
        if self._file is not None:
            os.write(self._file, f"{line}\n".encode())


@functools.cache  # once, however often the job begins anew
def start_step_log(rank: int, num_ranks: int) -> None:
    """Log and limit the steps of this process, if the environment says so."""
    path, limit = config.step_log(), config.step_limit()
    if path is not None or limit:
        log = StepLog(path if rank == 0 else None, limit, num_ranks)
        register_optimizer_step_post_hook(log)
