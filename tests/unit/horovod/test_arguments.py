"""Arguments that are looked at on this rank alone, before anything is sent."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mpisgd.horovod as hvd
from mpisgd import UnsupportedOp
from mpisgd.horovod.ops.alltoall import _rows_for
from mpisgd.horovod.ops.reduce_ops import name_of, reduction_for
from mpisgd.horovod.optimizer import _indices, _named


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


# --- reductions ---------------------------------------------------------------------------------------


def test_the_reduction_is_an_average_unless_told_otherwise():
    assert reduction_for(None, None, torch.float32) == "Average"
    assert reduction_for(hvd.Product, None, torch.int8) == "Product"


@pytest.mark.parametrize(("average", "name"), [(True, "Average"), (False, "Sum")])
def test_the_older_spelling_warns(average, name):
    with pytest.warns(DeprecationWarning, match="average"):
        assert reduction_for(None, average, torch.float32) == name


def test_both_spellings_together_are_refused():
    with pytest.raises(ValueError, match="The op parameter supersedes average"):
        reduction_for(hvd.Sum, False, torch.float32)


@pytest.mark.parametrize("op", [-1, 6, "Sum", 1.0])
def test_a_reduction_that_does_not_exist(op):
    with pytest.raises(ValueError, match=r"expected one of hvd\.Average"):
        name_of(op)


@pytest.mark.parametrize(
    ("op", "dtype"), [(hvd.Average, torch.bool), (hvd.Adasum, torch.bool), (hvd.Adasum, torch.int32)]
)
def test_reductions_that_a_dtype_does_not_have(op, dtype):
    with pytest.raises(UnsupportedOp):
        reduction_for(op, None, dtype)


# --- compression --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compression", "travels"),
    [
        (hvd.Compression.none, None),
        (hvd.Compression.fp16, torch.float16),
        (hvd.Compression.bf16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_what_travels_and_what_arrives(compression, travels, dtype):
    x = torch.arange(5).to(dtype)
    smaller, context = compression.compress(x)
    assert smaller.dtype == (travels if travels and dtype.is_floating_point else dtype)
    back = compression.decompress(smaller, context)
    assert back.dtype == dtype
    assert torch.equal(back, x)


# --- alltoall -----------------------------------------------------------------------------------------


def test_rows_are_shared_equally_without_splits():
    assert _rows_for(torch.zeros(6, 2), None, 3) == [2, 2, 2]
    assert _rows_for(torch.zeros(0), None, 3) == [0, 0, 0]


@pytest.mark.parametrize(
    "splits", [[1, 0, 3], (1, 0, 3), torch.tensor([1, 0, 3]), torch.tensor([1, 0, 3], dtype=torch.int32)]
)
def test_splits_may_leave_rows_behind(splits):
    assert _rows_for(torch.zeros(5), splits, 3) == [1, 0, 3]


@pytest.mark.parametrize(
    ("splits", "said"),
    [
        (None, "not an even multiple of the number of workers"),
        ([3, 3], "greater than the first dimension"),
        ([-1, 2], "greater than the first dimension"),
        ([1, 2, 2], "does not equal number of workers"),
        (torch.ones(2, 1, dtype=torch.int32), "1D splits"),
        (torch.tensor([2.0, 3.0]), "32-bit integer"),
    ],
)
def test_splits_that_do_not_fit(splits, said):
    with pytest.raises(ValueError, match=said):
        _rows_for(torch.zeros(5), splits, 2)


# --- DistributedOptimizer -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
        ({"gradient_predivide_factor": 0.0}, "expected a positive number"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "not supported with op != Average"),
        ({"op": 17}, "op=17: expected one of"),
        ({"groups": -1}, "groups should be"),
    ],
    ids=str,
)
def test_arguments_of_the_optimizer_that_make_no_sense(arguments, said):
    net = model()
    opt = sgd(net)
    with pytest.raises(ValueError, match=said):
        hvd.DistributedOptimizer(opt, net.named_parameters(), **arguments)
    assert type(opt) is torch.optim.SGD


def test_parameters_without_names_are_numbered():
    net = model()
    assert [name for name, _ in _named(sgd(net), None)] == ["noname.0", "noname.1", "noname.2"]


def test_names_may_cover_more_than_the_optimizer_has():
    net = model()
    opt = torch.optim.SGD(net[1].parameters(), lr=0.1)
    assert [name for name, _ in _named(opt, net.named_parameters())] == ["1.weight"]


def test_names_that_do_not_fit():
    net = model()
    with pytest.raises(ValueError, match=r"sequence of tuples \(name, parameter\)"):
        _named(sgd(net), net.parameters())
    with pytest.raises(ValueError, match=r"must be unique\. Found duplicates: a"):
        _named(sgd(net), [("a", param) for param in net.parameters()])
    with pytest.raises(ValueError, match=r"were not named: one of shape \[1, 3\]"):
        _named(sgd(net), net[0].named_parameters())


def test_groups_by_number_cut_the_parameters_into_parts():
    params = list(nn.Linear(1, 1).parameters()) * 1 + [nn.Parameter(torch.zeros(1)) for _ in range(3)]
    assert _indices(None, params) == _indices(0, params) == []
    assert _indices(2, params) == [[0, 1, 2], [3, 4]]
    assert _indices(99, params) == [[0], [1], [2], [3], [4]]


def test_groups_by_parameters_are_found_by_identity():
    params = [nn.Parameter(torch.zeros(1)) for _ in range(4)]
    frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    assert _indices([[params[2], params[0]], [frozen], (params[3],)], params) == [[2, 0], [3]]


@pytest.mark.parametrize("groups", [-1, [torch.zeros(1)], ["ab"], 2.0])
def test_groups_that_make_no_sense(groups):
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    with pytest.raises(ValueError, match=r"groups should be a non-negative integer or a list of list"):
        _indices(groups, params)


def test_a_parameter_in_two_groups_is_refused():
    params = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    with pytest.raises(ValueError, match="only appear once"):
        _indices([params, [params[1]]], params)


# --- process sets -------------------------------------------------------------------------------------


def test_a_process_set_before_it_is_added():
    process_set = hvd.ProcessSet([3, 0])
    assert process_set.ranks == [0, 3]
    assert process_set.process_set_id is None
    assert str(process_set) == repr(process_set) == "ProcessSet(process_set_id=None, ranks=[0, 3])"
    for question in (process_set.size, process_set.rank, process_set.included):
        with pytest.raises(ValueError, match=r"has not been added; use hvd\.add_process_set\(\)"):
            question()


def test_the_global_process_set_cannot_be_removed():
    assert hvd.remove_process_set(hvd.global_process_set) is False
    assert hvd.remove_process_set(hvd.ProcessSet([0])) is False
