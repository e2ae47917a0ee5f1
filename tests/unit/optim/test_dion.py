"""`Dion`: what it sends, what it keeps, what it refuses; tests/unit/methods has its paper."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.job.threads_as_ranks import RankFailed, run_ranks


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    draw = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(s, generator=draw).to(dtype)) for s in ((6, 8), (9, 4), (5,))]


def train(params: list[nn.Parameter], opt: Any, first: int, num: int, ranks: Any) -> list[Tensor]:
    """By the mean of the gradients of some ranks, which differ by rank and element."""
    for step in range(first, first + num):
        opt.zero_grad()
        for rank in ranks:
            draw = torch.Generator().manual_seed(100 * rank + step)
            noise = [torch.randn(p.shape, generator=draw).to(p.dtype) for p in params]
            losses = [((p - n) ** 2).sum() for p, n in zip(params, noise, strict=True)]
            (torch.stack(losses).sum() / len(ranks)).backward()
        opt.step()
    return [p.detach().clone() for p in params]


def alone(num: int, size: int) -> list[Tensor]:
    def program() -> list[Tensor]:
        params = parameters()
        return train(params, mpisgd.Dion(params, 0.02), 0, num, range(size))

    return run_ranks(1, program)[0]


def close(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=1e-11) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_low_rank_factors_of_all_ranks_are_those_of_whole_gradients(size):
    def program() -> tuple[list[Tensor], list[Tensor]]:
        params = parameters()
        opt = mpisgd.Dion(params, 0.02)
        found = train(params, opt, 0, 8, [mpisgd.rank()])
        return found, [opt.state[p]["momentum"].clone() for p in params[:2]]

    results = run_ranks(size, program)
    assert all(close(found, alone(8, size)) for found, _ in results)
    assert all(map(torch.equal, results[0][0], results[1][0]))
    assert not torch.allclose(results[0][1][0], results[1][1][0])  # momenta are each rank's own


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (4, 1), (1, 4)])
def test_a_state_is_that_of_any_number_of_ranks(before, after):
    """The mean of the momenta: that of one rank would be of its own gradients."""

    def begin() -> Any:
        params = parameters()
        opt = mpisgd.Dion(params, 0.02)
        values = train(params, opt, 0, 4, _share(before))
        return values, copy.deepcopy(opt.state_dict())

    def go_on() -> list[Tensor]:
        params = [nn.Parameter(value.clone()) for value in values]
        opt = mpisgd.Dion(params, 0.02)
        opt.load_state_dict(copy.deepcopy(state))
        return train(params, opt, 4, 4, _share(after))

    values, state = run_ranks(before, begin)[0]
    assert all(close(found, alone(8, 12)) for found in run_ranks(after, go_on))


def _share(size: int) -> range:
    """The ranks of twelve whose data this one of fewer has."""
    each = 12 // size
    return range(mpisgd.rank() * each, (mpisgd.rank() + 1) * each)


def test_saving_changes_the_momenta_once():
    def program() -> bool:
        params = parameters()
        opt = mpisgd.Dion(params, 0.02)
        train(params, opt, 0, 3, [mpisgd.rank()])
        first = copy.deepcopy(opt.state_dict())["state"]
        again = opt.state_dict()["state"]
        return all(torch.equal(first[i]["momentum"], again[i]["momentum"]) for i in (0, 1))

    assert all(run_ranks(3, program))


def test_a_state_that_one_rank_has_loaded_is_not_mixed_with_those_of_others():
    """`broadcast_optimizer_state` after rank 0 alone has read a checkpoint."""

    def program() -> list[Tensor]:
        params = parameters()
        opt = mpisgd.Dion(params, 0.02)
        train(params, opt, 0, 2, [mpisgd.rank()])
        saved = copy.deepcopy(opt.state_dict())
        train(params, opt, 2, 3, [mpisgd.rank()])
        if mpisgd.rank() == 0:
            opt.load_state_dict(copy.deepcopy(saved))
        mpisgd.broadcast_optimizer_state(opt)
        found = [opt.state[p]["momentum"].clone() for p in params[:2]]
        return [*found, *(saved["state"][i]["momentum"] for i in (0, 1))]

    for momenta in run_ranks(3, program):
        assert all(map(torch.equal, momenta[:2], momenta[2:]))


def test_a_model_in_bfloat16():
    def program() -> list[Tensor]:
        params = parameters(torch.bfloat16)
        opt = mpisgd.Dion(params, 0.02)
        found = train(params, opt, 0, 6, [mpisgd.rank()])
        assert {value.dtype for state in opt.state.values() for value in state.values()} <= {
            torch.bfloat16,
            torch.float32,  # of counts
        }
        return found

    first, *others = run_ranks(3, program)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    right = alone(6, 3)
    assert max(float((a - b).abs().max()) for a, b in zip(first, right, strict=True)) < 0.1


def test_layouts_that_are_not_in_the_order_of_elements():
    def program() -> list[Tensor]:
        params = parameters()
        params[0] = nn.Parameter(params[0].detach().t().contiguous().t())
        return train(params, mpisgd.Dion(params, 0.02), 0, 6, [mpisgd.rank()])

    assert all(close(found, alone(6, 2)) for found in run_ranks(2, program))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"rank_fraction": 0.0}, "rank_fraction=0.0"),
        ({"rank_fraction": 1.5}, "rank_fraction=1.5"),
        ({"adjust_lr_fn": "original"}, "adjust_lr_fn='original'"),
        ({"adamw_betas": (0.9,)}, "adamw_betas"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"adamw": ["head"]}, "the parameters have none"),
    ],
)
def test_what_makes_no_sense_is_refused(options, text):
    def program() -> None:
        with pytest.raises(mpisgd.InvalidArgument, match=text):
            mpisgd.Dion(parameters(), **options)

    run_ranks(1, program)


def test_ranks_that_chose_otherwise_are_told():
    def program() -> None:
        mpisgd.Dion(parameters(), rank_fraction=0.25 * (1 + mpisgd.rank()))

    with pytest.raises(RankFailed, match="rank_fraction"):
        run_ranks(2, program)


def test_it_is_not_wrapped_and_not_scaled():
    def program() -> None:
        params = parameters()
        opt = mpisgd.Dion(params)
        with pytest.raises(mpisgd.InvalidArgument, match="Dion averages by itself"):
            mpisgd.DistributedOptimizer(opt)
        opt.found_inf = torch.zeros(())
        with pytest.raises(mpisgd.InvalidArgument, match="GradScaler"):
            opt.step()

    run_ranks(1, program)
