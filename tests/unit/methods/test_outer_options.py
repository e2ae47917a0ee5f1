"""`OuterOptimizer`: whose options count after a load."""

from __future__ import annotations

import torch

from mpisgd.methods.diloco.outer import OuterChoice, OuterOptimizer


def test_options_that_are_asked_for_come_before_those_of_a_state():
    asked = {"lr": 0.5, "momentum": 0.25}
    choice = OuterChoice(lambda params: torch.optim.SGD(params, **asked), asked, "torch.optim.SGD")
    saved = {"lr": 0.7, "momentum": 0.9, "dampening": 0.125}
    found = OuterOptimizer(choice, {"0": torch.zeros(2)}, {}, saved).options
    assert {name: found[name] for name in saved} == {**asked, "dampening": 0.125}
