"""Optimizers that update whole parameters: N ranks have the bits of one process, and each does its part."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.sharding.division import Item, assign, divide
from mpisgd.sharding.update_work import matrix_work, work_of

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")

SHAPES = ((6, 9), (12, 4), (5, 5), (3, 8), (7, 2))
STEPS = 6
PLACEMENTS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "shared": {"share_parameters": True},
    "stage 1": {"strategy": mpisgd.Sharded(1)},
    "stage 2": {"strategy": mpisgd.Sharded(2)},
    "shared, stage 1": {"strategy": mpisgd.Sharded(1), "share_parameters": True},
    "shared, stage 2": {"strategy": mpisgd.Sharded(2), "share_parameters": True},
    "small buckets": {"strategy": mpisgd.Sharded(2), "bucket_cap_bytes": 64},
}
Step = Callable[[torch.optim.Optimizer, list[nn.Parameter], int, "int | None"], None]


def parameters(shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(3)
    return [nn.Parameter(torch.randn(shape, generator=draw).double()) for shape in shapes]


def integers(step: int, rank: int, place: int, shape: tuple[int, ...]) -> Tensor:
    """The gradient of a rank: every sum of such, and every half or quarter, is exact."""
    draw = torch.Generator().manual_seed(10_000 * step + 100 * rank + place)
    return 12.0 * torch.randint(-5, 6, shape, generator=draw).double()


def backward(params: list[nn.Parameter], step: int, rank: int | None, size: int) -> None:
    """The backward of one rank, or of the mean over all ranks (rank None)."""
    ranks = range(size) if rank is None else (rank,)
    total = sum(
        (param * integers(step, r, i, tuple(param.shape))).sum()
        for i, param in enumerate(params)
        for r in ranks
    )
    (total / len(ranks)).backward()


def muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups with other settings."""
    groups = [{"params": params[:2], "lr": 0.05, "momentum": 0.5}, {"params": params[2:]}]
    return torch.optim.Muon(groups, lr=0.02, adjust_lr_fn="match_rms_adamw")


def plain(opt: torch.optim.Optimizer, params: list[nn.Parameter], step: int, size: int, rank: int | None):
    opt.zero_grad()
    backward(params, step, rank, size)
    opt.step()


def accumulated(opt: Any, params: list[nn.Parameter], step: int, size: int, rank: int | None):
    opt.zero_grad()
    if rank is None:
        backward(params, 2 * step, None, size)
    else:
        with opt.no_sync():
            backward(params, 2 * step, rank, size)
    backward(params, 2 * step + 1, rank, size)
    opt.step()


def clipped(opt: Any, params: list[nn.Parameter], step: int, size: int, rank: int | None):
    """By the largest element, whose norm no order of additions changes."""
    opt.zero_grad()
    backward(params, step, rank, size)
    if rank is None:
        nn.utils.clip_grad_norm_(params, 8.0, float("inf"))
    else:
        opt.clip_grad_norm_(8.0, float("inf"))
    opt.step()


def closures(opt: Any, params: list[nn.Parameter], step: int, size: int, rank: int | None):
    def closure() -> float:
        opt.zero_grad()
        backward(params, step, rank, size)
        return 0.0

    opt.step(closure)


def some_unused(opt: Any, params: list[nn.Parameter], step: int, size: int, rank: int | None):
    plain(opt, params[: 2 + step % 3], step, size, rank)
    for param in params:
        param.grad = None


BODIES = (plain, accumulated, clipped, closures, some_unused)


def one_process(size: int, body: Any, make: Any = muon, steps: int = STEPS) -> tuple[list[Tensor], Any]:
    params = parameters()
    opt = make(params)
    for step in range(steps):
        body(opt, params, step, size, None)
    return [param.detach() for param in params], opt.state_dict()


def same_state(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    return all(
        one[i].keys() == other[i].keys()
        and all(torch.equal(torch.as_tensor(one[i][k]), torch.as_tensor(other[i][k])) for k in one[i])
        for i in one
    )


def check(results: list[tuple[list[Tensor], dict[str, Any]]], right: tuple[list[Tensor], Any]) -> None:
    for params, state in results:
        for place, (mine, other) in enumerate(zip(params, right[0], strict=True)):
            assert torch.equal(mine, other), f"parameter {place}: {(mine - other).abs().max()}"
        assert same_state(state["state"], right[1]["state"])


def pairs_once(*choices: Sequence[Any]) -> list[Any]:
    """All combinations; those in which each two choices of the first and the second meet once are not long.

    The third goes round with both of them, so that it meets each of either, too.
    """
    first, second, third = (list(each) for each in choices)
    return [
        pytest.param(a, b, c, marks=() if third.index(c) == (i + j) % len(third) else pytest.mark.long)
        for (i, a), (j, b), c in itertools.product(enumerate(first), enumerate(second), third)
    ]


def name_of(choice: Any) -> str | None:
    return getattr(choice, "__name__", None)


@pytest.mark.parametrize(
    ("placement", "body", "size"), pairs_once(PLACEMENTS, BODIES, [1, 2, 3, 4]), ids=name_of
)
def test_bits_are_those_of_one_process(placement, size, body):
    """With 4 ranks and 5 matrices some ranks own little, and none of what is not used."""

    def program() -> tuple[list[Tensor], Any]:
        params = parameters()
        opt = mpisgd.DistributedOptimizer(muon(params), **PLACEMENTS[placement])
        for step in range(STEPS):
            body(opt, params, step, size, mpisgd.rank())
        return [param.detach().clone() for param in params], copy.deepcopy(opt.state_dict())

    check(run_ranks(size, program), one_process(size, body))


# Unequal ones with each placement; hosts of one rank each, and equal ones, with each other placement.
ON_HOSTS = [
    pytest.param(placement, hosts, marks=() if j == 0 or i % 2 == j - 1 else pytest.mark.long)
    for i, placement in enumerate(PLACEMENTS)
    for j, hosts in enumerate([(1, 2), (2, 2), (1, 1, 1)])
]


@pytest.mark.parametrize(("placement", "hosts"), ON_HOSTS)
def test_bits_are_those_of_one_process_on_several_hosts(placement, hosts):
    size = sum(hosts)

    def program() -> tuple[list[Tensor], Any]:
        params = parameters()
        opt = mpisgd.DistributedOptimizer(muon(params), **PLACEMENTS[placement])
        for step in range(STEPS):
            plain(opt, params, step, size, mpisgd.rank())
        return [param.detach().clone() for param in params], copy.deepcopy(opt.state_dict())

    check(run_ranks(size, program, ranks_per_host=hosts), one_process(size, plain))


def test_parameters_that_arrive_during_the_next_forward():
    """The matrices of linear layers; what arrives late would be seen in the gradients."""

    def train(rank: int | None) -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False)).double()
        opt: Any = torch.optim.Muon(model.parameters(), lr=0.02)
        if rank is not None:
            opt = mpisgd.DistributedOptimizer(opt, strategy=mpisgd.Sharded(2, overlap_forward=True))
        for step in range(4):
            opt.zero_grad()
            inputs = integers(step, 0, 0, (5, 6))
            model(inputs).sum().backward()  # alike on all ranks, whose mean is exact
            opt.step()
        if rank is not None:
            opt.synchronizer.wait()
        return [param.detach().clone() for param in model.parameters()]

    right = train(None)
    for found in run_ranks(2, lambda: train(mpisgd.rank())):
        assert all(map(torch.equal, found, right))


@pytest.mark.parametrize("size", [2, 6])
def test_a_rank_may_own_nothing(size):
    def program() -> tuple[list[Tensor], Any]:
        params = parameters(SHAPES[:1])
        opt = mpisgd.DistributedOptimizer(torch.optim.Muon(params, lr=0.02), strategy=mpisgd.Sharded(2))
        for step in range(3):
            plain(opt, params, step, size, mpisgd.rank())
        return [param.detach().clone() for param in params], copy.deepcopy(opt.state_dict())

    params = parameters(SHAPES[:1])
    opt = torch.optim.Muon(params, lr=0.02)
    for step in range(3):
        plain(opt, params, step, size, None)
    check(run_ranks(size, program), ([param.detach() for param in params], opt.state_dict()))


LOADED = ("replicated", "shared", "stage 1", "stage 2", "shared, stage 2")
OTHER_SIZES = ((3, 2), (2, 4), (4, 1), (1, 3), (2, 2))
# Every rank of the first two has the whole state. The others have it whole and in shards, for each placement
# and for each change of size.
LOADS = [
    pytest.param(*case, marks=() if i < 2 or case[2] == bool((i + j) % 2) else pytest.mark.long)
    for (i, placement), (j, sizes) in itertools.product(enumerate(LOADED), enumerate(OTHER_SIZES))
    for case in [(placement, sizes, False), (placement, sizes, True)]
    if i >= 2 or not case[2]
]


@pytest.mark.parametrize(("placement", "sizes", "shards"), LOADS)
def test_a_state_is_loaded_by_other_ranks(placement, sizes, shards):
    """Whole, or of all ranks' shards. The data are those of 4 ranks, whatever number there is."""
    before, after = sizes

    def program(given: Any, first: int) -> Any:
        params = parameters()
        opt = mpisgd.DistributedOptimizer(muon(params), **PLACEMENTS[placement])
        if given is not None:
            values, states = given
            with torch.no_grad():
                if mpisgd.local_rank() == 0 or "shared" not in placement:
                    for param, value in zip(params, values, strict=True):
                        param.copy_(value)
            mpisgd.barrier()
            if shards:
                opt.load_shard_state_dicts(copy.deepcopy(states))
            else:
                opt.load_state_dict(copy.deepcopy(states[0]))
        for step in range(first, first + 3):
            plain(opt, params, step, 4, None)  # alike on all ranks
        state = copy.deepcopy(opt.shard_state_dict() if shards and given is None else opt.state_dict())
        return [param.detach().clone() for param in params], state

    first = run_ranks(before, lambda: program(None, 0))
    given = first[0][0], [state for _, state in first]
    check(run_ranks(after, lambda: program(given, 3)), one_process(4, plain))


# -- who does what --------------------------------------------------------------------------------------


def gpt_matrices(dim: int, layers: int) -> list[tuple[int, int]]:
    return [shape for _ in range(layers) for shape in [(dim, dim)] * 4 + [(4 * dim, dim), (dim, 4 * dim)]]


def test_the_work_of_a_matrix_is_that_of_its_transpose_and_grows_with_its_short_side():
    assert matrix_work(torch.Size((4, 64)), 5) == matrix_work(torch.Size((64, 4)), 5)
    assert matrix_work(torch.Size((16, 16)), 5) > 2 * matrix_work(torch.Size((4, 64)), 5)
    assert matrix_work(torch.Size((16, 16)), 5) < matrix_work(torch.Size((16, 16)), 6)


@pytest.mark.parametrize("layers", [4, 6, 12])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_owners_of_a_gpt_have_about_equally_much_to_orthogonalize(layers, size):
    work = [matrix_work(torch.Size(shape), 5) for shape in gpt_matrices(64, layers)]
    owners = assign(work, [0] * size)
    loads = [sum(w for w, owner in zip(work, owners, strict=True) if owner == rank) for rank in range(size)]
    assert max(loads) <= 1.15 * sum(work) / size


def test_owners_are_balanced_by_work_and_not_by_bytes():
    """Eight long matrices have the bytes of eight squares, and a fraction of their work."""
    squares, kind = {0, 1, 4, 5}, (0, "float32", True)
    shapes = [(64, 64) if i in squares else (8, 512) for i in range(8)]
    items = [Item(i, 4096, 4, kind, matrix_work(torch.Size(s), 5)) for i, s in enumerate(shapes)]
    for rank in divide(items, range(8), 4, 2**20):
        assert len({piece.members[0].param for piece in rank} & squares) == 1


def test_the_memory_of_owners_is_that_of_the_parameters_they_have():
    params = [torch.nn.Parameter(torch.empty(shape)) for shape in [(64, 64), (64, 64), (4, 2048), (4, 4096)]]
    found = mpisgd.estimate_memory(params, torch.optim.Muon, ranks=2, strategies=[mpisgd.Sharded(1)])
    # By bytes the last one would be a rank's alone; its work is a sixth of a square's.
    assert found.estimates[0].optimizer_state == 4 * (64 * 64 + 4 * 4096)


class Watched(torch.optim.Muon):
    """Notes what it is given."""

    def step(self, closure=None):
        self.seen = [tuple(p.shape) for group in self.param_groups for p in group["params"]]
        return super().step(closure)


@pytest.mark.parametrize("placement", ["shared", "stage 1", "stage 2"])
def test_each_rank_orthogonalizes_what_it_owns_and_nothing_else(placement):
    """What the optimizer of each rank has seen: every matrix once in all, and whole."""

    def program() -> list[tuple[int, ...]]:
        params = parameters()
        opt: Any = mpisgd.DistributedOptimizer(Watched(params, lr=0.02), **PLACEMENTS[placement])
        for step in range(2):
            plain(opt, params, step, 3, mpisgd.rank())
        return opt.seen

    found = run_ranks(3, program)
    assert sorted(shape for of_rank in found for shape in of_rank) == sorted(SHAPES)
    assert all(len(of_rank) < len(SHAPES) for of_rank in found)


class RowNormalized(torch.optim.SGD):
    """An optimizer of a user's own that looks at matrices as a whole, and at vectors element by element."""

    def whole_update_work(self, param, options):
        return float(param.numel()) if param.dim() == 2 else None

    @torch.no_grad()
    def step(self, closure=None):
        self.seen = [tuple(p.shape) for group in self.param_groups for p in group["params"]]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and param.dim() == 2:
                    param.grad = param.grad / param.grad.norm()
        return super().step(closure)


@pytest.mark.parametrize("placement", ["shared", "stage 1", "stage 2"])
def test_an_optimizer_of_ones_own_declares_what_it_updates_as_a_whole(placement):
    shapes = ((6, 9), (40,), (3, 8), (700,))

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return RowNormalized(params, lr=0.1, momentum=0.5)

    def program() -> tuple[list[Tensor], Any, list[tuple[int, ...]]]:
        params = parameters(shapes)
        opt: Any = mpisgd.DistributedOptimizer(make(params), **PLACEMENTS[placement])
        for step in range(3):
            plain(opt, params, step, 2, mpisgd.rank())
        return [param.detach().clone() for param in params], copy.deepcopy(opt.state_dict()), opt.seen

    params = parameters(shapes)
    opt = make(params)
    for step in range(3):
        plain(opt, params, step, 2, None)
    found = run_ranks(2, program)
    check([each[:2] for each in found], ([param.detach() for param in params], opt.state_dict()))
    pieces = [shape for *_, seen in found for shape in seen]
    assert {shape for shape in pieces if len(shape) == 2} == {(6, 9), (3, 8)}  # never cut
    assert all(numel < 700 for (numel,) in (shape for shape in pieces if len(shape) == 1))  # cut


# -- what is refused ------------------------------------------------------------------------------------


def refused_kinds() -> list[Any]:
    return [
        lambda params: torch.optim.Muon(params),
        lambda params: torch.optim.Adafactor(params),
        lambda params: RowNormalized(params, lr=0.1),
    ]


@pytest.mark.parametrize("placement", ["shared", "stage 1", "stage 2"])
@pytest.mark.parametrize("make", refused_kinds())
def test_elementwise_is_refused_where_it_is_not_true(make, placement):
    """A flat piece of a matrix has no rows: Adafactor updated it as a vector, and nobody was told."""

    def program() -> None:
        opt = make(parameters())
        with pytest.raises(mpisgd.InvalidArgument, match=f"elementwise=True with {type(opt).__name__}"):
            mpisgd.DistributedOptimizer(opt, elementwise=True, **PLACEMENTS[placement])

    run_ranks(2, program)


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_another_optimizer_are_an_error_on_ranks_that_own_nothing_too(stage):
    """These went on, and met the others in another operation."""

    def program() -> None:
        params = parameters(SHAPES[:1])
        first, second = (
            mpisgd.DistributedOptimizer(
                torch.optim.Muon(params), strategy=mpisgd.Sharded(stage), check_start=False
            )
            for _ in range(2)
        )
        backward(params, 0, mpisgd.rank(), 3)
        second.step()
        with pytest.raises(mpisgd.InvalidArgument, match="is updated by two optimizers, and with Sharded"):
            first.step()

    run_ranks(3, program)


def test_the_work_is_not_known_of_others():
    params = parameters()
    assert work_of(torch.optim.AdamW(params))(params[0], {}) is None
    assert work_of(muon(params))(params[0], {"ns_steps": 5}) == matrix_work(params[0].shape, 5)
