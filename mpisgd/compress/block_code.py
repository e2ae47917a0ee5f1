"""`BlockCode`: numbers as whole multiples of a scale that each block has, in one message.

    | codes, packed | scale of block 0 | ... | scale of the last block |

Both steps of an exchange use it: see `mpisgd.methods.two_step.two_step_exchange`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.compress.bit_packing import pack, packed_size, unpack
from mpisgd.compress.levels import segments_of

__all__ = ["BlockCode"]


class BlockCode:
    """How values travel as s round(x / s), where s is the largest magnitude of their block divided by L.

    L is the largest whole number of so many bits. A code of 0 stands for -L.

    Args:
        lengths: of the pieces, in their order; a block lies in one of them.
        dtype: of the values, float32 or float64.
        num_pieces: room in a message.
        num_values: room in a message, likewise.
        bits: of a code, 2 to 8.
        block: elements of a block; the last one of a piece may have less.

    Attributes:
        numel: how many values there are.
        nbytes: of a message.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        dtype: torch.dtype,
        num_pieces: int,
        num_values: int,
        *,
        bits: int,
        block: int,
    ) -> None:
        self.numel = sum(lengths)
        self._dtype, self._bits, self._largest = dtype, bits, 2 ** (bits - 1) - 1
        self._segments = segments_of(lengths, block)
        self._num_scales = sum(part.number for part in self._segments)
        most = num_values // block + num_pieces  # a block more than whole ones in each piece
        self._scales_at = packed_size(self.numel, bits)
        self.nbytes = packed_size(num_values, bits) + min(most, num_values) * dtype.itemsize

    def encode(self, values: Tensor, message: Tensor) -> Tensor:
        """Write what travels to `message`, leave the rest in `values`; see `SignCode.encode`.

        Returns:
            The scales; not all finite where `values` were not.
        """
        codes = torch.empty(self.numel, dtype=torch.uint8, device=values.device)
        scales = values.new_empty(self._num_scales)
        for part in self._segments:
            mine = scales[part.first : part.first + part.number].view(-1, 1)
            torch.div(part.of(values).abs().amax(1, keepdim=True), self._largest, out=mine)
            divisors = mine.masked_fill(mine == 0, 1)
            for numbers, out in part.chunks(values, codes):
                multiples = (numbers / divisors).round_()
                numbers.sub_(multiples * mine)
                out.copy_(multiples.add_(self._largest))
        message.zero_()
        pack(codes, self._bits, out=message[: self._scales_at])
        message[self._scales_at : self._scales_at + scales.nbytes] = scales.view(torch.uint8)
        return scales

    def decode(self, message: Tensor) -> Tensor:
        """Return the values [numel] that a message holds."""
        codes = unpack(message[: self._scales_at], self._bits, self.numel)
        # Copied, as codes of any number of bytes lie before them.
        end = self._scales_at + self._num_scales * self._dtype.itemsize
        scales = message[self._scales_at : end].clone().view(self._dtype)
        values = torch.empty(self.numel, dtype=self._dtype, device=message.device)
        for part in self._segments:
            mine = scales[part.first : part.first + part.number].view(-1, 1)
            for code, out in part.chunks(codes, values):
                out.copy_(code).sub_(self._largest).mul_(mine)
        return values
