"""The parts of a chunk: several ranks' views in one process, one after the other."""

import pytest
import torch

from mpisgd import ReduceOp
from mpisgd.transport.shm.chunk_partition import partition_chunk
from mpisgd.transport.torch_reduction import combine_in_rank_order


def inputs_of(size, numel, dtype):
    torch.manual_seed(numel)
    return [(100 * torch.randn(numel)).to(dtype) for _ in range(size)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16], ids=str)
@pytest.mark.parametrize("numel", [0, 1, 2, 3, 5, 1024, 1027])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_ends_with_the_combination(size, numel, dtype):
    buffers = [torch.full((8192,), 255, dtype=torch.uint8) for _ in range(size)]
    inputs = inputs_of(size, numel, dtype)
    chunks = [tensor.clone() for tensor in inputs]
    views = [partition_chunk(buffers, rank, numel, dtype) for rank in range(size)]
    for parts, chunk in zip(views, chunks, strict=True):
        parts.copy_in(chunk.data_ptr())
    for parts, chunk in zip(views, chunks, strict=True):
        parts.combine(chunk, 0, chunk.data_ptr(), ReduceOp.SUM)
    for parts, chunk in zip(views, chunks, strict=True):
        parts.copy_out(chunk.data_ptr())
    for chunk in chunks:
        assert torch.equal(chunk, combine_in_rank_order(inputs, ReduceOp.SUM))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_parts_can_be_put_together_with_the_first_rank(size):
    buffers = [torch.zeros(8192, dtype=torch.uint8) for _ in range(size)]
    inputs = inputs_of(size, 101, torch.float64)
    views = [partition_chunk(buffers, rank, 101, torch.float64) for rank in range(size)]
    for parts, tensor in zip(views, inputs, strict=True):
        parts.copy_in(tensor.data_ptr())
    for parts, tensor in zip(views, inputs, strict=True):
        parts.combine_into_first(tensor, 0, ReduceOp.MAX)
    result = buffers[0][: 101 * 8].view(torch.float64)
    assert torch.equal(result, combine_in_rank_order(inputs, ReduceOp.MAX))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_parts_cover_the_chunk_once(size):
    buffers = [torch.zeros(512, dtype=torch.uint8) for _ in range(size)]
    for rank in range(size):
        parts = partition_chunk(buffers, rank, 77, torch.int16)
        covered = sorted([parts.own, *parts.outputs], key=lambda span: span.start)
        ends = [span.start + span.nbytes for span in covered]
        assert [span.start for span in covered] == [0, *ends[:-1]]
        assert ends[-1] == 77 * 2
        assert sum(span.nbytes for span in parts.inputs) == 77 * 2 - parts.own.nbytes
