"""Each rank trains a model of 24 MB with Adam, and says what it takes beside it: argument: the strategy.

Writes a line of JSON per rank: the bytes by which the process has grown since the model was made (counted by
the kernel, shared memory by its share), and what `estimate_memory` predicts.
"""

import ctypes
import gc
import json
import sys

import torch
from torch import nn

import mpisgd
from mpisgd.methods.from_text import strategy_from_text
from mpisgd.tools.bench.memory.process_memory import read_memory

WIDTH, LAYERS = 1000, 6
BUCKET_CAP_BYTES = 2**22  # one layer


def taken() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is not taken
    found = read_memory()
    assert found is not None
    return found.private + found.shared


def main() -> None:
    mpisgd.init()
    torch.set_num_threads(1)
    warm = nn.Linear(8, 8)  # what torch takes for the first step of all
    warm_up = torch.optim.Adam(warm.parameters())
    warm(torch.ones(1, 8)).sum().backward()
    warm_up.step()
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    mpisgd.broadcast_parameters(model)
    plain = torch.optim.Adam(model.parameters())
    size, cap = mpisgd.size(), BUCKET_CAP_BYTES  # torch imports much for the estimate, so that comes first
    estimate = mpisgd.estimate_memory(model, plain, ranks=size, bucket_cap_bytes=cap)[sys.argv[1]]
    before = taken()
    strategy = strategy_from_text(sys.argv[1])
    optimizer = mpisgd.DistributedOptimizer(plain, strategy=strategy, bucket_cap_bytes=cap)
    seen = []
    # After mpisgd's own hooks, other than a program's.
    torch.optim.Optimizer.register_step_pre_hook(optimizer, lambda *_: seen.append(taken() - before))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
    line = {"seen": seen[-1], "predicted": estimate.total - estimate.parameters}
    gathered: list = [None] * mpisgd.size()
    mpisgd.all_gather_object(gathered, line)
    if mpisgd.rank() == 0:
        print("\n".join(map(json.dumps, gathered)))


if __name__ == "__main__":
    main()
