"""A folder that each host has to itself is found out."""

from __future__ import annotations

import pytest

from mpisgd.checkpoint.newest import Seen, newest_intact
from mpisgd.errors import CheckpointError


@pytest.mark.parametrize(("here", "said"), [(-1, "none: each host"), (10, "none newer than step 10")])
def test_a_newer_checkpoint_on_another_host_is_told(tmp_path, here, said):
    seen = [Seen("alpha", here), Seen("beta", 20)]
    with pytest.raises(CheckpointError, match=f"on beta has a checkpoint of step 20, on alpha.*{said}"):
        newest_intact(tmp_path, seen, ())


def test_a_folder_that_the_first_host_alone_has_is_fine(tmp_path):
    assert newest_intact(tmp_path, [Seen("alpha", 20), Seen("beta", -1)], ()) is None
