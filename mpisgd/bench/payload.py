"""The memory a collective works on, filled so that a wrong result shows.

Element i of rank r starts as ((i mod 13) + 1) * (r + 1): it differs by rank and by element, and the sums
have a closed form.
"""

import torch
from torch import Tensor

from mpisgd.bench.cases import Case

__all__ = ["Payload", "WrongResult", "expected", "given"]

PERIOD = 13


class WrongResult(Exception):
    """A variant does not compute what it should."""


class Payload:
    """Input and output of one rank in one case; every variant in a process works on the same memory.

    Attributes:
        input: [case.input_numel]; variants leave it alone.
        output: [case.output_numel]; of the collectives that work in place it holds the input first.
    """

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self.rank = rank
        self.input = given(case, rank)
        self.output = torch.zeros(case.output_numel, dtype=self.input.dtype)
        self._turn = -1

    def next_root(self) -> int:
        """Return the root of the next call, 0 after `reset()`.

        It goes round the ranks: with one root for all calls the others could run ahead of it, and a loop
        would show how fast they can be sent, not how long one call takes.
        """
        self._turn += 1
        return self._turn % self.case.size

    def reset(self) -> None:
        """Make everything ready for the next call."""
        self._turn = -1
        if self.case.in_place:
            self.output.copy_(self.input)
        else:
            self.output.zero_()

    def verify(self) -> None:
        """Raise WrongResult unless `output` is what one call after `reset()` leaves."""
        wanted = expected(self.case, self.rank)
        if wanted is None:
            return
        close = torch.isclose(self.output, wanted, rtol=_tolerance(wanted.dtype), atol=0.0)
        if not bool(close.all()):
            first = int((~close).nonzero()[0])
            raise WrongResult(
                f"wrong result on rank {self.rank}: element {first} of {wanted.numel()} is "
                f"{self.output[first].item()}, expected {wanted[first].item()}"
            )


def given(case: Case, rank: int) -> Tensor:
    """Return what `rank` puts in."""
    return _pattern(case, 0, case.input_numel) * (rank + 1)


def expected(case: Case, rank: int) -> Tensor | None:
    """Return what `rank` gets out from root 0, None where only the root gets something."""
    count, everyone = case.count, range(case.size)
    total = case.size * (case.size + 1) // 2
    if case.collective in ("reduce", "gather") and rank != 0:
        return None
    if case.collective in ("all_reduce", "reduce"):
        return _pattern(case, 0, count) * total
    if case.collective == "broadcast":
        return given(case, 0)
    if case.collective == "reduce_scatter":
        return _pattern(case, rank * count, count) * total
    if case.collective == "scatter":
        return _pattern(case, rank * count, count)
    first = rank * count if case.collective == "all_to_all" else 0
    return torch.cat([_pattern(case, first, count) * (other + 1) for other in everyone])


def _pattern(case: Case, first: int, numel: int) -> Tensor:
    """Return the elements `first` and so on of rank 0."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    period = (torch.arange(first, first + PERIOD) % PERIOD + 1).to(dtype)
    return period.repeat(-(-numel // PERIOD))[:numel].clone()


def _tolerance(dtype: torch.dtype) -> float:
    """Return the relative rounding error that a sum may have."""
    return 4 * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
