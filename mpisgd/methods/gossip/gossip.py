"""`Gossip`: every rank has a model of its own, and mixes it with those of a few neighbours.

The update rules are in the modules of the styles: `synchronous` has adapt then combine, combine then
adapt (D-PSGD) and push-sum (SGP), `asynchronous` averages pairs while the ranks compute (AD-PSGD);
`compressed` is adapt then combine by compressed changes (CHOCO-SGD).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpisgd.arguments import check_positive, check_ratio, shown
from mpisgd.compress.compressor import Casting
from mpisgd.errors import InvalidArgument
from mpisgd.gossip.graph import Graph
from mpisgd.gossip.graphs import GraphLike, as_graph
from mpisgd.methods.gossip.ad_psgd.ad_psgd import Asynchronous
from mpisgd.methods.gossip.choco.choco import CompressedMixer
from mpisgd.methods.gossip.choco.paper import Choco
from mpisgd.methods.gossip.d_psgd.d_psgd import AdaptThenCombine, CombineThenAdapt
from mpisgd.methods.gossip.d_psgd.paper import DPSGD
from mpisgd.methods.gossip.mixer import NAME, Mixer
from mpisgd.methods.gossip.push_sum.paper import PushSum as PushSumPaper
from mpisgd.methods.gossip.push_sum.push_sum import PushSum
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.strategy.goes_with import (
    Compressions,
    GoesWith,
    Sent,
    needs_contraction,
    needs_none,
    no,
    no_momentum,
    yes,
)
from mpisgd.methods.strategy.local_training import LOCAL_STEPS
from mpisgd.methods.strategy.strategy import Strategy, Synchronizer
from mpisgd.methods.strategy.training import Training
from mpisgd.standard_error import print_to_user

__all__ = ["Gossip"]

MAX_SIZE_OF_GAP = 1024  # ranks for which the spectral gap is printed; of more it takes too long

_printed: set[str] = set()


@dataclass(frozen=True)
class Gossip(Strategy):
    """Every rank has its own model, and averages it with those of its neighbours in a graph.

    Attributes:
        topology: a name ("ring", "torus", "hypercube", "exponential", "one_peer_exponential", "star",
            "complete", "random_pairs"), a graph of `mpisgd.gossip`, or a mixing matrix; kept as a graph.
            Graphs have Metropolis-Hastings weights: 1 / (neighbours + 1) if all ranks have the same number of
            neighbours.
        style: "adapt_then_combine": first the update, then the mean with the neighbours; "combine_then_adapt"
            (D-PSGD): the gradient is that of the parameters before the mean; "push_sum" (SGP): for matrices
            whose columns sum to 1, and whose rows need not; "asynchronous" (AD-PSGD): pairs of neighbours
            average while the ranks compute, and no rank waits.
        every: steps from one exchange with the neighbours to the next.
        consensus_step: with a compression that leaves elements out, how far ranks move towards their mean in
            a step, above 0 and up to 1. The less is sent, the smaller it must be: 0.3 for a tenth of the
            elements, for example.

    `compression` may be a cast. With "adapt_then_combine" and a topology that is the same in every step it
    may also be a compressor such as `TopK` or `OneBit` (CHOCO-SGD), which then needs a `consensus_step`.

    The ranks' models differ. Inside `optimizer.consensus()` each is replaced by their mean, to evaluate or to
    save it. Module buffers (`named_buffers`) are averaged as parameters are.

    Raises:
        InvalidArgument: found locally, before anything is sent.
    """

    topology: GraphLike = "exponential"
    style: str = "adapt_then_combine"
    every: int = 1
    consensus_step: float | None = None

    @classmethod
    def examples(cls) -> Sequence["Gossip"]:
        """See `Strategy`."""
        return (
            cls("ring"),
            cls("exponential", every=2),
            cls("one_peer_exponential"),
            cls("complete", style="combine_then_adapt"),
            cls("ring", style="push_sum"),
            cls("ring", consensus_step=0.3),
            cls("ring", style="asynchronous"),
        )

    def __post_init__(self) -> None:
        object.__setattr__(self, "topology", as_graph(NAME, self.topology))
        if not isinstance(self.style, str) or self.style not in STYLES:
            raise InvalidArgument(f"{NAME}: style={shown(self.style)}; expected one of {', '.join(STYLES)}")
        check_positive(NAME, "every", self.every, whole=True)
        if self.consensus_step is not None:
            check_ratio(NAME, "consensus_step", self.consensus_step)

    @property
    def graph(self) -> Graph:
        """The topology."""
        assert isinstance(self.topology, Graph)
        return self.topology

    def spectral_gap(self, size: int) -> float:
        """Return the share by which a step reduces the differences between `size` ranks."""
        return self.graph.spectral_gap(size)

    def check_size(self, size: int) -> None:
        """Raise InvalidArgument if this number of ranks would not converge to their mean."""
        self.graph.check_mixing(NAME, size, doubly=STYLES[self.style].doubly)

    @property
    def goes_with(self) -> GoesWith:
        """See `GoesWith`."""
        elastic = yes("survivors go on from their own models; weights of push-sum and copies begin anew")
        if self.style == "asynchronous":
            return replace(
                LOCAL_STEPS,
                of="Gossip(asynchronous)",
                compression=Compressions("no", (needs_none, self._needs_no_consensus_step)),
                repeats=no("the result depends on timing"),
                elastic=elastic,
            )
        rules = (no_momentum, needs_contraction, self._needs_consensus_step, self._needs_no_consensus_step)
        words = "casts; contractions with `consensus_step`"
        return replace(LOCAL_STEPS, compression=Compressions(words, rules), elastic=elastic)

    def _needs_consensus_step(self, sent: Sent) -> str:
        """What is left out of changes is kept as `CompressedMixer` does it."""
        if isinstance(sent.compressor, Casting):
            return ""
        if self.style == "adapt_then_combine" and self.consensus_step is not None:
            return ""
        return "it needs style='adapt_then_combine', and a consensus_step such as 0.3"

    def _needs_no_consensus_step(self, sent: Sent) -> str:
        """A cast leaves nothing out that it would be for."""
        if self.consensus_step is None or not isinstance(sent.compressor, Casting):
            return ""
        return f"consensus_step={self.consensus_step} goes with a compression that leaves something out"

    def check_ranks(self, training: Training) -> None:
        """Raise if the graph does not fit the ranks, or if MPI lacks what the style needs."""
        size, compression = training.group.size, training.options.compression
        if self.consensus_step is not None and self.graph.num_phases(size) != 1:
            raise InvalidArgument(
                f"{NAME}: compression={compression} goes with a topology that is the same in every step; "
                f"this is {self}"
            )
        if self.style == "asynchronous" and size > 1 and not training.group.queue.threads_allowed:
            raise InvalidArgument(
                f'{NAME}: style="asynchronous" needs an MPI that runs at thread level MULTIPLE; this one '
                "does not"
            )
        self.check_size(size)

    def synchronizer(self, training: Training) -> Synchronizer:
        """Return the working part; the first rank prints the spectral gap, once."""
        size = training.group.size
        if training.group.rank == 0 and 1 < size <= MAX_SIZE_OF_GAP:
            text = f"{self} of {size} ranks: spectral gap {self.spectral_gap(size):.4g}"
            if text not in _printed:
                _printed.add(text)
                print_to_user(text)
        if self.consensus_step is not None:
            return CompressedMixer(training, self.graph, self.every, self.consensus_step)
        return STYLES[self.style](training, self.graph, self.every)

    def paper(self, size: int, lengths: Sequence[tuple[str, int]] = ()) -> Paper[Any] | None:
        """See `Strategy`."""
        graph = self.graph

        def matrix(size: int, k: int) -> Sequence[Sequence[float]]:
            rows: list[list[float]] = graph.matrix(size, k).tolist()
            return rows

        if self.style == "asynchronous":  # its events are repeated, see `mpisgd.tools.verification.replay`
            return super().paper(size, lengths)
        if self.style == "push_sum":
            return PushSumPaper(matrix, self.every)
        if self.consensus_step is not None and size > 1:
            return Choco(matrix, self.consensus_step, self.every)
        return DPSGD(matrix, self.style == "adapt_then_combine", self.every)


STYLES: dict[str, type[Mixer]] = {
    "adapt_then_combine": AdaptThenCombine,
    "combine_then_adapt": CombineThenAdapt,
    "push_sum": PushSum,
    "asynchronous": Asynchronous,
}
