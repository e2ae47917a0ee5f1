"""Numbers as one bit each and a magnitude per piece; which pieces the owners of chunks have."""

from __future__ import annotations

import pytest
import torch

from mpisgd.compress.sign_code import SignCode
from mpisgd.methods.two_step.two_step_exchange import chunk_numel, pieces_by_owner

LENGTHS = [5, 1, 13]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("room", [(None, None), (5, 64)])
def test_what_is_decoded_and_what_is_left_are_the_values(dtype, room):
    code = SignCode(LENGTHS, dtype, *room)
    values = torch.randn(19, dtype=dtype, generator=torch.Generator().manual_seed(1))
    message, rest = torch.empty(code.nbytes, dtype=torch.uint8), values.clone()
    code.encode(rest, message)
    decoded = code.decode(message)
    torch.testing.assert_close(decoded + rest, values, rtol=0, atol=1e-6 if dtype is torch.float32 else 1e-15)
    for piece, original in zip(decoded.split(LENGTHS), values.split(LENGTHS), strict=True):
        torch.testing.assert_close(piece, original.sign() * original.abs().mean())
    assert rest.norm() < values.norm()


def test_a_message_has_a_bit_for_each_value_and_a_number_for_each_piece():
    assert SignCode(LENGTHS, torch.float32).nbytes == 3 * 4 + 3
    assert SignCode([8000], torch.float64).nbytes == 8 + 1000


def test_nothing_takes_no_room():
    code = SignCode([], torch.float32)
    message = torch.empty(code.nbytes, dtype=torch.uint8)
    assert code.encode(torch.empty(0), message).numel() == code.decode(message).numel() == 0


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("lengths", [[1], [64], [65, 3], [200, 1, 63, 136], [7] * 100])
def test_owners_have_every_element_once(lengths, size):
    chunk = chunk_numel(sum(lengths), size)
    pieces = pieces_by_owner(lengths, chunk, size)
    assert len(pieces) == size
    assert chunk % 64 == 0
    owned = [sum(own) for own in pieces]
    assert owned == [max(0, min(chunk, sum(lengths) - rank * chunk)) for rank in range(size)]
    ends = {sum(lengths[: i + 1]) for i in range(len(lengths))}
    cuts, place = set(), 0
    for length in [piece for own in pieces for piece in own]:
        place += length
        cuts.add(place)
    assert cuts == ends | {chunk * rank for rank in range(1, size + 1) if chunk * rank < sum(lengths)}
