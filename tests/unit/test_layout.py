"""Layouts are read, fitted to the job, and refused with a reason; a model's parts add up to the whole."""

from __future__ import annotations

import pytest
import torch
from training.layout import Layout, check_fit, parse_layout
from training.parallelize import keep_stage
from training.text_model import ModelSize, build_model

from mpisgd import JobError

SIZE = ModelSize(num_layers=5, num_heads=4, dim=16, context=8)


@pytest.mark.parametrize(
    ("text", "num_ranks", "expected"),
    [
        (None, 6, Layout(dp=6, tp=1, pp=1, zero=0)),
        ("dp=2,tp=2,pp=2", 8, Layout(dp=2, tp=2, pp=2, zero=0)),
        ("pp=3, dp=2", 6, Layout(dp=2, tp=1, pp=3, zero=0)),
        ("tp=1", 1, Layout(dp=1, tp=1, pp=1, zero=0)),
        ("cp=2,dp=3,tp=2", 12, Layout(dp=3, tp=2, pp=1, zero=0, cp=2)),
    ],
)
def test_layout_is_read(text, num_ranks, expected):
    assert parse_layout(text, 0, num_ranks) == expected
    assert parse_layout(str(expected), 0, num_ranks) == expected


@pytest.mark.parametrize(
    ("text", "zero", "num_ranks", "said"),
    [
        ("dp=2,tp=2", 0, 3, "2 x 2 x 1 = 4 ranks, but this job has 3"),
        ("dp=2", 0, 1, "2 x 1 x 1 = 2 ranks, but this job has 1"),
        ("dp=2,xp=2", 0, 4, "'xp=2' is none of"),
        ("dp=2,tp", 0, 2, "'tp' is none of"),
        ("dp=-2", 0, 2, "'dp=-2' is none of"),
        ("dp=0", 0, 0, "'dp=0' is none of"),
        ("dp=2,dp=2", 0, 2, "names dp twice"),
        ("", 0, 1, "'' is none of"),
        ("dp=2,tp=2", 1, 4, "--zero 1 goes with dp alone"),
        ("dp=2,pp=2", 1, 4, "--zero 1 goes with dp alone"),
        ("cp=2,pp=2", 0, 4, "cp goes with dp and tp"),
        ("cp=2", 0, 3, "1 x 2 x 1 x 1 = 2 ranks, but this job has 3"),
    ],
)
def test_layout_that_cannot_be_is_refused_in_one_line(text, zero, num_ranks, said):
    with pytest.raises(JobError) as caught:
        parse_layout(text, zero, num_ranks)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "batch_size", "num_micro_batches", "said"),
    [
        (Layout(1, 3, 1, 0), 8, 1, "--heads 4 cannot be divided among tp=3"),
        (Layout(1, 1, 6, 0), 12, 12, "--layers 5 is less than one for each of pp=6"),
        (
            Layout(3, 1, 1, 0),
            8,
            1,
            "is for the whole job and must divide by dp=3 x 1 micro-batch",
        ),
        (Layout(2, 1, 2, 0), 8, 3, "must divide by dp=2 x 3 micro-batches"),
        (Layout(1, 1, 1, 0, cp=3), 8, 1, "--context 8 must divide by 2 x cp=3"),
        (Layout(1, 1, 4, 0), 8, 2, "--accumulate 2: a pipeline of 4 stages needs 4 micro-batches or more"),
    ],
)
def test_model_or_batch_that_does_not_divide_is_refused(layout, batch_size, num_micro_batches, said):
    with pytest.raises(JobError) as caught:
        check_fit(layout, SIZE, batch_size, num_micro_batches)
    assert said in str(caught.value)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_stages_hold_every_part_once_and_make_the_whole_model(num_stages):
    whole = build_model(SIZE, seed=3)
    tokens = torch.arange(24).reshape(3, 8)
    stages = [build_model(SIZE, seed=3) for _ in range(num_stages)]
    for number, stage in enumerate(stages):
        keep_stage(stage, number, num_stages)
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert names == [name for name, _ in whole.named_parameters()]
    assert all(1 <= len(stage.blocks) <= -(-5 // num_stages) for stage in stages)
    x = tokens
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, whole(tokens))


def test_no_byte_sees_those_after_it():
    model = build_model(SIZE, seed=0)
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = 200
    same = (model(tokens) == model(changed)).all(dim=2)
    assert same.tolist() == [[True] * 5 + [False] * 3]


def test_activation_checkpointing_changes_no_gradient():
    gradients = []
    for checkpointed in (False, True):
        model = build_model(SIZE, seed=0).double()
        for block in model.blocks.values():
            block.checkpointed = checkpointed
        model(torch.arange(8).unsqueeze(0)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
