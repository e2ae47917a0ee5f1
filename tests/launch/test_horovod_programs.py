"""Programs written for Horovod, with the changed import and unchanged, beside one process."""

from __future__ import annotations

import json
import os
import re
import textwrap
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from launcher import run_python
from training import image_data

PROGRAMS = Path(__file__).with_name("programs")
TRAINING, BENCHMARK = "horovod_digits.py", "horovod_benchmark.py"
NUM_RANKS, EPOCHS, BATCH, NUM_IMAGES = 2, 3, 48, 1200
CHANGES = ("changed", "unchanged")
OLD, NEW = "import horovod.torch as hvd", "import mpisgd.horovod as hvd"

# To start processes takes far longer than the programs, so one job runs all of them: first those that are
# changed, which need no stand-in. Each is its process's main program.
DRIVER = """
import json, runpy, sys
from mpisgd.config import launcher_rank

for change, *line in json.loads(sys.argv[1]):
    if launcher_rank() == 0:
        print("running", change, flush=True)
    sys.argv = line
    left = runpy.run_path(line[0], run_name="__main__")
    assert ("horovod" in sys.modules) == (change == "unchanged")
    if "model" in left:
        weights = next(left["model"].parameters()).data
        firsts = left["hvd"].broadcast(weights, 0, name="weights")
        assert firsts.equal(weights), "the ranks' weights differ"
"""
BENCHMARK_RUNS = [("--num-iters", "2"), ("--num-iters", "1", "--fp16-allreduce")]


def digits() -> tuple[np.ndarray, np.ndarray]:
    train = image_data.load().train
    return train.pixels[:NUM_IMAGES].flatten(1).double().numpy(), train.labels[:NUM_IMAGES].numpy()


def changed(text: str) -> str:
    """The program with one line changed."""
    assert text.count("horovod.torch") == text.count(OLD) == 1
    return text.replace(OLD, NEW)


@pytest.fixture(scope="module")
def said(request) -> dict[str, list[str]]:
    """What rank 0 says in a job that runs the programs, with the changed import, then unchanged, as asked."""
    asked = [
        item.callspec.params.get("change") for item in request.session.items if hasattr(item, "callspec")
    ]
    return said_by([change for change in CHANGES if change in asked])


def said_by(changes: list[str]) -> dict[str, list[str]]:
    small = ("--width", "4", "--image-size", "8", "--batch-size", "2", "--num-batches-per-iter", "2")
    with TemporaryDirectory() as name:
        folder = Path(name)
        images, labels = digits()
        np.savez(folder / "digits.npz", images=images, labels=labels)
        lines = []
        for change in changes:
            (folder / change).mkdir()
            for program in (TRAINING, BENCHMARK):
                text = (PROGRAMS / program).read_text()
                (folder / change / program).write_text(text if change == "unchanged" else changed(text))
            train, benchmark = (str(folder / change / program) for program in (TRAINING, BENCHMARK))
            lines += [[change, train, str(folder / "digits.npz"), "--epochs", str(EPOCHS)]]
            lines += [[change, benchmark, *small, *run] for run in BENCHMARK_RUNS]
        (folder / "driver.py").write_text(DRIVER)
        program = ("-m", "mpisgd.horovod", str(folder / "driver.py"))
        done = run_python(*program, json.dumps(lines), num_ranks=NUM_RANKS)
    assert (done.returncode, done.stderr) == (0, "")
    parts = re.split(r"^running (\w+)\n", done.stdout, flags=re.MULTILINE)[1:]
    texts = {change: [] for change in changes}
    for change, text in zip(parts[::2], parts[1::2], strict=True):
        texts[change].append(text)
    return texts


def one_process() -> list[float]:
    """The losses of plain torch on the whole batches."""
    images, labels = map(torch.from_numpy, digits())
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    losses = []
    for epoch in range(EPOCHS):
        order = torch.randperm(NUM_IMAGES, generator=torch.Generator().manual_seed(epoch))
        steps = []
        for batch in order.split(BATCH):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
        losses.append(sum(steps) / len(steps))
    return losses


both = pytest.mark.parametrize("change", CHANGES)


@both
def test_training_has_the_loss_curve_of_one_process(said, change):
    training, *_ = said[change]
    losses = [float(loss) for loss in re.findall(r"^epoch \d+ loss (\S+)$", training, re.MULTILINE)]
    alone = one_process()
    print("max difference", max(abs(a - b) for a, b in zip(losses, alone, strict=True)))
    assert losses == pytest.approx(alone, rel=1e-11)
    assert losses[-1] < losses[0] / 2


@both
def test_benchmark_says_its_rates_once(said, change):
    _, *benchmarks = said[change]
    for run, text in zip(BENCHMARK_RUNS, benchmarks, strict=True):
        rates = re.findall(r"^Iter #\d+: (\S+) img/sec per rank$", text, re.MULTILINE)
        assert len(rates) == int(run[1])
        (rank,) = re.findall(r"^Img/sec per rank: (\S+) \+-", text, re.MULTILINE)
        (total,) = re.findall(rf"^Total img/sec on {NUM_RANKS} rank\(s\): (\S+) \+-", text, re.MULTILINE)
        assert float(total) == pytest.approx(NUM_RANKS * float(rank), abs=0.2)
        assert float(rank) == pytest.approx(sum(map(float, rates)) / len(rates), abs=0.2)


SCRIPT = """
    import multiprocessing
    import sys

    import horovod
    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError
    from horovod.torch.elastic.state import TorchState


    class Thing:
        def __init__(self, queue):
            self.queue = queue

        def run(self):
            import horovod.torch

            self.queue.put((__name__, horovod.torch.__name__))


    if __name__ == "__main__":
        print(*sys.argv, __file__, sys.path[0], __spec__)
        print(hvd.__name__, hvd.__spec__.name, horovod.__version__, hvd.mpi_ops.HorovodAllreduce.__name__)
        print(hvd.HorovodInternalError is HorovodInternalError, TorchState is hvd.elastic.TorchState)
        print("torch._dynamo" in sys.modules)
        for name in ("tensorflow", "keras", "tensorflow.keras", "mxnet", "spark", "torch.nothing"):
            try:
                __import__(f"horovod.{name}")
            except ImportError as exc:
                print(str(exc).partition(":")[0])
        try:
            horovod.run(print, np=2)
        except NotImplementedError as exc:
            print(exc)
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        child = context.Process(target=Thing(queue).run)
        child.start()
        print(*queue.get(timeout=150))
        child.join()
        hvd.init()
        print(hvd.rank(), hvd.size())
        raise KeyError("no such key")
"""


def test_a_script_runs_as_with_plain_python(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    real = tmp_path / "installed" / "horovod"
    real.mkdir(parents=True)
    (real / "__init__.py").write_text("raise ImportError('the one that is installed')")
    options = ("-m", "mpisgd.horovod", "--verbose")
    done = run_python(
        *options, str(script), "--verbose", "two", env={"PYTHONPATH": path_with(real.parent)}, fresh=True
    )
    first, second, third, compiler, *absent, run, child, alone = done.stdout.splitlines()
    assert first == f"{script} --verbose two {script} {tmp_path} None"
    assert second == "mpisgd.horovod mpisgd.horovod 0.28.1 HorovodAllreduce"
    assert third == "True True"
    assert compiler == "False"  # which takes as long to load as torch
    assert [line.removesuffix(" is not there").removeprefix("horovod.") for line in absent] == [
        "tensorflow",
        "keras",
        "tensorflow",
        "mxnet",
        "spark",
        "torch.nothing",
    ]
    assert "mpirun -n NUM_PROC python -m mpisgd.horovod SCRIPT" in run
    assert child == "__mp_main__ mpisgd.horovod"
    assert alone == "0 1"
    introduction, *trace = done.stderr.splitlines()
    assert introduction == f"mpisgd.horovod: horovod.torch is mpisgd.horovod in {script}, not {real}"
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[1].startswith(f'  File "{script}", line ')
    assert trace[-1] == "KeyError: 'no such key'"
    assert done.returncode == 1


def path_with(folder: Path) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
