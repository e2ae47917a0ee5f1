"""`Request`: what a rank says of an operation before it runs, and what must be alike on all ranks."""

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch

from mpisgd.arguments import ranks_text

__all__ = ["Request", "differences"]


class Request(NamedTuple):
    """One operation, on one tensor or on several that travel together.

    Attributes:
        name: unique among what is pending in a process set; begins with the kind.
        kind: `allreduce`, `allgather`, `broadcast`, `alltoall`, `reducescatter`, `barrier`.
        set_id: the process set.
        op: the reduction, or "".
        dtypes: of the tensors.
        shapes: of the tensors; without the first dimension where ranks may differ in it.
        root: global rank, or -1.
        prescale: multiplied before a reduction.
        postscale: multiplied after it.
        device: type of the device the tensors are on.
        ranks: of a process set that is made or given back.
        about: anything else that must be alike, in lines, of which those that differ are told.
    """

    name: str
    kind: str
    set_id: int = 0
    op: str = ""
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    device: str = "cpu"
    ranks: tuple[int, ...] = ()
    about: str = ""

    @property
    def key(self) -> tuple[int, str]:
        """What it is found by."""
        return self.set_id, self.name

    @property
    def label(self) -> str:
        """The name as the program gave it."""
        return self.name.removeprefix(f"{self.kind}.")

    def __str__(self) -> str:
        """Return the call as messages name it: `allreduce 'x'`, or `join`."""
        return self.kind if self.name == self.kind else f"{self.kind} {self.label!r}"

    @property
    def nbytes(self) -> int:
        """How many bytes the tensors have, or, where ranks may differ, a row of each."""
        itemsizes = [getattr(torch, dtype).itemsize for dtype in self.dtypes]
        return sum(map(operator.mul, itemsizes, map(math.prod, self.shapes)))


# Field by field, in the order in which a difference is worth telling; the words for it.
_TOLD = {
    "kind": "operation",
    "dtypes": "dtype",
    "shapes": "shape",
    "op": "reduction",
    "root": "root rank",
    "prescale": "prescale factor",
    "postscale": "postscale factor",
    "device": "device",
    "ranks": "ranks",
}


def differences(requests: Mapping[int, Request]) -> str | None:
    """Say in what the ranks' requests of one name differ, with ranks and values; None where they agree.

    Args:
        requests: by global rank.
    """
    if len(set(requests.values())) == 1:
        return None
    first = next(iter(requests.values()))
    if (cause := _difference_in_about(requests)) is not None:
        return f"tensor {first.label!r}: {cause}"
    found = [
        _difference(word, {rank: _shown(getattr(request, field)) for rank, request in requests.items()})
        for field, word in _TOLD.items()
    ]
    return f"tensor {first.label!r}: " + "; ".join(filter(None, found))


def _difference_in_about(requests: Mapping[int, Request]) -> str | None:
    """Say what is in the first line in which the ranks differ; what else differs follows from that."""
    listed = {rank: request.about.splitlines() for rank, request in requests.items()}
    for lines in itertools.zip_longest(*listed.values(), fillvalue="nothing"):
        if len(set(lines)) > 1:
            return _difference("parameter", dict(zip(listed, lines, strict=True)))
    return None


def _difference(word: str, values: Mapping[int, str]) -> str | None:
    by_value: dict[str, list[int]] = defaultdict(list)
    for rank, value in sorted(values.items()):
        by_value[value].append(rank)
    if len(by_value) == 1:
        return None
    told = ", ".join(f"{ranks_text(ranks)} gave {value}" for value, ranks in by_value.items())
    return f"mismatched {word}: {told}"


def _shown(value: object) -> str:
    """Return a value as text: a single tensor's shape without the tuple around it."""
    if not isinstance(value, tuple):
        return str(value)
    if value and isinstance(value[0], int):
        return str(list(value))
    return ", ".join(str(list(item) if isinstance(item, tuple) else item) for item in value)
