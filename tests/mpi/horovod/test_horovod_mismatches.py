"""What ranks ask for differently is an error on all of them, with both values; the next operation works."""

from __future__ import annotations

import pytest
import torch
from verdicts import everyone, raises_everywhere, referee, same_on_all_ranks

import mpisgd.horovod as hvd
from mpisgd.horovod.engine import stall_inspector

pytestmark = pytest.mark.mpi(min_size=2)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


# Name -> (what most ranks call, what the last one calls, the words, most ranks' value, the last one's).
CASES = {
    "shape": (
        lambda: hvd.allreduce(ones(2, 3), name="x"),
        lambda: hvd.allreduce(ones(3, 2), name="x"),
        ("shape", "[2, 3]", "[3, 2]"),
    ),
    "number of dimensions": (
        lambda: hvd.allreduce_(ones(6), name="x"),
        lambda: hvd.allreduce_(ones(6, 1), name="x"),
        ("shape", "[6]", "[6, 1]"),
    ),
    "dtype": (
        lambda: hvd.allreduce(ones(2), name="x"),
        lambda: hvd.allreduce(ones(2, dtype=torch.float64), name="x"),
        ("dtype", "float32", "float64"),
    ),
    "reduction": (
        lambda: hvd.allreduce(ones(2), name="x", op=hvd.Sum),
        lambda: hvd.allreduce(ones(2), name="x", op=hvd.Max),
        ("reduction", "Sum", "Max"),
    ),
    "prescale": (
        lambda: hvd.allreduce(ones(2), name="x"),
        lambda: hvd.allreduce(ones(2), name="x", prescale_factor=2.0),
        ("prescale factor", "1.0", "2.0"),
    ),
    "postscale": (
        lambda: hvd.reducescatter(ones(2), name="x"),
        lambda: hvd.reducescatter(ones(2), name="x", postscale_factor=0.5),
        ("postscale factor", "1.0", "0.5"),
    ),
    "number of tensors": (
        lambda: hvd.grouped_allreduce([ones(1), ones(2)], name="x"),
        lambda: hvd.grouped_allreduce([ones(1)], name="x"),
        ("shape", "[1], [2]", "[1]"),
    ),
    "rows of a gathering": (
        lambda: hvd.allgather(ones(4, 2), name="x"),
        lambda: hvd.allgather(ones(4, 3), name="x"),
        ("shape", "[2]", "[3]"),
    ),
    "dimensions of a gathering": (
        lambda: hvd.grouped_allgather([ones(4, 2)], name="x"),
        lambda: hvd.grouped_allgather([ones(4, 2, 1)], name="x"),
        ("shape", "[2]", "[2, 1]"),
    ),
    "rows of an exchange": (
        lambda: hvd.alltoall(ones(0, 2), name="x"),
        lambda: hvd.alltoall(ones(0, 5), name="x"),
        ("shape", "[2]", "[5]"),
    ),
    "length of what is scattered": (
        lambda: hvd.reducescatter(ones(4), name="x"),
        lambda: hvd.reducescatter(ones(5), name="x"),
        ("shape", "[4]", "[5]"),
    ),
    "shape of a broadcast": (
        lambda: hvd.broadcast(ones(2), 0, name="x"),
        lambda: hvd.broadcast(ones(1), 0, name="x"),
        ("shape", "[2]", "[1]"),
    ),
    "root": (
        lambda: hvd.broadcast_(ones(2), 0, name="x"),
        lambda: hvd.broadcast_(ones(2), 1, name="x"),
        ("root rank", "0", "1"),
    ),
    "operation": (
        lambda: hvd.allreduce(ones(2), name="x"),
        lambda: hvd.allgather(ones(2), name="x"),
        ("operation", "allreduce", "allgather"),
    ),
    "operation, within a gathering": (
        lambda: hvd.alltoall(ones(0), name="x"),
        lambda: hvd.broadcast(ones(2), 0, name="x"),
        ("operation", "alltoall", "broadcast"),
    ),
}


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may still turn out to be right is not waited for as long as usual."""
    monkeypatch.setattr(stall_inspector, "GRACE_S", 0.1)


@pytest.mark.parametrize("case", CASES)
def test_every_rank_is_told_tensor_ranks_and_both_values(case):
    most, last, (word, here, there) = CASES[case]
    neighbour = hvd.allreduce_async(ones(1), name="neighbour", op=hvd.Sum)
    with raises_everywhere(hvd.HorovodInternalError) as caught:
        (last if hvd.rank() == hvd.size() - 1 else most)()
    same_on_all_ranks(caught.text)
    others = list(range(hvd.size() - 1))
    they = f"rank{'s' * (len(others) > 1)} {', '.join(map(str, others))}"
    assert caught.text.startswith("tensor 'x': ")
    assert f"mismatched {word}: {they} gave {here}, rank {hvd.size() - 1} gave {there}" in caught.text
    assert hvd.synchronize(neighbour).item() == hvd.size()
    assert hvd.allreduce(ones(2), name="x", op=hvd.Sum).tolist() == [hvd.size()] * 2


def test_several_differences_are_told_at_once():
    x = ones(2) if hvd.rank() else ones(3, dtype=torch.float64)
    with raises_everywhere(hvd.HorovodInternalError) as caught:
        hvd.allreduce(x, name="x")
    assert "mismatched dtype: rank 0 gave float64" in caught.text
    assert "mismatched shape: rank 0 gave [3]" in caught.text


def test_tensors_stay_as_they_were():
    x = torch.full((2 + (hvd.rank() == 0),), float(hvd.rank()))
    with raises_everywhere(hvd.HorovodInternalError):
        hvd.allreduce_(x, name="x", prescale_factor=2.0)
    assert set(x.tolist()) == {float(hvd.rank())}


def test_a_mismatch_in_backward_is_an_error_of_backward():
    x = ones(hvd.rank() + 1).requires_grad_()
    y = hvd.allgather(x)
    weight = ones(*y.shape) if hvd.rank() else ones(*y.shape).double()
    with raises_everywhere(hvd.HorovodInternalError) as caught:
        hvd.allreduce(weight, name="weight")
    assert "mismatched dtype" in caught.text
    y.sum().backward()
    everyone(x.grad.tolist() == [1.0] * len(x), f"{x.grad}")


def test_splits_that_do_not_fit_on_one_rank_leave_the_others_able_to_go_on():
    """That rank knows before anything is sent, and may try again."""
    size = hvd.size()
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="greater than the first dimension"):
            hvd.alltoall(ones(1), [2] * size, name="x")
    received, _ = hvd.alltoall(ones(size), [1] * size, name="x")
    everyone(received.tolist() == [1.0] * size, f"{received}")


@pytest.mark.mpi(min_size=3)
def test_three_values_are_all_named():
    with raises_everywhere(hvd.HorovodInternalError) as caught:
        hvd.allreduce(ones(hvd.rank() + 1), name="x")
    wanted = ", ".join(f"rank {rank} gave [{rank + 1}]" for rank in range(hvd.size()))
    assert f"mismatched shape: {wanted}" in caught.text


def test_mismatches_in_a_loop_leave_nothing_behind():
    for turn in range(10):
        with raises_everywhere(hvd.HorovodInternalError):
            hvd.allreduce(ones(1 + (hvd.rank() + turn) % 2), name="x")
    assert hvd.allreduce(ones(1), name="x", op=hvd.Sum).item() == hvd.size()
    referee().Barrier()
