"""The models that are trained, and the check of their first step."""

import pytest

from mpisgd.tools.bench.cases import BATCHES
from mpisgd.tools.bench.measure import WrongResult
from mpisgd.tools.bench.training import MODELS, StepTask, Training, build


@pytest.mark.parametrize(
    ("model", "millions", "tensors"), [("mlp", 22, 8), ("deep", 1.26, 604), ("transformer", 8.9, None)]
)
def test_models_have_the_announced_size(model, millions, tensors):
    params = list(build(StepTask(model, 1, 1)).parameters())
    assert sum(param.numel() for param in params) / 1e6 == pytest.approx(millions, rel=0.02)
    assert tensors in (None, len(params))


def test_every_model_has_a_batch():
    assert set(BATCHES) == set(MODELS)


def averaged_step(trainings):
    """One step of several ranks in one process, by hand."""
    for training in trainings:
        training.reset()

    for training in trainings:
        training.backward()
    mine = [list(training.model.parameters()) for training in trainings]
    for params in zip(*mine, strict=True):
        mean = sum(param.grad for param in params) / len(params)
        for param in params:
            param.grad.copy_(mean)
    for training in trainings:
        training.optimizer.step()


@pytest.mark.parametrize("model", sorted(MODELS))
def test_averaged_gradients_pass_the_check(model):
    task = StepTask(model, 4, 2, small=True)
    trainings = [Training(task, rank) for rank in range(2)]
    averaged_step(trainings)
    for training in trainings:
        training.verify()


@pytest.mark.parametrize("model", sorted(MODELS))
def test_without_communication_the_check_fails(model):
    training = Training(StepTask(model, 4, 2, small=True), 0)
    training.reset()
    training.step()
    with pytest.raises(WrongResult, match=f"of {model} is off by"):
        training.verify()


def test_no_step_at_all_fails_the_check_too():
    training = Training(StepTask("mlp", 4, 2, small=True), 0)
    training.reset()
    with pytest.raises(WrongResult):
        training.verify()
