"""The packer: what travels together, and that everything comes back to where it was."""

from __future__ import annotations

import torch

from mpisgd.accelerator.buffers import ALONE_BYTES
from mpisgd.collectives.packing import Packer, messages_of, own_part


def some_tensors() -> list[torch.Tensor]:
    """Two dtypes, an empty one, a strided one, and a large one."""
    return [
        torch.arange(3.0),
        torch.arange(4),
        torch.zeros(0),
        torch.arange(12.0).view(3, 4).t(),
        torch.ones(ALONE_BYTES // 4),
        torch.arange(5),
    ]


def test_messages_hold_every_tensor_once_and_one_dtype_each():
    tensors = some_tensors()
    messages = messages_of(tensors)
    assert sorted(id(t) for message in messages for t in message) == sorted(map(id, tensors))
    assert all(len({t.dtype for t in message}) == 1 for message in messages)
    assert [len(message) for message in messages] == [3, 2, 1]


def test_results_come_back_in_logical_order_whatever_the_layout():
    for message in messages_of(some_tensors()):
        before = [t.clone() for t in message]
        packer = Packer()
        flat = packer.write_as_one(message, keep=True)
        assert torch.equal(flat, torch.cat([t.reshape(-1) for t in before]))
        flat += 1
        packer.finish()
        assert all(torch.equal(t, b + 1) for t, b in zip(message, before, strict=True))


def test_one_contiguous_tensor_is_not_copied():
    tensor = torch.arange(6.0).view(2, 3)
    assert Packer().write(tensor).data_ptr() == Packer().read(tensor).data_ptr() == tensor.data_ptr()
    assert Packer().write_as_one([tensor]).data_ptr() == tensor.data_ptr()


def test_an_input_is_copied_only_where_results_would_overwrite_it():
    out = torch.zeros(6)
    assert own_part(out, out[2:4], 1).data_ptr() == out[2:4].data_ptr()
    assert own_part(out, out[1:3], 1).data_ptr() != out[1:3].data_ptr()
