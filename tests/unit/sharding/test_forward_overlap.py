"""Each module waits for the parameters that it is about to read, which are others in evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mpisgd.methods.sharded.forward_overlap import ForwardOverlap


class Arriving:
    """A work that notes that somebody has waited for it."""

    def __init__(self) -> None:
        self.is_awaited = False

    def wait(self, timeout_s: float | None = None) -> None:
        self.is_awaited = True


class Direct(nn.Module):
    """Calls a layer in training, and in evaluation uses its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if self.training else nn.functional.linear(x, self.layer.weight)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)


@pytest.mark.parametrize("make", [encoder, Direct])
@pytest.mark.parametrize("grads", [False, True])
def test_evaluation_waits_for_what_training_has_called(make, grads):
    """torch's fused kernel of an encoder's layer calls none of the modules inside it."""
    model, x = make(), torch.randn(2, 3, 8)
    overlap: Any = ForwardOverlap(list(model.named_parameters()))
    model(x)
    works = {}
    for name, param in model.named_parameters():
        works[name] = Arriving()
        overlap.expect([param], works[name])
    model.eval()
    with torch.set_grad_enabled(grads):
        model(x)
    assert all(work.is_awaited for name, work in works.items())


def test_training_waits_for_a_layer_when_that_is_called():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8)
    overlap: Any = ForwardOverlap(list(model.named_parameters()))
    model(x)
    first, second = Arriving(), Arriving()
    overlap.expect(list(model[0].parameters()), first)
    overlap.expect(list(model[1].parameters()), second)
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(second.is_awaited))
    model(x)
    assert seen == [False]
    assert first.is_awaited
    assert second.is_awaited
