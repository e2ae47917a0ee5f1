"""`allreduce` in all its forms: dtypes, reductions, factors, layouts, several at once."""

from __future__ import annotations

import pytest
import torch
from closed_form import given
from reductions import OPS, dtypes_of, everyones, near, wanted
from verdicts import everyone, raises_everywhere

import mpisgd
import mpisgd.horovod as hvd
from mpisgd.horovod import state


@pytest.mark.parametrize("op", OPS)
def test_every_dtype(op):
    handles = {
        dtype: hvd.allreduce_async(given(hvd.rank(), dtype), name=f"{op}.{dtype}", op=getattr(hvd, op))
        for dtype in dtypes_of(op)
    }
    for dtype, handle in handles.items():
        near(hvd.synchronize(handle), wanted(op, everyones(dtype)))


FORMS = {
    "sync": lambda x, **how: hvd.allreduce(x, **how),
    "async": lambda x, **how: hvd.synchronize(hvd.allreduce_async(x, **how)),
    "in place": lambda x, **how: hvd.allreduce_(x, **how),
    "async in place": lambda x, **how: hvd.synchronize(hvd.allreduce_async_(x, **how)),
}
GROUPED = {
    "sync": lambda x, **how: hvd.grouped_allreduce(x, **how),
    "async": lambda x, **how: hvd.synchronize(hvd.grouped_allreduce_async(x, **how)),
    "in place": lambda x, **how: hvd.grouped_allreduce_(x, **how),
    "async in place": lambda x, **how: hvd.synchronize(hvd.grouped_allreduce_async_(x, **how)),
}


@pytest.mark.parametrize("form", FORMS)
def test_where_the_result_goes(form):
    x = given(hvd.rank(), torch.float64)
    result = FORMS[form](x, name=f"where.{form}", op=hvd.Sum)
    right = wanted("Sum", everyones(torch.float64))
    near(result, right)
    if "in place" in form:
        assert result is x
    else:
        assert torch.equal(x, given(hvd.rank(), torch.float64))


@pytest.mark.parametrize("form", GROUPED)
def test_several_at_once(form):
    kinds = [(torch.float64, (3, 4)), (torch.float32, ()), (torch.int32, (0, 2)), (torch.float32, (7,))]
    tensors = [given(hvd.rank(), dtype, shape) for dtype, shape in kinds]
    results = GROUPED[form](tensors, name=f"several.{form}", op=hvd.Max)
    assert isinstance(results, list)
    for result, tensor, (dtype, shape) in zip(results, tensors, kinds, strict=True):
        near(result, wanted("Max", everyones(dtype, shape)))
        if "in place" in form:
            assert result is tensor
        else:
            assert torch.equal(tensor, given(hvd.rank(), dtype, shape))


def test_by_position_as_old_scripts_do():
    x = torch.ones(3)
    hvd.allreduce_(x, None, "by position", hvd.Sum)
    assert x.tolist() == [hvd.size()] * 3
    with pytest.warns(DeprecationWarning, match="average"):
        assert hvd.allreduce(x, False, "by position").tolist() == [hvd.size() ** 2] * 3


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_factors_before_and_after(op):
    factors = {"prescale_factor": 0.25, "postscale_factor": 6.0}
    dtypes = [torch.float32, torch.float64, torch.complex128, torch.float16]
    handles = [
        hvd.allreduce_async(given(hvd.rank(), dtype), name=f"{op}.{dtype}", op=getattr(hvd, op), **factors)
        for dtype in dtypes
    ]
    for dtype, handle in zip(dtypes, handles, strict=True):
        scaled = [tensor * 0.25 for tensor in everyones(dtype)]
        near(hvd.synchronize(handle), wanted(op, scaled) * 6.0)


def test_factors_of_integers_are_cut_off_toward_zero_before_and_after():
    x = torch.tensor([-7, -1, 3, 100 * (hvd.rank() + 1)])
    result = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=0.3)
    before = [torch.tensor([-3, 0, 1, 50 * (rank + 1)]) for rank in range(hvd.size())]
    assert torch.equal(result, (sum(before).double() * 0.3).trunc().long())


def test_an_average_of_integers_is_cut_off_toward_zero():
    x = torch.tensor([-hvd.rank(), hvd.rank(), -1 if hvd.rank() == 0 else 0])
    total = sum(range(hvd.size()))
    quotient = total // hvd.size()
    assert hvd.allreduce(x).tolist() == [-quotient, quotient, -1 if hvd.size() == 1 else 0]


def layouts(rank: int) -> dict[str, torch.Tensor]:
    """Tensors that do not lie in memory as their elements are counted; no two of them share any."""
    square = given(rank, torch.float32, (6, 8))
    return {
        "transposed": square.t(),
        "every other": square.clone()[:, ::2],
        "turned": square.flip(0).t(),
        "channels_last": given(rank, torch.float32, (2, 3, 4, 5)).contiguous(
            memory_format=torch.channels_last
        ),
        "conjugated": given(rank, torch.complex64, (5, 3)).conj(),
        "no dimension": given(rank, torch.float32, ()),
        "empty": given(rank, torch.float32, (0, 3)),
        "window": given(rank, torch.float32, (40,))[7:19],
    }


def test_layouts():
    """In place and not; what lies around the window stays as it was."""
    plain = {name: [layouts(rank)[name] for rank in range(hvd.size())] for name in layouts(0)}
    mine = layouts(hvd.rank())
    fresh = {name: hvd.allreduce_async(x, name=f"fresh.{name}", op=hvd.Sum) for name, x in mine.items()}
    results = {name: hvd.synchronize(handle) for name, handle in fresh.items()}
    own = {name: hvd.allreduce_async_(x, name=f"own.{name}", op=hvd.Sum) for name, x in mine.items()}
    for name, handle in own.items():
        right = wanted("Sum", [x.resolve_conj().contiguous() for x in plain[name]])
        assert hvd.synchronize(handle) is mine[name]
        near(mine[name].resolve_conj().contiguous(), right)
        near(results[name].resolve_conj().contiguous(), right)
    around = torch.ones(40, dtype=torch.bool)
    around[7:19] = False
    whole = mine["window"]._base
    assert torch.equal(whole[around], given(hvd.rank(), torch.float32, (40,))[around])


def test_an_expanded_tensor_can_be_given_but_not_overwritten():
    x = torch.tensor([float(hvd.rank())]).expand(4)
    assert hvd.allreduce(x, op=hvd.Sum).tolist() == [sum(range(hvd.size()))] * 4
    with raises_everywhere(mpisgd.UnsupportedTensor) as caught:
        hvd.allreduce_(x, op=hvd.Sum)
    assert "expanded" in caught.text


def test_a_parameter_is_reduced_in_place():
    param = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))
    assert hvd.allreduce_(param, op=hvd.Sum) is param
    assert param.requires_grad
    assert param.tolist() == [sum(range(hvd.size()))] * 3


@pytest.mark.parametrize("limit", [0, 100, 2**20])
def test_results_do_not_depend_on_what_travels_together(limit, monkeypatch):
    monkeypatch.setattr(state.engine(), "fusion_bytes", limit)
    hvd.barrier()  # nothing is under way while ranks differ in the limit
    tensors = [given(hvd.rank() + i, torch.float64, (i,)) for i in range(20)]
    handles = [hvd.allreduce_async_(x, name=f"many.{i}", op=hvd.Sum) for i, x in enumerate(tensors)]
    for i, handle in enumerate(handles):
        right = wanted("Sum", [given(rank + i, torch.float64, (i,)) for rank in range(hvd.size())])
        near(hvd.synchronize(handle), right)
    hvd.barrier()


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed(compression):
    x = given(hvd.rank(), torch.float64)
    smaller = getattr(hvd.Compression, compression)
    one, (two,) = (
        hvd.allreduce(x, compression=smaller, op=hvd.Sum),
        hvd.grouped_allreduce([x], None, None, smaller),
    )
    tolerance = 4 * torch.finfo(getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}[compression])).eps
    right = wanted("Sum", everyones(torch.float64))
    assert one.dtype == two.dtype == torch.float64
    torch.testing.assert_close(one, right, rtol=tolerance, atol=tolerance * 8)
    torch.testing.assert_close(two, right / hvd.size(), rtol=tolerance, atol=tolerance * 8)
    assert not torch.equal(one, right)


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_sparse_tensors(op):
    """Ranks have rows in common, of their own, and the last one has none."""
    dense = given(hvd.rank(), torch.float64, (6, 2))
    dense[hvd.rank() + 1 : 5] = 0
    if hvd.rank() == hvd.size() - 1:
        dense.zero_()
    start = hvd.sparse_allreduce_async(dense.to_sparse(1), f"sparse.{op}", getattr(hvd, op))
    result = hvd.synchronize(start)
    right = hvd.allreduce(dense, op=getattr(hvd, op))
    assert result.is_sparse
    assert result.shape == right.shape
    near(result.to_dense(), right)


def test_what_cannot_be_reduced_is_refused_before_anything_is_sent():
    x = torch.ones(2)
    for call, kind in [
        (lambda: hvd.allreduce(x.to_sparse()), mpisgd.UnsupportedTensor),
        (lambda: hvd.allreduce([1.0]), (TypeError, AttributeError)),
        (lambda: hvd.allreduce(x > 0), mpisgd.UnsupportedOp),
        (lambda: hvd.allreduce(x, op=17), ValueError),
        (lambda: hvd.allreduce(x, True, op=hvd.Sum), ValueError),
        (lambda: hvd.grouped_allreduce([]), ValueError),
        (lambda: hvd.grouped_allreduce(x), ValueError),
        (lambda: hvd.sparse_allreduce_async(x.to_sparse(), "x", hvd.Max), ValueError),
    ]:
        with pytest.raises(kind):
            call()
    everyone(not state.engine().queue.pending(), "something was sent")
