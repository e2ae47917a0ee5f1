"""`paper_of`: what `DistributedOptimizer` is to be equal to, from the papers that methods name themselves."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import mpisgd
from mpisgd import Compressor
from mpisgd.arguments import shown
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.methods.adasum.adasum import AdaptiveSum
from mpisgd.methods.cast.cast import Compression
from mpisgd.methods.gossip.choco.paper import Choco
from mpisgd.methods.gossip.d_psgd.paper import DPSGD
from mpisgd.methods.gossip.push_sum.paper import PushSum
from mpisgd.methods.natural.paper import Natural
from mpisgd.methods.paper_kit import Slice, Vec
from mpisgd.methods.sharded.paper import CodedGradients, CodedParameters
from mpisgd.methods.synchronous.paper import Synchronous
from mpisgd.tools.verification.draws import BucketDraws, Buckets
from mpisgd.tools.verification.paper_run import Definition
from mpisgd.tools.verification.shares import Shares

__all__ = ["in_order", "paper_of"]

MIXES_WHOLE = (DPSGD, PushSum)  # papers of gossip in which nothing is compressed


def paper_of(
    strategy: mpisgd.Strategy | None = None,
    compression: Compressor | None = None,
    op: ReduceOp | AdaptiveSum = ReduceOp.AVG,
    *,
    size: int,
    lengths: Sequence[tuple[str, int]] = (),
) -> Definition:
    """Return the definition of what `DistributedOptimizer` does with these arguments.

    Args:
        strategy: `Synchronous` by default.
        compression: none by default.
        op: AVG, SUM or Adasum.
        size: how many ranks there are; one of them compresses nothing.
        lengths: names of the parameters, and their bytes, for strategies that divide them.

    Raises:
        InvalidArgument: there is no paper of it.
    """
    strategy = mpisgd.Synchronous() if strategy is None else strategy
    chosen = Compression.none if compression is None or size == 1 else compression
    wire, paper = _compressor(chosen), strategy.paper(size, lengths)
    if paper is None or isinstance(paper, Synchronous):
        if op != ReduceOp.AVG and chosen != Compression.none:
            raise InvalidArgument(f"there is no paper of op={shown(op)} with {chosen}")
        if op == ReduceOp.SUM:
            return Definition(Synchronous(sums=True))
        return Definition(op.paper()) if isinstance(op, AdaptiveSum) else wire
    if isinstance(paper, CodedGradients | CodedParameters) and op in (ReduceOp.AVG, ReduceOp.SUM):
        return Definition(_with_op(paper, op), layout=Shares(size))
    if op != ReduceOp.AVG or (chosen != Compression.none and isinstance(paper, MIXES_WHOLE)):
        raise InvalidArgument(f"there is no paper of {strategy} with {chosen} and op={shown(op)}")
    if isinstance(paper, Choco):
        wire = _compressor(_operator(chosen))
    layout = in_order if isinstance(paper, (*MIXES_WHOLE, Choco)) else wire.layout
    return Definition(paper, wire.paper, layout, wire.draw)


def _with_op(paper: Any, op: ReduceOp) -> Any:
    if isinstance(paper, CodedParameters):
        return replace(paper, gradients=_with_op(paper.gradients, op))
    return replace(paper, sums=op == ReduceOp.SUM)


def _operator(chosen: Compressor) -> Compressor:
    """Return a compressor with the operator that gossip takes of it: of one step, and not made unbiased."""
    how = {"error_feedback": True, "two_step": False}
    return replace(chosen, **{name: value for name, value in how.items() if hasattr(chosen, name)})


def _compressor(chosen: Compressor) -> Definition:
    """Return the definition of a mean that travels by a compressor, maybe inside of `PerHost`."""
    inner: Any = getattr(chosen, "compressor", chosen)
    paper, definition = inner.paper(), Definition(chosen.paper())
    seed, from_mantissas = getattr(inner, "seed", 0), isinstance(paper, Natural)
    return definition._replace(draw=partial(BucketDraws, seed=seed, from_mantissas=from_mantissas))


def in_order(x: Vec) -> Buckets:
    """Return one bucket of all parameters, the first one first."""
    return (tuple(Slice(name, 0, tensor.numel()) for name, tensor in x.items()),)
