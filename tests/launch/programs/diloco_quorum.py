"""Learners of DiLoCo, of which one is stopped for a while and another is killed; what rank 0 has seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import torch

import mpisgd
from mpisgd.event_log import EventLog

STEPS, GRACE_S, STOPPED, KILLED = 60, 0.5, 1, 2
STEP_S = 0.02

mpisgd.init()
rank = mpisgd.rank()
torch.manual_seed(rank)
model = torch.nn.Linear(16, 4)
mpisgd.broadcast_parameters(model)
optimizer = mpisgd.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=0.01),
    strategy=mpisgd.DiLoCo(4, quorum=2, grace_s=GRACE_S),
)
optimizer.synchronizer.outer_events = EventLog()
longest_s = 0.0
for step in range(STEPS):
    if (rank, step) == (STOPPED, 10):
        pause = f"kill -STOP {os.getpid()}; sleep 2; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", pause], start_new_session=True)
        time.sleep(0.2)
    if (rank, step) == (KILLED, STEPS // 2):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(STEP_S)
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    began_s = time.monotonic()
    optimizer.step()
    longest_s = max(longest_s, (time.monotonic() - began_s) * (step > 0))
optimizer.synchronizer.finish()
seen = {
    "rank": rank,
    "outer": [entry.ranks for entry in optimizer.synchronizer.outer_events.entries],
    "longest_s": longest_s,
    "parameters": [float(param.detach().double().sum()) for param in model.parameters()],
}
print(json.dumps(seen), flush=True)
time.sleep(1)
os._exit(0)
