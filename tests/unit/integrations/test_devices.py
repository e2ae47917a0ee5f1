"""The devices of a host go round its ranks."""

import pytest
import torch

import mpisgd


@pytest.mark.parametrize(
    ("given", "num_ranks", "dealt"),
    [([0, 1, 2, 3], 2, [0, 1]), ([2, 5], 2, [2, 5]), ([0, 1], 5, [0, 1, 0, 1, 0]), ([3], 2, [3, 3])],
)
def test_ranks_take_devices_in_turn(given, num_ranks, dealt, monkeypatch):
    pytest.importorskip("lightning")
    from mpisgd.integrations.lightning import MpisgdStrategy

    monkeypatch.setattr(mpisgd, "local_size", lambda: num_ranks)
    strategy = object.__new__(MpisgdStrategy)
    strategy.parallel_devices = [torch.device("cuda", index) for index in given]
    assert [device.index for device in strategy.parallel_devices] == dealt
