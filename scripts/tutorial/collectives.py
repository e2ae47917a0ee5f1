"""Operations that all ranks take part in, and what each has afterwards.

mpirun -n 4 python scripts/tutorial/collectives.py

broadcast        one rank's tensor, to all               reduce           the sum, to one rank
scatter          one part of it, to each                 all_reduce       the sum, to all
gather           each one's tensor, to one rank          reduce_scatter   a part of the sum, to each
all_gather       each one's tensor, to all               all_to_all       from each a part, to each
"""

import torch
from torch import Tensor

import mpisgd


def run(rank: int, size: int) -> dict[str, Tensor | None]:
    """Return what this rank has after each operation; before, rank r has [r, r, ...]."""

    def mine() -> Tensor:
        return torch.full((size,), float(rank))

    def parts() -> list[Tensor]:
        return [torch.empty(size) for _ in range(size)]

    done: dict[str, Tensor | None] = {"broadcast": mine(), "all_reduce": mine(), "reduce": mine()}
    mpisgd.broadcast(done["broadcast"], src=size - 1)
    mpisgd.all_reduce(done["all_reduce"])
    mpisgd.reduce(done["reduce"], dst=0)
    done["scatter"] = torch.empty(1)
    mpisgd.scatter(done["scatter"], list(torch.arange(float(size)).split(1)) if rank == 0 else None, src=0)
    gathered = parts() if rank == 0 else None
    mpisgd.gather(mine(), gathered, dst=0)
    done["gather"] = torch.stack(gathered) if gathered is not None else None
    everything = parts()
    mpisgd.all_gather(everything, mine())
    done["all_gather"] = torch.stack(everything)
    done["reduce_scatter"], done["all_to_all"] = torch.empty(1), torch.empty(size)
    mpisgd.reduce_scatter_tensor(done["reduce_scatter"], mine())
    mpisgd.all_to_all_single(done["all_to_all"], mine())
    return done


if __name__ == "__main__":
    mpisgd.init()
    for name, tensor in run(mpisgd.rank(), mpisgd.size()).items():
        if mpisgd.rank() == 0 and tensor is not None:
            print(f"{name}: {tensor.tolist()}", flush=True)
