"""The memory a collective works on, filled so that a wrong result shows.

Element i of rank r starts as ((i mod 13) + 1) * (r + 1): it differs by rank and by element, and the sums
have a closed form.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.tools.bench.cases import INPUT_OF_PIECES, Case
from mpisgd.tools.bench.measure import OnDevice, WrongResult

__all__ = ["Payload", "expected", "given", "torch_call"]

PERIOD = 13


class Payload(OnDevice):
    """Input and output of one rank in one case; every variant in a process works on the same memory.

    Attributes:
        input: [case.input_numel]; variants leave it alone.
        output: [case.output_numel]; of the collectives that work in place it holds the input first.
    """

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(case.device)
        self.case = case
        self.rank = rank
        self.input = given(case, rank).to(case.device)
        self.output = torch.zeros(case.output_numel, dtype=self.input.dtype, device=case.device)
        self._turn = -1

    def next_root(self) -> int:
        """Return the root of the next call, 0 after `reset()`.

        It goes round the ranks: with one root for all calls the others could run ahead of it, and a loop
        would show how fast they can be sent, not how long one call takes.
        """
        self._turn += 1
        return self._turn % self.case.size

    def reset(self) -> None:
        """See `Subject`."""
        self._turn = -1
        if self.case.in_place:
            self.output.copy_(self.input)
        else:
            self.output.zero_()

    def verify(self) -> None:
        """See `Subject`; sums may have a rounding error."""
        wanted = expected(self.case, self.rank)
        if wanted is None:
            return
        rtol = 4 * torch.finfo(wanted.dtype).eps if wanted.dtype.is_floating_point else 0.0
        found = self.output.cpu()
        close = torch.isclose(found, wanted, rtol=rtol, atol=0.0)
        if not bool(close.all()):
            first = int((~close).nonzero()[0])
            raise WrongResult(
                f"wrong result on rank {self.rank}: element {first} of {wanted.numel()} is "
                f"{found[first].item()}, expected {wanted[first].item()}"
            )


def torch_call(
    api: Any, payload: Payload, ranks: Sequence[int], group: Any = None, **options: Any
) -> Callable[[], object]:
    """Return a function that runs the collective once, by functions called as in `torch.distributed`.

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
    """Return the input of `rank`."""
    return _pattern(case, 0, case.input_numel) * (rank + 1)


def expected(case: Case, rank: int) -> Tensor | None:
    """Return the output of `rank` with root 0, None where only the root has one."""
    if case.collective in ("reduce", "gather") and rank != 0:
        return None
    first = rank * case.count if case.collective in INPUT_OF_PIECES else 0
    piece = _pattern(case, first, case.count)
    if case.reduces:
        return piece * (case.size * (case.size + 1) // 2)
    if case.collective in ("broadcast", "scatter"):
        return piece
    return torch.cat([piece * (other + 1) for other in range(case.size)])


def _pattern(case: Case, first: int, numel: int) -> Tensor:
    """Return the elements `first` and so on of rank 0."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    period = (torch.arange(first, first + PERIOD) % PERIOD + 1).to(dtype)
    return period.repeat(-(-numel // PERIOD))[:numel].clone()
