"""Rank 1 is killed while the others wait for their GPUs, which wait for it by NCCL; they go on without it.

Rank 0 writes what happened to the file that is the first argument: a line for each world.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from simulated_gpu.runtime import SimulatedGpu

import mpisgd
from mpisgd.accelerator.runtime import set_runtime


def main() -> None:
    set_runtime(SimulatedGpu())
    mpisgd.init(gpu="nccl")
    state = mpisgd.elastic.State(began_s=0.0)

    @mpisgd.elastic.run
    def train(state: mpisgd.elastic.State) -> None:
        tensor = torch.ones(4, device=f"simgpu:{mpisgd.local_rank()}")
        mpisgd.all_reduce(tensor)
        line = f"{mpisgd.size()} ranks, sum {tensor.sum().item():g}"
        if mpisgd.size() == 3:
            if mpisgd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            began_s = time.monotonic()
            mpisgd.all_reduce(tensor)
            tensor.sum().item()
            try:
                mpisgd.all_reduce(tensor)
            except mpisgd.MpisgdError as exc:
                write(f"{line}; woken after {time.monotonic() - began_s:.1f} s: {type(exc).__name__}: {exc}")
                raise
        write(line)

    train(state)


def write(line: str) -> None:
    if mpisgd.rank() == 0:
        with open(sys.argv[1], "a") as file:
            print(line, file=file)


main()
