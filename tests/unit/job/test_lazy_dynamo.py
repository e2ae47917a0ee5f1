"""The compiler of torch is imported by programs that compile; others do the same without it."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

PROGRAM = """
    import json
    import sys
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    NAMES = "SGD Adam AdamW RMSprop Adagrad Adadelta Adamax NAdam RAdam ASGD Rprop Adafactor".split()
    NAMES = [name for name in NAMES if hasattr(torch.optim, name)]  # Adafactor came with torch 2.5

    def train(name, compiled=False):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = getattr(torch.optim, name)([model.weight], lr=0.1)
        if name != "Adagrad":  # KeyError('sum') in its next step, until some torch after 2.7
            optimizer.add_param_group({"params": model.bias})
        step = torch.compile(optimizer.step, backend="eager") if compiled else optimizer.step
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.linspace(-1, 1, 10).view(2, 5)).square().sum().backward()
            step()
            optimizer.load_state_dict(optimizer.state_dict())
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()

    def gradient_through_a_step():
        start = torch.ones((), requires_grad=True)
        weight = start.clone()
        weight.grad = torch.ones(())
        torch.optim.SGD([weight], lr=0.1, weight_decay=0.5, differentiable=True).step()
        weight.backward()
        return round(start.grad.item(), 6), torch.is_grad_enabled()

    def recomputed_gradient():
        start, calls = torch.linspace(-1, 1, 5, requires_grad=True), []
        part = lambda values: (calls.append(1), (values * 3).sin())[1]
        checkpoint(part, start, use_reentrant=True).sum().backward()
        return len(calls), start.grad.tolist()

    def all_steps():
        found = {name: train(name) for name in NAMES}
        return found, gradient_through_a_step(), recomputed_gradient()

    def is_direct():
        found = set()
        for method in (torch.optim.Optimizer.zero_grad, checkpoint):
            called = method.__wrapped__.__dict__.get("__dynamo_disable")
            code = getattr(called, "__code__", None)
            found.add(code is not None and "lazy_dynamo" in code.co_filename)
        return sorted(found)

    if sys.argv[1] == "deferred":
        from mpisgd.job.lazy_dynamo import defer_import

        defer_import()
        defer_import()
    seen = {"alone": all_steps(), "is_loaded": "torch._dynamo" in sys.modules, "is_direct": is_direct()}

    import torch._dynamo

    seen["beside the compiler"] = all_steps()
    seen["is_direct_later"] = is_direct()
    seen["compiled"] = train("SGD", compiled=True)
    seen["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    print(json.dumps(seen))
"""


def run(how: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), how],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_optimizers_take_the_same_steps_without_the_compiler_and_leave_it_unloaded():
    """And those of a program that loads it later are torch's own."""
    deferred, plain = run("deferred"), run("plain")
    assert (deferred["is_loaded"], deferred["is_direct"], deferred["is_direct_later"]) == (
        False,
        [True],
        [False],
    )
    assert (plain["is_loaded"], plain["is_direct"]) == (True, [False])
    assert deferred["alone"][1] == [0.95, True]
    assert len(deferred["alone"][0]) >= 11
    assert deferred["alone"][2][0] == 2
    for when in ("alone", "beside the compiler"):
        assert deferred[when] == plain["alone"] == plain[when]
    # Some versions of torch round a compiled step in another way.
    assert deferred["compiled"] == plain["compiled"]
    assert deferred["graphs"] == plain["graphs"] > 0
