"""Gradients of losses of divided outputs, which torch's decompositions get wrong where they are means."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from verdicts import everyone

import mpisgd

pytestmark = pytest.mark.mpi(min_size=2)

IN, OUT = 3, 12


def loss_of(name: str, reduction: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """A scalar of outputs, and of targets between 0 and 1."""
    if name == "binary_cross_entropy":
        outputs = outputs.sigmoid()
    elif name == "soft_margin_loss":
        targets = (targets - 0.5).sign()
    loss: Tensor = getattr(functional, name)(outputs, targets, reduction=reduction)
    return loss.square().sum() if reduction == "none" else loss


@pytest.mark.parametrize("divided", ["batch", "out"])
@pytest.mark.parametrize(
    "name", ["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"]
)
def test_gradients_equal_one_process(name, divided):
    torch.manual_seed(0)
    inputs, targets = torch.randn(12, IN).double(), torch.rand(12, OUT).double()
    layout = mpisgd.layout(f"{divided}:a", mesh={"a": mpisgd.size()})
    for reduction in ("mean", "sum", "none"):
        plain, model = (nn.Linear(IN, OUT).double() for _ in range(2))
        model.load_state_dict(plain.state_dict())
        layout.distribute(
            model,
            {"weight": ("out", "in"), "bias": ("out",)},
            inputs=("batch", "in"),
            outputs=("batch", "out"),
        )
        wanted = loss_of(name, reduction, plain(inputs), targets)
        loss = loss_of(name, reduction, model(inputs), layout.shard(targets, ("batch", "out")))
        wanted.backward()
        loss.backward()
        pairs = [(loss.full_tensor(), wanted)]
        pairs += [
            (ours.grad.full_tensor(), right.grad)
            for ours, right in zip(model.parameters(), plain.parameters(), strict=True)
        ]
        for ours, right in pairs:
            everyone(torch.allclose(ours, right, rtol=1e-12, atol=1e-12), f"{name}, {reduction}")
