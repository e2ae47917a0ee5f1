"""Pieces of an elementwise optimizer, and the state that belongs to them."""

from __future__ import annotations

import torch
from torch import nn

from mpisgd.gradients.fusion_buffer import flat_view, layout_of
from mpisgd.sharding.division import Member
from mpisgd.sharding.offload.state_store import StateInMemory
from mpisgd.sharding.piece import Piece, is_elementwise_entry, join_states

SCALAR = torch.tensor(1.5)


def flat_piece():
    """Parameters 4, 5 and 6 of 3, 2 and 4 elements, with a gap of one before the last."""
    members = [Member(4, 0, 3, 0), Member(5, 7, 2, 3), Member(6, 0, 4, 6)]
    return Piece(nn.Parameter(torch.arange(10.0)), 0, members)


def test_neighbours_with_one_key_stay_together():
    piece = flat_piece()
    parts = piece.split(["a", "a", "b"])
    assert [part.members for part in parts] == [piece.members[:2], (Member(6, 0, 4, 0),)]
    assert [part.tensor.tolist() for part in parts] == [[0, 1, 2, 3, 4], [6, 7, 8, 9]]
    parts[1].tensor.data.fill_(0)  # it is the same memory
    assert piece.tensor[6:].tolist() == [0, 0, 0, 0]
    assert flat_piece().split([1, 1, 1])[0].members == piece.members
    assert len(piece.split([1, 2, 1])) == 3


def test_state_is_cut_with_the_piece():
    piece = flat_piece()
    entries = {"average": torch.arange(10.0), "step": SCALAR, "name": "x"}
    first, last = (piece.cut_entries(entries, part) for part in piece.split([True, True, False]))
    assert first["average"].tolist() == [0, 1, 2, 3, 4]
    assert last["average"].tolist() == [6, 7, 8, 9]
    last["step"].add_(1)
    assert first["step"] == SCALAR == 1.5
    assert first["name"] == "x"


def test_states_of_pieces_and_parameters_become_each_other():
    piece = flat_piece()
    entries = {"average": torch.arange(10.0), "step": SCALAR}
    states = piece.states(entries)
    assert [state.cut["average"].tolist() for state in states] == [[0, 1, 2], [3, 4], [6, 7, 8, 9]]
    joined = piece.joined(states)
    assert joined["average"].tolist() == [0, 1, 2, 3, 4, 0, 6, 7, 8, 9]
    assert joined["step"] == 1.5


def test_a_parameter_in_two_pieces_is_put_together_in_its_layout():
    param = torch.arange(6.0).view(2, 3).t()
    layout = layout_of(param)
    flat = flat_view(param, layout)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5]
    assert flat_view(param.contiguous(), layout).tolist() == [0, 1, 2, 3, 4, 5]
    halves = [Piece(nn.Parameter(torch.zeros(3)), 0, [Member(0, first, 3, 0)]) for first in (0, 3)]
    states = [
        half.states({"average": flat[first : first + 3], "step": SCALAR})[0]
        for half, first in zip(halves, (0, 3), strict=True)
    ]
    whole = join_states(states, layout, StateInMemory().empty)
    assert torch.equal(whole["average"], param)
    assert whole["average"].stride() == param.stride()


def test_a_counter_is_no_average_of_a_parameter_without_dimensions():
    assert is_elementwise_entry("exp_avg", torch.tensor(1.0), torch.Size(()))
    assert not is_elementwise_entry("step", torch.tensor(1.0), torch.Size(()))
    assert is_elementwise_entry("step", torch.ones(3), torch.Size((3,)))
    assert not is_elementwise_entry("exp_avg", torch.ones(3), torch.Size((4,)))
