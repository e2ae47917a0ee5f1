"""`ElasticSampler`: shards of a data set, made again of the rest when the ranks change."""

import itertools
import random
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from mpisgd.arguments import check_flag, check_seed
from mpisgd.errors import InvalidArgument
from mpisgd.job import rank_info

__all__ = ["ElasticSampler"]


class ElasticSampler(Sampler[int]):
    """Distributes the indices of a data set over the ranks, round robin, without those recorded as processed.

    All ranks get the same number; the first indices are repeated if they do not divide evenly. Put the
    sampler into the `State`, call `record_batch` after each batch, and `set_epoch` at the end of an epoch.

    Args:
        dataset: only its length is used.
        shuffle: whether to permute the indices in each epoch, the same on all ranks.
        seed: of the permutations.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        if not hasattr(type(dataset), "__len__"):
            kind = type(dataset).__name__
            raise InvalidArgument(f"ElasticSampler: dataset is a {kind}; expected one with a length")
        check_flag("ElasticSampler", "shuffle", shuffle)
        check_seed("ElasticSampler", seed)
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch; called at the end of the one before, and not after a restore."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that every rank has processed a batch of `batch_size`."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the number of processed indices."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state of a sampler, at any number of ranks."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Distribute the remaining indices over the present ranks."""
        self.num_replicas, self.rank = rank_info.size(), rank_info.rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        repeated = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return itertools.islice(repeated, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
