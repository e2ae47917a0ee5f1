"""Which rank of a host works on which of its devices."""

from collections.abc import Sequence

import torch

__all__ = ["deal_out"]


def deal_out(devices: Sequence[torch.device], num_ranks: int) -> list[torch.device]:
    """Return a device for each rank of a host, in turn; where they are fewer, ranks share them."""
    return [devices[rank % len(devices)] for rank in range(num_ranks)]
