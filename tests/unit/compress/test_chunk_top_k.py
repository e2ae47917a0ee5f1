"""What of each chunk travels, as which bytes, and what it stands for; nothing is computed but comparisons."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mpisgd.compress import ChunkTopK
from mpisgd.compress.compressor import BucketLayout
from mpisgd.compress.selection import top_k_of_rows
from mpisgd.methods.compression_kit import of_chunks

RANDOM = np.random.default_rng(0)  # nothing is drawn from it
SHAPES = (torch.Size([7, 9]), torch.Size([]), torch.Size([0]), torch.Size([50]), torch.Size([3]))
INF, NAN = torch.inf, torch.nan


def codec_of(method: ChunkTopK, *shapes: torch.Size, dtype: torch.dtype = torch.float64):
    return method.codec(BucketLayout(shapes, dtype))


def decoded(codec, flat: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(flat)
    codec.decompress(codec.compress(flat, RANDOM), out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [1, 2, 10, 64, 256, 257, 2**16])
@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_a_codec_is_the_papers_operator_to_the_last_bit(chunk, bits, dtype):
    draw = torch.Generator().manual_seed(chunk + bits)
    for keep in {1, max(1, chunk // 3), chunk}:
        method = ChunkTopK(keep, chunk, bits)
        parts = [torch.randn(shape, dtype=dtype, generator=draw) for shape in (*SHAPES, torch.Size([1000]))]
        codec = codec_of(method, *(part.shape for part in parts), dtype=dtype)
        flat = torch.cat([part.flatten() for part in parts])
        expected = [of_chunks(part, keep, chunk, 2 ** (bits - 1) - 1).flatten() for part in parts]
        assert torch.equal(decoded(codec, flat), torch.cat(expected))


def test_large_parameters_are_coded_in_parts():
    """Chunks whose elements do not fit into a cache together."""
    method = ChunkTopK(keep=5, chunk=3000, bits=4)
    flat = torch.randn(200_001, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(decoded(codec_of(method, flat.shape), flat), of_chunks(flat, 5, 3000, 7))


def test_a_message_has_places_codes_and_bounds():
    method = ChunkTopK(keep=2, chunk=300, bits=2)
    flat = torch.zeros(700)
    flat[[1, 260, 599, 300, 650]] = torch.tensor([-1.0, 3.0, 2.0, -2.5, 0.5])
    codec = codec_of(method, torch.Size([700]), dtype=torch.float32)
    message = codec.compress(flat, RANDOM)
    # Two places of each whole chunk, one of the 100 elements at the end, of 9 bits each.
    low, high, codes, bounds = message.split([5, 1, 2, 3 * 2 * 4])
    assert low.tolist() == [1, 260 - 256, 0, 299 - 256, 50]
    assert high.tolist() == [0b01010]
    assert codes.tolist() == [0b00_11_01_10, 0b00]
    assert bounds.clone().view(torch.float32).tolist() == [1, 3, 2, 2.5, 0.5, 0.5]
    assert codec.nbytes == message.numel() == 5 + 1 + 2 + 24
    assert torch.equal(decoded(codec, flat), flat)


@pytest.mark.parametrize(("keep", "chunk"), [(64, 4096), (1, 1), (3, 1000), (100, 256)])
def test_bytes_by_the_formula(keep, chunk):
    bits, number = 2, 5
    codec = codec_of(ChunkTopK(keep, chunk, bits), torch.Size([number, chunk]), dtype=torch.float32)
    places = max(1, (chunk - 1).bit_length())
    parts = [min(8, places), max(0, places - 8), bits]
    assert codec.nbytes == sum(-(-number * keep * each // 8) for each in parts) + number * 8
    if (keep, chunk) == (64, 4096):
        assert codec.nbytes * 136 < number * chunk * 4


def test_of_equals_the_first_ones_are_sent():
    flat = torch.tensor([1.0, -1, 1, -1, 2, 1, 0, 0, 0, 0, 0, 0, 1, 3, 3, 3, -3, 3], dtype=torch.float64)
    got = decoded(codec_of(ChunkTopK(keep=3, chunk=6), flat.shape), flat)
    assert got.tolist() == [1, -1, 0, 0, 2, 0, *[0] * 6, 0, 3, 3, 3, 0, 0]


def test_rows_of_equals_are_as_a_stable_sort_has_them():
    draw = torch.Generator().manual_seed(2)
    for length in (1, 2, 7, 33):
        rows = torch.randint(-3, 4, (50, length), generator=draw).double()
        rows[1] = NAN
        for k in range(1, length + 1):
            order = rows.abs().nan_to_num(nan=INF, posinf=INF).argsort(dim=1, descending=True, stable=True)
            assert torch.equal(top_k_of_rows(rows, k), order[:, :k].sort(1).values)


def test_no_error_is_larger_than_the_element_and_the_largest_has_none():
    draw = torch.Generator().manual_seed(3)
    for bits in (2, 4):
        flat = torch.randn(40, 100, dtype=torch.float64, generator=draw) ** 5
        got = decoded(codec_of(ChunkTopK(10, 100, bits), flat.shape), flat.view(-1)).view_as(flat)
        assert bool(((got - flat).abs() <= flat.abs()).all())
        largest = flat.abs().max(1, keepdim=True)
        at_largest = (got - flat).abs().gather(1, largest.indices)
        assert float((at_largest / largest.values).max()) < 1e-15


def test_what_was_never_changed_is_never_changed():
    """Of a chunk with fewer numbers than are sent, zeros stay zeros, whatever the bits."""
    flat = torch.zeros(100, dtype=torch.float64)
    flat[[3, 50]] = torch.tensor([0.3, -7.0], dtype=torch.float64)
    for bits in (2, 3, 8):
        got = decoded(codec_of(ChunkTopK(10, 100, bits), flat.shape), flat)
        assert {*got.nonzero().view(-1).tolist()} <= {3, 50}
        assert not decoded(codec_of(ChunkTopK(10, 100, bits), flat.shape), flat.zero_()).any()
        flat[[3, 50]] = torch.tensor([0.3, -7.0], dtype=torch.float64)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_what_is_not_finite_arrives_in_its_chunk_alone(value, count):
    flat = torch.arange(20, dtype=torch.float64)
    flat[10 : 10 + count] = value
    got = decoded(codec_of(ChunkTopK(2, 10), flat.shape), flat)
    assert bool(got[:10].isfinite().all())
    assert int(got[10:].isfinite().logical_not().sum()) == 2
    assert got[[8, 9]].tolist() == [8, 9]
