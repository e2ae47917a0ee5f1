"""Learners of DiLoCo that are several ranks each, of which one rank is killed; what the others have seen.

mpirun -n 4 --with-ft ulfm python diloco_learners.py 2 3       # two ranks are a learner; rank 3 is killed
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch

import mpisgd
from mpisgd.errors import LearnerLost
from mpisgd.event_log import EventLog

STEPS, GRACE_S, STEP_S = 60, 0.5, 0.02

learners, killed = sys.argv[1:3]
catches = "catches" in sys.argv
mpisgd.init()
rank = mpisgd.rank()
torch.manual_seed(rank)
model = torch.nn.Linear(16, 4)
mpisgd.broadcast_parameters(model)
optimizer: Any = mpisgd.DistributedOptimizer(
    torch.optim.AdamW(model.parameters(), lr=0.01),
    strategy=mpisgd.DiLoCo(
        4, quorum=1, grace_s=GRACE_S, learners=int(learners) if learners.isdigit() else learners
    ),
)
optimizer.synchronizer.outer_events = EventLog()
longest_s = 0.0


def train() -> None:
    global longest_s
    for step in range(STEPS):
        if (rank, step) == (int(killed), STEPS // 2):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(STEP_S)
        optimizer.zero_grad()
        began_s = time.monotonic()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        longest_s = max(longest_s, (time.monotonic() - began_s) * (step > 0))
    optimizer.synchronizer.finish()


def tell(**more: object) -> None:
    parameters = [float(param.detach().double().sum()) for param in model.parameters()]
    print(json.dumps({"rank": rank, "longest_s": longest_s, "parameters": parameters, **more}), flush=True)


if catches:
    try:
        train()
    except LearnerLost as exc:
        tell(error=str(exc))
        sys.exit()
else:
    train()
tell(outer=[entry.ranks for entry in optimizer.synchronizer.outer_events.entries])
time.sleep(1)
os._exit(0)
