"""Trains an MLP with what `Offload` keeps in files, or with everything in memory, and prints the losses.

offloaded.py '{"folder": ..., "what": null | "optimizer" | "optimizer,parameters", "limit_mib": 0, ...}'
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import mpisgd
from mpisgd import checkpoint
from mpisgd.sharding.offload.private_file import PrivateFile

OPTIONS = {
    "what": None,
    "limit_mib": 0,
    "room_mib": 0,
    "width": 64,
    "depth": 4,
    "steps": 4,
    "save_every": 0,
    "kill_at": 0,
    "resume": False,
}


def data_mib():
    """The private memory that this process has now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmData"))


def make_model(width, depth):
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())))


def kill_at(num_writes):
    """Have this process killed when it is about to write for the n-th time."""
    write, left = PrivateFile.write, [num_writes]

    def counting(self, memory, start):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        write(self, memory[: len(memory) // 2], start)
        write(self, memory, start)

    PrivateFile.write = counting


def main(options):
    mpisgd.init(num_threads=1)
    torch.manual_seed(0)
    limit = options["limit_mib"] or (data_mib() + options["room_mib"] if options["room_mib"] else 0)
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit * 2**20, limit * 2**20))
    offload, what = None, options["what"]
    if what:
        offload = mpisgd.Offload(options["folder"], what=what, block_bytes=options.get("block_bytes", 2**20))
    with torch.device("meta" if what == "optimizer,parameters" else "cpu"):
        model = make_model(options["width"], options["depth"])
    if what == "optimizer,parameters":
        mpisgd.offload_parameters(model, offload)
    num_parameters = sum(param.numel() for param in model.parameters())
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=1e-3), strategy=mpisgd.Sharded(offload=offload)
    )
    if options["kill_at"]:
        kill_at(options["kill_at"])
    if options["resume"]:
        scratch = options["folder"] if what else None
        checkpoint.load(options["folder"], model=model, optimizer=optimizer, scratch=scratch)
    losses = []
    generator = torch.Generator().manual_seed(mpisgd.rank())
    for step in range(1, options["steps"] + 1):
        x = torch.randn(8, options["width"], generator=generator)
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if options["save_every"] and step % options["save_every"] == 0:
            checkpoint.save(options["folder"], step, model=model, optimizer=optimizer, keep_last=1)
    if mpisgd.rank() == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"losses": losses, "bytes": 12 * num_parameters, "peak": peak}), flush=True)


main({**OPTIONS, **json.loads(sys.argv[1])})
