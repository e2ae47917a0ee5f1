"""`BackwardHooks`: which gradients became ready, and one call at the end of every outermost backward."""

from __future__ import annotations

import _thread
import gc
import queue
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mpisgd.gradients.backward_hooks import BackwardHooks, backward_depth


class Diary:
    """Writes down what a watch says; `ends` has the gradients that exist at that moment."""

    def __init__(self, model: nn.Module) -> None:
        self.params = list(model.parameters())
        self.watch = BackwardHooks(self.touched, self.became_ready, self.ended)
        self.watch.watch(self.params)
        self.num_touched = 0
        self.num_nested = 0
        self.ready: list[int] = []
        self.ends: list[list[int]] = []

    def touched(self, nested: bool) -> None:
        self.num_touched += 1
        self.num_nested += nested

    def became_ready(self, index: int) -> None:
        self.ready.append(index)

    def ended(self) -> None:
        self.ends.append([i for i, param in enumerate(self.params) if param.grad is not None])


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1, bias=False))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(4, 2)).sum()


def test_every_backward_is_told_once_when_all_gradients_are_there(model):
    diary = Diary(model)
    for _ in range(3):
        loss_of(model).backward()
    assert diary.num_touched == 3
    assert diary.ends == [[0, 1, 2]] * 3


def test_the_order_is_that_of_the_latest_backward(model):
    diary = Diary(model)
    loss_of(model).backward()
    assert next(iter(diary.watch.notes.observed)) == 2
    assert sorted(diary.watch.notes.observed) == [0, 1, 2]
    model[0].requires_grad_(False)
    loss_of(model).backward()
    assert list(diary.watch.notes.observed) == [2]


def test_it_tells_of_each_gradient_if_asked_to(model):
    diary = Diary(model)
    loss_of(model).backward()
    assert diary.ready == []
    diary.watch.notes.reports_each = True
    for _ in range(2):
        loss_of(model).backward()
    assert sorted(diary.ready) == [0, 0, 1, 1, 2, 2]


def test_a_backward_that_reaches_nothing_is_not_told(model):
    diary = Diary(model)
    nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
    torch.autograd.grad(loss_of(model), list(model.parameters()))
    assert diary.num_touched == 0
    assert diary.ends == []


def test_what_is_frozen_is_watched_from_its_release_on(model):
    model.requires_grad_(False)
    diary = Diary(model)
    assert not any(param.requires_grad for param in model.parameters())
    model[2].requires_grad_(True)
    loss_of(model).backward()
    assert diary.ends == [[2]]


def test_a_backward_that_raises_is_touched_but_not_ended(model):
    diary = Diary(model)

    def refuse(grad):
        raise ValueError("no")

    handle = model[0].weight.register_hook(refuse)
    with pytest.raises(ValueError, match="no"):
        loss_of(model).backward()
    assert (diary.num_touched, diary.ends) == (1, [])
    handle.remove()
    loss_of(model).backward()
    assert (diary.num_touched, len(diary.ends)) == (2, 1)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("outside", [False, True])
def test_nested_backward_passes_end_with_the_outermost(model, depth, outside):
    """Reentrant checkpointing, nested, with or without a gradient of the outermost graph itself."""
    first = nn.Linear(2, 2) if outside else nn.Identity()
    whole = nn.Sequential(first, model)
    diary = Diary(whole)

    def nested(inputs, left=depth):
        return checkpoint(nested, inputs, left - 1, use_reentrant=True) if left else model(inputs)

    for _ in range(2):
        whole.zero_grad()
        inputs = torch.ones(4, 2, requires_grad=True)
        (nested(first(inputs)).sum() + nested(inputs * 2).sum()).backward()
    assert diary.ends == [list(range(len(diary.params)))] * 2
    assert sorted(diary.watch.notes.observed) == sorted(set(diary.watch.notes.observed))


def test_the_newest_watch_takes_over(model):
    first, second = Diary(model), Diary(model)
    loss_of(model).backward()
    assert (len(first.ends), len(second.ends)) == (0, 1)


def test_watching_ends_with_remove(model):
    diary = Diary(model)
    diary.watch.remove()
    loss_of(model).backward()
    assert diary.ends == []


def test_a_forgotten_watch_is_not_kept_alive_by_its_hooks(model):
    diary = Diary(model)
    gone = weakref.ref(diary.watch)
    gc.disable()
    try:
        del diary
        assert gone() is None
        loss_of(model).backward()
    finally:
        gc.enable()


def test_parameters_that_can_have_no_gradient_are_let_be():
    number = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    module = nn.ParameterList([number, nn.Parameter(torch.ones(1))])
    diary = Diary(module)
    module[1].sum().backward()
    assert diary.ends == [[1]]
    assert not number.requires_grad


def _engine_run_backward(work):
    """What torch calls the function in which a backward runs."""
    return work()


def test_a_thread_of_the_engine_is_inside_a_backward_that_it_has_not_called():
    """What lies on a GPU is computed there; a thread that Python has not started stands for it."""
    assert backward_depth() == 0
    assert _engine_run_backward(backward_depth) == 1
    depths: queue.Queue[int] = queue.Queue()

    def compute() -> None:
        depths.put(backward_depth())
        depths.put(_engine_run_backward(backward_depth))  # a checkpoint's, inside it

    _thread.start_new_thread(compute, ())
    assert [depths.get(timeout=10), depths.get(timeout=10)] == [1, 2]
