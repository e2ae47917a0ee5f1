"""What torch's own wrappers are given in the benchmark."""

from __future__ import annotations

import pytest
import torch

from mpisgd.tools.bench.torch_parallel import _layers
from mpisgd.tools.bench.training import MODELS


@pytest.mark.parametrize(("model", "units"), [("mlp", 3), ("deep", 0), ("transformer", 6)])
def test_layers_worth_two_collectives_are_sharded_by_themselves(model, units):
    with torch.device("meta"):
        assert len(_layers(MODELS[model](False))) == units
        assert _layers(MODELS[model](True)) == []
