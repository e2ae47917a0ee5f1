"""One-sided windows of groups, `dist._new_window`. Judged by the meaning of torch's tests of windows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pretended_hosts import group_of_hosts
from verdicts import everyone, raises_everywhere, referee

import mpisgd
from mpisgd.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    InvalidArgument,
    InvalidRank,
    NotInitialized,
    ShapeMismatch,
    UnsupportedOp,
    UnsupportedTensor,
)
from mpisgd.torch_backend import compat
from mpisgd.torch_backend.window import BackendWindow

pytestmark = pytest.mark.skipif(
    not compat.HAS_WINDOWS, reason=f"torch {torch.__version__} has no windows of groups; 2.14 has"
)


@pytest.fixture(params=["one host", "many hosts"])
def window(request: pytest.FixtureRequest, pg: dist.ProcessGroup) -> Iterator[BackendWindow]:
    """A window of the group, and one of ranks that take each other for those of other hosts."""
    if request.param == "one host":
        assert dist._supports_window(pg)
        yield dist._new_window(group=pg)
    else:
        with group_of_hosts(range(mpisgd.size())) as group:
            yield BackendWindow(group)


def place(window: BackendWindow) -> tuple[int, int]:
    return window._group.rank, window._group.size


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(("count", "dtype"), [(4, torch.float), (1024, torch.int), (65536, torch.int8)])
def test_put_signal_wait_around_a_ring(window, count, dtype, async_op):
    rank, size = place(window)
    buffer = torch.ones(count * size, dtype=dtype)
    window.tensor_register(buffer)
    target, source = (rank + 1) % size, (rank - 1) % size
    for iteration in range(4):
        payload = torch.full([count], rank + 10 * iteration, dtype=dtype)
        window.put(payload, target, target * count, async_op).wait()
        window.signal(target, async_op).wait()
        window.wait_signal(source, async_op).wait()
        local = window.map_remote_tensor(rank)
        expected = torch.full([count], source + 10 * iteration, dtype=dtype)
        received = local[rank * count : (rank + 1) * count]
        everyone(torch.equal(received, expected), f"iteration {iteration}: {received}")
        everyone(torch.equal(local, buffer), "the tensor is not the window")
    window.tensor_deregister()


def test_new_window_with_tensor_keeps_its_values_and_is_it(pg):
    buffer = torch.arange(8.0).view(2, 4) + pg.rank()
    window = dist._new_window(buffer, pg)
    own = window.map_remote_tensor(pg.rank())
    everyone(own.shape == buffer.shape and own.data_ptr() == buffer.data_ptr(), f"{own}")
    mapped = [window.map_remote_tensor(rank) for rank in range(pg.size())]
    right = [torch.equal(each, torch.arange(8.0).view(2, 4) + rank) for rank, each in enumerate(mapped)]
    everyone(all(right), f"{mapped}")
    window.tensor_deregister()
    everyone(torch.equal(buffer, torch.arange(8.0).view(2, 4) + pg.rank()), f"{buffer}")


def test_a_window_can_have_one_tensor_after_another(window):
    rank, size = place(window)
    for value in (1.0, 2.0):
        buffer = torch.zeros(3)
        window.tensor_register(buffer)
        window.put(torch.full((2,), value + rank), (rank + 1) % size, 1, False)
        window.signal((rank + 1) % size, False)
        window.wait_signal((rank - 1) % size, False)
        came = value + (rank - 1) % size
        everyone(torch.equal(buffer, torch.tensor([0.0, came, came])), f"{buffer}")
        window.tensor_deregister()


def test_sizes_may_differ_by_rank_and_dtypes_not(pg):
    window = dist._new_window(torch.zeros(pg.rank() + 1), pg)
    last = pg.size() - 1
    if pg.rank() == 0:
        window.put(torch.ones(1), last, last, False)
    referee().barrier()
    everyone(window.map_remote_tensor(last)[-1].item() == 1.0)
    window.tensor_deregister()


@pytest.mark.mpi(min_size=2)
def test_another_dtype_on_one_rank_is_an_error_on_all():
    pg = dist.new_group()
    window = dist._new_window(group=pg)
    with raises_everywhere(CollectiveMismatch):
        window.tensor_register(torch.zeros(3, dtype=torch.int32 if pg.rank() == 0 else torch.float32))
    dist.destroy_process_group(pg)


def test_window_attr(window):
    from torch._C._distributed_c10d import WindowAccessType

    window.tensor_register(torch.zeros(4))
    mapped = window._group.shared_memory is not None or window._group.size == 1
    expected = WindowAccessType.UNIFIED if mapped else WindowAccessType.SEPARATE
    said = [window.get_attr(rank).access_type for rank in range(place(window)[1])]
    everyone(all(kind == expected for kind in said), f"{said}")
    window.tensor_deregister()


def test_register_errors(pg):
    window = dist._new_window(group=pg)
    for call in (
        lambda: window.put(torch.ones(1), 0, 0, False),
        lambda: window.signal(0, False),
        lambda: window.wait_signal(0, False),
        lambda: window.map_remote_tensor(0),
        window.tensor_deregister,
    ):
        with raises_everywhere(NotInitialized) as caught:
            call()
        everyone("not registered" in caught.text, caught.text)
    window.tensor_register(torch.ones(4))
    with raises_everywhere(InvalidArgument) as caught:
        window.tensor_register(torch.ones(4))
    everyone("double registration" in caught.text, caught.text)
    window.tensor_deregister()


@pytest.mark.parametrize("case", ["view", "viewed", "strided", "sparse", "no tensor"])
def test_only_a_tensor_with_its_memory_for_itself_is_registered(pg, case):
    whole = torch.ones(8)
    view = whole[:] if case == "viewed" else None
    given = {
        "view": whole[2:6],
        "viewed": whole,
        "strided": torch.ones(4, 4).t(),
        "sparse": torch.ones(2, 2).to_sparse(),
        "no tensor": [1.0],
    }[case]
    window = dist._new_window(group=pg)
    with raises_everywhere(UnsupportedTensor):
        window.tensor_register(given)
    del view


def test_put_errors(pg):
    window = dist._new_window(torch.ones(16), pg)
    peer = (pg.rank() + 1) % pg.size()
    for offset in (8, -1):
        with raises_everywhere(ShapeMismatch) as caught:
            window.put(torch.zeros(16), peer, offset, False)
        everyone("exceeds the window size" in caught.text, caught.text)
    with raises_everywhere(UnsupportedTensor):
        window.put(torch.zeros(16, dtype=torch.int32), peer, 0, False)
    with raises_everywhere(InvalidRank):
        window.put(torch.zeros(16), pg.size(), 0, False)
    with raises_everywhere(InvalidArgument):
        window.put(torch.zeros(16), "next", 0, False)
    everyone(torch.equal(window.map_remote_tensor(peer), torch.ones(16)))
    window.tensor_deregister()


@pytest.mark.mpi(min_size=2)
def test_memory_on_another_host_cannot_be_mapped():
    with group_of_hosts(range(mpisgd.size())) as group:
        window = BackendWindow(group)
        window.tensor_register(torch.ones(4))
        with raises_everywhere(UnsupportedOp):
            window.map_remote_tensor((group.rank + 1) % group.size)
        window.tensor_deregister()


@pytest.mark.mpi(min_size=2)
def test_a_signal_that_does_not_come_is_an_error_after_the_timeout_and_can_be_waited_for_again(pg):
    from torch._C._distributed_c10d import WaitSignalOptions

    window = dist._new_window(torch.ones(4), pg)
    source = (pg.rank() - 1) % pg.size()
    options = WaitSignalOptions()
    options.timeout = timedelta(seconds=0.2)
    with raises_everywhere(CollectiveTimeout):
        window.wait_signal(source, False, options)
    work = window.wait_signal(source, True)
    everyone(not work.is_completed())
    window.signal((pg.rank() + 1) % pg.size(), False)
    assert work.wait(timedelta(seconds=30))
    everyone(work.is_completed() and work.is_success())
    window.tensor_deregister()


@pytest.mark.mpi(min_size=2)
def test_asynchronous_waits_take_one_signal_each(pg):
    window = dist._new_window(torch.ones(4), pg)
    target, source = (pg.rank() + 1) % pg.size(), (pg.rank() - 1) % pg.size()
    works = [window.wait_signal(source, True) for _ in range(2)]
    window.signal(target, False)
    until = time.monotonic() + 30
    while not works[1].is_completed() and time.monotonic() < until:
        time.sleep(0.001)
    everyone(works[1].is_completed() and not works[0].is_completed())
    window.signal(target, False)
    works[0].wait()
    everyone(works[0].is_completed())
    window.tensor_deregister()
