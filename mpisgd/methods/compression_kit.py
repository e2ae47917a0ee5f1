"""What papers of compressed methods are written with: operators, error feedback, and compressed momentum."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from mpisgd.methods.paper_kit import (
    Draws,
    Paper,
    Slice,
    Vec,
    Vecs,
    World,
    alike,
    everyone,
    filled,
    mean,
    own,
    part,
)

__all__ = [
    "CompressedMomentum",
    "Compressor",
    "Errors",
    "Moments",
    "Residual",
    "TwoStepCompressor",
    "by_rows",
    "compressed",
    "cut",
    "in_blocks",
    "largest",
    "of_chunks",
    "orthonormal",
    "root",
    "signs",
    "within",
]

UNIT = 64  # elements: a chunk of a bucket has a multiple of it
Chunk = tuple[tuple[Slice, ...], tuple[Slice, ...]]  # a bucket, and the pieces of it that a rank owns


# --- of a parameter -----------------------------------------------------------------------------------


def largest(v: Tensor, ratio: float) -> Tensor:
    """Return v with zeros in place of all but the k = max(1, ratio n) largest of its n elements."""
    k = max(1, round(ratio * v.numel()))
    chosen = v.flatten().abs().argsort(descending=True, stable=True)[:k]
    kept = torch.zeros_like(v).flatten()
    kept[chosen] = v.flatten()[chosen]
    return kept.view(v.shape)


def signs(v: Tensor) -> Tensor:
    """Return signs times the mean magnitude, |v|_1 / d sign(v) of d elements; the sign of 0 is 1."""
    return v.abs().mean() * (2.0 * (v >= 0) - 1.0).to(v.dtype) if v.numel() else v


def orthonormal(P: Tensor) -> Tensor:
    """Return an orthonormal basis of the columns of P, by Gram and Schmidt, twice over.

    Of zeros it is the first unit vectors, with which PowerSGD finds the next Q again.
    """
    if not P.any():
        return torch.eye(*P.shape, dtype=P.dtype)
    columns: list[Tensor] = []
    for column in P.T:
        for other in columns * 2:
            column = column - (other @ column) * other
        columns.append(column / column.norm())
    return torch.stack(columns, dim=1)


def cut(bucket: tuple[Slice, ...], p: int) -> list[tuple[Slice, ...]]:
    """Return the chunks of p ranks of a bucket, n elements side by side: pieces of parameters.

    Each has n / p elements, in multiples of 64; the last ones less, or none.
    """
    numel = UNIT * max(1, math.ceil(sum(piece.numel for piece in bucket) / (UNIT * p)))
    chunks, place = [list[Slice]() for _ in range(p)], 0
    for name, begin, end in bucket:
        while begin < end:
            stop = min(end, begin + numel - place % numel)
            chunks[place // numel].append(Slice(name, begin, stop))
            begin, place = stop, place + stop - begin
    return [tuple(chunk) for chunk in chunks]


def within(v: Vec, pieces: tuple[Slice, ...]) -> Vec:
    """Return v in these pieces, and else zeros of the same parameters."""
    out = v.only([piece.name for piece in pieces]).each(torch.zeros_like)
    for piece in pieces:
        if piece.name in v:
            out[piece.name].view(-1)[piece.begin : piece.end] = piece.of(v)
    return out


def root(v: Vec, eps: float) -> Vec:
    """Return sqrt(v) + eps, by which Adam and its kin divide; v: a variance."""
    return v.each(lambda tensor: tensor.sqrt() + eps)


def by_rows(f: Callable[..., Tensor], B: int, *vs: Tensor) -> Tensor:
    """Return f of the rows of B elements of all v [d], the last of which may be shorter, side by side."""
    whole = len(vs[0]) // B * B
    heads, tails = [v[:whole].view(-1, B) for v in vs], [v[whole:].view(1, -1) for v in vs]
    return torch.cat([f(*rows).flatten() for rows in (heads, tails) if rows[0].numel()] or [vs[0]])


def in_blocks(v: Tensor, L: int, B: int) -> Tensor:
    """Return s round(v / s) of each block of B elements of v [d], s = max |v| / L there; zeros stay."""

    def nearest(blocks: Tensor) -> Tensor:
        s = blocks.abs().amax(dim=1, keepdim=True) / L
        return torch.where(s > 0, s * (blocks / s).round(), 0.0)

    return by_rows(nearest, B, v)


def of_chunks(v: Tensor, keep: int, chunk: int, L: int) -> Tensor:
    """Return Q of the largest elements of each chunk of v, and else zeros.

        k    = keep, of fewer than `chunk` elements as large a part, and at least 1; of equals the first ones
        Q(x) = sign(x) (lo + n s),   n = round((|x| - lo) / s),   s = (hi - lo) / L

    lo and hi are the smallest and the largest of the k magnitudes of the chunk.
    """
    sent = torch.zeros_like(v).flatten()
    for begin in range(0, v.numel(), chunk):
        c = v.flatten()[begin : begin + chunk]
        k = max(1, round(keep * len(c) / chunk))
        largest = c.abs().argsort(descending=True, stable=True)[:k]
        x = c[largest]
        lo, hi = x.abs().min(), x.abs().max()
        s = (hi - lo) / L
        n = ((x.abs() - lo) / s).round() if s else torch.zeros_like(x)
        sent[begin + largest] = x.sign() * (lo + n * s)
    return sent.view(v.shape)


# --- error feedback -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Residual:
    """What a compressor keeps.

    Attributes:
        e: what a rank has not sent yet.
        k: how many reductions there were; random numbers differ by it.
    """

    e: Vecs = own(default_factory=dict, begin="zeros")
    k: int = alike(0)


def compressed(
    s: Residual, g: Vecs, w: World, send: Callable[[int, Vec], Vec], beta: float = 1.0
) -> tuple[Residual, Vecs]:
    """Return each rank's message, with error feedback (Seide 2014; Vogels 2019, algorithm 2).

        m_i = g_i + beta e_i;   s_i = C(m_i);   e_i = m_i - s_i

    The learning rate comes after it. Stich 2018 and Karimireddy 2019 have it before, in the residual: that is
    the same while it does not change. In these beta is 1.
    """
    m = {i: (g[i] + beta * s.e[i]).only(g[i]) for i in w.ranks}
    sent = {i: send(i, m[i]) for i in w.ranks}
    e = {i: Vec({**s.e[i], **(m[i] - sent[i])}) for i in w.ranks}
    return Residual(e, s.k + 1), sent


@dataclass(frozen=True)
class Compressor(Paper[Residual]):
    """What has an operator C: all ranks get the mean of C(g_i), or of C(g_i + e_i) with error feedback.

    Attributes:
        feedback: whether what C leaves out is added to the next gradient.
        beta: how much of it.
    """

    keeps = Residual

    feedback: bool = True
    beta: float = 1.0

    def C(self, v: Vec, w: World, draw: Draws) -> Vec:
        """Return the value of v after it was sent."""
        raise NotImplementedError

    def reduce(self, s: Residual, g: Vecs, w: World) -> tuple[Residual, Vecs]:
        """See `Paper`."""
        place = {i: number for number, i in enumerate(w.ranks)}
        kept, sent = compressed(
            s, filled(g), w, lambda i, v: self.C(v, w, self.drawn(s.k, place[i], w)), self.beta
        )
        g_mean = mean(sent, w)
        return kept if self.feedback else Residual(s.e, s.k + 1), dict.fromkeys(w.ranks, g_mean)

    def drawn(self, k: int, place: int, w: World) -> Draws:
        """Return the random numbers of a rank in reduction k: its own."""
        return w.draw(k, place)


@dataclass(frozen=True)
class Errors:
    """What a two-step compressor keeps.

    Attributes:
        e: what ranks have left out.
        d: what owners have, by chunk: of which bucket, and which pieces. An owner of another one begins anew.
    """

    e: Vecs = own(default_factory=dict, begin="zeros")
    d: dict[int, dict[Chunk, Vec]] = own(default_factory=dict, begin="zeros")


@dataclass(frozen=True)
class TwoStepCompressor(Paper[Errors]):
    """What has an operator on pieces of parameters: ranks send to the owners of chunks, and these to all.

    Tang et al. 2019, "DoubleSqueeze"; each bucket is cut into a chunk for each rank. One rank alone sends
    nothing.

        s_i = C(g_i + e_i);    e_i <- g_i + e_i - s_i     what a rank leaves out
        y   = mean of s_i + d;   d <- y - C(y)            what owners leave out, each of its chunk
        g  <- C(y)

    Attributes:
        feedback: whether what is left out is added to the next gradient; else e and d stay 0.
    """

    keeps = Errors
    of_buckets = of_memory = True

    feedback: bool = True

    def of_piece(self, v: Tensor) -> Tensor:
        """Return the value of a piece after it was sent."""
        raise NotImplementedError

    def reduce(self, s: Errors, g: Vecs, w: World) -> tuple[Errors, Vecs]:
        """See `Paper`."""
        if len(w.ranks) == 1:
            return s, g
        m = {i: g_i + s.e[i].only(g_i) for i, g_i in filled(g).items()}
        sent = {i: self.C(m_i, w) for i, m_i in m.items()}
        e, owned = {i: s.e[i] | (m[i] - sent[i]) for i in w.ranks}, self._owned(w)
        d = Vec()
        for i, chunks in owned.items():
            for chunk in chunks:
                d = d + s.d[i].get(chunk, Vec())
        y = mean(sent, w) + d.only(m[w.ranks[0]])
        v = self.C(y, w)
        left = {i: {chunk: within(d | (y - v), chunk[1]) for chunk in chunks} for i, chunks in owned.items()}
        return Errors(e, {i: {**s.d[i], **left[i]} for i in w.ranks}) if self.feedback else s, everyone(v, w)

    def _owned(self, w: World) -> dict[int, list[Chunk]]:
        """Return the chunks of each rank, one of each bucket."""
        chunks = {bucket: cut(bucket, len(w.ranks)) for bucket in w.layout}
        return {i: [(b, of_all[place]) for b, of_all in chunks.items()] for place, i in enumerate(w.ranks)}

    def C(self, v: Vec, w: World) -> Vec:
        """Return the value of v after it was sent."""
        out = v.each(lambda tensor: torch.full((tensor.numel(),), math.nan, dtype=tensor.dtype))
        for piece in [each for owned in self._owned(w).values() for _, pieces in owned for each in pieces]:
            if piece.name in v:
                out[piece.name][piece.begin : piece.end] = self.of_piece(piece.of(v))
        return Vec({name: tensor.view(v[name].shape) for name, tensor in out.items()})


# --- momentum by fewer bits ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Moments:
    """What is kept of gradients: momentum and variance, which all ranks have, and the errors of the wire."""

    m: Vec = alike(default_factory=Vec)
    v: Vec = alike(default_factory=Vec)
    wire: Any = part(lambda: None)


M = TypeVar("M", bound=Moments)


@dataclass(frozen=True)
class CompressedMomentum(Paper[M]):
    """Updates by itself: by Adam's moments for T steps, and then by a momentum that `w.wire` averages.

    The gradients that the ranks have stay their own until then. lr is a function of the step.
    """

    keeps = Moments
    depends_on = ("two_step",)

    T: int
    lr: Callable[[int], float]
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.0

    def moments(self, s: M, g: Vecs, w: World) -> M:
        """Return the moments of this step (Kingma and Ba 2015; Tang et al. 2021, algorithm 1).

            t <= T:   g = mean of g_i;   m <- b1 m + (1 - b1) g;   v <- b2 v + (1 - b2) g^2
            t > T:    m <- average of b1 m + (1 - b1) g_i

        Where v is 0 so is m: there was no gradient, and what comes is noise of the compression.
        """
        g, b1, b2 = filled(g), self.b1, self.b2
        if w.step <= self.T:
            g_mean = mean(g, w)
            return replace(s, m=b1 * s.m + (1 - b1) * g_mean, v=b2 * s.v + (1 - b2) * (g_mean * g_mean))
        wire, averaged = w.wire.reduce(s.wire, {i: b1 * s.m + (1 - b1) * g[i] for i in w.ranks}, w)
        return replace(s, m=averaged[w.ranks[0]] * s.v.nonzero(), wire=wire)
