"""The header lets safetensors open a file whose tensors have gaps between them."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from mpisgd.sharding.offload.safetensors_header import Stored, header, header_room


def test_safetensors_reads_what_is_where_the_header_says(tmp_path):
    one, two = torch.arange(5.0), torch.tensor([[True, False]])
    room = header_room(2)
    path = tmp_path / "state"
    stored = [Stored("two", torch.bool, (1, 2), room + 64), Stored("one", torch.float32, (5,), room)]
    data = bytearray(128)
    data[:20], data[64:66] = one.numpy().tobytes(), two.numpy().tobytes()
    path.write_bytes(header(stored, room, room + 128) + data)
    found = safetensors.torch.load_file(path)
    assert torch.equal(found.pop("one"), one)
    assert torch.equal(found.pop("two"), two)
    assert sorted(found) == ["padding.0", "padding.1"]


def test_an_empty_file_has_a_header_too(tmp_path):
    path = tmp_path / "state"
    path.write_bytes(header([], 64, 64))
    assert safetensors.torch.load_file(path) == {}


def test_what_has_no_room_is_refused():
    with pytest.raises(ValueError, match="room for 56"):
        header([Stored("a long name", torch.int8, (1,), 64)], 64, 65)
