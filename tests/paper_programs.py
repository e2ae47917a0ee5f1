"""Programs that mpisgd trains by ranks which are threads, and papers in one process; and their comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.methods.paper_kit import Vec
from mpisgd.tools.verification.paper_run import Definition, PaperRun
from mpisgd.tools.verification.papers import paper_of

SHAPES = {"matrix": (6, 8), "bias": (8,), "cube": (4, 2, 4), "scalar": (1,)}
LR = 0.5
CLOSE = 1e-12  # of the largest element: float64 has 1e-16, and sums here are of a hundred terms at most

Make = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
Terms = list[dict[str, Tensor]]  # by backward pass: a gradient for each parameter that it uses


def sgd(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR)


def momentum(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=LR, momentum=0.5)


@dataclass(frozen=True)
class Program:
    """What is trained.

    Attributes:
        size: how many ranks.
        hosts: how many of them each host has; one host by default.
        steps: how many.
        dyadic: gradients are whole numbers over 2^10 and do not depend on the parameters: sums are exact.
        passes: backward passes of a step, by rank and step; 0: the rank does not call backward.
        unused: names without a gradient, by rank and step.
        frozen: names that are never trained.
        max_norm: of the gradients, once they are reduced; 0: as they are.
        make: of the wrapped optimizer.
        options: of `DistributedOptimizer`, which change nothing.
        apart: ranks begin with parameters of their own.
        rows: of the matrix.
    """

    size: int = 2
    hosts: tuple[int, ...] = ()
    steps: int = 7
    dyadic: bool = True
    passes: Callable[[int, int], int] = lambda rank, step: 1
    unused: Callable[[int, int], Sequence[str]] = lambda rank, step: ()
    frozen: Sequence[str] = ()
    max_norm: float = 0.0
    make: Make = sgd
    options: Mapping[str, Any] = field(default_factory=dict)
    apart: bool = False
    rows: int = 6

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {**SHAPES, "matrix": (self.rows, *SHAPES["matrix"][1:])}

    @property
    def ranks_by_host(self) -> list[list[int]]:
        ranks = iter(range(self.size))
        return [[next(ranks) for _ in range(count)] for count in self.hosts or (self.size,)]

    def start(self, rank: int = 0) -> dict[str, nn.Parameter]:
        draw = torch.Generator().manual_seed(3 + rank * self.apart)
        values = {n: torch.randint(-64, 64, s, generator=draw).double() / 16 for n, s in self.shapes.items()}
        return {n: nn.Parameter(t, requires_grad=n not in self.frozen) for n, t in values.items()}

    def terms(self, rank: int, step: int) -> Terms:
        used = [name for name in SHAPES if name not in self.unused(rank, step) and name not in self.frozen]
        return [
            {name: self._gradient(rank, step, number, name) for name in used}
            for number in range(self.passes(rank, step))
        ]

    def _gradient(self, rank: int, step: int, number: int, name: str) -> Tensor:
        seed = 1000 * (100 * rank + step) + 10 * number + list(SHAPES).index(name)
        draw, shape = torch.Generator().manual_seed(seed), self.shapes[name]
        if self.dyadic:
            return torch.randint(-(2**20), 2**20, shape, generator=draw).double() / 2**10
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    def pull(self, rank: int) -> float:
        """How much of the parameters is in their gradients."""
        return 0.0 if self.dyadic else 0.1 * (rank + 1)

    def loss(self, params: Mapping[str, Tensor], rank: int, term: Mapping[str, Tensor]) -> Tensor:
        parts = [(params[name] * g).sum() for name, g in term.items()]
        parts += [0.5 * self.pull(rank) * params[name].square().sum() for name in term]
        return torch.stack(parts).sum()


def by_mpisgd(program: Program, **options: Any) -> list[list[dict[str, Tensor]]]:
    """Return the parameters of each rank after each step."""

    def wrapped(params: dict[str, nn.Parameter]) -> Any:
        return mpisgd.DistributedOptimizer(
            program.make(list(params.values())), params.items(), **program.options, **options
        )

    return by_optimizer(program, wrapped)


def by_optimizer(
    program: Program, wrapped: Callable[[dict[str, nn.Parameter]], Any]
) -> list[list[dict[str, Tensor]]]:
    def train() -> list[dict[str, Tensor]]:
        return trained_here(program, wrapped)

    return run_ranks(program.size, train, seed=1, ranks_per_host=program.hosts)


def trained_here(
    program: Program, wrapped: Callable[[dict[str, nn.Parameter]], Any]
) -> list[dict[str, Tensor]]:
    """Be one of the ranks; return the parameters after each step. Collective."""
    params, rows = program.start(mpisgd.rank()), []
    optimizer = wrapped(params)
    for step in range(program.steps):
        optimizer.zero_grad()
        for term in program.terms(mpisgd.rank(), step):
            if term:
                program.loss(params, mpisgd.rank(), term).backward()
        if program.max_norm:
            optimizer.clip_grad_norm_(program.max_norm)
        optimizer.step()
        rows.append({name: param.detach().clone() for name, param in params.items()})
    return rows


def paper_run(program: Program, definition: Definition, *, updates: bool = True) -> PaperRun:
    params = {rank: program.start(rank) for rank in range(program.size)}
    made = {rank: program.make(list(mine.values())) for rank, mine in params.items()} if updates else {}
    return PaperRun(definition, params, made, hosts=program.ranks_by_host)


def paper_step(program: Program, run: PaperRun, step: int) -> None:
    run.step({rank: gradient(program, run, rank, step) for rank in run.ranks}, clip(program.max_norm))


def gradient(program: Program, run: PaperRun, rank: int, step: int) -> Vec:
    g = Vec()
    for term in program.terms(rank, step):
        g = g + Vec(term) + program.pull(rank) * run.x[rank].only(term)
    return g


def clip(max_norm: float) -> Callable[[Vec], Vec]:
    def clipped(g: Vec) -> Vec:
        norm = torch.stack([grad.norm() for grad in g.values()]).norm()
        return float((max_norm / (norm + 1e-6)).clamp(max=1.0)) * g

    return clipped if max_norm else lambda g: g


def by_paper(program: Program, definition: Definition, *, updates: bool = True) -> list[list[Vec]]:
    run, rows = paper_run(program, definition, updates=updates), []
    for step in range(program.steps):
        paper_step(program, run, step)
        rows.append(run.x)
    return [[x[rank] for x in rows] for rank in run.ranks]


def definition_of(program: Program, **options: Any) -> Definition:
    lengths = [(name, param.nbytes) for name, param in program.start().items()]
    return paper_of(**options, size=program.size, lengths=lengths)


def assert_equal(program: Program, **options: Any) -> None:
    """Fail unless mpisgd's ranks are those of the paper: bit for bit where sums are exact."""
    found, expected = by_mpisgd(program, **options), by_paper(program, definition_of(program, **options))
    assert_same(found, expected, 0.0 if program.dyadic else CLOSE)


def assert_same(found: Sequence[Any], expected: Sequence[Any], close: float) -> None:
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for step, (have, want) in enumerate(zip(mine, theirs, strict=True)):
            for name in want:
                most = float(want[name].abs().max())
                apart = float((have[name] - want[name]).abs().max())
                assert apart <= close * most, f"rank {rank}, step {step}, {name}: {apart:.1e} of {most:.1e}"
