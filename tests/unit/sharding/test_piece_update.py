"""Updates piece by piece: small ones together, and an error that leaves nobody waiting."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpisgd.sharding.division import Member
from mpisgd.sharding.piece import Piece
from mpisgd.sharding.piece_update import BATCH_BYTES, PieceUpdate


def pieces_of(lengths):
    return [Piece(nn.Parameter(torch.zeros(n)), 0, [Member(i, 0, n, 0)]) for i, n in enumerate(lengths)]


def hand_over(update, pieces):
    for k, piece in enumerate(pieces):
        buffer = update.buffer_for(piece, None)
        buffer.fill_(k + 1)
        update.received(piece, buffer)
    update.finish()


def optimizer_without_parameters():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    optimizer.param_groups[0]["params"] = []
    return optimizer


@pytest.mark.parametrize("scale", [1, BATCH_BYTES // 16, BATCH_BYTES])
def test_every_piece_is_updated_with_its_own_gradient(scale):
    pieces = pieces_of([scale * n for n in (1, 3, 0, 2, 1)])
    hand_over(PieceUpdate(optimizer_without_parameters()), pieces)
    for k, piece in enumerate(pieces):
        assert (piece.tensor == -(k + 1)).all()
        assert piece.tensor.grad is None


def test_an_error_is_told_when_all_is_over():
    optimizer = optimizer_without_parameters()
    optimizer.param_groups[0]["lr"] = "much"
    update, pieces = PieceUpdate(optimizer), pieces_of([BATCH_BYTES, 1, BATCH_BYTES])
    hand_over(update, pieces)
    assert all((piece.tensor == 0).all() for piece in pieces)
    assert optimizer.param_groups[0]["params"] == []
    with pytest.raises(TypeError):
        update.raise_error()
