"""The memory a collective works on, filled so that a wrong result shows.

Element i of rank r starts as ((i mod 13) + 1) * (r + 1): it differs by rank and by element, and the sums
have a closed form.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.bench.cases import Case

__all__ = ["Payload", "WrongResult", "expected", "given", "torch_call"]

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


def torch_call(
    api: Any, payload: Payload, ranks: Sequence[int], group: Any = None, **options: Any
) -> Callable[[], object]:
    """Return what does the collective once, with functions called as in `torch.distributed`.

    Args:
        api: the module that has them.
        payload: what to do it on.
        ranks: the global ranks of the group.
        group: to do it in.
        options: of all_reduce.
    """
    given, out = payload.input, payload.output
    inputs, outputs = list(given.chunk(payload.case.size)), list(out.chunk(payload.case.size))
    rank = ranks[payload.rank]

    def next_root() -> int:
        return ranks[payload.next_root()]

    def gather() -> None:
        root = next_root()
        api.gather(given, outputs if root == rank else None, root, group)

    def scatter() -> None:
        root = next_root()
        api.scatter(out, inputs if root == rank else None, root, group)

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: api.all_reduce(out, group=group, **options),
        "reduce": lambda: api.reduce(out, next_root(), group=group),
        "broadcast": lambda: api.broadcast(out, next_root(), group),
        "reduce_scatter": lambda: api.reduce_scatter_tensor(out, given, group=group),
        "all_gather": lambda: api.all_gather_into_tensor(out, given, group),
        "all_to_all": lambda: api.all_to_all_single(out, given, group=group),
        "gather": gather,
        "scatter": scatter,
    }
    return calls[payload.case.collective]


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
