"""`mpisgd.average` beside the mean over all examples; on ranks that are threads."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

import mpisgd
from mpisgd.job.threads_as_ranks import RankFailed, run_ranks

COUNTS = (3, 1, 0, 4)  # examples of each rank
EXAMPLES = torch.split(torch.arange(8.0) ** 2, list(COUNTS))


class Metrics(NamedTuple):
    loss: float
    parts: tuple[torch.Tensor, list[int]]


@pytest.mark.parametrize("hosts", [(), (1, 3)], ids=["one host", "two hosts"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_means_of_ranks_become_the_mean_of_all_examples(size, hosts):
    def program():
        mine = EXAMPLES[mpisgd.rank()]
        mean = mine.mean()  # NaN where there are none
        return mpisgd.average({"loss": mean, "max": float(mean) * 2, "n": [1, True]}, weight=len(mine))

    everything = torch.cat(EXAMPLES[:size])
    for found in run_ranks(size, program, ranks_per_host=hosts if sum(hosts) == size else ()):
        assert list(found) == ["loss", "max", "n"]
        assert found["loss"].dtype == torch.float32
        assert found["loss"].item() == pytest.approx(everything.mean().item(), rel=1e-6)
        assert found["max"] == pytest.approx(2 * everything.mean().item(), rel=1e-6)
        assert found["n"] == [1.0, 1.0]


def test_structures_stay_and_what_is_given_is_unchanged():
    def program():
        rank = mpisgd.rank()
        given = Metrics(float(rank), (torch.full((2, 3), rank), [rank, rank + 1]))
        found = mpisgd.average(given)
        assert given.parts[0].unique().tolist() == [rank]
        return found

    for found in run_ranks(3, program):
        assert isinstance(found, Metrics)
        assert found.loss == 1.0
        assert found.parts[0].dtype == torch.float64
        assert torch.equal(found.parts[0], torch.ones(2, 3, dtype=torch.float64))
        assert found.parts[1] == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_tensor_keeps_its_floating_dtype_and_is_rounded_once(dtype):
    values = [torch.tensor(1 / (1 + rank), dtype=dtype) for rank in range(3)]
    expected = torch.stack(values).double().sum().div(3).to(dtype)
    assert all(
        torch.equal(found, expected) for found in run_ranks(3, lambda: mpisgd.average(values[mpisgd.rank()]))
    )


def test_keys_may_come_in_another_order_and_numbers_from_numpy():
    def program():
        pairs = [("a", np.float32(mpisgd.rank())), ("b", 10 * mpisgd.rank())]
        return mpisgd.average(dict(pairs if mpisgd.rank() else reversed(pairs)))

    assert run_ranks(2, program) == [{"b": 5.0, "a": 0.5}, {"a": 0.5, "b": 5.0}]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (lambda rank: {"a": 1.0, **({"b": 2.0} if rank else {})}, "do not agree"),
        (lambda rank: {"a" if rank else "b": 1.0}, "do not agree"),
        (lambda rank: torch.ones(4) if rank else torch.ones(2, 2), "do not agree"),
        (lambda rank: {"a": "0.5"}, r"average: values\['a'\] is '0.5'"),
        (lambda rank: [torch.ones(1, dtype=torch.complex64)], r"values\[0\] is complex64"),
    ],
)
def test_what_cannot_be_averaged_is_named_on_every_rank(values, said):
    def program():
        with pytest.raises(mpisgd.MpisgdError, match=said):
            mpisgd.average(values(mpisgd.rank()))

    run_ranks(2, program)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "3", True])
def test_weights_that_make_no_sense(weight):
    with pytest.raises(RankFailed, match="average: weight="):
        run_ranks(2, lambda: mpisgd.average(1.0, weight=weight))


def test_no_weight_at_all_is_an_error_on_every_rank():
    def program():
        with pytest.raises(mpisgd.InvalidArgument, match="weights of all 3 ranks are 0"):
            mpisgd.average(1.0, weight=0)
        return mpisgd.average(float(mpisgd.rank()))  # the group goes on

    assert run_ranks(3, program) == [1.0] * 3
