"""All ranks but the last add up their tensors in a group of their own: python group_all_reduce.py BACKEND."""

import sys

import torch
import torch.distributed as dist


def main(backend: str) -> None:
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((2,), rank + 1.0)
    everybody, few = dist.new_group(list(range(size))), dist.new_group(list(range(size - 1)))
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=everybody)
    if rank < size - 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=few)
    print(f"group: rank {rank} has {tensor.tolist()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
