"""What can be measured: models, collectives, their sizes in memory, and what bounds them.

Sizes and bandwidths are those of nccl-tests: `nbytes` is the memory of the larger side of a rank (for
all_gather its output, for reduce_scatter its input), algorithm bandwidth is `nbytes` / time, and bus
bandwidth multiplies this by the share of `nbytes` that must pass a rank's link, so that it can be compared
with the hardware whatever the number of ranks.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from mpisgd.arguments import shown
from mpisgd.errors import JobError

__all__ = [
    "BATCHES",
    "COLLECTIVES",
    "ITEM_BYTES",
    "Case",
    "bus_factor",
    "halvings",
    "link_bytes",
    "parse_bytes",
    "powers",
    "sizes",
]

ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8}

IN_PLACE = ("all_reduce", "reduce", "broadcast")
COLLECTIVES = (*IN_PLACE, "reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")
# In which a rank's input or output has a piece for each rank; otherwise it is a single piece.
INPUT_OF_PIECES = ("reduce_scatter", "all_to_all", "scatter")
OUTPUT_OF_PIECES = ("all_gather", "all_to_all", "gather")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")

# The models that are trained, and examples of one rank; enough work for a step that is not all communication.
BATCHES = {"mlp": 32, "deep": 32, "transformer": 4}

UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
# MPI counts in a C int, and what is measured here is one call of it.
MAX_BYTES = 2**31 - 1


@dataclass(frozen=True)
class Case:
    """One collective on one size.

    Attributes:
        collective: one of COLLECTIVES.
        dtype: one of ITEM_BYTES.
        count: elements of one piece.
        size: number of ranks.
        device: what torch calls the kind of device on which the memory lies.
    """

    collective: str
    dtype: str
    count: int
    size: int
    device: str = "cpu"

    @property
    def input_numel(self) -> int:
        """Elements a rank gives."""
        return self.count * (self.size if self.collective in INPUT_OF_PIECES else 1)

    @property
    def output_numel(self) -> int:
        """Elements a rank gets."""
        return self.count * (self.size if self.collective in OUTPUT_OF_PIECES else 1)

    @property
    def nbytes(self) -> int:
        """Memory of the larger side."""
        return max(self.input_numel, self.output_numel) * ITEM_BYTES[self.dtype]

    @property
    def in_place(self) -> bool:
        """Whether input and output are the same memory."""
        return self.collective in IN_PLACE

    @property
    def reduces(self) -> bool:
        """Whether elements are added, not only moved."""
        return self.collective in REDUCING


def case_of(collective: str, dtype: str, nbytes: int, size: int, device: str = "cpu") -> Case:
    """Return the case whose larger side has `nbytes`, less what divides into no whole pieces."""
    pieces = 1 if collective in IN_PLACE else size
    return Case(collective, dtype, max(1, nbytes // (pieces * ITEM_BYTES[dtype])), size, device)


def bus_factor(collective: str, size: int) -> float:
    """Return bus bandwidth / algorithm bandwidth, as nccl-tests define it."""
    if collective in ("broadcast", "reduce"):
        return 1.0
    share = (size - 1) / size
    return 2 * share if collective == "all_reduce" else share


def link_bytes(case: Case, ranks_per_host: Sequence[int]) -> float:
    """Return how many bytes must cross the busiest host's link in one direction, whatever the algorithm.

    Args:
        case: its `size` is the sum of `ranks_per_host`.
        ranks_per_host: the root, where there is one, is on the first.
    """
    hosts, size, nbytes = len(ranks_per_host), case.size, case.nbytes
    if hosts == 1:
        return 0.0
    if case.collective == "all_reduce":
        return 2 * (hosts - 1) / hosts * nbytes
    if case.in_place:
        return float(nbytes)
    if case.collective == "all_to_all":
        return max(here * (size - here) / size for here in ranks_per_host) * nbytes
    if case.collective in ("gather", "scatter"):
        return (size - ranks_per_host[0]) / size * nbytes
    return (size - min(ranks_per_host)) / size * nbytes


def parse_bytes(text: str) -> int:
    """Return the number of bytes of `4`, `64KiB` or `1 MiB`."""
    found = re.fullmatch(r"\s*([0-9]{1,30})\s*([a-z]*)\s*", text, re.IGNORECASE)
    if found is None or found[2].lower() not in UNITS:
        raise JobError(f"{shown(text)} is no size; expected for example 4, 64KiB or 16MiB")
    nbytes = int(found[1]) * UNITS[found[2].lower()]
    if not 0 < nbytes <= MAX_BYTES:
        raise JobError(f"size {shown(text)}: expected 1 to {MAX_BYTES} bytes")
    return nbytes


def sizes(text: str) -> list[int]:
    """Return the sizes of a list such as `4,1KiB,64MiB`, or of a range such as `4-256MiB`."""
    first, dash, last = text.partition("-")
    if dash:
        return powers(parse_bytes(first), parse_bytes(last))
    return [parse_bytes(part) for part in text.split(",")]


def halvings(number: int) -> list[int]:
    """Return the number, half of it, half of that and so on, down to 1."""
    return [number >> shift for shift in range(number.bit_length())]


def powers(first: int, last: int, factor: int = 4) -> list[int]:
    """Return first, first * factor, ... up to last, which is always the end."""
    if first > last:
        raise JobError(f"sizes from {first} to {last}: the first is larger than the last")
    found = [first]
    while found[-1] * factor <= last:
        found.append(found[-1] * factor)
    return found if found[-1] == last else [*found, last]
