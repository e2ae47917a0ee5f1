"""What differs between versions of torch, each branch with this torch or with a stand-in for another."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from mpisgd.dtypes import ReduceOp
from mpisgd.errors import UnsupportedTorch
from mpisgd.torch_backend import compat


def test_methods_are_found_under_their_earlier_names():
    methods = {name: lambda self, name=name: name for name in compat.OLD_NAMES}
    group = compat.with_old_names(type("Group", (), methods))()
    for name, old in compat.OLD_NAMES.items():
        assert getattr(group, old)() == getattr(group, name)() == name


def test_our_group_has_every_name():
    from mpisgd.torch_backend import ProcessGroupMpisgd

    for name, old in compat.OLD_NAMES.items():
        assert getattr(ProcessGroupMpisgd, old) is getattr(ProcessGroupMpisgd, name)


@pytest.mark.parametrize(
    ("opts", "wanted"), [({"asyncOp": False}, True), ({"asyncOp": True}, False), ({}, False)]
)
def test_who_does_not_tell_may_not_wait_at_once(opts, wanted):
    assert compat.blocks(SimpleNamespace(**opts)) is wanted
    assert compat.blocks(None) is False


@pytest.mark.parametrize("op", ReduceOp)
def test_reductions_have_the_same_names(op):
    kind = getattr(dist.ReduceOp, op.name)
    assert compat.reduction_of(kind) is op
    assert compat.reduction_of(dist.ReduceOp(kind)) is op
    assert compat.factor_of(kind) is None
    assert compat.factor_of(dist.ReduceOp(kind)) is None


def test_a_premultiplied_sum_is_a_sum_and_a_factor():
    for factor in (0.25, torch.tensor([3.0])):
        op = dist._make_nccl_premul_sum(factor)
        assert compat.reduction_of(op) is ReduceOp.SUM
        assert compat.factor_of(op) == factor


def test_a_factor_that_torch_tells_by_name_is_taken():
    assert compat.factor_of(SimpleNamespace(op=dist.ReduceOp.PREMUL_SUM, factor=0.5)) == 0.5


@pytest.mark.parametrize(
    "version", ["2.7.0", "2.7.1+cu126", "2.13.0a0+git123", "2.15.0.dev20261101+cpu", "3.0"]
)
def test_versions_that_work(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    compat.check_version()


@pytest.mark.parametrize("version", ["2.6.0+cpu", "2.4.1", "1.13.1"])
def test_versions_that_are_too_old_are_refused_by_name(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(UnsupportedTorch, match=version.split("+")[0]):
        compat.check_version()


def test_torchs_recorder_is_told_to_keep_away_where_there_is_one(monkeypatch):
    name = "_FR_SELF_RECORDING_BACKENDS"
    monkeypatch.setattr(distributed_c10d, name, {"nccl"}, raising=False)
    compat.opt_out_of_flight_recorder("mpisgd")
    assert getattr(distributed_c10d, name) == {"nccl", "mpisgd"}
    monkeypatch.delattr(distributed_c10d, name)
    compat.opt_out_of_flight_recorder("mpisgd")
    assert not hasattr(distributed_c10d, name)


@pytest.mark.parametrize(
    ("backend", "wanted"),
    [("mpisgd", "ours"), ("MPISGD", "ours"), ("cpu:mpisgd", "ours"), ("gloo", "torch's"), (None, "torch's")],
)
def test_env_is_ours_for_our_backend_only(monkeypatch, backend, wanted):
    handlers = {"env": lambda url, **_: f"torch's {url}"}
    monkeypatch.setattr(sys.modules["torch.distributed.rendezvous"], "_rendezvous_handlers", handlers)
    compat.take_over_rendezvous("env", "mpisgd", lambda url, **_: f"ours {url}")

    def init_process_group(backend: str | None) -> str:
        return handlers["env"]("env://")

    assert init_process_group(backend) == f"{wanted} env://"
    assert handlers["env"]("env://") == "torch's env://"  # nobody's init_process_group
