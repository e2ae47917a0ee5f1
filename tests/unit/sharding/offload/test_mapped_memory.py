"""Tensors in a file that has no name: like others, and alive as long as they are used."""

from __future__ import annotations

import os

import pytest
import torch

from mpisgd.sharding.offload.mapped_memory import MappedMemory


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (70, 90)])
def test_they_hold_what_is_written_and_outlive_their_maker(tmp_path, dtype, shape):
    memory = MappedMemory(tmp_path, "copies")
    tensors = [memory.empty(shape, dtype).fill_(k % 2) for k in range(3)]
    del memory
    for k, tensor in enumerate(tensors):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert (tensor == k % 2).all()
    assert os.listdir(tmp_path) == []
