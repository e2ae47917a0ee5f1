"""What a few bits stand for: unbiased, within one level, of the size that is said."""

from __future__ import annotations

import pytest
import torch

from mpisgd.compress import QSGD, Natural, TernGrad
from mpisgd.compress.compressor import BucketLayout
from mpisgd.compress.randomness import generator

DRAWS, NUMEL = 2_000, 12
VALUES = torch.tensor([0.0, 1.0, -1.0, 0.3, -0.07, 2.5, 1e-3, -3.0, 0.77, -0.5, 1.9, 1e-6])
METHODS = (QSGD(bits=4), QSGD(bits=8), QSGD(bits=3, norm="l2"), TernGrad(), Natural())
WIDE = (torch.float32, torch.float64)


def there_and_back(method, flats: list[torch.Tensor], step: int = 0, rank: int = 0) -> torch.Tensor:
    """What parameters of these gradients become, side by side."""
    flat = torch.cat(flats)
    layout = BucketLayout(tuple(part.shape for part in flats), flat.dtype)
    codec, before = method.wide_reducer(layout)._codec, flat.clone()
    message = codec.compress(flat, generator(method.seed, step, flat.numel(), rank))
    assert torch.equal(flat.view(torch.uint8), before.view(torch.uint8))
    assert (message.dtype, message.numel()) == (torch.uint8, codec.nbytes)
    out = torch.full_like(flat, 1.0)
    codec.decompress(message, out, -1)
    out -= 1
    result = torch.zeros_like(flat)
    codec.decompress(message, result)
    assert torch.allclose(out, -result, atol=1e-3 * flat.abs().max().nan_to_num(1, 1).item(), equal_nan=True)
    return result


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_expectation_is_the_gradient(method, dtype):
    """The mean of 2,000 draws, each a parameter of its own, is off by 5 standard errors at most."""
    values = VALUES.to(dtype)
    drawn = there_and_back(method, [values] * DRAWS).view(DRAWS, NUMEL)
    error = drawn.double().std(0) / DRAWS**0.5
    error[error == 0] = error.max()  # 2,000 draws may have no event of what is rare
    off = (drawn.double().mean(0) - values.double()).abs()
    assert (off <= 5 * error + 1e-6 * values.abs().double()).all(), off / error
    assert error.sum() > 0  # something was rounded


@pytest.mark.parametrize("dtype", WIDE)
def test_qsgd_is_within_a_level(dtype):
    got = there_and_back(QSGD(bits=5, segment=5), [VALUES.to(dtype)])
    for start in range(0, NUMEL, 5):
        part = slice(start, start + 5)
        level = VALUES[part].abs().max() / 15
        assert (got[part] - VALUES[part]).abs().max() <= level * (1 + 1e-6)
        counts = got[part] / level
        assert torch.allclose(counts, counts.round(), atol=1e-4)


def test_terngrad_has_three_values():
    got = there_and_back(TernGrad(), [VALUES, 10 * VALUES])
    assert set(got[:NUMEL].abs().tolist()) == {0.0, 3.0}
    assert set(got[NUMEL:].abs().tolist()) == {0.0, 30.0}


def test_terngrad_cuts_what_is_far_off():
    flat = torch.ones(1000)
    flat[::2] = -1
    flat[0] = 1000.0
    limit = flat.mean() + 2.5 * flat.std(correction=0)
    got = there_and_back(TernGrad(clip_sigmas=2.5), [flat])
    assert torch.allclose(got.abs().max(), limit)


@pytest.mark.parametrize("flat", [[-3.0], [0.5, 0.5, 0.5], [1.0, 1.0, 1.001]])
def test_terngrad_leaves_elements_that_are_alike(flat):
    # With a deviation of 0, the clip made a parameter of one element 0 in every step: it never trained.
    flat = torch.tensor(flat)
    got = there_and_back(TernGrad(clip_sigmas=2.5), [flat])
    assert torch.allclose(got, flat, rtol=1e-2)


@pytest.mark.parametrize("dtype", WIDE)
def test_natural_has_powers_of_two_next_to_each_element(dtype):
    values = VALUES.to(dtype)
    got = there_and_back(Natural(), [values])
    assert torch.equal(torch.frexp(got[1:])[0].abs(), torch.full_like(got[1:], 0.5))
    assert torch.equal(got[[0, 1, 2, 9]], values[[0, 1, 2, 9]])  # those that are powers of two, and 0
    assert (got / values)[1:].min() > 0.5
    assert (got / values)[1:].max() < 2


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_what_is_not_finite_does_not_come_back_finite(method):
    for bad in (torch.inf, -torch.inf, torch.nan):
        assert not there_and_back(method, [torch.tensor([1.0, bad, 2.0])])[1].isfinite()


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_zeros_stay_zero_and_empty_parameters_empty(method):
    got = there_and_back(method, [torch.zeros(3), torch.zeros(0), torch.zeros(1)])
    assert torch.equal(got, torch.zeros(4))


def test_draws_differ_by_step_and_rank_and_can_be_repeated():
    draws = [
        there_and_back(QSGD(bits=2), [VALUES] * 9, step, rank) for step, rank in [(0, 0), (0, 1), (1, 0)]
    ]
    assert torch.equal(draws[0], there_and_back(QSGD(bits=2), [VALUES] * 9))
    assert len({tuple(draw.tolist()) for draw in draws}) == 3


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 9), (torch.float64, 12)])
def test_natural_takes_9_and_12_bits(dtype, bits):
    assert Natural().codec(BucketLayout((torch.Size([800]),), dtype)).nbytes * 8 == 800 * bits


@pytest.mark.parametrize("bits", range(2, 9))
def test_qsgd_takes_its_bits_and_a_norm_per_segment(bits):
    layout = BucketLayout((torch.Size([100]), torch.Size([513])), torch.float32)
    assert QSGD(bits=bits).wide_reducer(layout)._codec.nbytes == -(-613 * bits // 8) + 3 * 4


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_parts_of_a_bucket_of_many_chunks_stay_in_their_places(method):
    parts = [torch.randn(numel, dtype=torch.float64) for numel in (2**16 - 1, 300, 2**17 + 5)]
    got = there_and_back(method, parts).split([len(part) for part in parts])
    for part, back in zip(parts, got, strict=True):
        assert torch.nn.functional.cosine_similarity(back, part, dim=0) > 0.15  # 0.003 by chance
        assert (back * part >= 0).all()
