"""A strategy or a compressor is a folder and a line: tables, the fuzzer and `verify` know it then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

STRATEGY = '''
"""Ranks train by themselves; every `every` steps their parameters become the mean of all."""

from collections.abc import Sequence
from dataclasses import dataclass

from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.dtypes import ReduceOp
from mpisgd.methods.mean_every import paper
from mpisgd.methods.strategy.goes_with import GoesWith
from mpisgd.methods.strategy.local_training import LOCAL_STEPS, LocalSynchronizer
from mpisgd.methods.strategy.strategy import Strategy


@dataclass(frozen=True)
class MeanEvery(Strategy):
    """The mean of parameters."""

    every: int = 2

    @property
    def goes_with(self) -> GoesWith:
        return LOCAL_STEPS

    def synchronizer(self, training):
        return MeanEverySynchronizer(training, self.every)

    def paper(self, size, lengths=()):
        return paper.MeanEvery(self.every)


class MeanEverySynchronizer(LocalSynchronizer):
    def __init__(self, training, every):
        super().__init__(training)
        self._every = every

    def synchronize(self):
        if self.num_steps % self._every == 0:
            all_reduce_coalesced(self.averaged, ReduceOp.AVG, self.training.group)
'''
STRATEGY_COST = '''
"""What `MeanEvery` takes."""

from collections.abc import Iterator

from mpisgd.methods.cost_kit import Op, Sizes, World
from mpisgd.methods.cost_steps import kept, mean_of_parameters, unsent_step
from mpisgd.methods.mean_every.mean_every import MeanEvery


def cost(method: MeanEvery, sizes: Sizes, world: World, step: int) -> Iterator[Op]:
    if not step:
        yield from kept(sizes)
        return
    yield from unsent_step(sizes)
    if step % method.every == 0:
        yield from mean_of_parameters(sizes, world, step)
'''
STRATEGY_PAPER = '''
"""x_i <- z <- mean of all x_j after every k-th step."""

from dataclasses import dataclass

from mpisgd.methods.paper_kit import Paper, Vec, Vecs, World, alike, everyone, mean


@dataclass(frozen=True)
class State:
    z: Vec = alike(default_factory=Vec, begin="copy")


@dataclass(frozen=True)
class MeanEvery(Paper[State]):
    keeps = State  # z is no consensus, whatever it is called: it is older than the parameters

    k: int

    def after(self, s: State, x: Vecs, w: World) -> tuple[State, Vecs]:
        if w.step % self.k:
            return s, x
        z = mean(x, w)
        return State(z), everyone(z, w)
'''
COMPRESSOR = '''
"""Elements are cut to a limit before their mean is taken."""

from dataclasses import dataclass

from mpisgd.compress.compressor import BucketReducer, Compressor
from mpisgd.compress.sum_reducer import SumReducer
from mpisgd.methods.cut import paper


@dataclass(frozen=True)
class Cut(Compressor):
    """The mean of what is cut."""

    limit: float = 0.01

    def reducer(self, layout):
        return CutReducer(self.limit, layout.numel * layout.dtype.itemsize)

    def paper(self):
        return paper.Cut(self.limit)


class CutReducer(SumReducer):
    def __init__(self, limit, nbytes):
        super().__init__(nbytes)
        self._limit = limit

    def reduce(self, bucket, group, op):
        super().reduce(bucket.clamp_(-self._limit, self._limit), group, op)
'''
COMPRESSOR_PAPER = '''
"""g <- mean of max(-c, min(c, g_i))."""

from dataclasses import dataclass

from mpisgd.methods.paper_kit import Paper, Vecs, World, everyone, mean


@dataclass(frozen=True)
class Cut(Paper[None]):
    c: float

    def reduce(self, s: None, g: Vecs, w: World) -> tuple[None, Vecs]:
        cut = {i: g[i].each(lambda tensor: tensor.clamp(-self.c, self.c)) for i in w.ranks}
        return s, everyone(mean(cut, w), w)
'''
LINES = {
    "__init__.pyi": "from mpisgd.methods.mean_every.mean_every import MeanEvery as MeanEvery\n",
    "compress/__init__.pyi": "from mpisgd.methods.cut.cut import Cut as Cut\n",
}
PROGRAM = """
import goes_with_tables
import api_pages
import torch
from fuzzing import choices
from fuzzing.draw import draw

import mpisgd
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.methods.from_text import compressor_from_text, strategy_from_text
from mpisgd.tools.verification.cell import try_mode
from mpisgd.tools.verification.modes.pairs import pairs
from mpisgd.tools.verification.trial import trials_of
from mpisgd.methods.cost_kit import World
from mpisgd.methods.costs import cost_of, wire_of
from mpisgd.methods.sizes import parameter, sizes_of
from mpisgd.methods.wire_bytes import sent_bytes
from mpisgd.tools.plan.methods import planned_methods
from mpisgd.tools.verification.method_matrix import rows, try_in
from mpisgd.tools.verification.programs.serial_definition import definition_of
from mpisgd.tools.verification.programs.threads_backend import ThreadsBackend
from mpisgd.tools.verification.situations import SITUATIONS

assert strategy_from_text("MeanEvery(every=3)") == mpisgd.MeanEvery(3)
assert compressor_from_text("Cut(limit=2.0)") == mpisgd.compress.Cut(2.0)
assert " MeanEvery " in goes_with_tables.generated() and "`Cut`" in goes_with_tables.generated()
assert "mpisgd.MeanEvery()" in choices.LOCAL and "mpisgd.compress.Cut()" in choices.COMPRESSORS
assert api_pages.PAPERS["mpisgd.MeanEvery"] == ("mean_every",)
assert api_pages.PAPERS["mpisgd.compress.Cut"] == ("cut",)
assert mpisgd.MeanEvery().goes_with.compression.why_not(mpisgd.compress.Cut())  # it sends nothing by it
modes = [mode for mode in pairs() if "MeanEvery" in mode.name or "Cut" in mode.name]
assert {"MeanEvery(), Compression.none", "Synchronous(), compress.Cut()"} <= {mode.name for mode in modes}
wanted = [(mode, torch.float64) for mode in modes]
for cells in run_ranks(3, lambda: [try_mode(trial, "threads") for trial in trials_of(wanted, quick=True)]):
    assert len(cells) == len(modes)
    for cell in cells:
        assert cell.is_equal, cell
        print(cell.mode, cell.difference)

# plan, memory: as LocalSGD without anything kept beside
own, local = (cost_of(each.strategy) for each in planned_methods("MeanEvery(every=2); LocalSGD(2)"))
sizes = sizes_of([parameter(0, (64, 32), 4, 0), parameter(1, (64,), 4, 0)], 2**20)
world = World(2, 2, wire_of(mpisgd.Compression.none))
for step in (1, 2):
    sent, expected = (sent_bytes(each.cost(sizes, world, step), world) for each in (own, local))
    assert sent == expected
model = torch.nn.Linear(8, 4)
kept, expected = mpisgd.estimate_memory(
    model, torch.optim.Adam, ranks=4, strategies=[mpisgd.MeanEvery(2), mpisgd.LocalSGD(2)]
)
assert kept.total == expected.total, (kept, expected)

# situations and random programs
backend = ThreadsBackend()
(row,) = (row for row in rows() if row.name == "MeanEvery()")
for number, name in enumerate(("resumed", "a rank fewer, then as before", "a group is added", "clipped")):
    tried = try_in(row, [SITUATIONS[name]], number, backend.run)
    assert (tried.kind, tried.has_reference) == ("ok", True), tried
compared = 0
for seed in range(8):
    program = draw(seed, strategy="mpisgd.MeanEvery(every=2)")
    compared += definition_of(program) is not None
    verdict = backend.run(program)
    assert not verdict.is_fault, (seed, verdict)
assert compared > 3
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package, with two methods more."""
    package = tmp_path / "mpisgd"
    shutil.copytree(ROOT / "mpisgd", package, ignore=shutil.ignore_patterns("__pycache__"))
    files = {
        "mean_every/mean_every.py": STRATEGY,
        "mean_every/paper.py": STRATEGY_PAPER,
        "mean_every/cost.py": STRATEGY_COST,
        "cut/cut.py": COMPRESSOR,
        "cut/paper.py": COMPRESSOR_PAPER,
    }
    for name, text in files.items():
        path = package / "methods" / name
        path.parent.mkdir(exist_ok=True)
        path.with_name("__init__.py").touch()
        path.write_text(text.lstrip())
    for name, line in LINES.items():
        stub = package / name
        stub.write_text(stub.read_text() + line)
    return tmp_path


def test_a_folder_and_a_line_are_all_that_a_method_needs(copy):
    paths = [copy, ROOT / "scripts", ROOT / "scripts" / "docs_site"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=copy,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
