"""`Curve`: what one algorithm takes, by size; fitted to measured points.

An operation takes alpha + beta * bytes seconds; but beta is one number in cache and another out of it, and
MPI changes its protocol on the way, so the curve is piecewise linear, with up to three segments:

    seconds
      |                              /   3: out of cache
      |                           __/
      |                 _____-----       2: in cache
      |   ______--------                 1: one small message
      +----------------------------- bytes

Points alone would do for the ranks they were measured on. Alpha and beta are what other ranks are predicted
from: one grows with the number of steps, the other with what a link carries.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

__all__ = ["ALL_REDUCE", "Curve", "LineSegment", "Point", "fit"]

ALL_REDUCE = "all_reduce"
Point = tuple[float, float]  # bytes, seconds

MAX_SEGMENTS = 3
# The last segment may have one point: often the largest size alone shows that the caches have ended.
MIN_POINTS = 2
# With fewer than this a straight line goes through all points, whatever the noise.
FREE_POINTS = 3
# What a median may be off by: a further segment must explain more than that.
NOISE = 0.05
# Of a further segment: alpha, beta, and where it begins.
PARAMETERS = 3
# What may be left of alpha and beta, in columns of a matrix; on equal terms the first counts.
BOTH, ALPHA, BETA = [0, 1], [0], [1]


class LineSegment(NamedTuple):
    """Sizes that one latency and one bandwidth describe.

    Attributes:
        up_to_bytes: the largest size that belongs to it, infinite for the last one.
        alpha_s: latency.
        beta_s_per_byte: inverse bandwidth.
    """

    up_to_bytes: float
    alpha_s: float
    beta_s_per_byte: float


@dataclass(frozen=True)
class Curve:
    """What one algorithm takes.

    Attributes:
        algorithm: as in `all_reduce(algorithm=...)`.
        half: for float16 and bfloat16, in bytes of these; otherwise measured with float32.
        segments: by ascending size, the last one open; none before it is measured.
        num_leaders: how many ranks of each host send over the link (`hierarchical`); 1 for all others.
        points: what was measured.
        collective: what it was used for; `node` and `mpi` can do others than all_reduce.
    """

    algorithm: str
    half: bool
    segments: tuple[LineSegment, ...] = ()
    num_leaders: int = 1
    points: tuple[Point, ...] = ()
    collective: str = ALL_REDUCE

    @property
    def name(self) -> str:
        """In tables."""
        return self.algorithm if self.num_leaders == 1 else f"{self.algorithm} ({self.num_leaders} leaders)"

    @property
    def purpose(self) -> tuple[str, bool]:
        """What it competes for: the collective and the kind of dtype."""
        return self.collective, self.half

    def seconds(self, nbytes: float) -> float:
        """Predict the seconds that `nbytes` take."""
        segment = next(piece for piece in self.segments if nbytes <= piece.up_to_bytes)
        return segment.alpha_s + segment.beta_s_per_byte * nbytes

    def scaled(self, alpha: float, beta: float, num_leaders: int) -> "Curve":
        """Return the curve with every latency times `alpha` and every inverse bandwidth times `beta`."""
        segments = tuple(LineSegment(end, a * alpha, b * beta) for end, a, b in self.segments)
        return replace(self, segments=segments, num_leaders=num_leaders)

    def agreement(self) -> float:
        """Return R^2 of segments and points, in logarithms: the sizes span many powers of ten."""
        measured = np.log([seconds for _, seconds in self.points])
        missed = measured - np.log([self.seconds(nbytes) for nbytes, _ in self.points])
        deviation = measured - measured.mean()
        return float(1.0 - missed @ missed / (deviation @ deviation)) if deviation.any() else 1.0


def fit(points: Sequence[Point], max_segments: int = MAX_SEGMENTS) -> tuple[LineSegment, ...]:
    """Return the segments through measured points: the least squares of the relative errors.

    Relative, since a microsecond is much at 4 bytes and nothing at 64 MiB. A further segment must lower the
    error by more than noise would (the Bayesian information criterion). Neither alpha nor beta is ever
    negative, so that what is predicted between and beyond the points stays sane.

    Args:
        points: at least one, of different sizes above zero; every second above zero.
        max_segments: how many there may be.
    """
    points = sorted(points)

    @functools.cache
    def piece(first: int, end: int) -> tuple[float, LineSegment]:
        return _straight(points[first:end], is_last=end == len(points))

    def criterion(ends: Sequence[int]) -> float:
        error = sum(piece(*span)[0] for span in itertools.pairwise(ends))
        return error / NOISE**2 + PARAMETERS * len(ends) * math.log(len(points))

    ends = min(_partitions(len(points), max_segments), key=criterion)
    lines = [piece(*span)[1] for span in itertools.pairwise(ends)]
    borders = [
        _border(left, right, points[end - 1][0], points[end][0])
        for (left, right), end in zip(itertools.pairwise(lines), ends[1:-1], strict=True)
    ]
    return tuple(
        line._replace(up_to_bytes=end) for line, end in zip(lines, [*borders, math.inf], strict=True)
    )


def _partitions(count: int, max_segments: int) -> Iterator[tuple[int, ...]]:
    """Yield every way to cut `count` points into pieces that are long enough, as their ends; uncut first."""
    for cuts in range(max_segments):
        for inner in itertools.combinations(range(1, count), cuts):
            if all(end - first >= MIN_POINTS for first, end in itertools.pairwise([0, *inner])):
                yield (0, *inner, count)


def _straight(points: Sequence[Point], *, is_last: bool) -> tuple[float, LineSegment]:
    """Return the best straight line with neither alpha nor beta below zero, and its squared relative error.

    In relative terms a point demands alpha / seconds + beta * bytes / seconds = 1: linear least squares. If
    the optimum has one of them below zero, the best one that is allowed has it at zero. Few points tell one
    unknown; at the end, where larger sizes are predicted from them, that is beta.
    """
    nbytes, seconds = np.array(points).T
    demands = np.stack([1.0 / seconds, nbytes / seconds], axis=1)
    few = [BETA] if is_last else [ALPHA, BETA]
    found = [_solved(demands, kept) for kept in ([BOTH, ALPHA, BETA] if len(points) >= FREE_POINTS else few)]
    error, alpha, beta = min((each for each in found if min(each[1:]) >= 0.0), key=lambda each: each[0])
    return error, LineSegment(math.inf, alpha, beta)


def _solved(demands: Any, kept: list[int]) -> tuple[float, float, float]:
    """Return the least squares' error, alpha and beta; what is not kept is zero."""
    solution = np.zeros(2)
    solution[kept] = np.linalg.lstsq(demands[:, kept], np.ones(len(demands)), rcond=None)[0]
    missed = demands @ solution - 1.0
    return float(missed @ missed), float(solution[0]), float(solution[1])


def _border(left: LineSegment, right: LineSegment, first: float, last: float) -> float:
    """Return where one segment ends and the next begins: where they meet, if that is between two points."""
    if left.beta_s_per_byte != right.beta_s_per_byte:
        meet = (right.alpha_s - left.alpha_s) / (left.beta_s_per_byte - right.beta_s_per_byte)
        if first <= meet < last:
            return meet
    return math.sqrt(first * last)
