"""The log of a program's steps, and their limit."""

from __future__ import annotations

import pytest
import torch

from mpisgd import config
from mpisgd.errors import InvalidArgument
from mpisgd.job.step_log import StepLog


def optimizers(count):
    return [torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(count)]


def test_each_step_has_a_line_and_the_limit_is_that_of_one_optimizer(tmp_path):
    path = tmp_path / "steps"
    log = StepLog(path, 2, num_ranks=3)
    first, second = optimizers(2)
    for optimizer in (second, first):
        log(optimizer, (), {})
    with pytest.raises(SystemExit) as ended:
        log(first, (), {})
    assert ended.value.code == 0
    lines = [line.split() for line in path.read_text().splitlines()]
    assert lines[0] == ["ranks", "3"]
    assert [(kind, number) for kind, number, *_ in lines[1:]] == [("step", "0"), ("step", "1"), ("step", "1")]
    times = [float(words[2]) for words in lines[1:]]
    assert times == sorted(times)
    assert {int(words[3]) for words in lines[1:]} == {torch.get_num_threads()}


def test_other_ranks_write_nothing_and_no_limit_is_no_end():
    log = StepLog(None, 0, num_ranks=3)
    (optimizer,) = optimizers(1)
    for _ in range(5):
        log(optimizer, (), {})


def test_the_environment_says_where_and_how_many():
    assert (config.step_log({}), config.step_limit({})) == (None, 0)
    assert str(config.step_log({"MPISGD_STEP_LOG": "/x/steps"})) == "/x/steps"
    assert config.step_limit({"MPISGD_STEP_LIMIT": "25"}) == 25
    with pytest.raises(InvalidArgument, match="MPISGD_STEP_LIMIT='many'"):
        config.check({"MPISGD_STEP_LIMIT": "many"})
