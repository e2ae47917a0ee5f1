"""What a program may do between two steps of a pipeline: to weights, flags, modes and buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm, mse_loss

import mpisgd
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.pipeline import Pipeline
from mpisgd.pipeline.buffers import ChangingBuffers

FLUSHING, STASHING = ("gpipe", "1f1b"), ("pipedream", "pipedream-2bw")
DOUBLE = torch.float64


def made_stages(count: int = 2) -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double() for _ in range(count)]


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    inputs, targets = torch.randn(2, 8, 4, dtype=DOUBLE, generator=draw)
    return inputs, targets


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def pipeline_of(stages: Any, schedule: str, **options: Any) -> Pipeline:
    how: dict[str, Any] = {"num_micro_batches": 4, "loss": mse_loss, "optimizer": sgd, **options}
    return Pipeline(stages, schedule=schedule, **how)


def step_and_flush(pipeline: Pipeline, number: int) -> None:
    """Of ranks that another one tells of its error, some hear of it in the step and others after it."""
    pipeline.step(*batch(number))
    pipeline.flush()


def values(pipeline: Pipeline) -> dict[str, list[float]]:
    return {
        f"{number}.{name}": value.flatten().tolist()
        for number, module in pipeline.stages.items()
        for name, value in module.state_dict().items()
    }


def joined(told: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {name: value for of_rank in told for name, value in of_rank.items()}


def near(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value == pytest.approx(expected[name], abs=1e-12), name


def of_one_process(stages: list[nn.Module]) -> dict[str, list[float]]:
    return {
        f"{number}.{name}": value.flatten().tolist()
        for number, module in enumerate(stages)
        for name, value in module.state_dict().items()
    }


# --- weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", STASHING)
def test_weights_that_have_got_other_memory_while_the_pipeline_is_empty_are_those_that_are_read(schedule):
    """As `torch.nn.utils.vector_to_parameters` gives them; forward went on with the former."""

    def program(replaces: bool) -> Any:
        pipeline = pipeline_of(made_stages(), schedule)
        for number in range(2):
            pipeline.step(*batch(number))
        pipeline.flush()
        for param in pipeline.parameters():
            if replaces:
                param.data = param.data * 0.5
            else:
                with torch.no_grad():
                    param.mul_(0.5)
        output = pipeline.forward(batch(7)[0])
        pipeline.step(*batch(2))
        pipeline.flush()
        return values(pipeline), None if output is None else output.tolist()

    assert run_ranks(2, lambda: program(True)) == run_ranks(2, lambda: program(False))


@pytest.mark.parametrize("schedule", STASHING)
def test_weights_that_get_other_memory_while_others_are_read_are_refused_by_name(schedule):
    def program() -> None:
        pipeline = pipeline_of(made_stages(), schedule)
        pipeline.step(*batch(0))
        for param in pipeline.parameters():
            param.data = param.data * 0.5
        told = (mpisgd.InvalidArgument, mpisgd.PipelineFailed)  # by another rank
        with pytest.raises(told, match=r"'0\.weight' of a stage has got other memory"):
            step_and_flush(pipeline, 1)

    run_ranks(2, program)


@pytest.mark.parametrize("schedule", [*FLUSHING, *STASHING])
def test_parameters_that_were_replaced_as_objects_are_refused_on_all_ranks(schedule):
    """The optimizers went on with the former ones, so that nothing was trained."""

    def program() -> None:
        pipeline = pipeline_of(made_stages(), schedule)
        if mpisgd.rank() == 1:
            (module,) = pipeline.stages.values()
            module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
        text = r"rank 1: .*'0\.weight' of stage 1 is another object"
        with pytest.raises(mpisgd.InvalidArgument, match=text):
            pipeline.step(*batch(0))

    run_ranks(2, program)


# --- what is trained ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", FLUSHING)
def test_what_is_frozen_and_trained_in_turn_is_as_in_one_process(schedule):
    """What was frozen at the beginning was in no optimizer, and was never trained."""

    def freeze(stages: Any, step: int) -> None:
        for number, module in stages:
            module[0].requires_grad_(step >= 2)
            module[2].requires_grad_(step != 1 or number == 1)

    def program() -> dict[str, list[float]]:
        stages = made_stages()
        freeze(enumerate(stages), 0)
        pipeline = pipeline_of(stages, schedule)
        for step in range(4):
            freeze(pipeline.stages.items(), step)
            pipeline.step(*batch(step))
        return values(pipeline)

    stages = made_stages()
    model = nn.Sequential(*stages)
    optimizer = sgd(model.parameters())
    for step in range(4):
        freeze(enumerate(stages), step)
        inputs, targets = batch(step)
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
    near(joined(run_ranks(2, program)), of_one_process(stages))


@pytest.mark.parametrize("schedule", STASHING)
@pytest.mark.parametrize("flushes", [False, True])
def test_what_was_frozen_stays_as_it_is_with_stashed_weights(schedule, flushes):
    def program() -> bool:
        pipeline = pipeline_of(made_stages(), schedule)
        for step in range(2):
            pipeline.step(*batch(step))
        if flushes:
            pipeline.flush()
        layers = [module[2] for module in pipeline.stages.values()]
        for layer in layers:
            layer.bias.requires_grad_(False)
        before = [layer.bias.detach().clone() for layer in layers]
        for step in range(2, 4):
            pipeline.step(*batch(step))
        pipeline.flush()
        return all(torch.equal(layer.bias, was) for layer, was in zip(layers, before, strict=True))

    assert run_ranks(2, program) == [True, True]


def test_what_is_trained_again_is_so_from_the_next_batch_on_with_stashed_weights():
    def program() -> bool:
        stages = made_stages()
        for stage in stages:
            stage[2].bias.requires_grad_(False)
        pipeline = pipeline_of(stages, "pipedream-2bw")
        pipeline.step(*batch(0))
        pipeline.flush()
        layers = [module[2] for module in pipeline.stages.values()]
        before = [layer.bias.detach().clone() for layer in layers]
        for layer in layers:
            layer.bias.requires_grad_(True)
        pipeline.step(*batch(1))
        pipeline.flush()
        return any(torch.equal(layer.bias, was) for layer, was in zip(layers, before, strict=True))

    assert run_ranks(2, program) == [False, False]


class Tied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.own = weight, nn.Parameter(torch.ones(4, dtype=DOUBLE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) * self.own


def tied_stages() -> list[nn.Module]:
    torch.manual_seed(3)
    weight = nn.Parameter(torch.randn(4, 4, dtype=DOUBLE))
    return [Tied(weight), Tied(weight)]


def test_tied_weights_that_are_frozen_stay_as_they_are():
    """They got gradients of zero, by which momentum and weight decay moved them."""

    def program() -> bool:
        pipeline = pipeline_of(tied_stages(), "1f1b")
        for step in range(2):
            pipeline.step(*batch(step))
        (module,) = pipeline.stages.values()
        module.weight.requires_grad_(False)
        before = module.weight.detach().clone()
        for step in range(2, 4):
            pipeline.step(*batch(step))
        return torch.equal(module.weight, before)

    assert run_ranks(2, program) == [True, True]


class Sometimes(nn.Module):
    """Uses a part of its parameters in the first steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.first = nn.Linear(4, 4), nn.Linear(4, 4)
        self.uses_first = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.always(x)) + (self.first(x) if self.uses_first else 0.0)


def test_what_no_micro_batch_uses_stays_as_it_is_where_a_stage_has_replicas():
    def stages() -> list[nn.Module]:
        torch.manual_seed(3)
        return [Sometimes().double()]

    def program() -> dict[str, list[float]]:
        pipeline = pipeline_of(stages(), "1f1b", replicas=2)
        for step in range(4):
            pipeline.stages[0].uses_first = step < 2
            pipeline.step(*batch(step))
        return values(pipeline)

    (model,) = plain = stages()
    optimizer = sgd(model.parameters())
    for step in range(4):
        model.uses_first = step < 2  # type: ignore[assignment]
        inputs, targets = batch(step)
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        optimizer.step()
    for found in run_ranks(2, program):
        near(found, of_one_process(plain))


# --- exceptions ---------------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """As Ctrl-C raises: no Exception."""


@pytest.mark.parametrize("schedule", ["gpipe", "pipedream"])
def test_a_pipeline_whose_step_was_interrupted_is_of_no_use_any_more(schedule):
    """Micro-batches of the step before were taken for those of the next."""

    def program() -> None:
        calls = 0

        def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise Interrupted
            return mse_loss(output, targets)

        pipeline = pipeline_of(made_stages(), schedule, loss=loss)
        with pytest.raises((Interrupted, mpisgd.PipelineFailed)):
            step_and_flush(pipeline, 0)
        with pytest.raises(mpisgd.PipelineFailed, match="Interrupted"):
            pipeline.step(*batch(1))

    run_ranks(2, program)


# --- buffers, where forward is computed again ---------------------------------------------------------------


class Counted(nn.Module):
    """Has a count, by which its output is multiplied, and which it changes in a way of its own."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(4, dtype=DOUBLE))
        self._change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._change(self)
        return x * self.count.clone()


def replace_twice(module: Any) -> None:
    module.count = module.count + 1
    module.count = module.count + 1


def add_in_training(module: Any) -> None:
    if module.training:
        module.count += 1


def by_a_kernel(module: Any) -> None:
    with torch.no_grad():
        x = torch.arange(12.0, dtype=DOUBLE).reshape(3, 4) + module.count.sum()
        batch_norm(x, module.count, torch.ones(4, dtype=DOUBLE), training=True)


@pytest.mark.parametrize("change", [replace_twice, add_in_training, by_a_kernel])
def test_a_forward_that_is_computed_again_finds_the_buffers_of_the_first_one(change):
    def program(checkpoint: bool) -> dict[str, list[float]]:
        stages = made_stages()
        for stage in stages:
            stage.insert(1, Counted(change))
        pipeline = pipeline_of(stages, "1f1b", checkpoint=checkpoint)
        for step, trains in enumerate((False, True, True, False, True)):
            for module in pipeline.stages.values():
                module.train(trains)
            pipeline.step(*batch(step))
        return values(pipeline)

    near(joined(run_ranks(2, lambda: program(True))), joined(run_ranks(2, lambda: program(False))))


def test_a_buffer_that_changes_in_place_in_a_late_forward_alone_is_refused_by_name():
    def program() -> None:
        changes = False

        def late(module: Any) -> None:
            if changes:
                module.count += 1

        stages = made_stages()
        for stage in stages:
            stage.insert(1, Counted(late))
        pipeline = pipeline_of(stages, "1f1b", checkpoint=True)
        pipeline.step(*batch(0))
        changes = True
        told = (mpisgd.InvalidArgument, mpisgd.PipelineFailed)  # by another rank
        with pytest.raises(told, match="the buffer 'count' of a Counted"):
            pipeline.step(*batch(1))

    run_ranks(2, program)


def test_a_buffer_that_is_replaced_in_a_late_forward_is_found_as_it_was():
    module = Counted(lambda module: None)
    buffers = ChangingBuffers(module)
    buffers.learn(buffers.copies())
    was = module.count
    copies = buffers.copies()
    assert not copies
    module.count = was + 1  # type: ignore[assignment]
    buffers.learn(copies)
    assert copies == {(module, "count"): was}
