"""`paper_of`: which paper a strategy, a compressor or `op=` is to be equal to, by its description."""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import mpisgd
from mpisgd import Compressor, compress
from mpisgd.arguments import shown
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.methods.adasum.adasum import AdaptiveSum
from mpisgd.methods.adasum.paper import Adasum
from mpisgd.methods.cast import paper as cast
from mpisgd.methods.cast.cast import Cast, Compression
from mpisgd.methods.deep_gradient import paper as deep_gradient
from mpisgd.methods.diloco import paper as diloco
from mpisgd.methods.elastic_averaging import paper as elastic_averaging
from mpisgd.methods.gossip.choco.paper import Choco
from mpisgd.methods.gossip.d_psgd.paper import DPSGD
from mpisgd.methods.gossip.push_sum.paper import PushSum
from mpisgd.methods.local_sgd import paper as local_sgd
from mpisgd.methods.natural import paper as natural
from mpisgd.methods.one_bit import paper as one_bit
from mpisgd.methods.paper_kit import Paper, Slice, Vec
from mpisgd.methods.per_host import paper as per_host
from mpisgd.methods.power_sgd import paper as power_sgd
from mpisgd.methods.qsgd import paper as qsgd
from mpisgd.methods.random_k import paper as random_k
from mpisgd.methods.sign_sgd import paper as sign_sgd
from mpisgd.methods.synchronous.paper import Synchronous
from mpisgd.methods.tern_grad import paper as tern_grad
from mpisgd.methods.threshold import paper as threshold
from mpisgd.methods.top_k import paper as top_k
from mpisgd.methods.two_step.paper import TwoStep
from mpisgd.verification.draws import BucketDraws, Layout
from mpisgd.verification.paper_run import Definition

__all__ = ["chunks_of", "paper_of"]

CHUNK_UNIT = 64  # elements: chunks of owners are a multiple of it


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
    wire = _compressor(chosen, size)
    if isinstance(strategy, mpisgd.Synchronous | mpisgd.Sharded):
        if op != ReduceOp.AVG and chosen != Compression.none:
            raise InvalidArgument(f"there is no paper of op={shown(op)} with {chosen}")
        if op == ReduceOp.SUM:
            return Definition(Synchronous(sums=True))
        return Definition(Adasum()) if isinstance(op, AdaptiveSum) else wire
    if op != ReduceOp.AVG or (chosen != Compression.none and _mixes_whole(strategy)):
        raise InvalidArgument(f"there is no paper of {strategy} with {chosen} and op={shown(op)}")
    layout = _in_order if isinstance(strategy, mpisgd.Gossip) else wire.layout
    return Definition(_strategy(strategy, size, lengths), wire.paper, layout, wire.draw)


def _mixes_whole(strategy: mpisgd.Strategy) -> bool:
    return isinstance(strategy, mpisgd.Gossip) and strategy.consensus_step is None


def _in_order(x: Vec) -> Layout:
    return (tuple(Slice(name, 0, tensor.numel()) for name, tensor in x.items()),)


def chunks_of(x: Vec, size: int) -> Layout:
    """Return the pieces of parameters, side by side, in the chunks that ranks own."""
    ends = list(itertools.accumulate(tensor.numel() for tensor in x.values()))
    chunk = max(1, -(-sum(tensor.numel() for tensor in x.values()) // (size * CHUNK_UNIT))) * CHUNK_UNIT
    chunks: list[list[Slice]] = [[] for _ in range(size)]
    for (name, tensor), end in zip(x.items(), ends, strict=True):
        begin = end - tensor.numel()
        cuts = sorted({begin, end, *(cut for cut in range(0, end, chunk) if begin < cut)})
        for low, high in itertools.pairwise(cuts):
            chunks[low // chunk].append(Slice(name, low - begin, high - begin))
    return tuple(map(tuple, chunks))


# --- strategies -----------------------------------------------------------------------------------------


def _strategy(strategy: mpisgd.Strategy, size: int, lengths: Sequence[tuple[str, int]]) -> Paper[Any]:
    if isinstance(strategy, mpisgd.LocalSGD) and not strategy.average_state:
        return local_sgd.LocalSGD(
            H=strategy.period,
            H_host=(strategy.hierarchy or {}).get("host", 0),
            warmup=strategy.warmup_steps,
            growth=strategy.growth,
            H_max=math.inf if strategy.max_sync_every is None else strategy.max_sync_every,
        )
    if isinstance(strategy, mpisgd.DiLoCo) and strategy.outer_optimizer is torch.optim.SGD:
        return _diloco(strategy, lengths)
    if isinstance(strategy, mpisgd.ElasticAveraging):
        beta = {} if strategy.alpha is None else {"beta": strategy.alpha * size}
        return elastic_averaging.ElasticAveraging(tau=strategy.every, **beta)
    if isinstance(strategy, mpisgd.Gossip) and strategy.style != "asynchronous":
        return _gossip(strategy, size)
    raise InvalidArgument(f"there is no paper of {strategy}")


def _diloco(strategy: mpisgd.DiLoCo, lengths: Sequence[tuple[str, int]]) -> Paper[Any]:
    given = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    if strategy.outer_options is not None:
        given = {"lr": 1e-3, "momentum": 0.0, "nesterov": False, **strategy.outer_options}
    lr, mu, nesterov = given.pop("lr"), given.pop("momentum"), given.pop("nesterov")
    if given:
        raise InvalidArgument(f"there is no paper of {strategy}")
    count = strategy.fragments
    return diloco.DiLoCo(
        H=strategy.sync_every,
        lr=lr,
        mu=mu,
        nesterov=bool(nesterov),
        fragments=_fragments(lengths, count) if count > 1 else (),
        tau=strategy.overlap_steps,
        alpha=strategy.overlap_alpha,
    )


def _fragments(lengths: Sequence[tuple[str, int]], count: int) -> tuple[tuple[str, ...], ...]:
    """Cut names into fragments: a parameter is in that in which its first byte would be."""
    total = sum(nbytes for _, nbytes in lengths)
    fragments: list[list[str]] = [[] for _ in range(count)]
    begin = 0
    for name, nbytes in lengths:
        fragments[begin * count // total].append(name)
        begin += nbytes
    if not all(fragments):
        raise InvalidArgument(f"parameters of {total} bytes cannot be cut evenly into {count} fragments")
    return tuple(map(tuple, fragments))


def _gossip(strategy: mpisgd.Gossip, size: int) -> Paper[Any]:
    graph = strategy.graph

    def matrix(size: int, k: int) -> Sequence[Sequence[float]]:
        rows: list[list[float]] = graph.matrix(size, k).tolist()
        return rows

    if strategy.style == "push_sum":
        return PushSum(matrix, strategy.every)
    if strategy.consensus_step is not None and size > 1:
        return Choco(matrix, strategy.consensus_step, strategy.every)
    return DPSGD(matrix, strategy.style == "adapt_then_combine", strategy.every)


# --- compressors ----------------------------------------------------------------------------------------


def _compressor(chosen: Compressor, size: int) -> Definition:
    draw = partial(
        BucketDraws,
        seed=getattr(chosen, "seed", 0),
        from_mantissas=isinstance(chosen, compress.Natural),
    )
    if chosen == compress.OneBit(two_step=True):
        return Definition(TwoStep(), layout=lambda x: chunks_of(Vec(dict(reversed(x.items()))), size))
    if isinstance(chosen, compress.PerHost):
        inner = _compressor(chosen.compressor, size)
        return inner._replace(paper=per_host.PerHost(inner.paper))
    if isinstance(chosen, Cast):
        return Definition(Synchronous() if chosen.dtype is None else cast.Cast(chosen.dtype))
    make = _PAPERS.get(type(chosen))
    if make is None:
        raise InvalidArgument(f"there is no paper of {chosen}")
    return Definition(make(chosen), draw=draw)


_PAPERS: dict[type[Compressor], Callable[[Any], Paper[Any]]] = {
    compress.TopK: lambda c: top_k.TopK(ratio=c.ratio, feedback=c.error_feedback),
    compress.Threshold: lambda c: threshold.Threshold(tau=c.value, feedback=c.error_feedback),
    compress.RandomK: lambda c: random_k.RandomK(ratio=c.ratio, feedback=c.error_feedback),
    compress.OneBit: lambda c: one_bit.OneBit(),
    compress.SignSGD: lambda c: sign_sgd.SignSGD(c.majority_vote),
    compress.Natural: lambda c: natural.Natural(feedback=c.error_feedback),
    compress.TernGrad: lambda c: tern_grad.TernGrad(c=math.inf if c.clip_sigmas is None else c.clip_sigmas),
    compress.QSGD: lambda c: qsgd.QSGD(
        L=2 ** (c.bits - 1) - 1,
        segment=c.segment,
        norm=math.inf if c.norm == "max" else 2.0,
        feedback=c.error_feedback,
    ),
    compress.DeepGradient: lambda c: deep_gradient.DeepGradient(
        c.ratio,
        c.momentum,
        c.nesterov,
        c.warmup_steps,
        c.warmup_ratio,
        math.inf if c.clip_norm is None else c.clip_norm,
    ),
    compress.PowerSGD: lambda c: power_sgd.PowerSGD(
        c.rank, c.warmup_steps, c.error_feedback, c.min_compression_rate
    ),
}
