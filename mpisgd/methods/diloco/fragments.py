"""How parameters are cut into the fragments of `DiLoCo`."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from mpisgd.errors import InvalidArgument

__all__ = ["cut", "names_of_fragments"]


def cut(params: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Cut into `count` parts of about as many bytes, in their order; none is empty if there are enough."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    total, before, place = sum(param.nbytes for param in params.values()), 0, -1
    for number, (key, param) in enumerate(params.items()):
        even = min(before * count // total, count - 1) if total else 0  # the last may have no bytes
        last_chance = count - (len(params) - number)  # from here on each part gets one parameter
        place = max(place, min(even, place + 1), last_chance)
        parts[place][key] = param
        before += param.nbytes
    return [part for part in parts if part]


def names_of_fragments(lengths: Sequence[tuple[str, int]], count: int) -> tuple[tuple[str, ...], ...]:
    """Cut names into fragments: a parameter is in that in which its first byte would be."""
    total = sum(nbytes for _, nbytes in lengths)
    fragments: list[list[str]] = [[] for _ in range(count)]
    begin = 0
    for name, nbytes in lengths:
        fragments[begin * count // total].append(name)
        begin += nbytes
    if not all(fragments):
        raise InvalidArgument(f"parameters of {total} bytes cannot be cut evenly into {count} fragments")
    return tuple(map(tuple, fragments))
