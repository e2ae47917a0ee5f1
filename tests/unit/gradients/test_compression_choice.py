"""The sample of parameters on which compressors are tried."""

from __future__ import annotations

import pytest
import torch

from mpisgd import Compression, InvalidArgument, compress
from mpisgd.methods.auto.compression_choice import sample_shapes
from mpisgd.methods.from_text import compressor_from_text


def params(*shapes):
    return [torch.empty(shape) for shape in shapes]


def test_a_small_model_is_taken_as_it_is():
    model = params((30, 40), (40,), (7, 30))
    assert sample_shapes(model, most_bytes=10**6) == [(i, p.shape) for i, p in enumerate(model)]


def test_of_a_large_model_about_as_many_bytes_as_allowed_are_taken_from_everywhere():
    model = params(*[(100, 10), (10,)] * 50)
    taken = sample_shapes(model, most_bytes=40_000)
    assert 36_000 <= sum(4 * shape.numel() for _, shape in taken) <= 44_000
    places = [place for place, _ in taken]
    assert places == sorted(set(places))
    assert min(places) < 20
    assert max(places) > 80


def test_of_one_large_parameter_the_first_rows_are_taken():
    assert sample_shapes(params((5, 2), (1000, 100)), most_bytes=4_000) == [(1, torch.Size([10, 100]))]


def test_without_parameters_there_is_no_sample():
    assert sample_shapes([]) == []


@pytest.mark.parametrize("wrong", [(), [Compression.none], ("fp16",), (compress.Auto(),)])
def test_candidates_are_compressors(wrong):
    with pytest.raises(InvalidArgument, match="Auto: candidates="):
        compress.Auto(candidates=wrong)


def test_auto_can_be_written_as_a_text():
    assert compressor_from_text("auto") == compress.Auto()
