"""`TwoStepExchange`: an average of which a few bits per element travel, to the owners of chunks and back.

Source: Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
Speed", the compressed all-reduce of section 5 and the two errors of algorithm 1.

    rank 0   | 0 | 1 | 2 |     all-to-all      owner 0 averages | 0 |    all-gather    | 0 | 1 | 2 |
    rank 1   | 0 | 1 | 2 |   --- codes --->    owner 1 averages | 1 |  --- codes --->  | 0 | 1 | 2 |
    rank 2   | 0 | 1 | 2 |                     owner 2 averages | 2 |                  | 0 | 1 | 2 |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import cut_by
from mpisgd.collectives.all_gather import all_gather_into_tensor
from mpisgd.collectives.all_to_all import all_to_all_single
from mpisgd.compress.code import Code
from mpisgd.compress.residual import fitted
from mpisgd.compress.sign_code import SignCode
from mpisgd.core.group import Group
from mpisgd.method_state import own

__all__ = ["Errors", "MakeCode", "TwoStepExchange", "chunk_numel", "pieces_by_owner"]

ALIGN = 64  # elements: 8 bytes of signs, so that every message begins where a float64 may


class MakeCode(Protocol):
    """Makes the code of a chunk of which the pieces have these lengths."""

    def __call__(self, lengths: Sequence[int], dtype: torch.dtype, most: int, chunk: int, /) -> Code:
        """Return it, with room for `most` pieces and `chunk` values in each message."""


def chunk_numel(numel: int, size: int) -> int:
    """Return how many of `numel` elements each of `size` ranks owns, the last ones less or none."""
    return -(-numel // (size * ALIGN)) * ALIGN


def pieces_by_owner(lengths: Sequence[int], chunk: int, size: int) -> list[list[int]]:
    """Return for each owner the lengths of the pieces that its chunk cuts from tensors side by side."""
    pieces: list[list[int]] = [[] for _ in range(size)]
    place = 0
    for length in lengths:
        end = place + length
        while place < end:
            owner = place // chunk
            stop = min(end, (owner + 1) * chunk)
            pieces[owner].append(stop - place)
            place = stop
    return pieces


def _codes(lengths: Sequence[int], dtype: torch.dtype, size: int, make: MakeCode) -> list[Code]:
    """Return how the chunk of each owner travels; all messages have the same size."""
    chunk = chunk_numel(sum(lengths), size)
    pieces = pieces_by_owner(lengths, chunk, size)
    most = max(map(len, pieces))
    return [make(own, dtype, most, chunk) for own in pieces]


@dataclass
class Errors:
    """What is left out on a rank.

    Attributes:
        worker_error: e_i; None: zero.
        server_error: s_o, [1, elements of the chunk]; None: zero. Of use to the owner of the same chunk only:
            one of other elements begins anew.
        server_begin: the place of the first of these among the values, a scalar; None: where it is now.
    """

    worker_error: Tensor | None = own(None)
    server_error: Tensor | None = own(None)  # not as long as a bucket, else it would be cut by parameter
    server_begin: Tensor | None = own(None)


class TwoStepExchange:
    """Averages values of all ranks, with what was left out before: the worker's error and the server's.

    With C the compression of a code, rank i and owner o of a chunk:

        C(x_i + e_i)              is what rank i sends;       e_i = x_i + e_i - C(x_i + e_i) stays there
        y_o = mean of these + s_o is what the owner means;    s_o = y_o - C(y_o) stays there
        C(y_o)                    is what all ranks get, with the same bits

    With `SignCode` each tensor has a magnitude in each chunk that it lies in. Values that are not finite
    arrive as such on all ranks and leave the errors as they are.

    Args:
        lengths: of the tensors that lie side by side, the same on all ranks; each at least 1.
        dtype: float32 or float64.
        device: where they are.
        group: the ranks.
        state: the errors; None: what is left out is lost.
        code: makes the codes of chunks.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        group: Group,
        state: Errors | None,
        code: MakeCode = SignCode,
    ) -> None:
        self.lengths = tuple(lengths)
        self._group = group
        self._codes = _codes(lengths, dtype, group.size, code)
        self._mine = self._codes[group.rank]
        self._numels = [code.numel for code in self._codes]
        self._dtype, self._device = dtype, device
        self.state = state

    @property
    def worker_error(self) -> Tensor:
        """e_i, [sum(lengths)]; of an exchange that keeps errors."""
        assert self.state is not None
        kept = fitted(self.state.worker_error, sum(self.lengths), self._dtype, self._device)
        self.state.worker_error = kept
        return kept

    @property
    def server_error(self) -> Tensor:
        """s_o, [elements of this rank's chunk]; of an exchange that keeps errors."""
        assert self.state is not None
        begin, state = self._begin, self.state
        kept = None if state.server_error is None else state.server_error.flatten()
        if state.server_begin is not None and int(state.server_begin) != begin:
            kept = None
        self._keep(fitted(kept, self._mine.numel, self._dtype, self._device))
        assert state.server_error is not None
        return state.server_error[0]

    @property
    def _begin(self) -> int:
        """The place of the first element of this rank's chunk."""
        return sum(self._numels[: self._group.rank])

    def _keep(self, error: Tensor) -> None:
        """Note s_o."""
        assert self.state is not None
        self.state.server_error, self.state.server_begin = error.unsqueeze(0), torch.tensor(self._begin)

    def average(self, values: Tensor) -> None:
        """Replace `values` by what all ranks get. Collective.

        Args:
            values: [sum(lengths)], contiguous, of `dtype`; overwritten.
        """
        incoming = self._send_to_owners(values)
        answer = self._answer(incoming, cut_by(values, self._numels)[self._group.rank])
        answers = torch.empty_like(incoming)
        all_gather_into_tensor(answers, answer, self._group)
        for part, code, row in zip(cut_by(values, self._numels), self._codes, answers, strict=True):
            part.copy_(code.decode(row))

    def _send_to_owners(self, values: Tensor) -> Tensor:
        """Send each owner its chunk; return what this rank gets of its own, [size, nbytes]."""
        outgoing = self._new_messages(self._group.size)
        rest = values if self.state is None else values + self.worker_error
        parts = zip(self._codes, cut_by(rest, self._numels), outgoing, strict=True)
        magnitudes = [code.encode(part, row) for code, part, row in parts]
        if self.state is not None and torch.cat(magnitudes).isfinite().all():
            self.state.worker_error = rest
        incoming = torch.empty_like(outgoing)
        all_to_all_single(incoming, outgoing, group=self._group)
        return incoming

    def _answer(self, incoming: Tensor, sent: Tensor) -> Tensor:
        """Return the message of this chunk's owner to all; `sent` is its chunk, whose memory is free now."""
        rest = sent.zero_() if self.state is None else torch.zeros_like(sent)
        for row in incoming:
            rest += self._mine.decode(row)
        rest.div_(self._group.size)
        if self.state is not None:
            rest.add_(self.server_error)
        answer = self._new_messages(1)[0]
        found = self._mine.encode(rest, answer)
        if self.state is not None and found.isfinite().all():
            self._keep(rest)
        return answer

    def _new_messages(self, num: int) -> Tensor:
        return torch.empty(num, self._mine.nbytes, dtype=torch.uint8, device=self._device)

    @staticmethod
    def bytes_on_the_wire(
        lengths: Sequence[int], dtype: torch.dtype, size: int, code: MakeCode = SignCode
    ) -> int:
        """Return how many bytes each of `size` ranks sends: of bits of a code 2 (size - 1) / size.

        And as many magnitudes for each chunk as the one of most tensors needs.
        """
        chunk = chunk_numel(sum(lengths), size)
        pieces = pieces_by_owner(lengths, chunk, size)
        return 2 * (size - 1) * code(pieces[0], dtype, max(map(len, pieces)), chunk).nbytes
