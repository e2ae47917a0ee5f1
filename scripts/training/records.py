"""What a training run leaves behind: metrics, a plot, curves for TensorBoard, and lines on the terminal.

Nothing here knows of ranks; the programs call it on rank 0.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpisgd import CheckpointError, JobError
from mpisgd.config import launcher_rank

if TYPE_CHECKING:
    from rich.progress import Progress


@dataclass(frozen=True)
class Epoch:
    """The figures of one epoch, counted from 1, over all ranks."""

    epoch: int
    loss: float
    test_accuracy: float
    images_per_s: float
    lr: float


# --- which run it was ---------------------------------------------------------------------------------


def check_identity(path: Path, theirs: Any, ours: dict[str, Any]) -> None:
    """Raise CheckpointError, with the differences, where `path` is another run's."""
    if not isinstance(theirs, dict):
        raise CheckpointError(f"{path} is no checkpoint of this program")
    others = [
        f"{name} {theirs.get(name)} (here {here})" for name, here in ours.items() if theirs.get(name) != here
    ]
    if others:
        raise CheckpointError(f"{path} is of a run with {', '.join(others)}")


# --- files for people ---------------------------------------------------------------------------------


def check_writable(*paths: Path) -> None:
    """Raise OSError where one of `paths` cannot be written; leave all as they are."""
    for path in paths:
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink()


def append_metrics(path: Path, figures: Iterable[Any], *, afresh: bool = False) -> None:
    """Add one line of JSON for each of these dataclasses; they are in the file when this returns."""
    with path.open("w" if afresh else "a") as file:
        file.writelines(json.dumps(asdict(figure)) + "\n" for figure in figures)


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


# --- TensorBoard --------------------------------------------------------------------------------------


def check_tensorboard(folder: Path | None) -> None:
    """Find out before training that TensorBoard is missing, or that nothing can be written there."""
    if folder is None:
        return
    if not importlib.util.find_spec("tensorboard"):
        raise JobError("--tensorboard needs tensorboard: pip install 'mpisgd[tensorboard]'")
    folder.mkdir(parents=True, exist_ok=True)
    check_writable(folder / "probe")


class TensorBoard:
    """The curves of a run, one for each figure.

    Args:
        folder: where TensorBoard looks for them; None: there are none.
        history: figures from before a resume, which are in the folder already.
    """

    def __init__(self, folder: Path | None, history: Sequence[Any]) -> None:
        self._writer: Any = None
        if folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            # What an earlier run has written beyond this point does not count any more.
            start = astuple(history[-1])[0] + 1 if history else 0
            self._writer = SummaryWriter(str(folder), purge_step=start)

    def add(self, figures: Any) -> None:
        """Add a point to each curve, from a dataclass whose first field says where."""
        if self._writer is not None:
            at, *others = fields(figures)
            for each in others:
                self._writer.add_scalar(each.name, getattr(figures, each.name), getattr(figures, at.name))
            self._writer.flush()

    def close(self) -> None:
        """Write the rest."""
        if self._writer is not None:
            self._writer.close()


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


def progress_bar() -> "Progress":
    """A bar that stays below the lines printed meanwhile and goes away at the end."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        transient=True,
    )


class Terminal:
    """Lines about the run and, where somebody watches, a progress bar below them.

    Args:
        visible: whether this process shows any of it.
        completed: steps before this run.
        total: steps at the end of it.
    """

    def __init__(self, *, visible: bool, completed: int, total: int) -> None:
        self.visible = visible
        self.bar = progress_bar() if visible and is_watched() else None
        if self.bar:
            self.steps = self.bar.add_task("training", completed=completed, total=total)

    def __enter__(self) -> "Terminal":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def say(self, line: str) -> None:
        """Print a line."""
        if self.bar:
            self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif self.visible:
            print(line, flush=True)

    def advance(self) -> None:
        """Count a step."""
        if self.bar:
            self.bar.advance(self.steps)
