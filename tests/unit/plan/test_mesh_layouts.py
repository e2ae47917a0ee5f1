"""`mpisgd.layout` in a plan and in estimates of memory: by formulas, beside other methods, without a job."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import torch.distributed as dist
from plan_examples import ALPHA, RATE, cluster
from torch import nn
from torch.distributed import distributed_c10d
from typer.testing import CliRunner

import mpisgd
from mpisgd.errors import InvalidArgument, JobError
from mpisgd.layouts.pretended import pretended_ranks
from mpisgd.tools.cli.main import app
from mpisgd.tools.plan.advice import code_line, equals_one_process
from mpisgd.tools.plan.cluster import Cluster, Link
from mpisgd.tools.plan.files import read_step, write_step
from mpisgd.tools.plan.methods import planned_methods
from mpisgd.tools.plan.models.count_model import count
from mpisgd.tools.plan.models.model import profile_of
from mpisgd.tools.plan.prediction import predict

WIDTH, HIDDEN, BATCH = 64, 256, 8
WEIGHTS = 4 * 2 * WIDTH * HIDDEN
NAMES = {
    "up.weight": ("hidden", "model"),
    "down.weight": ("model", "hidden"),
    "up": ("batch", "hidden"),
    "down": ("batch", "model"),
}


class Pair(nn.Module):
    """Two linear layers, and a buffer that all ranks have."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


def named(model: nn.Module | None = None, names=NAMES, **options) -> mpisgd.NamedModel:
    options = {"inputs": ("batch", "model"), **options}
    return mpisgd.NamedModel(model or Pair(), names, [torch.zeros(4, WIDTH)], **options)


def profile(where: Cluster, optimizer: str = "sgd", made: mpisgd.NamedModel | None = None):
    made = made or named()
    counted = count("pair", made.model, *made.example)
    return profile_of(
        type(counted)(counted.name, counted.layers, counted.itemsize, made), where, BATCH, optimizer
    )


def planned(text: str, where: Cluster, **options):
    return predict(where, profile(where, **options), planned_methods(text)[0])


def hosts(number: int = 4, ranks_per_host: int = 1) -> Cluster:
    return cluster(number, ranks_per_host, flops_per_s=1e9)


def ring(ranks: int, nbytes: float) -> float:
    return 2 * (ranks - 1) / ranks * nbytes


def test_data_parallelism_by_a_layout_is_the_synchronous_strategy():
    layout, plain = (planned(text, hosts()) for text in ("layout('batch:dp', 'dp:4')", "Overlap(False)"))
    assert layout.step.sent_bytes == plain.step.sent_bytes == ring(4, WEIGHTS)
    assert layout.memory.gradients == plain.memory.gradients == WEIGHTS
    assert layout.step.optimizer_s == plain.step.optimizer_s
    checks_s = 2 * ALPHA  # of an operation for each parameter, instead of one for a bucket
    assert layout.step_s == pytest.approx(plain.step_s, abs=20 * checks_s)
    assert layout.examples_per_s == 4 * BATCH / layout.step_s


def test_tensor_parallelism_by_hand():
    """One all-reduce of the joined batch's output; what backward computes of the input is not asked for."""
    found = planned("layout('hidden:tp', 'tp:4')", hosts(), optimizer="adam")
    output = 4 * (4 * BATCH) * WIDTH
    assert found.step.sent_bytes == ring(4, output)
    assert found.memory.parameters == WEIGHTS / 4 + 12
    assert (found.memory.gradients, found.memory.optimizer) == (WEIGHTS / 4, WEIGHTS / 2)
    sum_s = ALPHA + 2 * (ALPHA + 0.75 * output / RATE)  # the check; all send to all, there and back
    compute_s = found.profile.compute_s  # a quarter of four ranks' examples
    assert found.step_s == pytest.approx(compute_s + sum_s + found.step.optimizer_s)
    assert found.step.optimizer_s == pytest.approx(found.profile.optimizer_s / 4)


def test_both_axes_send_in_their_own_groups():
    """Pairs on a host add up outputs, pairs across hosts gradients: two of these share a link."""
    found = planned("layout('batch:dp; hidden:tp', mesh='dp:2, tp:2')", hosts(2, 2))
    output = 4 * (2 * BATCH) * WIDTH
    assert found.step.sent_bytes == ring(2, output) + ring(2, WEIGHTS / 2)
    assert found.step.traffic["host out"] == 2 * ring(2, WEIGHTS / 2)
    turned = planned("layout('batch:dp; hidden:tp', mesh='tp:2, dp:2')", hosts(2, 2))
    assert turned.step.traffic["host out"] == 2 * ring(2, output)
    assert turned.step.sent_bytes == found.step.sent_bytes


def test_links_are_shared_by_the_groups_that_use_them():
    fast = Link(1e-9, 1e15)
    where = Cluster(2, 4, Link(1e-6, 100.0), fast)
    assert where.group_of([0, 4]).between.bytes_per_s == 100.0 / 4
    assert where.group_of([0, 2, 4, 6]).between.bytes_per_s == 100.0 / 2
    assert where.group_of(range(8)).between.bytes_per_s == 100.0
    pair = where.group_of([0, 2])
    assert (pair.hosts, pair.ranks_per_host, pair.within.bytes_per_s) == (1, 2, fast.bytes_per_s / 2)


@pytest.mark.parametrize(
    ("text", "where", "said"),
    [
        ("layout('batch:a', 'a:3')", (4, 1), "it has 3, the job 4"),
        ("layout('batch:a', 'a:4') + bf16", (4, 1), "expected no compression"),
        ("layout('hiden:a', 'a:4')", (4, 1), "hiden:a, but there are batch, hidden, model"),
        ("layout('hidden:a', 'b:2, a:3')", (2, 3), "256, a length 3"),
        ("layout('batch:a', 'b:3, a:2')", (2, 3), "in part"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(text, where, said):
    with pytest.raises(InvalidArgument, match=said):
        planned(text, hosts(*where))


def test_a_model_without_names_is_refused():
    where = hosts()
    step = profile(where)
    plain = profile_of(count("pair", Pair(), torch.zeros(4, WIDTH)), where, BATCH)
    (method,) = planned_methods("layout('batch:a', 'a:4')")
    with pytest.raises(InvalidArgument, match="NamedModel"):
        predict(where, plain, method)
    assert predict(where, step, method).step.sent_bytes


def test_a_step_that_cannot_be_counted_says_why():
    def wrong(outputs):
        raise RuntimeError("no such target")

    made = named(loss=wrong)
    with pytest.raises(InvalidArgument, match="cannot be counted: RuntimeError: no such target"):
        made.cost(mpisgd.layout("batch:a", "a:2"))


def test_a_loss_may_lay_out_its_targets():
    layout, targets = mpisgd.layout("batch:a", "a:2"), torch.zeros(4, dtype=torch.long)

    def loss(outputs):
        return nn.functional.cross_entropy(outputs, layout.shard(targets, ("batch",)))

    assert named(loss=loss).cost(layout).gradient_bytes == WEIGHTS


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": 3}, "expected a torch.nn.Module"),
        ({"names": {"top.weight": ("a", "b")}}, "top.weight"),
        ({"names": 3}, "expected a mapping"),
        ({"example": torch.zeros(2, 3)}, "in a list"),
        ({"example": []}, "in a list"),
        ({"example": [torch.zeros(())]}, "one or more examples"),
        ({"inputs": 3}, "inputs"),
    ],
)
def test_a_named_model_is_checked_when_it_is_made(options, said):
    given = {"model": Pair(), "names": NAMES, "example": [torch.zeros(2, WIDTH)], **options}
    with pytest.raises(InvalidArgument, match=said):
        mpisgd.NamedModel(**given)


# -- estimates of memory -------------------------------------------------------------------------------


def test_memory_of_a_layout_beside_strategies():
    layout = mpisgd.layout("batch:dp; hidden:tp", mesh="dp:2, tp:2")
    found = mpisgd.estimate_memory(
        named(), torch.optim.AdamW, ranks=4, strategies=[mpisgd.Synchronous(), layout]
    )
    here, plain = found[layout.text], found["Synchronous()"]
    assert here.gradients == plain.gradients / 2 == WEIGHTS / 2
    assert here.parameters == WEIGHTS / 2 + 12
    assert here.optimizer_state == 2 * WEIGHTS / 2 + 2 * 4  # and the number of steps of each parameter
    assert plain.optimizer_state == 2 * WEIGHTS + 2 * 4
    assert (here.buckets, here.copies) == (0, 0)
    assert sum(layout.text in each.strategy for each in found) == 1  # no line with share_parameters


def test_frozen_parameters_have_no_gradient_in_a_layout():
    model = Pair()
    model.up.weight.requires_grad_(False)
    layout = mpisgd.layout("hidden:a", "a:4")
    found = mpisgd.estimate_memory(named(model), torch.optim.SGD, ranks=4, strategies=[layout])[layout.text]
    assert found.parameters == WEIGHTS / 4 + 12
    assert found.gradients == WEIGHTS / 8


def test_masters_and_states_by_hand_are_of_the_parts():
    layout = mpisgd.layout("hidden:a", "a:4")
    options = {"ranks": 4, "strategies": [layout], "master_dtype": torch.float32}
    model = Pair().bfloat16()
    (found,) = mpisgd.estimate_memory(named(model), torch.optim.Adam, **options)
    assert found.optimizer_state == 3 * WEIGHTS / 4 + 8
    (by_hand,) = mpisgd.estimate_memory(named(model), state_per_parameter=8, **options)
    assert by_hand.optimizer_state == 3 * WEIGHTS / 4


class Whole(torch.optim.SGD):
    """Of which nobody knows whether it updates each element by itself."""

    @torch.no_grad()
    def step(self, closure=None):
        """Do nothing."""


def test_what_optimizers_keep_of_parts_must_be_known():
    layout = mpisgd.layout("hidden:a", "a:2")
    with pytest.raises(InvalidArgument, match="state_per_parameter"):
        mpisgd.estimate_memory(named(), Whole, ranks=2, strategies=[layout])
    assert mpisgd.estimate_memory(named(), Whole, ranks=2, strategies=[layout], state_per_parameter=4)


def test_layouts_are_asked_of_models_with_names_and_of_as_many_ranks():
    layout = mpisgd.layout("hidden:a", "a:2")
    with pytest.raises(InvalidArgument, match="NamedModel"):
        mpisgd.estimate_memory(Pair(), ranks=2, strategies=[layout])
    with pytest.raises(InvalidArgument, match="it has 2, the job 4"):
        mpisgd.estimate_memory(named(), ranks=4, strategies=[layout])


# -- what is asked leaves nothing behind ---------------------------------------------------------------


def test_a_question_leaves_torch_as_it_was():
    before = distributed_c10d._world, sys.excepthook, distributed_c10d._world.group_count
    layout = mpisgd.layout("batch:dp; hidden:tp", mesh="dp:2, tp:2")
    first = named().cost(layout)
    assert named().cost(layout) == first  # of what is cached
    assert (distributed_c10d._world, sys.excepthook, distributed_c10d._world.group_count) == before
    assert not dist.is_initialized()
    with pretended_ranks(4):
        assert dist.get_world_size() == 4
    assert not dist.is_initialized()


def test_questions_go_on_behind_a_job_that_has_ended(tmp_path):
    """torch then forgets all groups, pretended ones too; meshes of before must not find those of others."""
    two, one = mpisgd.layout("batch:dp; hidden:tp", mesh="dp:2, tp:2"), mpisgd.layout("batch:dp", "dp:4")
    expected = [named().cost(layout) for layout in (two, one)]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    dist.destroy_process_group()
    assert [named().cost(layout) for layout in (one, two)] == expected[::-1]


def test_a_real_job_of_equal_axes_comes_after_a_question(tmp_path):
    """torch keeps what it has found out of a mesh: a step must not send in groups that only pretend."""
    layout = mpisgd.layout("batch:a", mesh="a:1")
    named().cost(layout)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Pair()
        expected = model(torch.ones(2, WIDTH)).sum()
        layout.distribute(model, NAMES, inputs=("batch", "model"))
        assert named().cost(mpisgd.layout("batch:a", mesh="a:4")).sent_bytes  # in the job, of more ranks
        assert dist.get_world_size() == 1
        assert model(torch.ones(2, WIDTH)).sum().full_tensor() == expected
    finally:
        dist.destroy_process_group()


# -- command lines -------------------------------------------------------------------------------------

PROGRAM = f"""
import torch, mpisgd
def named():
    layers = torch.nn.Sequential(torch.nn.Linear({WIDTH}, {HIDDEN}), torch.nn.Linear({HIDDEN}, {WIDTH}))
    names = {{"0.weight": ("hidden", "in"), "0.bias": ("hidden",), "1.weight": ("out", "hidden")}}
    return mpisgd.NamedModel(layers, names, [torch.zeros(4, {WIDTH})], inputs=("batch", "in"))
"""
CLUSTER = """
hosts = 2
ranks_per_host = 2
flops = "1 GFLOP/s"
within = { latency = "1 us", bandwidth = "10 GB/s" }
between = { latency = "20 us", bandwidth = "1 GB/s" }
"""


def asked(*words):
    return CliRunner().invoke(app, list(words), catch_exceptions=False).output


def test_commands_take_layouts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "layout_program.py").write_text(PROGRAM)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    layout = "layout('batch:dp; hidden:tp', 'dp:2, tp:2')"
    memory = ("memory", "--model", "layout_program:named", "--ranks", "4", "--strategy")
    assert layout in asked(*memory, layout)
    plan = ("plan", "cluster.toml", "--model", "layout_program.py:named", "--methods")
    asked(*plan, f"Synchronous; {layout}", "--json", "plan.json")
    rows = {row["method"]: row for row in json.loads((tmp_path / "plan.json").read_text())["rows"]}
    assert rows[layout]["memory_bytes"]["gradients"] < rows["Synchronous"]["memory_bytes"]["gradients"]
    for command in (memory, plan):
        with pytest.raises(JobError, match="missing 1 required positional argument: 'mesh'"):
            asked(*command, "layout('batch:dp')")


def test_what_is_said_of_a_layout(tmp_path):
    where = hosts()
    (method,) = planned_methods("layout('batch:a; hidden:b', mesh='a:2, b:2')")
    assert equals_one_process(method)
    assert "mpisgd.layout('batch:a; hidden:b', 'a:2, b:2').distribute(" in code_line(method)
    write_step(tmp_path / "step.json", profile(where))
    assert read_step(tmp_path / "step.json").named is None
