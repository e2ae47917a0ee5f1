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

from mpisgd.compress.compressor import BucketLayout, Compressor
from mpisgd.compress.randomness import generator
from mpisgd.gossip.graph import Graph
from mpisgd.gossip.neighbor_all_reduce import mix
from mpisgd.gossip.neighbor_gather import neighbor_gather
from mpisgd.strategies.gossip.synchronous import Mixer
from mpisgd.strategies.training import Training

__all__ = ["CompressedMixer"]


class _Flat:
    """The tensors of one dtype and device, side by side as float32 or float64, with their two copies.

    Args:
        tensors: of this rank.
        compressor: C.

    Attributes:
        hat: h[i] of this rank.
        total: s[i].
    """

    def __init__(self, tensors: Sequence[Tensor], compressor: Compressor) -> None:
        self._tensors = tensors
        dtype = torch.float64 if tensors[0].dtype is torch.float64 else torch.float32
        layout = BucketLayout(tuple(tensor.shape for tensor in tensors), dtype, tensors[0].device)
        self._codec, self._seed = compressor.codec(layout), getattr(compressor, "seed", 0)
        self.hat = torch.zeros(layout.numel, dtype=dtype, device=layout.device)
        self.total = torch.zeros_like(self.hat)

    def values(self) -> Tensor:
        """Return x[i]."""
        return torch.cat([tensor.reshape(-1).to(self.hat.dtype) for tensor in self._tensors])

    def begin(self, graph: Graph, training: Training) -> None:
        """Set h to x, and s to the mean of that with the neighbours. Collective."""
        self.hat = self.values()
        self.total = self.hat.clone()
        mix([self.total], graph, training.group, 0)

    def mix(self, graph: Graph, training: Training, number: int, consensus_step: float) -> None:
        """Send q, take those of the neighbours, and go towards their mean. Collective."""
        group, x = training.group, self.values()
        random = generator(self._seed, number, x.numel(), group.rank)
        mine = self._codec.compress(x - self.hat, random)
        messages = {**neighbor_gather(mine.cpu(), graph, group), group.rank: mine}
        self._codec.decompress(mine, self.hat)
        for src, weight in graph.exchange(group.rank, group.size).terms:
            change = torch.zeros_like(x)
            self._codec.decompress(messages[src].to(x.device), change)
            self.total.add_(change, alpha=weight)
        x.add_(self.total - self.hat, alpha=consensus_step)
        for tensor, part in zip(self._tensors, x.split([t.numel() for t in self._tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


class CompressedMixer(Mixer):
    """Updates, then mixes by compressed changes; tensors that the compressor does not change are mixed whole.

    Args:
        training: what it works on, with the compressor among its options.
        graph: whom each rank exchanges with, the same in every step.
        every: the ranks mix in every so manieth step.
        consensus_step: c, see above.
    """

    def __init__(self, training: Training, graph: Graph, every: int, consensus_step: float) -> None:
        super().__init__(training, graph, every)
        self._consensus_step = consensus_step
        self._divide()

    def _divide(self) -> None:
        """Find out what is compressed, and with what."""
        compressor = self.training.options.compression
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in self.mixed:
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        compressed = {key: each for key, each in alike.items() if compressor.changes(key[0])}
        self._flats = [_Flat(each, compressor) for each in compressed.values()]
        self._whole = [tensor for key, each in alike.items() if key not in compressed for tensor in each]

    def begin(self) -> None:
        """Take the parameters as they are for the copies. Collective."""
        for flat in self._flats:
            flat.begin(self._graph, self.training)

    def synchronize(self) -> None:
        """Mix, if it is time to. Collective then."""
        if self.steps % self._every:
            return
        for flat in self._flats:
            flat.mix(self._graph, self.training, self.steps, self._consensus_step)
        if self._whole:
            self.mix_if_due(self._whole, self.steps)

    def reopen(self) -> None:
        """Begin anew with the ranks and parameters that there are now."""
        super().reopen()
        self._divide()
        self._begins = True

    def own_state(self) -> dict[str, Any]:
        """Return the copies."""
        return {"copies": [(flat.hat, flat.total) for flat in self._flats]}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Take over the copies."""
        for flat, (hat, total) in zip(self._flats, state["copies"], strict=True):
            flat.hat, flat.total = hat.clone(), total.clone()
