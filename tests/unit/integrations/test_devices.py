"""The devices of a host go round its ranks."""

import pytest
import torch

from mpisgd.integrations.devices import assign_devices


@pytest.mark.parametrize(
    ("given", "num_ranks", "dealt"),
    [([0, 1, 2, 3], 2, [0, 1]), ([2, 5], 2, [2, 5]), ([0, 1], 5, [0, 1, 0, 1, 0]), ([3], 2, [3, 3])],
)
def test_ranks_take_devices_in_turn(given, num_ranks, dealt):
    devices = [torch.device("cuda", index) for index in given]
    assert [device.index for device in assign_devices(devices, num_ranks)] == dealt
