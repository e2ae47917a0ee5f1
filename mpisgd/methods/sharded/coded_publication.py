"""`CodedPublication`: updated parameters travel between hosts as codes of a few bits per element.

    owner      master, exact  ->  code  ->  parameter      of what it owns
    others                        code  ->  parameter      the same bits

All ranks have what the codes stand for, and owners have masters, which the optimizer updates: what codes
leave out of a parameter in one step is there in the next. On one host nothing travels, and all is exact.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpisgd.compress.code import Code
from mpisgd.methods.sharded.publication import Publication
from mpisgd.sharding.divided_parameters import DividedParameters
from mpisgd.sharding.owners import Buffers
from mpisgd.sharding.reduction.coded_reduction import MakeShardCode
from mpisgd.sharding.state_exchange import runs_of

__all__ = ["CodedPublication"]


class CodedPublication(Publication):
    """Brings updated parameters to everyone; see `Publication`.

    Args:
        parameters: as there, with masters; so is `cap_bytes`.
        make_code: makes the code of what an owner has, of the lengths of the parts of parameters in it.
    """

    def __init__(self, parameters: DividedParameters, cap_bytes: int, make_code: MakeShardCode) -> None:
        super().__init__(parameters, cap_bytes)
        self._make_code = make_code
        self._codes: dict[tuple[torch.dtype, tuple[int, ...]], Code] = {}

    def publish(self, updated: Sequence[bool], *, in_background: bool = False) -> None:
        """See `Publication`."""
        super().publish(updated)
        self._parameters.note_updated()  # what has come is written as a program writes
        for piece in self._parameters.pieces:
            if updated[piece.members[0].param]:
                piece.note_written()

    def _find_parts(self, cap_bytes: int) -> list[Sequence[int]]:
        """See `Publication`; a code is of one dtype, as a bucket is."""
        named = self._parameters.named
        dtypes = sorted({param.dtype for _, param in named}, key=str)
        alike = [
            [i for i in part if named[i][1].dtype is dtype] for part in self._by_bucket() for dtype in dtypes
        ]
        return [part for part in alike if part]

    def _find_buffers(self, parts: Sequence[Sequence[int]]) -> list[list[list[Tensor]]]:
        """See `Publication`; blocks of a code go on where pieces cut a parameter, and end with it."""
        self._codes.clear()
        runs = [
            runs_of(member for range_ in of_one for member in range_.members if member.numel)
            for of_one in self._parameters.ranges
        ]
        return [
            [
                [self._parameters.part(run) for index in part for run in of_one.get(index, ())]
                for of_one in runs
            ]
            for part in parts
        ]

    # -- inside the queue ---------------------------------------------------------------------------

    def _pack(self, buffers: Buffers) -> tuple[Buffers, Callable[[], None]]:
        """Return the messages of the owners that this rank sends and receives for; see `Pack`."""
        owners = self._parameters.owners
        codes = {owner: self._code_of(buffers[owner]) for owner in owners.mine if buffers[owner]}
        messages = [
            [torch.empty(codes[owner].nbytes, dtype=torch.uint8)] if owner in codes else []
            for owner in range(owners.size)
        ]
        if owners.rank in codes:
            codes[owners.rank].encode(torch.cat(list(buffers[owners.rank])), messages[owners.rank][0])

        def unpack() -> None:
            for owner, code in codes.items():
                values = code.decode(messages[owner][0])
                for buffer, value in zip(
                    buffers[owner],
                    torch.split(values, [buffer.numel() for buffer in buffers[owner]]),
                    strict=True,
                ):
                    buffer.copy_(value)

        return messages, unpack

    def _code_of(self, buffers: Sequence[Tensor]) -> Code:
        key = buffers[0].dtype, tuple(buffer.numel() for buffer in buffers)
        if key not in self._codes:
            self._codes[key] = self._make_code(key[1], key[0])
        return self._codes[key]
