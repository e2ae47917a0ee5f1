"""`--tensorboard` of the training programs: a point per epoch on each curve, also after a resume."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace

import pytest
from training.records import Epoch, TensorBoard, check_tensorboard

from mpisgd import JobError

EPOCHS = [Epoch(number, 1.0 / number, 0.5 + 0.1 * number, 100.0, 0.01) for number in (1, 2, 3)]


class Writer:
    """Stands for torch's writer."""

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step, self.points, self.closed = folder, purge_step, [], False
        WRITERS.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.points.append((name, value, step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


WRITERS: list[Writer] = []


@pytest.fixture
def writers(monkeypatch) -> list[Writer]:
    WRITERS.clear()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    return WRITERS


def test_each_figure_is_a_curve(writers, tmp_path):
    board = TensorBoard(tmp_path, [])
    board.add(EPOCHS[0])
    board.close()
    (writer,) = writers
    assert (writer.folder, writer.purge_step, writer.closed) == (str(tmp_path), 0, True)
    assert writer.points == [
        ("loss", 1.0, 1),
        ("test_accuracy", 0.6, 1),
        ("images_per_s", 100.0, 1),
        ("lr", 0.01, 1),
    ]


def test_after_a_resume_later_points_of_the_earlier_run_do_not_count(writers, tmp_path):
    TensorBoard(tmp_path, EPOCHS[:2])
    assert writers[0].purge_step == 3


def test_without_a_folder_nothing_is_written(writers):
    board = TensorBoard(None, EPOCHS)
    board.add(EPOCHS[0])
    board.close()
    assert not writers


def test_where_tensorboard_is_missing_it_is_said_before_training(monkeypatch, tmp_path):
    check_tensorboard(None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(JobError, match="--tensorboard needs tensorboard: pip install"):
        check_tensorboard(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check_tensorboard(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        check_tensorboard(tmp_path / "file")


def test_tensorboard_reads_the_curves(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for history, added in (([], EPOCHS), (EPOCHS[:1], [Epoch(2, 0.25, 0.9, 50.0, 0.02)])):
        board = TensorBoard(tmp_path, history)
        for epoch in added:
            board.add(epoch)
        board.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(point.step, point.value) for point in found.Scalars("loss")] == [(1, 1.0), (2, 0.25)]
