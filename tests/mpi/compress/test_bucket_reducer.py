"""`compression=`: a user's own reducer, its state, and the bytes that it says it sends."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from examples import example
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd.errors import CollectiveMismatch, InvalidArgument
from mpisgd.job.lifecycle import current_job
from mpisgd.methods.one_bit.paper import OneBit
from mpisgd.tools.verification.paper_run import Definition, PaperRun

NUMEL = 12  # of each of two parameters in one bucket


def gradient(rank: int, step: int, which: int) -> torch.Tensor:
    """[NUMEL], different for every rank, step and parameter."""
    seed = 1000 * step + 10 * rank + which
    return torch.randn(NUMEL, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(NUMEL, dtype=torch.float64)) for _ in range(2)]


def reduced(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    """What the ranks' gradients of a step have become, [2, NUMEL]."""
    optimizer.zero_grad()
    sum((p * gradient(mpisgd.rank(), step, i)).sum() for i, p in enumerate(params)).backward()
    result = torch.stack([param.grad.clone() for param in params])
    optimizer.step()
    return result


def wrapped(**options):
    params = parameters()
    return params, mpisgd.DistributedOptimizer(torch.optim.SGD(params, lr=0.1), **options)


def signs_by_paper(size: int, num_steps: int, op: mpisgd.ReduceOp) -> list[torch.Tensor]:
    """EF-signSGD: what the gradients of each step become, [2, NUMEL].

    A bucket holds both parameters, the last one first, and has one magnitude, as a parameter in the paper.
    """
    zeros = {rank: {"bucket": torch.zeros(2 * NUMEL, dtype=torch.float64)} for rank in range(size)}
    still = {rank: torch.optim.SGD(bucket.values(), lr=0.0) for rank, bucket in zeros.items()}
    run = PaperRun(Definition(OneBit()), zeros, still)
    results = []
    for step in range(num_steps):
        parts = {rank: [gradient(rank, step, which) for which in (1, 0)] for rank in range(size)}
        mean = run.step({rank: {"bucket": torch.cat(grads)} for rank, grads in parts.items()})[0]["bucket"]
        results.append(mean.view(2, NUMEL).flip(0) * (1 if op is mpisgd.ReduceOp.AVG else size))
    return results


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("op", [mpisgd.ReduceOp.AVG, mpisgd.ReduceOp.SUM])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_documented_compressor_is_its_paper(op, overlap):
    params, optimizer = wrapped(compression=example("compressor")["Signs"](), op=op, overlap=overlap)
    got = [reduced(params, optimizer, step) for step in range(6)]
    expected = signs_by_paper(mpisgd.size(), 6, op)
    errors = [(a - b).abs().max().item() for a, b in zip(got, expected, strict=True)]
    everyone(max(errors) < 1e-12, str(errors))


@pytest.mark.mpi(min_size=2)
def test_what_a_reducer_keeps_is_saved_and_loaded():
    compression = example("compressor")["Signs"]()
    params, optimizer = wrapped(compression=compression)
    for step in range(3):
        reduced(params, optimizer, step)
    saved = optimizer.state_dict()
    again, resumed = wrapped(compression=compression)
    resumed.load_state_dict(saved)
    forgot, anew = wrapped(compression=compression)
    expected, got, without = (
        reduced(params, optimizer, 3),
        reduced(again, resumed, 3),
        reduced(forgot, anew, 3),
    )
    everyone(torch.equal(expected, got), "resumed")
    everyone(not torch.equal(expected, without), "the residual makes no difference")
    plain = torch.optim.SGD(parameters(), lr=0.1)
    plain.load_state_dict(saved)  # a run without mpisgd takes it, too


@pytest.mark.mpi(min_size=2)
def test_a_state_goes_with_the_parameters_to_other_buckets():
    compression = example("compressor")["Signs"]()
    params, optimizer = wrapped(compression=compression)
    reduced(params, optimizer, 0)
    saved = optimizer.state_dict()["mpisgd"]["own"]["compression"]["own"]
    again, resumed = wrapped(compression=compression, bucket_cap_bytes=64)
    resumed.load_state_dict(optimizer.state_dict())
    arrived = reduced(again, resumed, 0)
    left = resumed.state_dict()["mpisgd"]["own"]["compression"]["own"]
    for which in range(2):
        meant = gradient(mpisgd.rank(), 0, which) + saved[str(which)]["residual"]
        residual = left[str(which)]["residual"]
        sent = meant - residual  # one magnitude in each bucket, so of each parameter now
        everyone(torch.allclose(sent.abs(), meant.abs().mean().expand(NUMEL), rtol=1e-12))
        mpisgd.all_reduce(sent, mpisgd.ReduceOp.AVG)
        everyone((sent - arrived[which]).abs().max().item() < 1e-12)


@pytest.mark.parametrize("compression", [mpisgd.Compression.none, mpisgd.Compression.fp16])
def test_what_keeps_nothing_saves_nothing(compression):
    params, optimizer = wrapped(compression=compression)
    reduced(params, optimizer, 0)
    everyone("mpisgd" not in optimizer.state_dict())


@pytest.mark.mpi(min_size=2)
def test_other_compression_on_one_rank_is_found_at_construction():
    signs = example("compressor")["Signs"]()
    compression = signs if mpisgd.rank() == 0 else mpisgd.Compression.bf16
    with raises_everywhere(CollectiveMismatch) as caught:
        wrapped(compression=compression)
    everyone("Signs()" in caught.text and "Compression.bf16" in caught.text, caught.text)


def test_what_is_no_compressor_is_refused():
    with pytest.raises(InvalidArgument, match="compression="):
        wrapped(compression="fp16")


@dataclass(frozen=True)
class Failing(mpisgd.Compressor):
    """Raises in its second step."""

    def reducer(self, layout):
        return _Failing()


class _Failing(mpisgd.BucketReducer):
    steps = 0

    def reduce(self, bucket, group, op):
        self.steps += 1
        mpisgd.all_reduce(bucket, op, group)
        if self.steps == 2:
            raise ValueError("on purpose")

    def bytes_on_the_wire(self, size):
        return 0


@pytest.mark.mpi(min_size=2)
def test_an_error_of_a_reducer_reaches_the_program(groups):
    group = mpisgd.new_group(name="fails")
    params, optimizer = wrapped(compression=Failing(), group=group)
    reduced(params, optimizer, 0)
    with pytest.raises(ValueError, match="on purpose"):
        reduced(params, optimizer, 1)
    with pytest.raises(mpisgd.MpisgdError, match="cannot be used any more"):
        mpisgd.barrier(group)
    current_job().groups.remove(group)  # every rank has left it in the same way
