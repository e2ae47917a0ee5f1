"""Each method equals a simulation of all ranks in one process, written from its paper; nothing is shared."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from fixed_gradients import NUMELS, SHAPES, TWO_BUCKETS, Trained, gradient, largest_difference
from torch import Tensor
from verdicts import everyone, same_on_all_ranks

import mpisgd
from mpisgd.compress import QSGD, DeepGradient, Natural, PowerSGD, RandomK, TernGrad, Threshold, TopK

STEPS = 20
Simulated = list[list[Tensor]]  # by step and parameter


def zeros() -> list[Tensor]:
    return [torch.zeros(numel, dtype=torch.float64) for numel in NUMELS]


def sent_by_largest(meant: Tensor, ratio: float) -> Tensor:
    """What of [n] is among the k largest; one after the other."""
    k = max(1, round(ratio * len(meant)))
    largest = sorted(range(len(meant)), key=lambda i: -abs(meant[i].item()))[:k]
    sent = torch.zeros_like(meant)
    for i in largest:
        sent[i] = meant[i]
    return sent


def simulate_elements(send: Callable[[Tensor], Tensor], size: int, feedback: bool = True) -> Simulated:
    """Error feedback around a function of one parameter's elements."""
    residuals = [zeros() for _ in range(size)]
    results = []
    for step in range(STEPS):
        totals = zeros()
        for rank in range(size):
            for which in range(len(SHAPES)):
                meant = gradient(rank, step, which).flatten() + residuals[rank][which]
                sent = send(meant)
                residuals[rank][which] = meant - sent if feedback else 0
                totals[which] += sent
        results.append([total / size for total in totals])
    return results


def simulate_dgc(method: DeepGradient, size: int) -> Simulated:
    """Algorithm 1 of Lin and others, with clipping and the exponential warm-up."""
    velocity, waiting = [zeros() for _ in range(size)], [zeros() for _ in range(size)]
    results = []
    for step in range(STEPS):
        ratio, totals = method.ratio, zeros()
        if step < method.warmup_steps:
            decay = math.log(method.ratio / method.warmup_ratio) / method.warmup_steps
            ratio = method.warmup_ratio * math.exp(decay * step)
        for rank in range(size):
            for which in range(len(SHAPES)):
                g = gradient(rank, step, which).flatten()
                if method.clip_norm is not None:
                    limit = method.clip_norm / math.sqrt(size)
                    norm = math.sqrt(sum(x * x for x in g.tolist()))
                    g = g * (limit / norm) if norm > limit else g
                u = method.momentum * velocity[rank][which] + g
                ahead = g + method.momentum * u if method.nesterov else u
                v = waiting[rank][which] + ahead
                sent = sent_by_largest(v, ratio)
                waiting[rank][which] = torch.where(sent != 0, 0.0, v)
                velocity[rank][which] = torch.where(sent != 0, 0.0, u)
                totals[which] += sent
        results.append([total / size for total in totals])
    return results


def gram_schmidt(matrix: Tensor) -> Tensor:
    columns: list[Tensor] = []
    for column in matrix.T.clone():
        for other in columns * 2:  # twice is enough
            column = column - (other @ column) * other
        columns.append(column / column.norm())
    return torch.stack(columns, dim=1)


def simulate_power_sgd(method: PowerSGD, size: int) -> Simulated:
    """Algorithms 1 and 2 of Vogels and others."""
    matrices = {0: (6, 5), 2: (4, 6)}
    factors = {
        which: torch.from_numpy(
            np.random.Generator(np.random.SFC64([method.seed, 0, NUMELS[which]])).standard_normal(
                (columns, method.rank)
            )
        )
        for which, (_, columns) in matrices.items()
    }
    residuals = [zeros() for _ in range(size)]
    results = []
    for step in range(STEPS):
        result = []
        for which in range(len(SHAPES)):
            grads = [gradient(rank, step, which).flatten() for rank in range(size)]
            if which not in matrices or step < method.warmup_steps:
                result.append(sum(grads) / size)
                continue
            meant = [(grads[rank] + residuals[rank][which]).view(matrices[which]) for rank in range(size)]
            basis = gram_schmidt(sum(each @ factors[which] for each in meant) / size)
            factors[which] = sum(each.T @ basis for each in meant) / size
            result.append((basis @ factors[which].T).flatten())
            for rank in range(size):
                residuals[rank][which] = meant[rank].flatten() - result[-1]
        results.append(result)
    return results


def simulate_random_k(method: RandomK, size: int) -> Simulated:
    """All ranks send the same elements of the bucket, which has the last parameter first."""
    numel, order = sum(NUMELS), [*range(len(SHAPES))][::-1]
    residuals = [torch.zeros(numel, dtype=torch.float64) for _ in range(size)]
    results = []
    for step in range(STEPS):
        random = np.random.Generator(np.random.SFC64([method.seed, step, numel]))
        kept = random.choice(numel, round(method.ratio * numel), replace=False, shuffle=False).tolist()
        total = torch.zeros(numel, dtype=torch.float64)
        for rank in range(size):
            meant = torch.cat([gradient(rank, step, which).flatten() for which in order]) + residuals[rank]
            for i in kept:
                total[i] += meant[i] / size * (1 if method.error_feedback else numel / len(kept))
                meant[i] = 0
            residuals[rank] = meant if method.error_feedback else residuals[rank]
        results.append(list(total.split([NUMELS[which] for which in order]))[::-1])
    return results


def draws(seed: int, step: int, rank: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64([seed, step, sum(NUMELS), rank]))


def simulate_codes(
    code: Callable[[list[float], list[float]], list[float]], size: int, seed: int
) -> Simulated:
    """Every rank sends codes of each parameter, the last one first, with uniform numbers in that order."""
    results = []
    for step in range(STEPS):
        totals = zeros()
        for rank in range(size):
            numbers = draws(seed, step, rank).random(sum(NUMELS)).tolist()
            for which in range(len(SHAPES))[::-1]:
                mine, numbers = numbers[: NUMELS[which]], numbers[NUMELS[which] :]
                values = gradient(rank, step, which).flatten().tolist()
                totals[which] += torch.tensor(code(values, mine), dtype=torch.float64)
        results.append([total / size for total in totals])
    return results


def levels_code(levels: int, segment: int, norm: str) -> Callable[[list[float], list[float]], list[float]]:
    """QSGD's Q: magnitudes between levels l / L go up with the probability of their distance from l."""

    def code(values: list[float], numbers: list[float]) -> list[float]:
        out = []
        for start in range(0, len(values), segment):
            part = values[start : start + segment]
            scale = max(map(abs, part)) if norm == "max" else math.sqrt(sum(x * x for x in part))
            for x, u in zip(part, numbers[start : start + segment], strict=True):
                below = math.floor(levels * abs(x) / scale)
                distance = levels * abs(x) / scale - below
                # The same draw as of floor(y + u): a negative y goes down where u is small.
                up = u >= 1 - distance if x > 0 else u < distance
                out.append(math.copysign(scale * (below + up) / levels, x))
        return out

    return code


def simulate_natural(size: int, seed: int) -> Simulated:
    """2^a or 2^(a + 1), by a draw of 52 bits."""
    results = []
    for step in range(STEPS):
        totals = zeros()
        for rank in range(size):
            words = draws(seed, step, rank).integers(0, 2**64, sum(NUMELS), dtype=np.uint64)
            numbers = [word % 2**52 for word in words.tolist()]
            for which in range(len(SHAPES))[::-1]:
                for i, x in enumerate(gradient(rank, step, which).flatten().tolist()):
                    mantissa, exponent = math.frexp(abs(x))  # in [1/2, 1)
                    beyond = 2 * mantissa - 1
                    up = beyond + numbers.pop(0) / 2**52 >= 1
                    totals[which][i] += math.copysign(2.0 ** (exponent - 1 + up), x)
        results.append([total / size for total in totals])
    return results


def check(compression: mpisgd.Compressor, simulated: Simulated, **options) -> None:
    trained = Trained(compression=compression, **options)
    seen = [trained.step(step) for step in range(STEPS)]
    scale = mpisgd.size() if options.get("op") is mpisgd.ReduceOp.SUM else 1
    off = []  # relative to the largest element
    for got, expected in zip(seen, simulated, strict=True):
        whole = [scale * part for part in expected]
        off.append(largest_difference(got, whole) / max(1, *(part.abs().max().item() for part in whole)))
    everyone(max(off) < 1e-12, f"{compression}: {off}")
    same_on_all_ranks([[part.tolist() for part in got] for got in seen])


pytestmark = pytest.mark.mpi(min_size=2)


@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_bytes": TWO_BUCKETS, "overlap": True}, {"op": mpisgd.ReduceOp.SUM}],
    ids=["one", "two", "sum"],
)
def test_top_k(options):
    check(TopK(0.2), simulate_elements(lambda m: sent_by_largest(m, 0.2), mpisgd.size()), **options)


def test_top_k_without_feedback():
    expected = simulate_elements(lambda m: sent_by_largest(m, 0.1), mpisgd.size(), feedback=False)
    check(TopK(0.1, error_feedback=False), expected)


@pytest.mark.parametrize("value", [0.3, 1.5, 5.0])  # most elements, some, hardly any
def test_threshold(value):
    expected = simulate_elements(lambda m: torch.where(m.abs() >= value, m, 0.0), mpisgd.size())
    check(Threshold(value), expected, bucket_cap_bytes=TWO_BUCKETS)


@pytest.mark.parametrize(
    "method",
    [
        DeepGradient(0.1, warmup_steps=7, warmup_ratio=0.6),
        DeepGradient(0.2, momentum=0.7, nesterov=True, clip_norm=1.5),
    ],
    ids=repr,
)
def test_deep_gradient(method):
    check(method, simulate_dgc(method, mpisgd.size()), bucket_cap_bytes=TWO_BUCKETS)


@pytest.mark.parametrize("options", [{}, {"bucket_cap_bytes": TWO_BUCKETS, "op": mpisgd.ReduceOp.SUM}])
def test_power_sgd(options):
    method = PowerSGD(2, warmup_steps=3)
    check(method, simulate_power_sgd(method, mpisgd.size()), **options)


@pytest.mark.parametrize("method", [RandomK(0.2), RandomK(0.3, error_feedback=False, seed=5)], ids=repr)
def test_random_k(method):
    check(method, simulate_random_k(method, mpisgd.size()))


@pytest.mark.parametrize("method", [QSGD(4, segment=10), QSGD(2, norm="l2", seed=3)], ids=repr)
def test_qsgd(method):
    code = levels_code(2 ** (method.bits - 1) - 1, method.segment, method.norm)
    check(method, simulate_codes(code, mpisgd.size(), method.seed))


def test_terngrad():
    check(TernGrad(), simulate_codes(levels_code(1, 10**9, "max"), mpisgd.size(), 0))


def test_natural():
    check(Natural(seed=2), simulate_natural(mpisgd.size(), 2))
