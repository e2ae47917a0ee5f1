"""`CompressedMixer`: ranks send compressed changes of their parameters, and mix what these add up to.

CHOCO-SGD. x[i] is the parameters of rank i, h[i] the copy of them that its neighbours have, too, C the
compressor, W the mixing matrix, c the consensus step, g the step size:

    x[i] <- x[i] - g grad f[i](x[i])                              any optimizer
    q[i]  = C(x[i] - h[i])                                        sent to the neighbours
    h[j] <- h[j] + q[j]                                           for j = i and all neighbours j
    x[i] <- x[i] + c * (sum over j of W[i, j] (h[j] - h[i]))

What C leaves out is in x - h and so comes up again: there is no other residual. Since W does not change, a
rank needs the h of its neighbours only in their sum s[i] = sum over j of W[i, j] h[j], which grows by that of
the messages; so there are two copies of the parameters, whatever the number of neighbours. At first h = x,
for which the parameters travel once as they are. With C(x) = x and c = 1 it is adapt then combine.

Source: Koloskova, Stich and Jaggi 2019, "Decentralized Stochastic Optimization and Gossip Algorithms with
Compressed Communication", algorithms 2 and 6 (the sum instead of copies).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import cut_by
from mpisgd.compress.compressor import BucketLayout, Compressor, codec_of
from mpisgd.compress.randomness import generator
from mpisgd.core.group import Group
from mpisgd.gossip.graph import Graph
from mpisgd.gossip.neighbor_all_reduce import mix, neighbor_gather
from mpisgd.method_state import own
from mpisgd.methods.gossip.mixer import Mixer
from mpisgd.methods.strategy.training import Training

__all__ = ["CompressedMixer"]


@dataclass
class _State:
    """The copies of a rank, by tensor, in float32 or float64: of use only where all ranks have theirs.

    Attributes:
        copy: h[i] of this rank.
        total: s[i].
    """

    copy: dict[str, Tensor] = own(default_factory=dict, lost="rebuild")
    total: dict[str, Tensor] = own(default_factory=dict, lost="rebuild")


class _Bucket:
    """Tensors of one dtype and device, whose copies lie side by side.

    Args:
        tensors: by key.
        state: has their copies, which become views of the bucket.
        compressor: C.
    """

    def __init__(self, tensors: Mapping[str, Tensor], state: _State, compressor: Compressor) -> None:
        self._numels = [tensor.numel() for tensor in tensors.values()]
        layout = _layout(list(tensors.values()))
        self._dtype = layout.dtype
        codec = codec_of(compressor, layout)
        assert codec is not None  # `Gossip` has seen to that
        self._codec, self._seed = codec, getattr(compressor, "seed", 0)
        self._own = self._as_one(state.copy, tensors)
        self._total = self._as_one(state.total, tensors)
        self.keys = list(tensors)

    def _as_one(self, copies: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> Tensor:
        """Put the copies of `tensors` side by side, as views of what is returned."""
        flat = torch.cat([copies[key].reshape(-1) for key in tensors])
        for (key, tensor), view in zip(tensors.items(), cut_by(flat, self._numels), strict=True):
            copies[key] = view.view(tensor.shape)
        return flat

    def mix(self, tensors: Sequence[Tensor], graph: Graph, group: Group, number: int, share: float) -> None:
        """Send q, take those of the neighbours, and go towards their mean. Collective.

        Args:
            tensors: x[i]; changed.
            graph: whom each rank exchanges with, as for `group`.
            group: the ranks.
            number: of the step: random numbers of compressors differ by it.
            share: c.
        """
        x = torch.cat([tensor.reshape(-1).to(self._dtype) for tensor in tensors])
        mine = self._codec.compress(x - self._own, generator(self._seed, number, x.numel(), group.rank))
        messages = {**neighbor_gather(mine.cpu(), graph, group), group.rank: mine}
        self._codec.decompress(mine, self._own)
        change = torch.empty_like(x)
        for src, weight in graph.exchange(group.rank, group.size).terms:
            self._codec.decompress(messages[src].to(x.device), change.zero_())
            self._total.add_(change, alpha=weight)
        x.add_(torch.sub(self._total, self._own, out=change), alpha=share)
        for tensor, part in zip(tensors, cut_by(x, self._numels), strict=True):
            tensor.copy_(part.view(tensor.shape))


class CompressedMixer(Mixer):
    """Updates, then mixes by compressed changes; buffers, and what is not compressed, are mixed whole.

    Args:
        training: what it works on, with the compressor among its options.
        graph: whom each rank exchanges with, the same in every step.
        every: steps from one exchange with the neighbours to the next.
        consensus_step: c, see above.
    """

    def __init__(self, training: Training, graph: Graph, every: int, consensus_step: float) -> None:
        super().__init__(training, graph, every)
        self._consensus_step = consensus_step
        self._dtypes: list[torch.dtype] = []
        self.state = _State()

    def has_changed(self) -> bool:
        """Return whether parameters were frozen, or are no longer so, or have another dtype."""
        dtypes = [param.dtype for _, param in self.training.named]
        before, self._dtypes = self._dtypes, dtypes
        return super().has_changed() or before != dtypes

    def begin(self, tensors: Mapping[str, Tensor]) -> None:
        """Set h to x, and s to the mean of that with the neighbours: x travels as it is. Collective."""
        state, by_device = self.state, defaultdict[torch.device, list[Tensor]](list)
        for key, tensor in tensors.items():
            if self.training.options.compression.changes(tensor.dtype):
                state.copy[key] = tensor.to(_wide(tensor.dtype), copy=True).contiguous()
                state.total[key] = state.copy[key].clone()
                by_device[tensor.device].append(state.total[key])
        for alike in by_device.values():
            mix(alike, self._graph, self.training.group, 0)

    def derive(self) -> None:
        """Make the buckets of what is mixed now, and compressed. Collective where dtypes have changed."""
        alike: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
        compressor, tensors = self.training.options.compression, self.tensors()
        copies = self.state.copy
        self.begin({k: t for k, t in tensors.items() if k not in copies or copies[k].dtype != _wide(t.dtype)})
        for key, tensor in tensors.items():
            if compressor.changes(tensor.dtype):
                alike.setdefault((tensor.dtype, tensor.device), {})[key] = tensor
        self._buckets = [_Bucket(tensors, self.state, compressor) for tensors in alike.values()]

    def synchronize(self) -> None:
        """Mix, if it is time to. Collective then."""
        if self.num_steps % self._every:
            return
        tensors, group = self.tensors(), self.training.group
        for bucket in self._buckets:
            values = [tensors[key] for key in bucket.keys]
            bucket.mix(values, self._graph, group, self.num_steps, self._consensus_step)
        changes = self.training.options.compression.changes
        unchanged = [tensor for tensor in tensors.values() if not changes(tensor.dtype)]
        if whole := [*unchanged, *self.buffers]:
            self.mix_whole(whole, self.num_steps)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of `dtype` are compressed."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _layout(tensors: Sequence[Tensor]) -> BucketLayout:
    """Return the layout of tensors side by side, in the dtype in which they are compressed."""
    return BucketLayout(tuple(tensor.shape for tensor in tensors), _wide(tensors[0].dtype), tensors[0].device)
