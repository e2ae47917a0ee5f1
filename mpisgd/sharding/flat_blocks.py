"""Small parameters that lie side by side, so that a rank updates, sends and receives many of them as one.

What a tensor costs, whatever its size, is felt where a model has hundreds of small ones:

    before    | b3 |   | b1 |      | b2 |
    after     | b3 | b2 | b1 |              one block for each kind: optimizer group, dtype
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.gradients.fusion_buffer import layout_of, window
from mpisgd.gradients.in_place_gradient import ALONE, num_uses
from mpisgd.sharding.division import Item, PieceRange, lay_out

__all__ = ["Block", "is_movable", "move_to_blocks"]


class Block(NamedTuple):
    """Memory of parameters of one kind.

    Attributes:
        start: the byte at which it begins, as `lay_out` counts.
        flat: the elements, with the padding between parameters.
    """

    start: int
    flat: Tensor

    def part(self, range_: PieceRange) -> Tensor:
        """Return the memory of a piece that lies here, [range_.numel]."""
        first = (range_.start - self.start) // self.flat.element_size()
        return self.flat[first : first + range_.numel]


def is_movable(param: Tensor) -> bool:
    """Return whether nobody notices that a parameter is moved: nothing else lies in its memory."""
    data = param.detach()
    storage = data.untyped_storage()
    is_shared = storage.is_shared() and data.is_cpu  # torch says so of all memory of GPUs
    owns = storage.nbytes() == data.nbytes and not is_shared
    del data, storage
    return owns and type(param.data) is Tensor and num_uses(param) == ALONE


def move_to_blocks(params: Sequence[Tensor], items: Sequence[Item]) -> Mapping[int, Block]:
    """Move the parameters that may share pieces; return the block of each of them.

    Args:
        params: some of which stay where they are.
        items: what is to be known of each.
    """
    param_of = {item.param: param for item, param in zip(items, params, strict=True)}
    ordered, starts, _ = lay_out(items)
    joining = [(item, at) for item, at in zip(ordered, starts, strict=True) if not item.kind[2]]
    blocks: dict[int, Block] = {}
    for _, placed in groupby(joining, key=lambda pair: pair[0].kind):
        of_kind = list(placed)
        block = _make_block(of_kind, [param_of[item.param] for item, _ in of_kind])
        blocks.update({item.param: block for item, _ in of_kind})
    return blocks


def _make_block(placed: Sequence[tuple[Item, int]], params: Sequence[Tensor]) -> Block:
    (_, start), (last, end) = placed[0], placed[-1]
    itemsize = last.itemsize
    numel = (end - start) // itemsize + last.numel
    flat = torch.zeros(numel, dtype=params[0].dtype, device=params[0].device)
    views = [
        window(flat, (at - start) // itemsize, layout_of(p))
        for (_, at), p in zip(placed, params, strict=True)
    ]
    torch._foreach_copy_(views, [param.detach() for param in params])
    for param, view in zip(params, views, strict=True):
        param.data = view
    return Block(start, flat)
