"""Communication hooks for DistributedDataParallel that torch's own wheels refuse."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

__all__ = ["bf16_compress"]


# DDP reads the annotations and refuses what is not just these two types, spelt out.
def bf16_compress(process_group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Send a bucket of gradients as bfloat16: half the bytes.

    In place of torch's `bf16_compress_hook`, which DDP refuses by name on wheels without CUDA:
    `model.register_comm_hook(None, mpisgd.torch_backend.bf16_compress)`. The ranks' values are averaged in
    float32 and rounded once.

    Args:
        process_group: to average over; None for the default group.
        bucket: DDP's bucket of gradients.
    """
    group = process_group or distributed_c10d._get_default_group()
    buffer: Tensor = bucket.buffer()
    halves = buffer.to(torch.bfloat16)
    work = dist.all_reduce(halves, op=dist.ReduceOp.AVG, group=group, async_op=True)
    assert work is not None
    reduced: torch.futures.Future[Tensor] = work.get_future().then(lambda _: buffer.copy_(halves))
    return reduced
