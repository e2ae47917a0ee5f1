"""What the hosts of a job send over their network interfaces."""

import psutil
import torch

import mpisgd

__all__ = ["sent_bytes"]


def sent_bytes() -> float:
    """Return what all hosts have sent so far, headers and whatever else passes included. Collective.

    0 where all ranks share a host.
    """
    mine = 0
    if mpisgd.num_nodes() > 1 and mpisgd.local_rank() == 0:
        counters = psutil.net_io_counters(pernic=True)
        mine = sum(counter.bytes_sent for name, counter in counters.items() if name != "lo")
    total = torch.tensor(mine, dtype=torch.float64)
    mpisgd.all_reduce(total)
    return float(total)
