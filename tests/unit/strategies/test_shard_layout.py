"""How parameters and their state are divided into shards."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.methods.parameter_server.layout import PARAMETER, WORD_BYTES, lay_out_shards

SHAPES = st.lists(st.lists(st.integers(0, 40), max_size=2).map(tuple), min_size=1, max_size=12)


@given(SHAPES, st.integers(1, 5), st.integers(1, 5))
def test_every_tensor_is_in_one_shard_and_overlaps_no_other(shapes, num_shards, num_ranks):
    schemas = [
        {PARAMETER: (shape, torch.float32), "step": ((), torch.float32), "sum": (shape, torch.float64)}
        for shape in shapes
    ]
    layouts = lay_out_shards(schemas, num_shards, num_ranks)
    assert len(layouts) == num_shards
    places = [(entry.param, entry.key) for layout in layouts for entry in layout.entries]
    assert sorted(places) == sorted((i, key) for i, schema in enumerate(schemas) for key in schema)
    for layout in layouts:
        end = (num_ranks + len(layout.entries)) * WORD_BYTES
        for entry in layout.entries:
            assert entry.start >= end
            assert entry.start % entry.dtype.itemsize == 0
            end = entry.start + torch.Size(entry.shape).numel() * entry.dtype.itemsize
        assert end <= layout.version_bytes
        assert layout.start_of(1) == layout.start_of(0) + layout.version_bytes == layout.start_of(3)
        assert layout.start_of(1) + layout.version_bytes == layout.nbytes


def test_shards_have_about_equally_much():
    schemas = [{PARAMETER: ((100,), torch.float32)} for _ in range(8)]
    assert len({layout.nbytes for layout in lay_out_shards(schemas, 4, 4)}) == 1
