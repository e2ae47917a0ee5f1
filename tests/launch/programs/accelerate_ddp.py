"""Train with Accelerate."""

import os

import torch
from accelerate import Accelerator
from one_process import BATCH_SIZE, loss_of, make_data, make_net, make_optimizer, max_difference
from torch.utils.data import DataLoader

from mpisgd.integrations.accelerate import use_mpi

use_mpi()
assert os.environ["ACCELERATE_USE_CPU"] == "true"  # otherwise ranks of transformers' Trainer train alone
accelerator = Accelerator()
rank, size = accelerator.process_index, accelerator.num_processes
net = make_net(seed=rank)  # DDP gives everyone rank 0's weights
net, optimizer, loader = accelerator.prepare(
    net, make_optimizer(net), DataLoader(make_data(size), batch_size=BATCH_SIZE)
)
for batch in loader:
    optimizer.zero_grad()
    accelerator.backward(loss_of(net, batch))
    optimizer.step()

ranks = accelerator.gather(torch.tensor([rank])).tolist()
print(f"rank {rank} of {size} took {len(loader)} steps over {accelerator.state.backend} with ranks {ranks}")
print(f"trained: max difference {max_difference(net, size):.1e}")
