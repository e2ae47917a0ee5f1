"""Which file is taken, and what is said of the others and of mistakes: the same on every rank."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from verdicts import everyone, raises_everywhere, referee

import mpisgd
from mpisgd import checkpoint


def model(seed: int = 0, width: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))


def on_rank_0(action: Any) -> None:
    if referee().rank == 0:
        action()
    referee().barrier()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 16
    path.write_bytes(content)


def test_damaged_files_are_passed_over_with_a_message_each(folder: Path, capfd: Any) -> None:
    assert checkpoint.latest(folder) is None
    for step in (10, 20, 30, 40):
        checkpoint.save(folder, step, model=model(step))
    newest, before, whole, _ = sorted(folder.iterdir(), reverse=True)
    on_rank_0(lambda: newest.write_bytes(newest.read_bytes()[:500]))
    on_rank_0(lambda: flip_a_bit(before))
    on_rank_0((folder / ".step-00000050.safetensors.host-1.tmp").touch)

    everyone(checkpoint.latest(folder) == whole)
    expected = [f"{newest} is cut short", f"{before} is damaged: "] if mpisgd.rank() == 0 else []
    said = capfd.readouterr().err.splitlines()
    everyone(len(said) == len(expected), f"{said}")
    everyone(all(text in line for text, line in zip(expected, said, strict=True)), f"{said}")

    loaded = model()
    assert checkpoint.load(folder, model=loaded).step == 20
    assert torch.equal(loaded[0].weight, model(20)[0].weight)
    with raises_everywhere(mpisgd.CheckpointDamaged) as caught:
        checkpoint.load(before, model=loaded)
    assert "has checksum" in caught.text

    checkpoint.save(folder, 60, model=loaded, keep_last=1)
    assert [path.name for path in folder.iterdir()] == ["step-00000060.safetensors"]


def test_a_fifo_does_not_block_and_a_private_file_stays_private(folder: Path) -> None:
    saved = model(1)
    path = checkpoint.save(folder, 10, model=saved, mode=0o600)
    checkpoint.save(folder, 10, model=saved)
    everyone(path.stat().st_mode & 0o777 == 0o600)
    fifo = folder / "step-00000020.safetensors"
    on_rank_0(lambda: os.mkfifo(fifo))
    everyone(checkpoint.latest(folder) == path)
    with raises_everywhere(mpisgd.CheckpointDamaged) as caught:
        checkpoint.load(fifo, model=saved)
    everyone("no regular file but a FIFO" in caught.text, caught.text)
    everyone(checkpoint.load(folder, model=saved).step == 10)


MISTAKES: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "a value that needs pickle": (
        lambda folder: checkpoint.save(folder, 2, model=model(), hook=lambda: 0),
        mpisgd.CheckpointError,
        ("cannot be saved without pickle: hook is a function",),
    ),
    "such a value on one rank only": (
        lambda folder: checkpoint.save(folder, 2, x=[0, print] if mpisgd.rank() == mpisgd.size() - 1 else 0),
        mpisgd.CheckpointError,
        ("x.1 is a builtin_function_or_method print",),
    ),
    "a folder that is a file": (
        lambda folder: checkpoint.save(next(folder.iterdir()) / "below", 2, model=model()),
        mpisgd.CheckpointError,
        ("Not a directory", "step-00000001.safetensors"),
    ),
    "such a folder for a writer": (
        lambda folder: checkpoint.Writer(next(folder.iterdir()) / "below"),
        mpisgd.CheckpointError,
        ("checkpoint.Writer: ", "Not a directory"),
    ),
    "a folder that cannot be": (
        lambda folder: checkpoint.save("\0", 2, model=model()),
        mpisgd.CheckpointError,
        ("embedded null",),
    ),
    "no such folder": (
        lambda folder: checkpoint.load(folder / "nowhere", model=model()),
        mpisgd.CheckpointError,
        ("nowhere holds no whole checkpoint",),
    ),
    "another name": (
        lambda folder: checkpoint.load(folder, net=model()),
        mpisgd.CheckpointMismatch,
        ("has no net; it has model, optimizer, epoch",),
    ),
    "another shape": (
        lambda folder: checkpoint.load(folder, model=model(width=4)),
        mpisgd.CheckpointMismatch,
        ("model.0.weight is [4, 2], not [3, 2] as in it; model.0.bias is [4], not [3] as in it",),
    ),
    "a model with more layers": (
        lambda folder: checkpoint.load(folder, model=nn.Sequential(*model(), nn.Linear(1, 1))),
        mpisgd.CheckpointMismatch,
        ("model.2.weight is not in it; model.2.bias is not in it",),
    ),
    "another optimizer": (
        lambda folder: checkpoint.load(folder, optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))])),
        mpisgd.CheckpointMismatch,
        ("optimizer has [1] parameters in its groups, not [4]",),
    ),
    "the state of something else": (
        lambda folder: checkpoint.load(
            checkpoint.save(folder.parent / "other", 1, optimizer=model()),
            optimizer=torch.optim.SGD(model().parameters()),
        ),
        mpisgd.CheckpointMismatch,
        ("optimizer is no state of an optimizer in it",),
    ),
    "plain data as an object": (
        lambda folder: checkpoint.load(folder, epoch=model()),
        mpisgd.CheckpointMismatch,
        ("epoch was saved as plain data",),
    ),
    "an object as plain data": (
        lambda folder: checkpoint.load(folder, model={"weight": 1}),
        mpisgd.InvalidArgument,
        ("model is a dict, without load_state_dict()",),
    ),
    "a step that is none": (
        lambda folder: checkpoint.save(folder, -1, model=model()),
        mpisgd.InvalidArgument,
        ("step=-1",),
    ),
    "permissions that are none": (
        lambda folder: checkpoint.save(folder, 2, mode="rw", model=model()),
        mpisgd.InvalidArgument,
        ("mode='rw'; expected permissions",),
    ),
    "permissions that keep the owner out": (
        lambda folder: checkpoint.Writer(folder, mode=0o444),
        mpisgd.InvalidArgument,
        ("mode=292; expected permissions",),
    ),
    "nothing to save": (lambda folder: checkpoint.save(folder, 1), mpisgd.InvalidArgument, ("nothing",)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_everywhere_and_change_nothing(folder: Path, name: str) -> None:
    mistake, kind, said = MISTAKES[name]
    saved = model()
    checkpoint.save(folder, 1, model=saved, optimizer=torch.optim.SGD(saved.parameters()), epoch=3)
    with raises_everywhere(kind) as caught:
        mistake(folder)
    everyone(all(text in caught.text for text in said), caught.text)
    everyone([path.name for path in folder.iterdir()] == ["step-00000001.safetensors"])
    other = model(1)
    checkpoint.load(folder, model=other)  # the ranks are together
    assert torch.equal(other[0].weight, saved[0].weight)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("differs", "said"),
    [
        (lambda folder, last: checkpoint.save(folder, 1 + last, model=model()), "step 2, model"),
        (lambda folder, last: checkpoint.save(folder, 1, **{"ab"[last]: 1}), "step 1, b"),
        (lambda folder, last: checkpoint.save(folder, 1, model=model(width=3 + last)), "model.0.weight"),
        (lambda folder, last: checkpoint.load(folder, **{"ab"[last]: model()}), "checkpoint.load"),
    ],
    ids=["step", "names", "shapes", "what is loaded"],
)
def test_ranks_that_differ_are_told(folder: Path, differs: Any, said: str) -> None:
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        differs(folder, int(mpisgd.rank() == mpisgd.size() - 1))
    everyone(said in caught.text, caught.text)
    everyone(not folder.exists())
