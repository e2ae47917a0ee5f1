"""Two ranks pass a tensor to and fro, first blocking, then not: python point_to_point.py BACKEND."""

import sys

import torch
import torch.distributed as dist


def blocking(rank: int) -> None:
    tensor = torch.zeros(3)
    if rank == 0:
        tensor += 1
        dist.send(tensor, dst=1)
    else:
        dist.recv(tensor, src=0)
    print(f"blocking: rank {rank} has {tensor.tolist()}", flush=True)


def immediate(rank: int) -> None:
    tensor = torch.zeros(3)
    if rank == 0:
        tensor += 2
        request = dist.isend(tensor, dst=1)
    else:
        request = dist.irecv(tensor, src=0)
    request.wait()
    print(f"immediate: rank {rank} has {tensor.tolist()}", flush=True)


def main(backend: str) -> None:
    dist.init_process_group(backend)
    blocking(dist.get_rank())
    immediate(dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
