"""Mixing matrices as plain data: weights of a graph, what they sum to, and how fast they mix.

A matrix is given by its rows, each of which maps ranks to weights: `rows[i][j]` is what the tensor of rank j
counts in the new tensor of rank i. Entries that are zero are left out: nothing is sent there.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

__all__ = [
    "Rows",
    "dense_of",
    "is_column_stochastic",
    "is_row_stochastic",
    "is_strongly_connected",
    "metropolis_hastings",
    "second_eigenvalue",
]

Rows = Sequence[Mapping[int, float]]

ZERO, NUM_DOUBLINGS = 1e-12, 50
TOLERANCE = 1e-9  # of a sum that is to be 1


def metropolis_hastings(destinations: Sequence[Iterable[int]]) -> tuple[dict[int, float], ...]:
    """Return weights with which a graph mixes: rows and columns sum to 1 where it is undirected or regular.

        W[i, j] = 1 / (1 + max(d[i], d[j]))  for every edge from j to i,  W[i, i] = 1 - the rest of row i,

    where d[i] is the number of neighbours that rank i sends to. On a regular graph all are 1 / (d + 1).

    Args:
        destinations: for each rank, the ranks that it sends to, itself left out.

    Source: Xiao, Boyd and Kim 2007, "Distributed average consensus with least-mean-square deviation".
    """
    targets = [set(each) for each in destinations]
    divisors: list[dict[int, int]] = [{} for _ in targets]
    for j, mine in enumerate(targets):
        for i in mine:
            divisors[i][j] = 1 + max(len(mine), len(targets[i]))
    return tuple(_with_own_weight(i, row) for i, row in enumerate(divisors))


def _with_own_weight(rank: int, divisors: Mapping[int, int]) -> dict[int, float]:
    """Return a row of 1 / divisor, and the rest of 1 for the rank itself: exactly 1 / (d + 1) if all are."""
    rest = 1 - sum(Fraction(count, divisor) for divisor, count in Counter(divisors.values()).items())
    row = {j: 1.0 / divisor for j, divisor in divisors.items()} | {rank: float(rest)}
    return {j: row[j] for j in sorted(row) if row[j]}


def dense_of(rows: Rows) -> Tensor:
    """Return the matrix, [size, size] of float64."""
    matrix = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for i, row in enumerate(rows):
        matrix[i, list(row)] = torch.tensor(list(row.values()), dtype=torch.float64)
    return matrix


def is_row_stochastic(rows: Rows) -> bool:
    """Return whether every rank takes a mean: equal tensors stay as they are."""
    return all(abs(sum(row.values()) - 1) <= TOLERANCE for row in rows)


def is_column_stochastic(rows: Rows) -> bool:
    """Return whether every rank gives away what it has, no more and no less: the sum over the ranks stays."""
    sums = [0.0] * len(rows)
    for row in rows:
        for j, weight in row.items():
            sums[j] += weight
    return all(abs(total - 1) <= TOLERANCE for total in sums)


def is_strongly_connected(rows: Rows) -> bool:
    """Return whether what any rank has comes to every other, in as many steps as it takes."""
    forth: list[list[int]] = [list(row) for row in rows]
    back: list[list[int]] = [[] for _ in rows]
    for i, row in enumerate(rows):
        for j in row:
            back[j].append(i)
    return all(len(_reached(edges)) == len(rows) for edges in (forth, back))


def _reached(edges: Sequence[Iterable[int]]) -> set[int]:
    seen, ahead = {0}, [0]
    while ahead:
        new = set(edges[ahead.pop()]) - seen
        seen |= new
        ahead += new
    return seen


def second_eigenvalue(matrix: Tensor) -> float:
    """Return the second largest modulus of a stochastic matrix's eigenvalues; below 1e-12 it counts as 0.

    That is the spectral radius of W - J, where all of J is 1 / size, as the limit of |(W - J)**k|**(1 / k)
    for k = 1, 2, 4, ... . LAPACK's own does not converge for matrices with as many equal eigenvalues.
    """
    power = matrix - 1.0 / len(matrix)
    if float(power.norm()) <= ZERO:
        return 0.0
    log_radius = 0.0
    for doubling in range(NUM_DOUBLINGS):
        norm = float(power.norm())
        log_radius += math.log(norm) / 2**doubling
        power = (power / norm) @ (power / norm)
        if not float(power.norm()) > 0:
            return 0.0
    return math.exp(log_radius)
