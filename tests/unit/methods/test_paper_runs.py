"""What a program can do, by papers: to resume, to lose a rank, to have two optimizers ..."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from paper_programs import (
    CLOSE,
    SHAPES,
    Program,
    assert_same,
    by_mpisgd,
    by_paper,
    definition_of,
    momentum,
    paper_run,
    paper_step,
    sgd,
)
from torch import nn

import mpisgd
from mpisgd import DiLoCo, ElasticAveraging, Gossip, LocalSGD, compress
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.methods.paper_kit import Vec
from mpisgd.methods.synchronous.paper import Synchronous
from mpisgd.tools.verification.paper_run import Definition, PaperRun, bucket_of, gradients
from mpisgd.tools.verification.papers import paper_of

PUSH = [[0.5, 0.25, 0.25], [0.25, 0.5, 0.5], [0.25, 0.25, 0.25]]
STATEFUL: list[dict[str, Any]] = [
    {"compression": compress.TopK(0.2)},
    {"compression": compress.DeepGradient(0.2, momentum=0.5)},
    {"compression": compress.PowerSGD(1)},
    {"compression": compress.RandomK(0.3)},
    {"compression": compress.QSGD(4)},
    {"compression": compress.SignSGD()},
    {"compression": compress.OneBit(two_step=True)},
    {"strategy": LocalSGD(3, growth=1.5)},
    {"strategy": LocalSGD(2), "compression": compress.TopK(0.2)},
    {"strategy": DiLoCo(3, fragments=2, overlap_steps=1)},
    {"strategy": ElasticAveraging(every=2), "compression": compress.TopK(0.2)},
    {"strategy": Gossip(PUSH, style="push_sum")},
    {"strategy": Gossip("ring", consensus_step=0.3), "compression": compress.TopK(0.2)},
]


def trained_with(options: dict[str, Any], size: int) -> Program:
    has_own = isinstance(options.get("compression"), compress.DeepGradient)
    return Program(size=size, dyadic=False, make=sgd if has_own else momentum)


@pytest.mark.parametrize("options", STATEFUL, ids=repr)
def test_a_run_that_is_resumed_is_one_that_was_not_stopped(options):
    program = trained_with(options, 3)
    expected = by_paper(program, definition_of(program, **options))
    run = paper_run(program, definition_of(program, **options))
    for step in range(program.steps):
        if step == 4:
            saved, run = run.saved(), paper_run(program, definition_of(program, **options))
            run.load(saved)
        paper_step(program, run, step)
    assert_same([[x] for x in run.x.values()], [mine[-1:] for mine in expected], 0.0)


@pytest.mark.parametrize("options", STATEFUL, ids=repr)
def test_mpisgd_resumes_as_the_paper_goes_on(options):
    program = trained_with(options, 3)

    def train() -> list[dict[str, torch.Tensor]]:
        params, rank = program.start(), mpisgd.rank()

        def make() -> Any:
            return mpisgd.DistributedOptimizer(
                program.make(list(params.values())), params.items(), check_start=False, **options
            )

        optimizer, rows = make(), []
        for step in range(program.steps):
            if step == 4:
                state, optimizer = optimizer.state_dict(), make()
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            for term in program.terms(rank, step):
                program.loss(params, rank, term).backward()
            optimizer.step()
            rows.append({name: param.detach().clone() for name, param in params.items()})
        return rows

    assert_same(run_ranks(3, train, seed=2), by_paper(program, definition_of(program, **options)), CLOSE)


LOST: list[dict[str, Any]] = [
    {"strategy": mpisgd.Synchronous()},
    {"compression": compress.TopK(0.2)},
    {"compression": compress.DeepGradient(0.2, momentum=0.5)},
    {"compression": compress.PowerSGD(1)},
    {"compression": compress.OneBit()},
    {"strategy": LocalSGD(3)},
    {"strategy": LocalSGD(2), "compression": compress.TopK(0.2)},
    {"strategy": LocalSGD(2), "compression": compress.OneBit(two_step=True)},
    {"strategy": ElasticAveraging(), "compression": compress.OneBit(two_step=True)},
    {"strategy": ElasticAveraging(), "compression": compress.RandomK(0.3)},
    {"strategy": DiLoCo(3)},
    {"strategy": DiLoCo(2), "compression": compress.TopK(0.2)},
    {"strategy": ElasticAveraging(every=2)},
    {"strategy": ElasticAveraging(every=2), "compression": compress.TopK(0.2)},
    {"strategy": Gossip("ring")},
    {"strategy": Gossip("star", style="push_sum")},
    {"strategy": Gossip("ring", consensus_step=0.3), "compression": compress.TopK(0.2)},
]


@pytest.mark.parametrize("options", LOST, ids=repr)
def test_without_the_last_rank_mpisgd_goes_on_as_the_paper(options):
    check_without(options, 4, gone=3)


@pytest.mark.parametrize("compression", [compress.OneBit(two_step=True), compress.TopK(0.2)], ids=repr)
def test_without_the_first_rank_mpisgd_goes_on_as_the_paper(compression):
    """The second owner of 64 elements had the first ones then, and added its error of others to them."""
    check_without({"compression": compression}, 4, gone=0, rows=16)


def check_without(options: dict[str, Any], size: int, *, gone: int, rows: int = 6) -> None:
    """Compare a training of which a rank is lost after three steps."""
    program = replace(trained_with(options, size), rows=rows)
    left = [rank for rank in range(size) if rank != gone]

    def train() -> list[dict[str, torch.Tensor]]:
        params, rank, mine = program.start(), mpisgd.rank(), []
        others = mpisgd.new_group(left)
        optimizer = mpisgd.DistributedOptimizer(
            program.make(list(params.values())), params.items(), **options
        )
        for step in range(3 if rank == gone else program.steps):
            if step == 3:
                optimizer.rebuild(others)
            optimizer.zero_grad()
            for term in program.terms(rank, step):
                program.loss(params, rank, term).backward()
            optimizer.step()
            mine.append({name: param.detach().clone() for name, param in params.items()})
        return mine

    run, xs = paper_run(program, definition_of(program, **options)), []
    for step in range(program.steps):
        if step == 3:
            run.lose(gone)
        paper_step(program, run, step)
        xs.append(run.x)
    expected = [[x[rank] for x in xs] for rank in left]
    found = run_ranks(size, train, seed=3)
    assert_same([found[rank] for rank in left], expected, CLOSE)


def test_two_optimizers_are_two_runs_on_the_same_parameters():
    """One of them by top-k, the other one by local steps; neither touches what the other one has."""
    program, names = Program(size=2), (("matrix", "scalar"), ("bias", "cube"))
    options = [{"compression": compress.TopK(0.2)}, {"strategy": LocalSGD(2)}]

    def train() -> list[dict[str, torch.Tensor]]:
        params, rank, rows = program.start(), mpisgd.rank(), []
        optimizers = [
            mpisgd.DistributedOptimizer(
                momentum([params[name] for name in mine]), [(name, params[name]) for name in mine], **chosen
            )
            for mine, chosen in zip(names, options, strict=True)
        ]
        for step in range(program.steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for term in program.terms(rank, step):
                program.loss(params, rank, term).backward()
            for optimizer in optimizers:
                optimizer.step()
            rows.append({name: param.detach().clone() for name, param in params.items()})
        return rows

    params = [program.start() for _ in range(2)]
    runs = [
        PaperRun(
            definition_of(program, **chosen),
            {rank: {name: params[rank][name] for name in mine} for rank in range(2)},
            {rank: momentum([params[rank][name] for name in mine]) for rank in range(2)},
        )
        for mine, chosen in zip(names, options, strict=True)
    ]
    rows = []
    for step in range(program.steps):
        g = {rank: Vec(program.terms(rank, step)[0]) for rank in range(2)}
        for run in runs:
            run.step(g)
        rows.append([{name: param.detach().clone() for name, param in mine.items()} for mine in params])
    assert_same(run_ranks(2, train, seed=1), [[row[rank] for row in rows] for rank in range(2)], 0.0)


def test_weights_are_those_of_the_joined_batch():
    """Ranks with 1, 2 and 3 examples, of the mean losses: weights 1/2, 1 and 3/2."""
    data = torch.linspace(-1, 2, 6, dtype=torch.float64)
    params = {rank: {"x": nn.Parameter(torch.ones((), dtype=torch.float64))} for rank in range(3)}
    run = PaperRun(
        Definition(Synchronous()), params, {r: torch.optim.SGD(p.values(), lr=0.5) for r, p in params.items()}
    )
    for _ in range(3):
        shares = torch.split(data, [1, 2, 3])
        losses = [(params[rank]["x"] - share).square().mean() for rank, share in enumerate(shares)]
        whole = (params[0]["x"] - data).square().mean()
        (expected,) = torch.autograd.grad(whole, [params[0]["x"]])
        taken = run.step(
            {rank: gradients(loss, params[rank]) for rank, loss in enumerate(losses)},
            weight={0: 0.5, 1: 1.0, 2: 1.5},
        )
        assert abs(float(taken[2]["x"] - expected)) < 1e-15


LOCAL = [LocalSGD(2), DiLoCo(2), DiLoCo(2, fragments=2), ElasticAveraging()]
CUT = [  # what becomes of a parameter depends on where it lies, or on how many means there were
    compress.BlockQuantized(),
    compress.BlockQuantized(8, block=7, error_feedback=True),
    compress.OneBit(two_step=True),
    compress.RandomK(0.3),
]
CHANGING: list[dict[str, Any]] = [
    {},
    *STATEFUL[:1],
    {"compression": compress.OneBit()},
    {"compression": compress.PowerSGD(1)},
    {"compression": compress.RandomK(0.3)},
    {"compression": compress.QSGD(4)},
    {"strategy": LocalSGD(2)},
    {"strategy": LocalSGD(2), "compression": compress.TopK(0.2)},
    {"strategy": DiLoCo(2)},
    {"strategy": DiLoCo(2), "compression": compress.TopK(0.2)},
    {"strategy": ElasticAveraging(every=2)},
    {"strategy": LocalSGD(3), "compression": compress.BlockQuantized()},
    *({"strategy": strategy, "compression": each} for strategy in LOCAL for each in CUT),
    {"strategy": ElasticAveraging(every=2), "compression": compress.TopK(0.2)},
    {"strategy": Gossip("ring")},
    {"strategy": Gossip("ring", style="combine_then_adapt")},
    {"strategy": Gossip("star", style="push_sum")},
    {"strategy": Gossip("ring", consensus_step=0.3), "compression": compress.TopK(0.2)},
]
Params = dict[str, nn.Parameter]


class Changing:
    """A program of three ranks in which a parameter is frozen for some steps, or one is added."""

    program = Program(size=3, dyadic=False, steps=8)

    def __init__(self, rank: int, *, adds: bool) -> None:
        self.rank, self.adds = rank, adds
        self.params: Params = self.program.start()
        self.added = {"cube": self.params.pop("cube")} if adds else {}

    def change(self, step: int) -> bool:
        """Freeze or add; return whether something was added."""
        if not self.adds:
            self.params["bias"].requires_grad_(step not in (2, 3, 4))
        elif step == 3:
            self.params.update(self.added)
        return self.adds and step == 3

    def loss(self, step: int) -> torch.Tensor:
        (term,) = self.program.terms(self.rank, step)
        used = {n: g for n, g in term.items() if n in self.params and self.params[n].requires_grad}
        return self.program.loss(self.params, self.rank, used)


def packed(x: Vec) -> Any:
    """As backward has it, whatever was added last."""
    return bucket_of(Vec({name: x[name] for name in SHAPES if name in x}))


@pytest.mark.parametrize("adds", [False, True], ids=["frozen for some steps", "added"])
@pytest.mark.parametrize("options", CHANGING, ids=repr)
def test_parameters_are_frozen_for_some_steps_or_added(options, adds):
    def train() -> list[dict[str, torch.Tensor]]:
        mine, rows = Changing(mpisgd.rank(), adds=adds), []
        optimizer = mpisgd.DistributedOptimizer(
            momentum(list(mine.params.values())), mine.params.items(), **options
        )
        for step in range(mine.program.steps):
            if mine.change(step):
                optimizer.add_param_group({"params": list(mine.added.values())})
            optimizer.zero_grad()
            mine.loss(step).backward()
            optimizer.step()
            rows.append({name: param.detach().clone() for name, param in mine.params.items()})
        return rows

    ranks = [Changing(rank, adds=adds) for rank in range(3)]
    optimizers = {mine.rank: momentum(list(mine.params.values())) for mine in ranks}
    lengths = [(name, param.nbytes) for name, param in ranks[0].params.items()]
    definition = paper_of(**options, size=3, lengths=lengths)
    if "strategy" not in options:
        definition = definition._replace(layout=packed)
    run, rows = PaperRun(definition, {mine.rank: mine.params for mine in ranks}, optimizers), []
    for step in range(Changing.program.steps):
        for mine in ranks:
            if mine.change(step):
                optimizers[mine.rank].add_param_group({"params": list(mine.added.values())})
        run.step({mine.rank: gradients(mine.loss(step), mine.params) for mine in ranks})
        rows.append(run.x)
    expected = [[x[rank] for x in rows] for rank in range(3)]
    assert_same(run_ranks(3, train, seed=4), expected, CLOSE)


def test_an_optimizer_that_evaluates_the_loss_several_times():
    data = torch.linspace(-1, 2, 6, dtype=torch.float64).view(3, 2)

    def run_of(shares: torch.Tensor) -> torch.Tensor:
        params = {
            rank: {"x": nn.Parameter(torch.ones((), dtype=torch.float64))} for rank in range(len(shares))
        }
        lbfgs = {rank: torch.optim.LBFGS(mine.values(), max_iter=3) for rank, mine in params.items()}
        run = PaperRun(Definition(Synchronous()), params, lbfgs)

        def evaluate(rank: int) -> tuple[torch.Tensor, Vec]:
            loss = (params[rank]["x"] - shares[rank]).pow(4).mean()
            return loss.detach(), gradients(loss, params[rank])

        for _ in range(4):
            run.step_with_closure(evaluate, lambda losses: torch.stack(losses).mean())
        assert len({float(x["x"]) for x in run.x.values()}) == 1
        return run.x[0]["x"]

    assert abs(float(run_of(data) - run_of(data.view(1, -1)))) < 1e-7


def test_a_run_leaves_nothing_of_itself_in_what_it_was_given():
    """Papers are pure: a state that was kept does not change when the run goes on."""
    program = Program(size=2, dyadic=False)
    for options in STATEFUL[:5]:
        run = paper_run(program, definition_of(program, **options))
        paper_step(program, run, 0)
        kept, before = run.state, run.saved().state
        paper_step(program, run, 1)
        assert repr(kept) == repr(before)


def test_mpisgd_on_the_papers_side_is_not_needed():
    """The comparison can fail: with another rate on one side it does."""
    program = Program(size=2)
    found = by_mpisgd(program, compression=compress.TopK(0.2))
    other = by_paper(program, definition_of(program, compression=compress.TopK(0.3)))
    with pytest.raises(AssertionError, match="rank 0, step 0"):
        assert_same(found, other, CLOSE)
