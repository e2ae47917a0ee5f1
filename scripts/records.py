"""What a training run leaves behind: checkpoints, a metrics file, a plot, and lines on the terminal.

Nothing here knows of ranks; the programs call it on rank 0.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mpisgd.config import launcher_rank

__all__ = [
    "CheckpointError",
    "Epoch",
    "append_metrics",
    "check_writable",
    "counted",
    "load_checkpoint",
    "progress_bar",
    "save_checkpoint",
    "save_plot",
]

T = TypeVar("T")


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or belongs to another run."""


@dataclass(frozen=True)
class Epoch:
    """The figures of one epoch, counted from 1, over all ranks."""

    epoch: int
    loss: float
    test_accuracy: float
    images_per_s: float
    lr: float


# --- checkpoints --------------------------------------------------------------------------------------


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Replace `path` by what `write` writes: whenever the program is killed, the old or the new is whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())  # the bytes first, then the name
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state`: tensors, numbers, strings, lists and dicts; `state["identity"]` says of which run."""
    write_atomically(path, lambda file: torch.save(state, file))


def load_checkpoint(path: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote, for a run of the same identity.

    Raises:
        CheckpointError: no such file, a damaged one, another program's, or another run's.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoint {path}: {error.strerror or error}") from error
    except (
        EOFError,
        KeyError,
        RuntimeError,
        ValueError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
    ) as error:
        raise CheckpointError(f"{path} is damaged or no checkpoint of this program") from error
    if not isinstance(state, dict) or not isinstance(state.get("identity"), dict):
        raise CheckpointError(f"{path} is no checkpoint of this program")
    theirs = state["identity"]
    others = [
        f"{name} {theirs.get(name)} (here {ours})"
        for name, ours in identity.items()
        if theirs.get(name) != ours
    ]
    if others:
        raise CheckpointError(f"{path} is of a run with {', '.join(others)}")
    return state


# --- files for people ---------------------------------------------------------------------------------


def check_writable(*paths: Path) -> None:
    """Raise OSError where one of `paths` cannot be written; leave all as they are."""
    for path in paths:
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink()


def append_metrics(path: Path, epochs: Iterable[Epoch], *, afresh: bool = False) -> None:
    """Add one line of JSON for each epoch; they are in the file when this returns."""
    with path.open("w" if afresh else "a") as file:
        file.writelines(json.dumps(asdict(epoch)) + "\n" for epoch in epochs)


def save_plot(path: Path, history: Sequence[Epoch], title: str) -> None:
    """Draw training loss and test accuracy over the epochs; the format goes by the file's suffix."""
    from matplotlib.figure import Figure  # a figure by itself needs no display
    from matplotlib.ticker import MaxNLocator

    epochs = [epoch.epoch for epoch in history]
    figure = Figure(figsize=(8, 5), layout="constrained")
    loss = figure.subplots()
    accuracy = loss.twinx()
    marker = "o" if len(epochs) < 30 else ""
    lines = loss.plot(
        epochs, [epoch.loss for epoch in history], color="tab:blue", marker=marker, label="training loss"
    )
    lines += accuracy.plot(
        epochs,
        [100 * epoch.test_accuracy for epoch in history],
        color="tab:orange",
        marker=marker,
        label=f"test accuracy, {history[-1].test_accuracy:.2%} at the end",
    )
    loss.set(title=title, xlabel="epoch", ylabel="training loss (cross entropy)", yscale="log")
    loss.xaxis.set_major_locator(MaxNLocator(integer=True))
    loss.grid(alpha=0.3)
    accuracy.set(ylabel="test accuracy (%)", ylim=(None, 100.5))
    loss.legend(handles=lines, loc="center right")
    figure.savefig(path, dpi=120)


# --- the terminal -------------------------------------------------------------------------------------


def is_watched() -> bool:
    """Whether output goes to a terminal.

    Open MPI gives each rank a pseudo-terminal even where mpirun's own output goes to a file, so under a
    launcher the question is put to the parent process.
    """
    if not sys.stdout.isatty() or launcher_rank() is None:
        return sys.stdout.isatty()
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty", "/dev/console"))
    except OSError:  # the parent is another user's, or this is no Linux
        return False


def progress_bar(*, visible: bool) -> Progress:
    """A bar that stays below the lines printed meanwhile and goes away at the end."""
    return Progress(
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        transient=True,
        disable=not (visible and is_watched()),
    )


def counted(items: Iterable[T], count: Callable[[], object]) -> Iterator[T]:
    """Pass `items` on and call `count` after each has been dealt with."""
    for item in items:
        yield item
        count()
