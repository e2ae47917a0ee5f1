"""The main job under mpirun: the same curve at every number of ranks, resumed runs, and users' mistakes."""

from __future__ import annotations

import gzip
import json
import os
import struct
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from launcher import run_python

PROGRAM = Path(__file__).resolve().parents[2] / "scripts" / "train.py"
SHORT = ("--model", "mlp", "--epochs", "3", "--batch-size", "48")

# Starting eight ranks costs far more than the training: one job per number of ranks makes all runs.
RUNS = {
    "float64": ("--dtype", "float64"),
    "float32": ("--dtype", "float32"),
    "another seed": ("--dtype", "float64", "--seed", "1"),
    "without communication": ("--dtype", "float64", "--no-sync"),
}
DRIVER = """
import json, sys
import typer
import train
for args in json.loads(sys.argv[1]):
    typer.main.get_command(train.app).main(args, standalone_mode=False)
"""
UNNEEDED = """
unneeded = {"matplotlib", "rich", "sklearn", "sympy", "torch._dynamo"} & set(sys.modules)
assert not unneeded, unneeded  # to import one of them takes longer than these runs
"""


def train(*args, num_ranks=None):
    return run_python(str(PROGRAM), *map(str, args), num_ranks=num_ranks)


def read_metrics(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(path: Path) -> list[float]:
    return [epoch["loss"] for epoch in read_metrics(path)]


def train_all(runs, num_ranks):
    """Make several runs in one job."""
    path = os.pathsep.join(filter(None, [str(PROGRAM.parent), os.environ.get("PYTHONPATH")]))
    args = json.dumps([[*map(str, run)] for run in runs])
    fresh = num_ranks == 1  # one says what is imported
    driver = DRIVER + UNNEEDED * fresh
    done = run_python("-c", driver, args, num_ranks=num_ranks, env={"PYTHONPATH": path}, fresh=fresh)
    assert done.returncode == 0, done.stderr


@cache
def curves(num_ranks: int) -> dict[str, list[float]]:
    """The losses, epoch by epoch, of each of RUNS."""
    with TemporaryDirectory() as folder:
        paths = {name: Path(folder) / name for name in RUNS}
        train_all([[*SHORT, *RUNS[name], "--metrics", path] for name, path in paths.items()], num_ranks)
        return {name: losses(path) for name, path in paths.items()}


# --- the curve ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3, *(pytest.param(n, marks=pytest.mark.long) for n in (4, 8))])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-4)])
def test_every_number_of_ranks_gives_the_same_curve(num_ranks, dtype, tolerance):
    alone = curves(1)[dtype]
    assert alone[-1] < alone[0] / 2  # something was learnt, so that there is something to compare
    assert curves(num_ranks)[dtype] == pytest.approx(alone, rel=tolerance)


@pytest.mark.parametrize("num_ranks", [2, 3, 4, pytest.param(8, marks=pytest.mark.long)])
def test_without_communication_the_curves_differ(num_ranks):
    assert curves(num_ranks)["without communication"] != pytest.approx(curves(1)["float64"], rel=1e-2)


def test_seed_decides_the_curve():
    assert curves(1)["another seed"] != pytest.approx(curves(1)["float64"], rel=1e-3)


def test_resumed_run_continues_the_curve_exactly(tmp_path):
    whole, resumed, saved = (tmp_path / name for name in ("whole", "resumed", "saved"))
    options = (*SHORT, "--dtype", "float64", "--optimizer", "adam", "--warmup-epochs", "2")
    keep = ("--checkpoint-folder", saved, "--checkpoint-every", 20)  # epochs have 29 steps
    train_all([(*options, "--metrics", whole), (*options, *keep)], num_ranks=2)
    kept = [f"step-{step:08d}.safetensors" for step in (60, 80, 87)]
    assert sorted(path.name for path in saved.iterdir()) == kept  # and nothing temporary

    for num_ranks in (2, 3):
        for name in kept[1:]:
            (saved / name).unlink(missing_ok=True)
        assert [path.name for path in saved.iterdir()] == kept[:1]
        train_all([(*options, *keep, "--resume", "--metrics", resumed)], num_ranks)
        tolerance = 1e-15 if num_ranks == 2 else 1e-10  # the losses are added up in two parts
        assert losses(resumed) == pytest.approx(losses(whole), rel=tolerance)


# --- what a run says and leaves -----------------------------------------------------------------------


def test_default_model_reaches_its_accuracy_and_leaves_plot_and_metrics(tmp_path):
    plot, metrics = tmp_path / "loss.png", tmp_path / "metrics.jsonl"
    done = train("--epochs", 10, "--plot", plot, "--metrics", metrics, num_ranks=4)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert sum(line.startswith("epoch ") for line in lines) == len(lines) - 4 == 10
    assert lines[-2:] == [f"loss curve: {plot}", f"metrics: {metrics}"]
    assert "\x1b" not in done.stdout  # no bar: this is no terminal

    epochs = read_metrics(metrics)
    assert [epoch["epoch"] for epoch in epochs] == list(range(1, 11))
    assert epochs[-1]["test_accuracy"] >= 0.97
    assert f"test accuracy {epochs[-1]['test_accuracy']:.2%} after 10 epochs" in lines[-3]
    assert all(epoch["images_per_s"] > 0 for epoch in epochs)
    assert plot.read_bytes().startswith(b"\x89PNG\r\n")
    assert plot.stat().st_size > 10_000


@pytest.mark.long
def test_mnist_files_are_read_by_one_rank_for_all(tmp_path):
    generator = np.random.default_rng(0)
    for part, count in (("train", 50), ("t10k", 7)):  # seven test images: three ranks share them unevenly
        images = generator.integers(0, 256, (count, 5, 4), dtype=np.uint8)
        labels = generator.integers(0, 3, count, dtype=np.uint8)
        header = struct.pack(">4B3I", 0, 0, 8, 3, count, 5, 4)
        (tmp_path / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(
            struct.pack(">4BI", 0, 0, 8, 1, count) + labels.tobytes()
        )
    done = train("--data", tmp_path, "--classes", 3, "--epochs", 1, "--batch-size", 12, num_ranks=3)
    assert (done.returncode, done.stderr) == (0, "")
    assert "50 training and 7 test images; 3 ranks on 1 host, batch 12 = 3 x 4" in done.stdout


# --- users' mistakes: one line, from one rank, exit code 2 --------------------------------------------


def assert_refused(done, *said: str) -> None:
    """Exit code 2 and one line of ours that says `said`; the launcher may add lines of its own."""
    assert done.returncode == 2, done.stderr
    ours = [line for line in done.stderr.splitlines() if "train.py" in line]
    assert len(ours) == 1, done.stderr
    assert ours[0].startswith("train.py: error: ")
    assert [text for text in said if text not in ours[0]] == []
    assert "Traceback" not in done.stderr
    assert "epoch" not in done.stdout


@pytest.mark.parametrize("num_ranks", [None, 2])
def test_mistyped_option_is_refused_once(num_ranks):
    assert_refused(train("--optimizer", "sdg", num_ranks=num_ranks), "--optimizer", "sdg")


def test_batch_smaller_than_the_rank_count_is_refused():
    assert_refused(train("--batch-size", 2, num_ranks=3), "--batch-size 2", "3 ranks", "; 3 would")


def test_batch_that_does_not_divide_is_refused():
    assert_refused(train("--batch-size", 50, num_ranks=3), "--batch-size 50", "3 ranks", "48 or 51 would")


def test_batch_larger_than_the_data_is_refused():
    assert_refused(train("--batch-size", 4000), "4000", "1437 training images")


def test_missing_data_is_refused_by_the_one_rank_that_reads():
    assert_refused(train("--data", "/nowhere", num_ranks=2), "/nowhere", "No such file")


def test_damaged_data_is_refused(tmp_path):
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(100))[:-9])
    assert_refused(train("--data", tmp_path), "train-images-idx3-ubyte.gz")


def test_output_that_cannot_be_written_is_refused_before_training():
    assert_refused(train("--metrics", "/nowhere/metrics.jsonl", num_ranks=2), "/nowhere/metrics.jsonl")


def test_unknown_kind_of_plot_is_refused_before_training(tmp_path):
    assert_refused(train("--plot", tmp_path / "loss.xyz"), "loss.xyz", ".png")


def saved_in(folder: Path, *options) -> Path:
    """The newest checkpoint of a short run."""
    done = train("--model", "linear", "--epochs", 1, "--checkpoint-folder", folder, *options)
    assert done.returncode == 0, done.stderr
    return max(folder.iterdir())


def test_resume_without_a_folder_is_refused():
    assert_refused(train("--resume"), "--resume and --checkpoint-every need --checkpoint-folder")


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    newest = saved_in(tmp_path, "--checkpoint-every", 20)
    newest.write_bytes(newest.read_bytes()[:2000])
    done = train("--model", "linear", "--epochs", 1, "--checkpoint-folder", tmp_path, "--resume", num_ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"mpisgd: checkpoint passed over: {newest} is cut short")
    assert "goes on after step 20\nepoch   1/1" in done.stdout


@pytest.mark.long
def test_checkpoint_of_another_run_is_refused_with_the_difference(tmp_path):
    saved_in(tmp_path)
    again = train("--model", "mlp", "--lr", 0.5, "--checkpoint-folder", tmp_path, "--resume")
    assert_refused(again, "--model linear (here mlp), --lr 0.1 (here 0.5)")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "below"
    done = train("--epochs", 1, "--checkpoint-folder", folder, num_ranks=2)
    assert_refused(done, "checkpoint.Writer", "Not a directory")
