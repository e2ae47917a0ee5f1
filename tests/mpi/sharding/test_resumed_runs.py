"""A run that was saved and loaded goes on as if nothing had been, whatever the situation: drawn at random."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from test_offload import FEATURES, batch
from torch import nn
from verdicts import everyone

import mpisgd

STRATEGIES = {
    "stage 1": {"strategy": mpisgd.Sharded(1)},
    "stage 2": {"strategy": mpisgd.Sharded(2)},
    "overlapped": {"strategy": mpisgd.Sharded(2, overlap_forward=True), "overlap": True},
    "shared": {"share_parameters": True},
    "shared shards": {"strategy": mpisgd.Sharded(1), "share_parameters": True},
}
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}


class Training:
    """Two optimizers over halves of a model, whose parameters have equal shapes."""

    def __init__(self, how, kind):
        torch.manual_seed(3)
        self.model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES) for _ in range(4))).double()
        self.optimizers = [
            mpisgd.DistributedOptimizer(OPTIMIZERS[kind](half.parameters()), bucket_cap_bytes=3000, **how)
            for half in (self.model[:2], self.model[2:])
        ]

    def step(self, number, situation):
        frozen, accumulates, clips = situation
        for k, layer in enumerate(self.model):
            layer.requires_grad_(k != frozen)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if accumulates:
            with self.optimizers[0].no_sync(), self.optimizers[1].no_sync():
                self.model(batch(number, 1)).square().sum().backward()
        self.model(batch(number)).square().sum().backward()
        for optimizer in self.optimizers:
            if clips:
                optimizer.clip_grad_norm_(0.5)
            optimizer.step()

    def saved(self):
        return copy.deepcopy([value.state_dict() for value in (self.model, *self.optimizers)])

    def load(self, saved):
        for value, state in zip((self.model, *self.optimizers), saved, strict=True):
            value.load_state_dict(copy.deepcopy(state))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_resumed_run_equals_one_that_went_on(name, seed):
    draw = random.Random(f"{name} {seed}")  # the same on all ranks
    kind, stop = draw.choice(list(OPTIMIZERS)), draw.randrange(1, 4)
    steps = [(draw.choice([None, 0, 3]), draw.random() < 0.4, draw.random() < 0.4) for _ in range(6)]
    whole = Training(STRATEGIES[name], kind)
    for number, situation in enumerate(steps):
        if number == stop:
            saved = whole.saved()
        whole.step(number, situation)
    resumed = Training(STRATEGIES[name], kind)
    resumed.load(saved)
    for number, situation in enumerate(steps[stop:], stop):
        resumed.step(number, situation)
    ends = [list(run.model.state_dict().values()) for run in (whole, resumed)]
    off = max(float((a - b).abs().max()) for a, b in zip(*ends, strict=True))
    # The norm to clip by is summed piece by piece, and a loaded state may have cut other pieces.
    everyone(off <= (1e-12 if any(clips for _, _, clips in steps) else 0.0), f"{kind}, {steps}: {off}")
