"""What has been broken once, under torch.distributed; each test tells what it was."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from verdicts import everyone, raises_everywhere

pytestmark = pytest.mark.mpi(min_size=2)


def test_a_failed_all_reduce_is_an_error_of_backward():
    # A segmentation fault: DDP's reducer, in C++, took the exception in the future for the future's tensors.
    group = dist.new_group()
    net = DistributedDataParallel(torch.nn.Linear(3, 2), process_group=group)
    loss = net(torch.ones(4, 3)).sum()
    with raises_everywhere(RuntimeError) as caught:
        if dist.get_rank() == 0:
            loss.backward()
        else:
            dist.all_reduce(torch.ones(5), group=group)
    everyone("all_reduce(op=SUM, dtype=float32, shape=[8]" in caught.text, caught.text)
    everyone("all_reduce(op=SUM, dtype=float32, shape=[5]" in caught.text, caught.text)
    dist.destroy_process_group(group)
