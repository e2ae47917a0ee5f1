"""Workers that are stopped at random, of which one is killed in the middle of a push; what rank 0 counts."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time

import torch

import mpisgd
from mpisgd.methods.parameter_server.shard_memory import ShardMemory

MODE, STEPS, KILLED, NUM_STOPS = sys.argv[1], 60, 2, 30


def stop_at_random(pids: list[int]) -> None:
    """Stop workers for a moment, one after another; they may hold a lock then."""
    dice = random.Random(3)
    for _ in range(NUM_STOPS):
        pid = dice.choice(pids)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(dice.uniform(0.005, 0.03))
        os.kill(pid, signal.SIGCONT)
        time.sleep(dice.uniform(0, 0.01))


def die_in_the_middle() -> None:
    """Kill this process in its next commit, when one half of the shard is new."""

    def commit(self: ShardMemory, shard: int) -> None:
        version = self._version(shard, self._next[shard])
        version.flat[: len(version.flat) // 2] = 255
        os.kill(os.getpid(), signal.SIGKILL)

    ShardMemory.commit = commit


mpisgd.init()
rank = mpisgd.rank()
pids: list[int] = [0] * mpisgd.size()
mpisgd.all_gather_object(pids, os.getpid())
torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = mpisgd.DistributedOptimizer(
    torch.optim.Adam(model.parameters(), lr=0.001),
    strategy=mpisgd.ParameterServer(MODE, staleness_steps=3 if MODE == "ssp" else None),
)
stopper = threading.Thread(target=stop_at_random, args=([pids[1]],))
for step in range(STEPS):
    if rank == 0 and step == 5:
        stopper.start()
    if rank == KILLED and step == STEPS // 3:
        die_in_the_middle()
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
if rank == 0:
    stopper.join()
optimizer.synchronizer.finish()
counters = optimizer.synchronizer.counters()
if rank == 0:
    finite = all(bool(param.isfinite().all()) for param in model.parameters())
    print(json.dumps({**counters._asdict(), "finite": finite}), flush=True)
    time.sleep(1)
os._exit(0)
