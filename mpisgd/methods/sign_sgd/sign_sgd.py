"""signSGD: the sign of each element is all that travels, and by majority vote all that comes back.

Source: Bernstein, Wang, Azizzadenesheli and Anandkumar 2018, "signSGD: Compressed Optimisation for Non-Convex
Problems"; the vote: algorithm 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mpisgd.arguments import check_flag
from mpisgd.collectives.all_gather import all_gather_into_tensor
from mpisgd.collectives.all_to_all import all_to_all_single
from mpisgd.compress.bit_packing import pack, packed_size, unpack
from mpisgd.compress.compressor import BucketLayout, BucketReducer, Compressor, Traits
from mpisgd.compress.residual import is_finite
from mpisgd.compress.sign_code import pack_signs, unpack_signs
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.method_state import alike
from mpisgd.methods.coding import Coding
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.sign_sgd import paper

__all__ = ["SignSGD"]


@dataclass(frozen=True)
class SignSGD(Compressor):
    """Replaces gradients by their signs: choose the learning rate as for Adam.

    With g_i the gradient of rank i, every rank applies

        sign(sum of sign(g_i))      with the majority vote: -1, 1, and 0 where the votes are equal
        mean of sign(g_i)           without

    There is no error feedback; `OneBit` has it. One bit cannot represent zero, so a gradient of exactly zero
    counts as + in one step and as - in the next, which avoids a drift. If a gradient is not finite on some
    rank, all ranks get NaN.

    Attributes:
        majority_vote: whether the sign of the sum of the signs is used.
    """

    majority_vote: bool = True

    @classmethod
    def examples(cls) -> Sequence["SignSGD"]:
        """See `Compressor`."""
        return (cls(), cls(majority_vote=False))

    def __post_init__(self) -> None:
        check_flag("SignSGD", "majority_vote", self.majority_vote)

    @cached_property
    def traits(self) -> Traits:
        """Without magnitudes, and not additive: the result is -1, 0 or 1, or a mean of these."""
        return Traits(has_magnitudes=False, is_homogeneous=False, is_additive=False)

    def reducer(self, layout: BucketLayout) -> BucketReducer:
        """Return the reducer, which sends the signs of a bucket."""
        return (_VoteReducer if self.majority_vote else _MeanReducer)(layout.numel)

    def coding(self) -> Coding:
        """Return what compressing costs beside the bytes, for `plan`.

        Votes go to owners of chunks and the outcome to all ranks; or all signs to all.
        """
        if self.majority_vote:
            return Coding(collectives=("all_to_all", "all_gather"), element_s=5e-9, copies=0.2, of_chunk=0.6)
        return Coding(element_s=5e-9, copies=2.0)

    def paper(self) -> Paper[Any]:
        """See `Compressor`."""
        return paper.SignSGD(self.majority_vote)


@dataclass
class _Count:
    """What is kept: how many reductions there were, for the signs of zeros."""

    num_reductions: int = alike(0)


class _SignReducer(BucketReducer):
    """Signs of a bucket as codes, 1 for plus."""

    state: _Count

    def __init__(self, numel: int) -> None:
        self._numel = numel
        self.state = _Count()

    def _pack(self, bucket: Tensor) -> Tensor:
        """Return the packed signs of a bucket."""
        self.state.num_reductions += 1
        return pack_signs(bucket, zero_is_positive=self.state.num_reductions % 2 == 1)


class _VoteReducer(_SignReducer):
    """Sends each owner the signs of its chunk, which counts them, and gets what the others have counted.

    A message ends with a byte that is 1 where a gradient was not finite. The result of an even number of
    votes has three values, two bits; that of an odd number, one.
    """

    def reduce(self, bucket: Tensor, group: Group, op: ReduceOp) -> None:
        """Replace the bucket by the signs that most ranks have, for SUM as for AVG."""
        size, chunk = group.size, self._chunk(group.size)
        packed = self._pack(bucket)
        padded = torch.nn.functional.pad(packed, (0, size * chunk // 8 - len(packed)))
        sent = torch.empty(size, chunk // 8 + 1, dtype=torch.uint8, device=bucket.device)
        sent[:, :-1] = padded.view(size, -1)
        sent[:, -1] = not is_finite(bucket)
        votes = torch.empty_like(sent)
        all_to_all_single(votes, sent, group=group)
        counted = self._count(votes, chunk)
        everyone = counted.new_empty(size, len(counted))
        all_gather_into_tensor(everyone, counted, group)
        bucket.copy_(_outcome(everyone, chunk, size)[: self._numel])
        if everyone[:, -1].any():
            bucket.fill_(torch.nan)

    def _chunk(self, size: int) -> int:
        """Return how many elements a rank counts: whole bytes of them."""
        return 8 * -(-self._numel // (8 * size))

    def _count(self, votes: Tensor, chunk: int) -> Tensor:
        """Return the signs that the owner of a chunk sends to everyone."""
        size = len(votes)
        total = torch.zeros(chunk, dtype=torch.int16 if size < 2**15 else torch.int32, device=votes.device)
        for row in votes:
            total += unpack_signs(row[:-1], chunk, total.dtype)
        codes = (total > 0).to(torch.uint8)
        if size % 2 == 0:
            codes += total >= 0
        return torch.cat([pack(codes, _num_bits(size)), votes[:, -1].amax().view(1)])

    def bytes_on_the_wire(self, size: int) -> int:
        """Return (size - 1) / size of one bit of each element there, one or two back, and the last bytes."""
        chunk = self._chunk(size)
        return (size - 1) * (packed_size(chunk, 1) + packed_size(chunk, _num_bits(size)) + 2)


def _num_bits(size: int) -> int:
    """Return how many bits the outcome of so many votes takes."""
    return 1 if size % 2 else 2


def _outcome(everyone: Tensor, chunk: int, size: int) -> Tensor:
    """Return -1, 0 or 1 for each element."""
    bits = _num_bits(size)
    codes = torch.empty(size, chunk, dtype=torch.int8, device=everyone.device)
    for row, counted in zip(codes, everyone, strict=True):
        row.copy_(unpack(counted[:-1], bits, chunk))
    return (codes.mul_(2).sub_(1) if bits == 1 else codes.sub_(1)).view(-1)


class _MeanReducer(_SignReducer):
    """Gathers the signs of all ranks, and counts them on each."""

    def reduce(self, bucket: Tensor, group: Group, op: ReduceOp) -> None:
        """Replace the bucket by the mean, or the sum, of everyone's signs."""
        flag = torch.full((1,), not is_finite(bucket), dtype=torch.uint8, device=bucket.device)
        message = torch.cat([self._pack(bucket), flag])
        everyone = message.new_empty(group.size, len(message))
        all_gather_into_tensor(everyone, message, group)
        total = torch.zeros_like(bucket)
        for row in everyone:
            total += unpack_signs(row[:-1], self._numel, bucket.dtype)
        bucket.copy_(total if op is ReduceOp.SUM else total.div_(group.size))
        if everyone[:, -1].any():
            bucket.fill_(torch.nan)

    def bytes_on_the_wire(self, size: int) -> int:
        """Return (size - 1) bits of each element, and the last bytes."""
        return (size - 1) * (packed_size(self._numel, 1) + 1)
