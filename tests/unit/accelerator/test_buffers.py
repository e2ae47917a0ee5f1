"""From any tensor to memory that can travel, and back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mpisgd.accelerator import runtime
from mpisgd.accelerator.buffers import StagedOutput, cut_by, overlap, readable
from mpisgd.collectives.tensor_arguments import check_output, check_same, check_tensor, check_tensors
from mpisgd.errors import ShapeMismatch, UnsupportedTensor
from mpisgd.transport.messages.link import even_ranges

VALUES = torch.arange(24.0).reshape(2, 3, 4)
LAYOUTS = {
    "contiguous": lambda: VALUES.clone(),
    "transposed": lambda: VALUES.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "strided": lambda: VALUES.repeat_interleave(2, dim=-1)[..., ::2],
    "negated": lambda: torch.complex(VALUES, -VALUES).conj().imag,
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


@layouts
def test_readable_gives_the_elements_in_logical_order(layout):
    tensor = LAYOUTS[layout]()
    flat = readable(tensor)
    assert torch.equal(flat, VALUES.flatten())
    assert flat.is_contiguous()
    assert not flat.is_neg()


def test_readable_copies_only_what_it_must():
    tensor = LAYOUTS["contiguous"]().requires_grad_()
    assert readable(tensor).data_ptr() == tensor.data_ptr()
    assert not readable(tensor).requires_grad
    conjugated = torch.ones(3, dtype=torch.complex64).conj()
    assert readable(conjugated).data_ptr() != conjugated.data_ptr()


@layouts
@pytest.mark.parametrize("keep", [False, True])
def test_what_lands_is_in_the_tensor_afterwards(layout, keep):
    tensor = LAYOUTS[layout]()
    output = StagedOutput(tensor, keep=keep)
    if keep:
        assert torch.equal(output.flat, VALUES.flatten())
    output.flat.copy_(torch.arange(24.0) * 2)
    output.copy_back()
    assert torch.equal(tensor, VALUES * 2)


@layouts
def test_a_result_from_elsewhere_is_taken(layout):
    tensor = LAYOUTS[layout]()
    output = StagedOutput(tensor, keep=False)
    output.result = torch.arange(24.0) * 3
    output.copy_back()
    assert torch.equal(tensor, VALUES * 3)


@layouts
def test_autograd_learns_of_the_change(layout):
    tensor = LAYOUTS[layout]()
    before = tensor._version
    StagedOutput(tensor, keep=False).copy_back()
    assert tensor._version > before


def test_a_scalar_and_an_empty_tensor_land():
    for shape in ((), (0,), (2, 0)):
        tensor = torch.zeros(shape)
        output = StagedOutput(tensor, keep=False)
        assert output.flat.shape == (tensor.numel(),)
        output.copy_back()


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [((0, 4), (4, 8), False), ((0, 5), (4, 8), True), ((2, 3), (0, 8), True), ((3, 3), (0, 8), False)],
)
def test_overlap(a, b, expected):
    memory = torch.zeros(8)
    assert overlap(memory[slice(*a)], memory[slice(*b)]) == expected
    assert overlap(memory[slice(*b)], memory[slice(*a)]) == expected


@pytest.mark.parametrize("total", [0, 1, 2, 7, 8, 1000])
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 8])
def test_even_ranges_lose_nothing_and_is_balanced(total, parts):
    pieces = even_ranges(total, parts)
    assert [start for start, _ in pieces] == [0, *[stop for _, stop in pieces[:-1]]]
    assert pieces[-1][1] == total
    lengths = [stop - start for start, stop in pieces]
    assert max(lengths) - min(lengths) <= 1
    assert lengths[-1] == max(lengths)  # the ring's scratch memory is as long as the last one


def test_cut_by_shares_memory():
    flat = torch.arange(6.0)
    first, nothing, rest = cut_by(flat, [2, 0, 4])
    assert (first.tolist(), nothing.numel(), rest.tolist()) == ([0, 1], 0, [2, 3, 4, 5])
    rest.zero_()
    assert flat.sum() == 1


REFUSED: dict[str, tuple[object, str]] = {
    "no tensor": ([1.0], "list"),
    "sparse": (torch.eye(2).to_sparse(), "to_dense"),
    "meta": (torch.zeros(1, device="meta"), "meta"),
}


@pytest.mark.parametrize("what", ["no tensor", "sparse", "meta"])
def test_what_cannot_travel_is_refused_with_advice(what):
    tensor, said = REFUSED[what]
    for check in (check_tensor, check_output):
        with pytest.raises(UnsupportedTensor, match=f"gather: thing.*{said}"):
            check("gather", tensor, "thing")


def test_expanded_tensors_are_inputs_only():
    tensor: Tensor = torch.zeros(1).expand(3)
    assert check_tensor("gather", tensor) is tensor
    with pytest.raises(UnsupportedTensor, match=r"clone\(\)"):
        check_output("gather", tensor)
    check_output("gather", torch.zeros(1).expand(1))


def test_lists_are_counted():
    with pytest.raises(ShapeMismatch, match="has 2 tensors; expected 3"):
        check_tensors("gather", [torch.zeros(1)] * 2, "outputs", count=3)
    for wrong in (torch.zeros(3, 2), None, iter([])):
        with pytest.raises(UnsupportedTensor, match="expected a list of tensors"):
            check_tensors("gather", wrong, "outputs")
    with pytest.raises(UnsupportedTensor, match=r"outputs\[1\]"):
        check_tensors("gather", [torch.zeros(1), 3], "outputs")


def test_one_operations_tensors_are_on_one_device(monkeypatch):
    """A tensor on torch's meta device plays one on a GPU."""
    here, there = torch.ones(3), torch.ones(3, device="meta")
    with pytest.raises(UnsupportedTensor, match="gather: tensor is on meta; tensors of the CPU and of CUDA"):
        check_tensor("gather", there)
    monkeypatch.setattr(runtime, "_stand_in", SimpleNamespace(holds=lambda tensor: tensor.is_meta))
    assert check_tensors("gather", [there, there], "gather_list") == [there, there]
    for mixed in ([here, there], [there, here]):
        with pytest.raises(UnsupportedTensor, match=r"list\[1\] is on .*list\[0\] on .* all on one device"):
            check_tensors("gather", mixed, "gather_list")
    with pytest.raises(UnsupportedTensor, match="all on one device"):
        check_same("gather", "output", here, 3, there, "as `tensor`")
