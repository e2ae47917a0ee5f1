"""`Line`: seconds over bytes, as few straight pieces.

An operation takes alpha seconds to begin and beta for each byte; but beta is one number in cache and another
out of it, and MPI changes its protocol on the way, so one straight line cannot hold all sizes:

    seconds
      |                              /   3: out of cache
      |                           __/
      |                 _____-----       2: in cache
      |   ______--------                 1: one small message
      +----------------------------- bytes
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

__all__ = ["Line", "Point", "Segment", "agreement", "fit"]

Point = tuple[float, float]  # bytes, seconds

MAX_SEGMENTS = 3
# The last piece may be one point: often the largest size alone shows that the caches have ended.
MIN_POINTS = 2
# With fewer than this a straight line goes through all points, whatever the noise.
FREE_POINTS = 3
# What a median may be off by: a further piece must explain more than that.
NOISE = 0.05
# Of a further piece: alpha, beta, and where it begins.
PARAMETERS = 3


@dataclass(frozen=True)
class Segment:
    """Sizes that one latency and one bandwidth describe.

    Attributes:
        up_to_bytes: the largest size that belongs to it, infinite for the last one.
        alpha_s: latency.
        beta_s_per_byte: inverse bandwidth.
    """

    up_to_bytes: float
    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, nbytes: float) -> float:
        """Return what `nbytes` take."""
        return self.alpha_s + self.beta_s_per_byte * nbytes


@dataclass(frozen=True)
class Line:
    """Segments by ascending size, the last one open."""

    segments: tuple[Segment, ...]

    def seconds(self, nbytes: float) -> float:
        """Return what `nbytes` are predicted to take."""
        for segment in self.segments[:-1]:
            if nbytes <= segment.up_to_bytes:
                return segment.seconds(nbytes)
        return self.segments[-1].seconds(nbytes)

    def scaled(self, alpha: float, beta: float) -> "Line":
        """Return the line with every latency times `alpha` and every inverse bandwidth times `beta`."""
        return Line(
            tuple(
                replace(piece, alpha_s=piece.alpha_s * alpha, beta_s_per_byte=piece.beta_s_per_byte * beta)
                for piece in self.segments
            )
        )


def fit(points: Sequence[Point], max_segments: int = MAX_SEGMENTS) -> Line:
    """Return the line through measured points: the least squares of the relative errors.

    Relative, since a microsecond is much at 4 bytes and nothing at 64 MiB. A further segment must lower the
    error by more than noise would (the Bayesian information criterion). Neither alpha nor beta is ever
    negative, so that what is predicted between and beyond the points stays sane.

    Args:
        points: at least one, of different sizes above zero; every second above zero.
        max_segments: how many pieces there may be.
    """
    points = sorted(points)
    pieces = min(
        _partitions(points, max_segments),
        key=lambda pieces: _misfit(pieces) + PARAMETERS * len(pieces) * math.log(len(points)),
    )
    lines = _lines(pieces)
    borders = [_border(*sides) for sides in zip(lines, lines[1:], pieces, pieces[1:], strict=False)]
    return Line(
        tuple(replace(line, up_to_bytes=end) for line, end in zip(lines, [*borders, math.inf], strict=True))
    )


def agreement(line: Line, points: Sequence[Point]) -> float:
    """Return R^2 of a line and measured points, in logarithms: the sizes span many powers of ten."""
    measured = [math.log(seconds) for _, seconds in points]
    mean = sum(measured) / len(measured)
    spread = sum((value - mean) ** 2 for value in measured)
    errors = (math.log(line.seconds(nbytes)) for nbytes, _ in points)
    missed = sum((value - error) ** 2 for value, error in zip(measured, errors, strict=True))
    return 1.0 - missed / spread if spread else 1.0


def _partitions(points: Sequence[Point], max_segments: int) -> Iterator[list[Sequence[Point]]]:
    """Yield every way to cut the points into pieces that are long enough; uncut first."""
    yield [points]
    for cuts in range(1, max_segments):
        for inner in itertools.combinations(range(1, len(points)), cuts):
            ends = [0, *inner]
            if all(last - first >= MIN_POINTS for first, last in itertools.pairwise(ends)):
                yield [points[first:last] for first, last in itertools.pairwise([*ends, len(points)])]


def _misfit(pieces: Sequence[Sequence[Point]]) -> float:
    """Return the squared relative errors of the best lines, in units of the noise."""
    return sum(map(_error, _lines(pieces), pieces)) / NOISE**2


def _error(line: Segment, points: Sequence[Point]) -> float:
    return sum((line.seconds(nbytes) / seconds - 1.0) ** 2 for nbytes, seconds in points)


def _lines(pieces: Sequence[Sequence[Point]]) -> list[Segment]:
    """Return the best line for each piece; the last one is what larger sizes are predicted from."""
    *others, last = pieces
    return [*map(_straight, others), _straight(last) if len(last) >= FREE_POINTS else _steep(last)]


def _straight(points: Sequence[Point]) -> Segment:
    """Return the best straight line with neither alpha nor beta below zero.

    In relative terms a point demands alpha * u + beta * v = 1 with u = 1 / seconds and v = bytes / seconds:
    two unknowns, linear least squares. Where the optimum has one of them below zero, the best one that is
    allowed has it at zero. Two points tell one unknown.
    """
    u = [1.0 / seconds for _, seconds in points]
    v = [nbytes / seconds for nbytes, seconds in points]
    uu, vv, uv, su, sv = _dot(u, u), _dot(v, v), _dot(u, v), sum(u), sum(v)
    determinant = uu * vv - uv * uv
    if len(points) >= FREE_POINTS and determinant > 0:
        alpha, beta = (su * vv - sv * uv) / determinant, (sv * uu - su * uv) / determinant
        if alpha >= 0 and beta >= 0:
            return Segment(math.inf, alpha, beta)
    return min(Segment(math.inf, su / uu, 0.0), _steep(points), key=lambda line: _error(line, points))


def _steep(points: Sequence[Point]) -> Segment:
    """Return the best line through zero."""
    v = [nbytes / seconds for nbytes, seconds in points]
    return Segment(math.inf, 0.0, sum(v) / _dot(v, v))


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _border(left: Segment, right: Segment, before: Sequence[Point], after: Sequence[Point]) -> float:
    """Return where one segment ends and the next begins: where they meet, if that is between the points."""
    first, last = before[-1][0], after[0][0]
    if left.beta_s_per_byte != right.beta_s_per_byte:
        meet = (right.alpha_s - left.alpha_s) / (left.beta_s_per_byte - right.beta_s_per_byte)
        if first <= meet < last:
            return meet
    return math.sqrt(first * last)
