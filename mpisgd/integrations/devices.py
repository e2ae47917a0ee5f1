"""Which rank of a host uses which of its devices; separate, since it needs no framework."""

from collections.abc import Sequence

import torch

__all__ = ["assign_devices"]


def assign_devices(devices: Sequence[torch.device], num_ranks: int) -> list[torch.device]:
    """Return a device for each rank of a host, in turn; ranks share devices if there are fewer."""
    return [devices[rank % len(devices)] for rank in range(num_ranks)]
