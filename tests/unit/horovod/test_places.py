"""What is made for an operation is made where its tensors are: torch's meta device plays the GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mpisgd.gradients.sparse import empty_sparse
from mpisgd.horovod.engine import operations as module
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.engine.operations import perform_operation
from mpisgd.horovod.engine.request import Request

META = torch.device("meta")
GROUP = SimpleNamespace(size=3, rank=1, ranks=(0, 1, 2))
COLLECTIVES = [
    "all_gather",
    "all_gather_ragged",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter_tensor",
]


@pytest.fixture
def seen(monkeypatch) -> list[torch.Tensor]:
    """The tensors that collectives are given."""
    found: list[torch.Tensor] = []

    def collective(*args):
        tensors = [item for arg in args for item in (arg if isinstance(arg, list) else [arg])]
        found.extend(tensor for tensor in tensors if isinstance(tensor, torch.Tensor))
        return [args[0]] * GROUP.size

    for name in COLLECTIVES:
        monkeypatch.setattr(module, name, collective)
    monkeypatch.setattr(module, "all_gather_into_tensor", lambda out, mine, group: out.fill_(1))
    monkeypatch.setattr(module, "adasum", lambda everyone: everyone[0])
    return found


def request(kind: str, op: str = "", num: int = 1) -> Request:
    row = 1 if kind in ("allgather", "alltoall") else 0
    return Request(
        f"{kind}.x", kind, 0, op, ("float32",) * num, ((3, 2)[row:],) * num, 0 if kind == "broadcast" else -1,
        device="meta",
    )  # fmt: skip


CASES = [
    request("allreduce", "Sum"),
    request("allreduce", "Average", 3),
    request("allreduce", "Max"),
    request("allreduce", "Adasum"),
    request("allgather", "Sum"),
]
NEED_EVERYONE = [request("broadcast"), request("alltoall"), request("reducescatter", "Sum")]


@pytest.mark.parametrize(
    ("case", "joined"),
    [(case, joined) for case in CASES for joined in (False, True)]
    + [(case, False) for case in NEED_EVERYONE],
    ids=lambda given: given if isinstance(given, bool) else f"{given.kind} {given.op} {len(given.dtypes)}",
)
def test_everything_that_travels_lies_where_the_tensors_do(case, joined, seen):
    devices: dict[str, torch.device] = {}
    inputs = [torch.empty(3, 2, device=META) for _ in case.dtypes]
    entry = Entry(case, inputs, inputs, splits=[1, 1, 1])
    if joined:
        module._device_of(case, [entry], devices)  # used before this rank has joined
    perform_operation([case], [None if joined else entry], GROUP, devices)
    assert seen
    assert {tensor.device for tensor in seen} == {META}
    if not joined:
        result = entry.result[:1] if isinstance(entry.result, tuple) else entry.result
        assert {tensor.device for tensor in result} == {META}


def test_the_device_that_was_used_last_is_that_of_a_rank_without_tensors():
    devices, case = {}, request("allreduce", "Sum")
    assert module._device_of(case._replace(device="cpu"), [None], devices) == torch.device("cpu")
    module._device_of(case, [None, Entry(case, [torch.empty(1, device=META)])], devices)
    assert module._device_of(case, [None], devices) == META


def test_an_empty_sparse_gradient_lies_where_its_parameter_does():
    assert empty_sparse(torch.empty(4, 2, device=META), 1).device == META
