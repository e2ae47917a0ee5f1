"""Checkpoints that are written while training goes on, and what a signal does."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd import checkpoint
from mpisgd.checkpoint import files

LARGE = 1_000_000  # bytes


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def held(monkeypatch: Any) -> threading.Event:
    """Nothing is written before this is set."""
    event = threading.Event()
    write = files.write_file

    def write_later(*args: Any) -> None:
        assert event.wait(20)
        write(*args)

    monkeypatch.setattr(files, "write_file", write_later)
    return event


def test_a_snapshot_is_written_while_the_state_changes(folder: Path, held: threading.Event) -> None:
    model = nn.Linear(3, 2)
    mpisgd.broadcast_parameters(model)
    before = model.weight.detach().clone()
    writer = checkpoint.Writer(folder, when_busy="skip")
    assert writer.save(1, model=model, epoch=1)
    with torch.no_grad():
        model.weight += 1
    assert not writer.save(2, model=model, epoch=2)  # on every rank, though one of them alone knows
    held.set()
    same_on_all_ranks(writer.wait())
    assert names(folder) == ["step-00000001.safetensors"]
    assert checkpoint.load(folder, model=model)["epoch"] == 1
    assert torch.equal(model.weight, before)


def test_the_next_save_waits_and_uses_the_memory_again(folder: Path, held: threading.Event) -> None:
    model = nn.Linear(3, 2)
    held.set()
    with checkpoint.Writer(folder, keep_last=2) as writer:
        rooms = []
        for step in range(4):
            assert writer.save(step, model=model, rest={"step": torch.tensor(step)})
            rooms.append({name: room.data_ptr() for name, room in writer._snapshot.items()})
    assert rooms[0] == rooms[3]
    assert (rooms[0] != {}) == (mpisgd.rank() == 0)
    assert names(folder) == ["step-00000002.safetensors", "step-00000003.safetensors"]
    assert checkpoint.load(folder)["rest"]["step"] == 3


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file of rank 0 gets longer than a small checkpoint."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mpisgd.rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGE // 2, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_told_at_the_next_save_on_every_rank(
    folder: Path, full_disk: None, capfd: Any
) -> None:
    small, large = torch.ones(10), torch.ones(LARGE // 4)
    writer = checkpoint.Writer(folder)
    assert writer.save(1, tensor=small)
    assert writer.save(2, tensor=large)
    with raises_everywhere(mpisgd.CheckpointError) as caught:
        writer.save(3, tensor=small)
    assert "could not be written: [Errno 27] File too large" in caught.text
    everyone(("checkpoint of step 2 could not" in capfd.readouterr().err) == (mpisgd.rank() == 0))
    assert names(folder) == ["step-00000001.safetensors"]
    with raises_everywhere(mpisgd.CheckpointError):
        checkpoint.save(folder, 4, tensor=large)
    assert writer.save(5, tensor=small)  # there is room again
    assert writer.wait() == folder / "step-00000005.safetensors"
    assert names(folder) == ["step-00000001.safetensors", "step-00000005.safetensors"]


@pytest.fixture
def handlers() -> Iterator[None]:
    """Put the signals' handlers back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_is_known_to_all_at_the_next_step(
    handlers: None, number: signal.Signals
) -> None:
    preemption = checkpoint.on_preemption()
    assert not preemption.agreed()
    last = mpisgd.rank() == mpisgd.size() - 1
    if last:
        os.kill(os.getpid(), number)
    everyone(preemption.agreed())
    everyone(preemption.told == last)
    with pytest.raises(SystemExit) as leaving:
        preemption.exit()
    assert leaving.value.code == 85


def test_arguments_of_on_preemption_are_checked(handlers: None) -> None:
    for signals in ([signal.SIGKILL], ["SIGTERM"], 15):
        with pytest.raises(mpisgd.InvalidArgument, match="on_preemption"):
            checkpoint.on_preemption(signals)
    with pytest.raises(mpisgd.InvalidArgument, match="when_busy"):
        checkpoint.Writer("folder", when_busy="never")
