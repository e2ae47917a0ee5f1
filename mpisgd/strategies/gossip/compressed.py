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

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import cut_by
from mpisgd.compress.compressor import BucketLayout, Compressor
from mpisgd.compress.randomness import generator
from mpisgd.core.group import Group
from mpisgd.gossip.graph import Graph
from mpisgd.gossip.neighbor_all_reduce import mix
from mpisgd.gossip.neighbor_gather import neighbor_gather
from mpisgd.strategies.gossip.synchronous import Mixer
from mpisgd.strategies.training import Training

__all__ = ["CompressedMixer"]


class _Copies:
    """What a rank keeps of tensors of one dtype and device, side by side as float32 or float64.

    Args:
        layout: of the tensors, in that dtype.
        compressor: C.

    Attributes:
        layout: as given.
        own: h[i] of this rank.
        total: s[i].
    """

    def __init__(self, layout: BucketLayout, compressor: Compressor) -> None:
        self.layout = layout
        self.own = torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)
        self.total = torch.zeros_like(self.own)
        self._codec, self._seed = compressor.codec(layout), getattr(compressor, "seed", 0)

    def begin(self, tensors: Sequence[Tensor], graph: Graph, group: Group) -> None:
        """Set h to x, and s to the mean of that with the neighbours. Collective."""
        self.own = self._joined(tensors)
        self.total = self.own.clone()
        mix([self.total], graph, group, 0)

    def mix(self, tensors: Sequence[Tensor], graph: Graph, group: Group, number: int, share: float) -> None:
        """Send q, take those of the neighbours, and go towards their mean. Collective.

        Args:
            tensors: x[i]; changed.
            graph: whom each rank exchanges with, as for `group`.
            group: the ranks.
            number: of the step: random numbers of compressors differ by it.
            share: c.
        """
        x = self._joined(tensors)
        mine = self._codec.compress(x - self.own, generator(self._seed, number, x.numel(), group.rank))
        messages = {**neighbor_gather(mine.cpu(), graph, group), group.rank: mine}
        self._codec.decompress(mine, self.own)
        for src, weight in graph.exchange(group.rank, group.size).terms:
            change = torch.zeros_like(x)
            self._codec.decompress(messages[src].to(x.device), change)
            self.total.add_(change, alpha=weight)
        x.add_(self.total - self.own, alpha=share)
        for tensor, part in zip(tensors, cut_by(x, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    def _joined(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(-1).to(self.layout.dtype) for tensor in tensors])


class CompressedMixer(Mixer):
    """Updates, then mixes by compressed changes; buffers, and what is not compressed, are mixed whole.

    Args:
        training: what it works on, with the compressor among its options.
        graph: whom each rank exchanges with, the same in every step.
        every: the ranks mix in every so manieth step.
        consensus_step: c, see above.
    """

    def __init__(self, training: Training, graph: Graph, every: int, consensus_step: float) -> None:
        super().__init__(training, graph, every)
        self._consensus_step = consensus_step
        self._make_copies()

    def _make_copies(self) -> None:
        compressor = self.training.options.compression
        self._copies = [_Copies(_layout(tensors), compressor) for tensors in self._compressed()]

    def _compressed(self) -> list[list[Tensor]]:
        """Return what is compressed, by dtype and device."""
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in self.mixed:
            if self.training.options.compression.changes(tensor.dtype):
                alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        return list(alike.values())

    def begin(self) -> None:
        """Take the parameters as they are for the copies. Collective."""
        for copies, tensors in zip(self._copies, self._compressed(), strict=True):
            copies.begin(tensors, self._graph, self.training.group)

    def synchronize(self) -> None:
        """Mix, if it is time to. Collective then."""
        if self.steps % self._every:
            return
        compressed = self._compressed()
        if [copies.layout for copies in self._copies] != [_layout(tensors) for tensors in compressed]:
            self._make_copies()  # parameters were frozen, say
            self.begin()
        for copies, tensors in zip(self._copies, compressed, strict=True):
            copies.mix(tensors, self._graph, self.training.group, self.steps, self._consensus_step)
        changes = self.training.options.compression.changes
        unchanged = [tensor for tensor in self.mixed if not changes(tensor.dtype)]
        if whole := [*unchanged, *self.buffers]:
            self.mix_whole(whole, self.steps)

    def reopen(self) -> None:
        """Begin anew with the ranks and parameters that there are now."""
        super().reopen()
        self._make_copies()
        self._begins = True

    def own_state(self) -> dict[str, Any]:
        """Return the copies."""
        return {"copies": [{"own": copies.own, "total": copies.total} for copies in self._copies]}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Take over the copies."""
        for copies, saved in zip(self._copies, state["copies"], strict=True):
            copies.own, copies.total = saved["own"].clone(), saved["total"].clone()


def _layout(tensors: Sequence[Tensor]) -> BucketLayout:
    """Return the layout of tensors side by side, in the dtype in which they are compressed."""
    wide = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
    return BucketLayout(tuple(tensor.shape for tensor in tensors), wide, tensors[0].device)
