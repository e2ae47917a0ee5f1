"""`Offload`: a value that compares and prints, and refuses what makes no sense before anything is done."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpisgd


def test_it_compares_and_prints_whatever_kind_of_path_was_given():
    offload = mpisgd.Offload(Path("/scratch/run"), what="optimizer, parameters", checksum="blake2b")
    assert offload == mpisgd.Offload("/scratch/run", "optimizer, parameters", checksum="blake2b")
    assert repr(offload).startswith("Offload(folder='/scratch/run', what='optimizer, parameters', prefetch=2")
    assert offload.parts == {"optimizer", "parameters"}
    assert mpisgd.Offload("x").parts == {"optimizer"}
    assert mpisgd.Offload() == mpisgd.Offload(folder=None)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"folder": ""}, "folder=''"),
        ({"folder": 3}, "folder=3"),
        ({"what": "parameters"}, "what='parameters'"),
        ({"folder": None, "what": "optimizer,parameters"}, "name a folder"),
        ({"what": "optimizer,gradients"}, "optimizer,gradients"),
        ({"what": None}, "what=None"),
        ({"prefetch": 0}, "prefetch=0"),
        ({"prefetch": 1.5}, "prefetch=1.5"),
        ({"block_bytes": 100}, "block_bytes=100"),
        ({"io": "mmap"}, "io='mmap'"),
        ({"checksum": "md17"}, "checksum='md17'"),
        ({"checksum": "shake_128"}, "shake_128"),
    ],
)
def test_what_makes_no_sense_is_refused_and_named(options, named):
    with pytest.raises(mpisgd.InvalidArgument, match="Offload: ") as caught:
        mpisgd.Offload(**{"folder": "x", **options})
    assert named in str(caught.value)
