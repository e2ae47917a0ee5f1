"""Masks of attention where queries and keys are divided: this rank's rows, and the columns of all keys.

The columns of a mask stay whole and in the order of the sequence: a rank needs those of all keys. So a mask
has as many rows as this rank has queries (a buffer of `context_parallel`, divided along its rows), or those
of all ranks, or one row for all.
"""

import torch
from torch import Tensor

from mpisgd.context.division import own_part
from mpisgd.errors import InvalidArgument

__all__ = ["check_chunks", "columns_of", "rows_of"]


def check_chunks(what: str, length: int, size: int) -> None:
    """Raise where a rank's part of a sequence is not the two chunks that places are told by.

    Args:
        what: goes by places.
        length: of the part.
        size: the number of ranks.

    Raises:
        InvalidArgument: it is odd, so it was not divided by `context_parallel`.
    """
    if size > 1 and length % 2:
        raise InvalidArgument(
            f"scaled_dot_product_attention: {what} with {length} places on this rank; context_parallel gives "
            "a rank two chunks of equal length, so that parts are even: divide sequences by `buffers`, and "
            "add no places afterwards"
        )


def rows_of(mask: Tensor, num_rows: int, num_columns: int, rank: int, size: int) -> Tensor:
    """Return a mask with the rows of this rank's queries, or one for all; 4-D.

    Args:
        mask: as the program gives it, of two to four dimensions.
        num_rows: of queries that this rank has.
        num_columns: of keys that this rank has.
        rank: this one.
        size: of how many.

    Raises:
        InvalidArgument: it has other rows or columns, or parts are odd; names them.
    """
    rows, columns = mask.shape[-2:]
    if columns not in (1, size * num_columns):
        raise InvalidArgument(
            f"scaled_dot_product_attention: attn_mask {list(mask.shape)} has {columns} columns, and there "
            f"are {size * num_columns} keys on the {size} ranks of context_parallel; expected one for each, "
            "in the order of the sequence: only rows may be divided"
        )
    if rows not in (1, num_rows, size * num_rows):
        raise InvalidArgument(
            f"scaled_dot_product_attention: attn_mask {list(mask.shape)} has {rows} rows; expected one "
            f"for each of this rank's {num_rows} queries (as a buffer that is divided along its rows), or "
            f"for each of the {size * num_rows} queries of all ranks, or a single one"
        )
    if columns != 1:
        check_chunks("attn_mask", num_columns, size)
    if rows not in (1, num_rows):
        check_chunks("attn_mask", num_rows, size)
    mask = mask[(None,) * (4 - mask.dim())]
    return own_part(mask, 2, rank, size) if rows not in (1, num_rows) else mask


def columns_of(mask: Tensor | None, source: int, size: int, dtype: torch.dtype) -> Tensor | None:
    """Return the columns of the keys of rank `source`, as numbers that are added to scores.

    Args:
        mask: of `rows_of`, None for none.
        source: whose keys.
        size: of how many ranks.
        dtype: of the queries.
    """
    if mask is None:
        return None
    part = mask if mask.shape[-1] == 1 else own_part(mask, 3, source, size)
    if part.dtype != torch.bool:
        keeps = part.dtype == torch.float32 and dtype != torch.float64  # the kernel takes both
        return part.contiguous() if keeps else part.to(dtype).contiguous()
    return torch.zeros(part.shape, dtype=dtype).masked_fill_(~part, -torch.inf)
