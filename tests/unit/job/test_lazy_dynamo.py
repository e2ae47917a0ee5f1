"""torch's compiler is imported by programs that compile; optimizers do the same with and without it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = """
    import sys
    import torch
    from torch import nn
    from mpisgd.job.lazy_dynamo import defer_import

    NAMES = "SGD Adam AdamW RMSprop Adagrad Adadelta Adamax NAdam RAdam ASGD Rprop Adafactor".split()

    def train(name, compiled=False):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = getattr(torch.optim, name)([model.weight], lr=0.1)
        optimizer.add_param_group({"params": model.bias})
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, 10).view(2, 5)).square().sum().backward()
            step()
            optimizer.load_state_dict(optimizer.state_dict())
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    def gradient_through_a_step():
        start = torch.ones((), requires_grad=True)
        weight = start.clone()
        weight.grad = torch.ones(())
        torch.optim.SGD([weight], lr=0.1, weight_decay=0.5, differentiable=True).step()
        weight.backward()
        return round(start.grad.item(), 6), torch.is_grad_enabled()

    def direct_calls():
        return torch.optim.Optimizer.zero_grad.__wrapped__.__dict__["__dynamo_disable"].__module__

    defer_import()
    defer_import()
    alone, gradient = [train(name) for name in NAMES], gradient_through_a_step()
    print("torch._dynamo" in sys.modules, gradient, direct_calls())

    import torch._dynamo
    print(all(train(name).equal(was) for name, was in zip(NAMES, alone)))
    print(gradient == gradient_through_a_step(), direct_calls())
    same = train("SGD", compiled=True).equal(alone[0])
    print(same, torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0)
"""


def test_optimizers_take_the_same_steps_without_the_compiler_and_leave_it_unloaded():
    """And those of a program that loads it later are torch's own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "False (0.95, True) mpisgd.job.lazy_dynamo",
        "True",
        "True torch._dynamo.eval_frame",
        "True True",
    ]
