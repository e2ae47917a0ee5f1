"""A reduction by its name is the reduction, in every function that takes one; on ranks that are threads."""

from __future__ import annotations

import inspect

import pytest
import torch

import mpisgd
from mpisgd import ReduceOp
from mpisgd.job.threads_as_ranks import RankFailed, run_ranks


def results(op):
    """What each function makes of `op` on this rank."""
    mine = torch.tensor([1.0, 2.0, 3.0]) * (1 + mpisgd.rank())
    out = {}
    out["all_reduce"] = mine.clone()
    mpisgd.all_reduce(out["all_reduce"], op)
    out["reduce"] = mine.clone()
    mpisgd.reduce(out["reduce"], 0, op)
    out["all_reduce_coalesced"] = mine.clone()
    mpisgd.all_reduce_coalesced([out["all_reduce_coalesced"]], op)
    out["reduce_scatter"] = torch.zeros(1)
    mpisgd.reduce_scatter(out["reduce_scatter"], list(mine.split(1)), op)
    out["reduce_scatter_tensor"] = torch.zeros(1)
    mpisgd.reduce_scatter_tensor(out["reduce_scatter_tensor"], mine, op)
    out["reduce_scatter_tensor_coalesced"] = torch.zeros(1)
    mpisgd.reduce_scatter_tensor_coalesced([out["reduce_scatter_tensor_coalesced"]], [mine], op)
    return out


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX], ids=lambda op: op.name)
def test_a_name_is_its_operation(op):
    by_name = run_ranks(3, lambda: results(op.name.lower()))
    itself = run_ranks(3, lambda: results(op))
    for theirs, ours in zip(by_name, itself, strict=True):
        assert all(torch.equal(theirs[name], ours[name]) for name in ours)


def trained(op):
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), op=op)
    (param * torch.tensor([1.0, 2.0, 4.0]) * (1 + mpisgd.rank())).sum().backward()
    optimizer.step()
    return param.detach()


@pytest.mark.parametrize(("name", "op"), [("avg", ReduceOp.AVG), ("Sum", ReduceOp.SUM), ("adasum", None)])
def test_an_optimizer_takes_names_too(name, op):
    by_name = run_ranks(2, lambda: trained(name))
    itself = run_ranks(2, lambda: trained(mpisgd.Adasum if op is None else op))
    assert torch.equal(by_name[0], itself[0])


@pytest.mark.parametrize("count", [0, 1])
def test_another_name_is_refused_even_where_nothing_is_sent(count):
    def program():
        mpisgd.all_reduce_coalesced([torch.ones(1)] * count, "mean")

    with pytest.raises(RankFailed, match="op='mean'; expected one of SUM, AVG"):
        run_ranks(2, program)


def test_a_number_is_no_tensor():
    with pytest.raises(RankFailed, match=r"a float; expected a torch.Tensor, such as torch.tensor\(3.0\)"):
        run_ranks(2, lambda: mpisgd.all_reduce(3.0))


def test_an_option_that_is_misspelt_is_corrected():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(TypeError, match="'compress'; did you mean 'compression'"):
        mpisgd.DistributedOptimizer(optimizer, compress="bf16")
    assert type(optimizer) is torch.optim.SGD


def test_help_shows_the_arguments():
    signature = inspect.signature(mpisgd.DistributedOptimizer)
    assert list(signature.parameters)[:3] == ["optimizer", "named_parameters", "strategy"]


def test_a_list_of_names_has_the_public_ones_alone():
    assert set(mpisgd.__all__) < set(dir(mpisgd))
    assert not [name for name in dir(mpisgd) if name.startswith("_") and name != "__version__"]
    assert "core" not in dir(mpisgd)
