"""What one writes: names, what they print, what they refuse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import mpisgd
from mpisgd import compress
from mpisgd.compress.compressor import BucketLayout, codec_of, is_contraction, wire_dtype_of
from mpisgd.errors import InvalidArgument
from mpisgd.methods.power_sgd.power_sgd import orthogonalize

SMALLEST = {
    compress.TopK: (0.5,),
    compress.RandomK: (0.5,),
    compress.Threshold: (0.1,),
    compress.DeepGradient: (0.5,),
    compress.PowerSGD: (2,),
    compress.QSGD: (4,),
    compress.BlockQuantized: (),
    compress.ChunkTopK: (),
    compress.TernGrad: (),
    compress.Natural: (),
}
methods = pytest.mark.parametrize("kind", SMALLEST, ids=lambda kind: kind.__name__)


@methods
def test_they_are_frozen_print_and_compare(kind):
    one, other = kind(*SMALLEST[kind]), kind(*SMALLEST[kind])
    assert one == other
    assert repr(one) == repr(other)
    assert repr(one).startswith(f"{kind.__name__}(")
    assert isinstance(one, mpisgd.Compressor)
    assert getattr(mpisgd.compress, kind.__name__) is kind
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.seed = 3


@methods
def test_floats_are_compressed_and_nothing_else_is(kind):
    one = kind(*SMALLEST[kind])
    assert all(map(one.changes, (torch.float32, torch.float64, torch.float16, torch.bfloat16)))
    assert not any(map(one.changes, (torch.complex64, torch.int32, torch.float8_e4m3fn)))
    assert wire_dtype_of(one, torch.float32) is None


@methods
def test_what_is_kept_of_16_bit_floats_is_float32(kind):
    layout = BucketLayout((torch.Size([40, 20]),), torch.bfloat16)
    for value in kind(*SMALLEST[kind]).reducer(layout).state_dict().values():
        tensors = value if isinstance(value, list) else [value]
        assert all(each.dtype is torch.float32 for each in tensors if isinstance(each, torch.Tensor))


CONTRACTIONS = (
    compress.TopK(0.1),
    compress.RandomK(0.1),
    compress.OneBit(),
    compress.QSGD(4),
    compress.Natural(),
    compress.ChunkTopK(keep=4, chunk=40),
)


@pytest.mark.parametrize("method", CONTRACTIONS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_codec_makes_messages_of_its_size_that_are_nearer_than_nothing(method, dtype):
    layout = BucketLayout((torch.Size([30, 20]), torch.Size([0]), torch.Size([50])), dtype)
    x = torch.randn(layout.numel, dtype=dtype, generator=torch.Generator().manual_seed(3))
    before, codec = x.clone(), codec_of(method, layout)
    message = codec.compress(x, np.random.default_rng(1))
    assert torch.equal(x, before)
    assert (message.dtype, message.shape) == (torch.uint8, (codec.nbytes,))
    assert codec.nbytes < x.nbytes
    rest = x.clone()
    codec.decompress(message, rest, -1)
    assert rest.norm() < x.norm()
    codec.decompress(message, rest)
    assert torch.allclose(rest, x)


@pytest.mark.parametrize(
    "method", [*CONTRACTIONS, compress.PowerSGD(2), compress.QSGD(2), compress.BlockQuantized()], ids=repr
)
def test_who_has_a_codec_says_so(method):
    assert is_contraction(method) == (method in CONTRACTIONS)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: compress.TopK(0), "TopK: ratio=0"),
        (lambda: compress.TopK(ratio=1.5), "TopK: ratio=1.5"),
        (lambda: compress.TopK(ratio="1 %"), "TopK: ratio='1 %'"),
        (lambda: compress.TopK(0.1, error_feedback=3), "TopK: error_feedback=3"),
        (lambda: compress.RandomK(True), "RandomK: ratio=True"),
        (lambda: compress.RandomK(0.1, seed=0.5), "RandomK: seed=0.5"),
        (lambda: compress.Threshold(-1.0), "Threshold: value=-1.0"),
        (lambda: compress.DeepGradient(0.1, momentum=1), "DeepGradient: momentum=1"),
        (lambda: compress.DeepGradient(0.1, momentum=None), "DeepGradient: momentum=None"),
        (lambda: compress.DeepGradient(0.1, warmup_steps=-1), "DeepGradient: warmup_steps=-1"),
        (lambda: compress.DeepGradient(0.1, clip_norm=0), "DeepGradient: clip_norm=0"),
        (lambda: compress.PowerSGD(0), "PowerSGD: rank=0"),
        (lambda: compress.PowerSGD(2, warmup_steps=1.5), "PowerSGD: warmup_steps=1.5"),
        (lambda: compress.QSGD(1), "QSGD: bits=1"),
        (lambda: compress.QSGD(9), "QSGD: bits=9"),
        (lambda: compress.QSGD(4, norm="l1"), "QSGD: norm='l1'"),
        (lambda: compress.BlockQuantized(bits=1), "BlockQuantized: bits=1"),
        (lambda: compress.BlockQuantized(block=0), "BlockQuantized: block=0"),
        (lambda: compress.BlockQuantized(4, 256, "yes"), "BlockQuantized: error_feedback='yes'"),
        (lambda: compress.ChunkTopK(keep=0), "ChunkTopK: keep=0"),
        (lambda: compress.ChunkTopK(chunk=2**17), "ChunkTopK: chunk=131072; expected at most 65536"),
        (lambda: compress.ChunkTopK(64, 32), "ChunkTopK: keep=64; expected at most chunk=32"),
        (lambda: compress.ChunkTopK(bits=1), "ChunkTopK: bits=1"),
        (lambda: compress.ChunkTopK(error_decay=1.5), "ChunkTopK: error_decay=1.5"),
        (lambda: compress.ChunkTopK(error_decay=True), "ChunkTopK: error_decay=True"),
        (lambda: compress.TernGrad(clip_sigmas=-2), "TernGrad: clip_sigmas=-2"),
        (lambda: compress.Natural(seed="x"), "Natural: seed='x'"),
    ],
)
def test_what_makes_no_sense_is_refused_at_construction(make, what):
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert what in str(caught.value)


def test_the_ratio_of_dgc_falls_as_in_the_paper():
    """25 %, 6.25 %, 1.56 %, 0.39 % in four epochs, then 0.1 %."""
    method = compress.DeepGradient(ratio=0.25 / 256, warmup_steps=400)
    assert [method.ratio_at(step) for step in (0, 100, 200, 300, 400, 9999)] == pytest.approx(
        [0.25, 0.0625, 0.015625, 0.00390625, 0.25 / 256, 0.25 / 256]
    )
    assert compress.DeepGradient(ratio=0.5, warmup_steps=9).ratio_at(0) == 0.5


def test_powersgd_compresses_what_becomes_smaller():
    method = compress.PowerSGD(rank=2)
    shapes = [(100,), (100, 100), (4, 4), (8, 3, 3, 3), (1, 50), (0, 9), ()]
    assert [method.rank_of(torch.Size(shape)) for shape in shapes] == [0, 2, 0, 2, 0, 0, 0]
    assert compress.PowerSGD(rank=9, min_compression_rate=0.1).rank_of(torch.Size([4, 4])) == 4


def test_a_basis_is_orthonormal_also_of_what_has_no_rank():
    for matrix in (torch.randn(9, 3), torch.zeros(9, 3), torch.ones(9, 3)):
        basis = orthogonalize(matrix)
        assert torch.allclose(basis.T @ basis, torch.eye(3), atol=1e-6)


def test_bytes_by_the_papers_formulas():
    """Before the first step: 2 k words of top-k, r (n + m) of PowerSGD, k of random-k."""
    layout = BucketLayout((torch.Size([100, 50]), torch.Size([30])), torch.float32)
    words = {
        compress.TopK(0.01): (4 - 1) * 2 * 51,
        compress.PowerSGD(3): 2 * 3 * (3 * (100 + 50) + 30) / 4,
        compress.RandomK(0.02): 2 * 3 * 101 / 4,
    }
    for method, expected in words.items():
        assert method.reducer(layout).bytes_on_the_wire(4) == pytest.approx(4 * expected, abs=4)


@pytest.mark.parametrize(
    ("compressor", "name"),
    [
        (mpisgd.Compression.fp16, "fp16"),
        (compress.OneBit(), "OneBit()"),
        (compress.PerHost(compress.PowerSGD(rank=4)), "PerHost(compressor=PowerSGD(rank=4))"),
    ],
)
def test_a_short_name_leaves_out_what_is_as_by_default(compressor, name):
    assert compressor.short_name == name
