"""The file: every damage to it is found, nothing in it is executed, other programs can read it."""

from __future__ import annotations

import os
import pickle
import random
import zipfile
from pathlib import Path

import pytest
import torch
from reading import read_file

from mpisgd.checkpoint.format import Document, write
from mpisgd.checkpoint.serialization import decode, encode
from mpisgd.dtypes import SAFETENSORS_DTYPES
from mpisgd.errors import CheckpointDamaged


def leave(path: Path, **values) -> Path:
    encoded = encode(values)
    kinds = dict.fromkeys(values, "value")
    with path.open("wb", buffering=0) as file:
        write(file, Document(7, 2, encoded.tree, kinds, []), encoded.tensors)
    return path


@pytest.fixture
def whole(tmp_path) -> Path:
    return leave(tmp_path / "whole", weight=torch.randn(3, 5), steps=[1, 2], bias=torch.zeros(3).double())


def test_all_dtypes_come_back_bit_by_bit(tmp_path):
    tensors = {name: torch.randint(0, 2, (3, 8)).to(dtype) for dtype, name in SAFETENSORS_DTYPES.items()}
    document, found = read_file(leave(tmp_path / "all", **tensors, empty=torch.zeros(0, 2)))
    assert (document.step, document.ranks) == (7, 2)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))


def test_only_what_is_wanted_is_kept(tmp_path):
    path = leave(tmp_path / "x", model={"w": torch.ones(2)}, value=torch.ones(3))
    encoded = encode({"model": {"w": torch.ones(2)}, "value": torch.ones(3)})
    with path.open("wb", buffering=0) as file:
        write(file, Document(7, 2, encoded.tree, {"model": "object", "value": "value"}, []), encoded.tensors)
    assert list(read_file(path)[1]) == ["value"]
    assert sorted(read_file(path, {"model"})[1]) == ["model.w", "value"]


def test_a_flipped_bit_is_found_wherever_it_is(whole):
    content = whole.read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << random.Random(place).randrange(8)
        whole.write_bytes(damaged)
        with pytest.raises(CheckpointDamaged, match="whole"):
            read_file(whole)


def test_a_file_that_was_cut_short_or_goes_on_is_found(whole):
    content = whole.read_bytes()
    for length in range(len(content)):
        whole.write_bytes(content[:length])
        with pytest.raises(CheckpointDamaged, match="whole"):
            read_file(whole)
    whole.write_bytes(content + b"\0")
    with pytest.raises(CheckpointDamaged):
        read_file(whole)


def test_the_damaged_tensor_is_named(whole):
    content = bytearray(whole.read_bytes())
    content[-1] ^= 1  # float32 comes last
    whole.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match="weight has checksum"):
        read_file(whole)


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_pickle_is_refused_and_not_executed(tmp_path):
    marker, path = tmp_path / "executed", tmp_path / "step-00000001.safetensors"
    evil = pickle.dumps(Malicious(marker))
    path.write_bytes(evil)
    with pytest.raises(CheckpointDamaged):
        read_file(path)
    torch.save({"model": Malicious(marker)}, path)
    assert zipfile.is_zipfile(path)
    with pytest.raises(CheckpointDamaged):
        read_file(path)
    with path.open("wb", buffering=0) as file:  # a whole file of ours, with the pickle where it may be
        write(file, Document(1, 1, {"x": ["system", str(marker)]}, {"x": "value"}, []), {})
    with pytest.raises(CheckpointDamaged, match="system"):
        read_file(path)
    with pytest.raises(KeyError):
        decode(["system", str(marker)], {})
    assert not marker.exists()


def test_other_programs_read_the_tensors(whole):
    safetensors = pytest.importorskip("safetensors.torch")
    found = safetensors.load_file(whole)
    assert torch.equal(found["weight"], read_file(whole)[1]["weight"])
