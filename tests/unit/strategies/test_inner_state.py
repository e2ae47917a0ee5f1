"""The state of wrapped optimizers is averaged also where ranks have it in several dtypes, or not at all."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import mpisgd
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.methods.local_sgd.inner_state import complete_states


def test_a_loaded_state_is_averaged_with_a_new_one():
    """Torch loads the counts of ASGD in the dtype of the parameter; found by the fuzzer."""

    def program():
        param = nn.Parameter(torch.ones((), dtype=torch.float64))

        def make():
            strategy = mpisgd.LocalSGD(sync_every=2, average_state=True)
            return mpisgd.DistributedOptimizer(torch.optim.ASGD([param], lr=0.01), strategy=strategy)

        optimizer = make()
        if mpisgd.rank() == 1:  # the parameter is used by this rank only
            param.sum().backward()
        optimizer.step()
        state = copy.deepcopy(optimizer.state_dict())
        optimizer = make()
        optimizer.load_state_dict(state)
        optimizer.zero_grad()
        (2 * param).sum().backward()
        optimizer.step()
        return param.item(), optimizer.state[param]["ax"]

    first, second = run_ranks(2, program)
    assert first == second


def test_all_ranks_get_the_dtype_that_theirs_promote_to():
    def program():
        param = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([param])
        dtype = (None, torch.bfloat16, torch.float32)[mpisgd.rank()]
        if dtype is not None:
            optimizer.state[param] = {"step": mpisgd.rank(), "mean": torch.full((3,), 2.0, dtype=dtype)}
        tensors = complete_states(optimizer, [param], mpisgd.new_group(range(3)))
        return [(tensor.dtype, tensor.tolist()) for tensor in tensors], optimizer.state[param]["step"]

    told = run_ranks(3, program)
    assert [tensors for tensors, _ in told] == [[(torch.float32, [value] * 3)] for value in (0.0, 2.0, 2.0)]
    assert [step for _, step in told] == [1, 1, 2]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.ASGD, torch.optim.NAdam])
def test_counts_of_steps_are_no_state_of_elements_whatever_the_shape(kind):
    def program():
        def trained(*shape):
            param = nn.Parameter(torch.ones(shape, dtype=torch.float64))
            strategy = mpisgd.LocalSGD(sync_every=2, average_state=True)
            optimizer = mpisgd.DistributedOptimizer(kind([param], lr=0.01), strategy=strategy)
            for step in range(4):
                optimizer.zero_grad()
                if mpisgd.rank() == 1 or step:  # so the ranks have taken different numbers of steps
                    (param * (mpisgd.rank() + step)).sum().backward()
                optimizer.step()
            return param.item(), {name: value.item() for name, value in optimizer.state[param].items()}

        return trained(), trained(1)

    for scalar, vector in run_ranks(2, program):
        assert scalar == vector
