"""What is asked of torch.cuda, as far as it can be seen without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpisgd.accelerator.runtime import Cuda, on_device, runtime
from mpisgd.transport.device import cuda_aware
from mpisgd.transport.device.cuda_aware import is_cuda_aware


@pytest.fixture
def cuda(monkeypatch):
    """torch.cuda with four GPUs; what was chosen is in `chosen`."""
    seen = SimpleNamespace(chosen=[], used=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: seen.used)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", seen.chosen.append)
    return seen


@pytest.mark.parametrize(("local_rank", "chosen"), [(0, []), (1, [1]), (3, [3]), (4, []), (6, [2])])
def test_the_local_rank_chooses_the_gpu(cuda, local_rank, chosen):
    Cuda().take_device(local_rank)
    assert cuda.chosen == chosen


def test_what_the_program_has_chosen_stands(cuda):
    cuda.used = True
    Cuda().take_device(3)
    assert cuda.chosen == []


def test_without_a_gpu_nothing_is_chosen(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Cuda().take_device(3)
    assert cuda.chosen == []


def test_gpus_are_told_apart_by_their_own_number(monkeypatch):
    def properties(device):
        return SimpleNamespace(name="H200", **({"uuid": "GPU-abc"} if device.index == 0 else {}))

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert Cuda().identity(torch.device("cuda", 0)) == "GPU-abc"
    assert Cuda().identity(torch.device("cuda", 1)) == "H200 1"


def test_the_tensors_of_the_cpu_are_on_no_device():
    assert not on_device(torch.ones(3))
    assert runtime().kind == "cuda"


def test_a_library_that_does_not_say_so_is_not_cuda_aware(monkeypatch):
    monkeypatch.setattr(cuda_aware, "libmpi", lambda: None)
    assert not is_cuda_aware()
    monkeypatch.setattr(cuda_aware, "libmpi", lambda: "/nowhere/libmpi.so")
    assert not is_cuda_aware()
    for answer in (0, 1):
        library = SimpleNamespace(MPIX_Query_cuda_support=lambda answer=answer: answer)
        monkeypatch.setattr(cuda_aware, "libmpi", lambda: "libmpi.so")
        monkeypatch.setattr(cuda_aware.ctypes, "CDLL", lambda path, library=library: library)
        assert is_cuda_aware() is bool(answer)
    monkeypatch.setattr(cuda_aware.ctypes, "CDLL", lambda path: SimpleNamespace())
    assert not is_cuda_aware()


@pytest.mark.parametrize(
    ("mapped", "found"),
    [
        ("/usr/lib/libmpi.so.40.40.3", True),
        ("/usr/lib/libmpich.so.12", True),
        ("/opt/cray/pe/lib64/libmpi_gnu_123.so.12.0.0", True),
        ("/opt/cray/pe/lib64/libmpi_cray.so.12", True),
        ("/opt/cray/pe/lib64/libmpi_nvidia.so.12", True),
        ("/opt/cray/pe/lib64/libmpi_gtl_cuda.so.0", False),  # beside it
        ("/usr/lib/libmpi_mpifh.so.40", False),
    ],
)
def test_the_library_is_found_under_the_names_that_vendors_give_it(monkeypatch, mapped, found):
    line = f"7f00-7f01 r-xp 00000000 08:01 123   {mapped}\n"
    monkeypatch.setattr(cuda_aware.Path, "read_text", lambda path: line)
    assert cuda_aware.libmpi() == (mapped if found else None)


@pytest.mark.parametrize(("hip", "kind", "name"), [(None, 0, "cuda"), ("6.2", 2, "rocm")])
def test_the_library_is_asked_for_gpus_of_the_kind_that_torch_has(monkeypatch, hip, kind, name):
    def query(asked: int, place: Any) -> int:
        place._obj.value = asked == kind
        return 0

    monkeypatch.setattr(cuda_aware, "libmpi", lambda: "libmpi.so")
    monkeypatch.setattr(torch.version, "hip", hip)
    other = {"cuda": "rocm", "rocm": "cuda"}[name]
    for library, wanted in (
        (SimpleNamespace(MPIX_GPU_query_support=query), True),
        (SimpleNamespace(MPIX_GPU_query_support=lambda asked, place: 1), False),
        (SimpleNamespace(**{f"MPIX_Query_{name}_support": lambda: 1}), True),
        (SimpleNamespace(**{f"MPIX_Query_{other}_support": lambda: 1}), False),
    ):
        monkeypatch.setattr(cuda_aware.ctypes, "CDLL", lambda path, library=library: library)
        assert is_cuda_aware() is wanted
