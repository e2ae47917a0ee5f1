"""Models counted on the meta device, and steps recorded in a program."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from mpisgd.errors import InvalidArgument, JobError
from mpisgd.tools.plan.models.count_model import bench_model, count, model_from_function
from mpisgd.tools.plan.recorder import StepRecorder, main, measure_step

TRAIN = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
"""


def test_a_perceptrons_operations_are_two_for_each_weight_and_example():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    found = count("mlp", model, torch.randn(4, 6))
    assert [(layer.name, layer.shapes, layer.flops) for layer in found.layers] == [
        ("0", ((5, 6), (5,)), 60.0),
        ("2", ((3, 5), (3,)), 30.0),
    ]
    # Of an example: the input, and what ReLU gives, which it and the second layer keep as one.
    assert sum(layer.activation_bytes for layer in found.layers) == (6 + 5) * 4


def test_layers_are_in_the_order_of_their_calls_and_a_shared_parameter_counts_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.again = nn.Linear(4, 4, bias=False)
            self.again.weight = self.first.weight

        def forward(self, x):
            return self.last(self.again(self.first(x)))

    found = count("tied", Tied(), torch.randn(2, 4))
    assert [layer.name for layer in found.layers] == ["first", "again", "last"]
    assert found.numel == 32


def test_counting_leaves_the_model_alone():
    model = nn.Linear(3, 3)
    before = model.weight.clone()
    count("x", model, torch.randn(2, 3))
    assert model.weight.device.type == "cpu"
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_the_models_of_bench_are_known_by_name():
    assert bench_model("mlp", small=True).numel == 11_082
    with pytest.raises(InvalidArgument, match="mlp, deep, transformer"):
        bench_model("large")


def test_a_function_in_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import torch\ndef make():\n    return torch.nn.Linear(7, 2), torch.randn(3, 7)\n")
    assert model_from_function(f"{path}:make").numel == 16
    for wrong in (f"{path}:other", f"{tmp_path / 'none.py'}:make", "no_such_module:make", "make"):
        with pytest.raises(InvalidArgument):
            model_from_function(wrong)


def test_a_recorded_step_has_its_parts_in_order():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    backward, done = torch.autograd.backward, []
    with StepRecorder(5, lambda: done.append(1)) as recorder:
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).sum().backward()
            optimizer.step()
    assert torch.autograd.backward is backward
    assert (len(recorder.steps), done) == (4, [1])
    found = recorder.profile("x", 4, warmup=1)
    assert found.optimizer == "momentum"
    assert sorted(gradient.place for gradient in found.gradients) == [0, 1, 2, 3]
    assert {gradient.place for gradient in found.gradients[:2]} == {2, 3}  # the last layer's come first
    times = [gradient.ready_s for gradient in found.gradients]
    assert found.forward_s <= times[0]
    assert times == sorted(times)
    assert times[-1] <= found.compute_s
    assert found.activation_bytes == 4 * (6 + 5) * 4


def test_a_program_is_measured_as_it_is(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    found = measure_step([str(path), "100"], batch=4, steps=3, warmup=1)
    assert (found.name, found.batch, found.optimizer) == ("train", 4, "adamw")
    assert {gradient.shape for gradient in found.gradients} == {(5, 6), (5,), (3, 5), (3,)}
    assert min(found.forward_s, found.backward_s, found.optimizer_s) > 0


def test_a_program_that_takes_too_few_steps_is_told_so(tmp_path, monkeypatch):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", list(sys.path))
    with pytest.raises(SystemExit, match="1 steps of a torch optimizer; expected more than 3"):
        main([str(tmp_path / "out"), "4", "3", "10", str(path), "1"])


def test_a_program_that_is_not_there(tmp_path):
    with pytest.raises(JobError, match="no such file"):
        measure_step([str(tmp_path / "none.py")], batch=4)
