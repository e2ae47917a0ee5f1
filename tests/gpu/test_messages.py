"""Messages between GPUs go by NCCL, and are matched, ordered and refused as those between CPUs."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_checks.gpu import FAILS, HOLDS, Gpu
from gpu_checks.streams import crossing
from gpu_under_test import DEVICE, IS_SIMULATED, gpu
from simulated_gpu.nccl import SimulatedNccl
from simulated_gpu.runtime import SimulatedGpu
from stage_models import batch, make_stages, sgd
from torch import Tensor
from torch.nn.functional import mse_loss
from verdicts import everyone, raises_everywhere, referee

import mpisgd
from mpisgd.errors import PeerLost
from mpisgd.job.groups import close_group, open_group
from mpisgd.job.lifecycle import current_job
from mpisgd.pipeline import Pipeline
from mpisgd.threads import waiting
from mpisgd.transport.device import selection
from mpisgd.transport.device.channel import Channel
from mpisgd.transport.device.messages import DeviceMessages
from mpisgd.transport.mpi.communicator import Communicator

pytestmark = pytest.mark.mpi(min_size=2)

N = 1000
LIMIT_S = 1.0
SOON_S = 10.0  # long before any timeout, also where cores are scarce
LOST = "rank 1 of the job was lost: killed, or out of reach"


@pytest.fixture(scope="module")
def opened() -> Iterator[mpisgd.Group]:
    """A group that NCCL has connected, for the tests that leave it whole."""
    made = mpisgd.new_group()
    mpisgd.all_reduce(torch.ones(1, device=DEVICE), group=made)
    yield made
    if made in current_job().groups:
        close_group(made)


@pytest.fixture
def group(expected_way, opened) -> mpisgd.Group:
    if expected_way != "nccl":
        pytest.skip("there is no communicator")
    return opened


@pytest.fixture
def short(group) -> Iterator[mpisgd.Group]:
    """One that a test may break; its timeout is short."""
    made = open_group(current_job(), range(mpisgd.size()), name="short", timeout_s=LIMIT_S)
    mpisgd.all_reduce(torch.ones(1, device=DEVICE), group=made)
    yield made
    close_group(made)


@pytest.fixture
def untouched(expected_way, idle_world) -> Iterator[mpisgd.Group]:
    """One that has not seen a GPU yet."""
    if expected_way != "nccl":
        pytest.skip("there is no communicator")
    made = mpisgd.new_group()
    assert made.device is None
    yield made
    close_group(made)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What NCCL and MPI have moved on this rank: operations, and bytes of messages."""
    counts = {"nccl": 0, "bytes": 0}
    launch, isend = SimulatedNccl._launch, Communicator.isend

    def launches(self: SimulatedNccl, *arguments: Any) -> Any:
        counts["nccl"] += 1
        return launch(self, *arguments)

    def sends(self: Communicator, tensor: Tensor, *where: Any) -> Any:
        counts["bytes"] += tensor.nbytes
        return isend(self, tensor, *where)

    monkeypatch.setattr(SimulatedNccl, "_launch", launches)
    monkeypatch.setattr(Communicator, "isend", sends)
    return counts


def given(rank: int, number: int = 0, n: int = N) -> Tensor:
    return torch.arange(float(n)) + 10_000 * rank + 0.5 * number


def on_gpu(rank: int, number: int = 0, n: int = N) -> Tensor:
    return given(rank, number, n).to(DEVICE)


def room(n: int = N) -> Tensor:
    return torch.zeros(n, device=DEVICE)


def ring() -> tuple[int, int]:
    return (mpisgd.rank() - 1) % mpisgd.size(), (mpisgd.rank() + 1) % mpisgd.size()


def equal(tensor: Tensor, wanted: Tensor) -> None:
    everyone(torch.equal(tensor.cpu(), wanted), f"{tensor[:4].tolist()}, {wanted[:4].tolist()}")


def test_a_ring_goes_by_nccl_and_not_by_mpi(group, moved):
    before, after = ring()
    for number in range(3):
        place = room()
        receive = mpisgd.irecv(place, before, group)
        sent = mpisgd.isend(on_gpu(mpisgd.rank(), number), after, group)
        assert sent.wait()
        assert receive.wait()
        everyone(receive.source == before)
        equal(place, given(before, number))
    everyone(moved["nccl"] == 6, f"{moved}")
    everyone(moved["bytes"] < 3 * N, f"{moved}")


def test_messages_before_any_collective_go_by_nccl_too(untouched, moved):
    """They went through host memory, and nobody was told."""
    before, after = ring()
    for number in range(2):
        place = room()
        receive = mpisgd.irecv(place, before, untouched)
        mpisgd.isend(on_gpu(mpisgd.rank(), number), after, untouched).wait()
        receive.wait()
        equal(place, given(before, number))
    everyone(untouched.device is None)
    everyone(moved["nccl"] == 4, f"{moved}")


def test_all_send_before_they_receive_and_take_the_last_tag_first(group, moved):
    """In each direction NCCL's order is that of the receiver, and no direction waits for another."""
    peers = [rank for rank in range(mpisgd.size()) if rank != mpisgd.rank()]
    sends = [mpisgd.isend(on_gpu(mpisgd.rank(), tag), peer, group, tag) for tag in range(8) for peer in peers]
    for tag in reversed(range(8)):
        for peer in peers:
            place = room()
            mpisgd.irecv(place, peer, group, tag).wait()
            equal(place, given(peer, tag))
    assert all(work.wait() for work in sends)
    everyone(moved["nccl"] == 16 * len(peers), f"{moved}")


def test_messages_of_one_tag_keep_their_order_short_and_long(group):
    """The short ones go through host memory."""
    before, after = ring()
    sizes = [N, 3, 2 * N, 1, 16, 17, N]
    places = [room(n) for n in sizes]
    receives = [mpisgd.irecv(place, before, group, 5) for place in places]
    sends = [mpisgd.isend(on_gpu(mpisgd.rank(), i, n), after, group, 5) for i, n in enumerate(sizes)]
    for work in [*sends, *receives]:
        work.wait()
    for number, place in enumerate(places):
        equal(place, given(before, number, len(place)))


def test_any_source_goes_by_nccl_and_tells_who_sent(group, moved):
    if mpisgd.rank() == 0:
        seen = set()
        for _ in range(mpisgd.size() - 1):
            place = room()
            src = mpisgd.recv(place, group=group, tag=7)
            seen.add(src)
            assert torch.equal(place.cpu(), given(src))
        assert seen == set(range(1, mpisgd.size()))
    else:
        mpisgd.send(on_gpu(mpisgd.rank()), 0, group, 7)
    everyone(moved["nccl"] == (mpisgd.size() - 1 if mpisgd.rank() == 0 else 1), f"{moved}")


@pytest.mark.parametrize("sender", ["cpu", DEVICE])
@pytest.mark.parametrize("n", [2, N])
def test_one_end_on_the_cpu(group, moved, sender, n):
    """Through host memory; messages beside it, of the same tag, keep their order."""
    before, after = ring()
    ends = [(sender, DEVICE if sender == "cpu" else "cpu"), (DEVICE, DEVICE)]
    places = [torch.zeros(n, device=end) for _, end in ends]
    receives = [mpisgd.irecv(place, before, group) for place in places]
    sends = [
        mpisgd.isend(given(mpisgd.rank(), i, n).to(start), after, group) for i, (start, _) in enumerate(ends)
    ]
    for work in [*receives, *sends]:
        work.wait()
    for number, place in enumerate(places):
        equal(place, given(before, number, n))
    everyone(moved["nccl"] == (2 if n == N else 0), f"{moved}")


@pytest.mark.parametrize(("sent", "place"), [(N, N + 1), (N + 1, N), (N, 3), (N, 0)])
@pytest.mark.parametrize("end", ["cpu", DEVICE])
def test_another_size_is_an_error_at_both_ends_before_anything_is_launched(group, moved, sent, place, end):
    before, after = ring()
    receive = mpisgd.irecv(torch.zeros(place, dtype=torch.float32, device=end), before, group, 3)
    work = mpisgd.isend(on_gpu(mpisgd.rank(), 0, sent), after, group, 3)
    for each, src in ((receive, before), (work, mpisgd.rank())):
        with raises_everywhere(mpisgd.ShapeMismatch) as caught:
            each.wait()
        told = f"rank {src} sends {4 * sent} bytes of float32"
        everyone(told in caught.text and f"has {4 * place} " in caught.text, caught.text)
    everyone(moved["nccl"] == 0, f"{moved}")
    place = room()
    again = mpisgd.irecv(place, before, group, 3)
    mpisgd.send(on_gpu(mpisgd.rank()), after, group, 3)
    again.wait()
    equal(place, given(before))


@pytest.mark.parametrize("place", [0, 3])
def test_a_short_receive_that_began_before_the_first_collective_is_told_of_another_size(untouched, place):
    """The sender waited for an answer until its timeout: an announcement had no room there."""
    before, after = ring()
    receive = mpisgd.irecv(torch.zeros(place), before, untouched)
    referee().barrier()
    mpisgd.all_reduce(room(1), group=untouched)
    began_s = time.monotonic()
    work = mpisgd.isend(on_gpu(mpisgd.rank()), after, untouched)
    for each, src in ((receive, before), (work, mpisgd.rank())):
        with raises_everywhere(mpisgd.ShapeMismatch) as caught:
            each.wait()
        told = f"rank {src} sends {4 * N} bytes of float32"
        everyone(told in caught.text and f"has {4 * place} " in caught.text, caught.text)
    everyone(time.monotonic() - began_s < SOON_S)


def test_parts_of_tensors_and_other_dtypes(group):
    before, after = ring()
    place = torch.zeros(4, 120, dtype=torch.int16, device=DEVICE)
    mine = torch.arange(120, dtype=torch.int16).view(60, 2).to(DEVICE) + mpisgd.rank()
    works = [mpisgd.irecv(place[1:3, ::2], before, group), mpisgd.isend(mine.t(), after, group)]
    for work in works:
        work.wait()
    wanted = torch.zeros(4, 120, dtype=torch.int16)
    wanted[1:3, ::2] = (torch.arange(120, dtype=torch.int16).view(60, 2) + before).t()
    equal(place, wanted)


def test_streams_keep_their_order(group):
    """What is sent comes late, what it arrives in is read late, and no host waits for a stream."""
    before, after = ring()
    mine, place, seen = room(), torch.full((N,), -1.0, device=DEVICE), room()
    values = on_gpu(mpisgd.rank())
    gpu.synchronize()
    gpu._sleep(200_000_000)
    mine.copy_(values)
    seen.copy_(place)
    receive = mpisgd.irecv(place, before, group)
    work = mpisgd.isend(mine, after, group)
    work.wait()
    mine.zero_()
    receive.wait()
    used = place * 2
    everyone(not gpu.current_stream().query(), "a host has waited for the GPU")
    equal(seen, torch.full((N,), -1.0))
    equal(used, 2 * given(before))


def test_a_future_is_used_on_another_stream(group):
    before, after = ring()
    place = room()
    receive = mpisgd.irecv(place, before, group).get_future()
    sent = mpisgd.isend(on_gpu(mpisgd.rank()), after, group)
    with gpu.stream(gpu.Stream()):
        used = receive.wait()[0] * 2
        gpu.current_stream().synchronize()
    equal(used, 2 * given(before))
    everyone(sent.get_future().wait()[0].shape == (N,))


def test_a_message_and_a_collective_cross(group):
    """The sender's host waits for the collective, and nobody but a thread of ours launches the message."""
    total = mpisgd.size() * (mpisgd.size() + 1) / 2
    tensor, place = torch.full((N,), mpisgd.rank() + 1.0, device=DEVICE), room()
    before, after = ring()
    work = mpisgd.isend(on_gpu(mpisgd.rank()), after, group)
    if mpisgd.rank() > 0:
        mpisgd.recv(place, before, group)
        mpisgd.all_reduce(tensor, group=group)
    else:
        mpisgd.all_reduce(tensor, group=group)
        everyone_waits = tensor.sum().item()
        assert everyone_waits == total * N
        mpisgd.recv(place, before, group)
    work.wait()
    equal(place, given(before))
    everyone(tensor.tolist() == [total] * N)


def test_two_gpus_of_a_rank(group, moved):
    """Each pair of GPUs has a route of its own."""
    if gpu.device_count() < 2 * mpisgd.size():
        pytest.skip("needs two GPUs for each rank")
    other = torch.device(DEVICE, mpisgd.local_rank() + mpisgd.local_size())
    mpisgd.all_reduce(torch.ones(1, device=other), group=group)
    before, after = ring()
    launched = moved["nccl"]
    works, places = [], []
    for number, (start, end) in enumerate([(DEVICE, other), (other, DEVICE), (other, other)]):
        places.append(torch.zeros(N, device=end))
        works.append(mpisgd.irecv(places[-1], before, group, number))
        works.append(mpisgd.isend(given(mpisgd.rank(), number).to(start), after, group, number))
    for work in works:
        work.wait()
    for number, place in enumerate(places):
        equal(place, given(before, number))
    everyone(moved["nccl"] - launched == 6, f"{moved}")


def test_by_torch_distributed(expected_way, moved):
    if expected_way != "nccl":
        pytest.skip("there is no communicator")
    dist.init_process_group("mpisgd")
    try:
        dist.all_reduce(room(1))
        before, after = ring()
        launched, places = moved["nccl"], [room() for _ in range(3)]
        ops = [
            op
            for number, place in enumerate(places)
            for op in (
                dist.P2POp(dist.isend, on_gpu(mpisgd.rank(), number), after, tag=number),
                dist.P2POp(dist.irecv, place, before, tag=number),
            )
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        for number, place in enumerate(places):
            equal(place, given(before, number))
        if mpisgd.rank() == 0:
            dist.send(on_gpu(0), 1)
        elif mpisgd.rank() == 1:
            assert dist.recv(places[0], None) == 0
            assert torch.equal(places[0].cpu(), given(0))
        everyone(moved["nccl"] - launched == 6 + (mpisgd.rank() < 2), f"{moved}")
    finally:
        dist.destroy_process_group()


def test_a_pipeline_sends_by_nccl(expected_way, moved):
    if expected_way != "nccl":
        pytest.skip("there is no communicator")
    count, outcomes = mpisgd.size(), {}
    for place in ("cpu", DEVICE):
        stages = [stage.to(place) for stage in make_stages(count)]
        pipeline = Pipeline(stages, num_micro_batches=2, loss=mse_loss, optimizer=sgd, loss_on_all_ranks=True)
        launched = moved["nccl"]
        losses = []
        for number in range(2):
            inputs, targets = (tensor.to(place) for tensor in batch(number, 8, count))
            losses.append(pipeline.step(inputs, targets))
        outcomes[place] = losses
        by_nccl = moved["nccl"] - launched
        pipeline.close()
    everyone(by_nccl >= 8, f"{by_nccl}")
    everyone(
        all(abs(a - b) < 1e-12 for a, b in zip(outcomes["cpu"], outcomes[DEVICE], strict=True)), f"{outcomes}"
    )


# -- the check of gpu_check ---------------------------------------------------------------------------------


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setattr(Gpu, "_simulate", lambda self: None)  # tests/gpu has done that
    return Gpu(simulated=IS_SIMULATED, quick=True)


def finds(gpu: Gpu, verdict: str) -> None:
    found = crossing(gpu)
    everyone(any(referee().allgather(found.verdict == verdict)), f"{found}")
    if verdict == HOLDS:
        everyone(found.verdict == HOLDS, f"{found}")
    gpu.synchronize()


def test_the_check_holds(checked):
    """By NCCL and through host memory."""
    finds(checked, HOLDS)


def test_the_check_fails_where_a_message_does_not_wait_for_its_tensor(group, checked, monkeypatch):
    real = Channel._launch

    def launch(self: Channel, transfer: Any) -> None:
        transfer.ready = gpu.Stream().record_event()
        real(self, transfer)

    monkeypatch.setattr(Channel, "_launch", launch)
    finds(checked, FAILS)


def test_the_check_fails_where_messages_go_through_host_memory(group, checked, monkeypatch):
    monkeypatch.setattr(DeviceMessages, "announces", lambda *given: False)
    finds(checked, FAILS)


# -- what goes wrong --------------------------------------------------------------------------------------


def test_where_a_pair_cannot_be_connected_messages_go_through_host_memory_with_a_warning(
    group, moved, monkeypatch
):
    made = mpisgd.new_group()
    mpisgd.all_reduce(room(1), group=made)
    monkeypatch.setattr(selection, "_warned", False)
    real = SimulatedNccl.eager_connect_single_device

    def connect(self: SimulatedNccl, device: torch.device) -> None:
        if mpisgd.rank() == 1:
            raise dist.DistBackendError("no memory left for the rings")
        real(self, device)

    monkeypatch.setattr(SimulatedNccl, "eager_connect_single_device", connect)
    launched, began_s = moved["nccl"], time.monotonic()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if mpisgd.rank() < 2:
            peer = 1 - mpisgd.rank()
            for _ in range(2):
                works, places = [], [room() for _ in range(3)]
                for number, place in enumerate(places):
                    works.append(mpisgd.isend(on_gpu(mpisgd.rank(), number), peer, made))
                    works.append(mpisgd.irecv(place, peer, made))
                for work in works:
                    work.wait()
                for number, place in enumerate(places):
                    assert torch.equal(place.cpu(), given(peer, number))
    told = [str(each.message) for each in seen if "no memory left for the rings" in str(each.message)]
    everyone(len(told) == (mpisgd.rank() < 2), f"{told}")
    took_s = time.monotonic() - began_s
    everyone(moved["nccl"] == launched and took_s < SOON_S, f"{moved}, {took_s:.1f} s")
    close_group(made)


def share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedGpu, "identity", lambda *given: "the only one")


def rank_one_has_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedGpu, "has_nccl", lambda self: mpisgd.rank() != 1)


@pytest.mark.parametrize(
    ("arrange", "reason"),
    [(share_a_gpu, "share one GPU"), (rank_one_has_no_nccl, "the torch of rank 1 has no NCCL")],
    ids=["shared", "without"],
)
def test_ends_without_nccl_between_them_are_told_so_once(untouched, moved, monkeypatch, arrange, reason):
    arrange(monkeypatch)
    monkeypatch.setattr(selection, "_warned", False)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number in range(2):
            if mpisgd.rank() < 2:
                place = room()
                receive = mpisgd.irecv(place, 1 - mpisgd.rank(), untouched)
                mpisgd.send(on_gpu(mpisgd.rank(), number), 1 - mpisgd.rank(), untouched)
                receive.wait()
                assert torch.equal(place.cpu(), given(1 - mpisgd.rank(), number))
    told = [str(each.message) for each in seen if reason in str(each.message)]
    expected = (mpisgd.rank() < 2) if arrange is share_a_gpu else (mpisgd.rank() == 1)
    everyone(len(told) == expected, f"{told}")
    everyone(moved["nccl"] == 0, f"{moved}")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 agrees to send, and is never heard of again."""
    real = Channel._launch
    monkeypatch.setattr(
        Channel, "_launch", lambda *given: None if mpisgd.rank() == 1 and given[0].sends else real(*given)
    )


def received_from_nobody(group: mpisgd.Group) -> Tensor:
    """What rank 0 receives from rank 1 by NCCL, which waits for that."""
    place = room()
    if mpisgd.rank() == 1:
        mpisgd.isend(on_gpu(1), 0, group)
    elif mpisgd.rank() == 0:
        mpisgd.recv(place, 1, group)
    return place


def is_woken(place: Tensor, limit_s: float) -> None:
    began_s = time.monotonic()
    place.sum().item()
    took_s = time.monotonic() - began_s
    everyone(mpisgd.rank() != 0 or took_s < limit_s, f"{took_s}")


def fails(kind: type[Exception], what: str, group: mpisgd.Group) -> None:
    """The next operation of rank 0 raises, whichever it is."""
    calls: list[Callable[[], object]] = [
        lambda: mpisgd.irecv(room(), 1, group),
        lambda: mpisgd.isend(room(), 1, group),
        lambda: mpisgd.all_reduce(room(), group=group),
    ]
    told = []
    for call in calls if mpisgd.rank() == 0 else ():
        with pytest.raises(kind) as caught:
            call()
        told.append(what in str(caught.value) or str(caught.value))
    everyone(all(each is True for each in told), f"{told}")


def test_a_sender_that_stops_is_an_error_where_the_host_waits_for_the_gpu(short, silent):
    place = received_from_nobody(short)
    is_woken(place, 4 * LIMIT_S)
    fails(mpisgd.CollectiveTimeout, "for rank 1", short)


def test_nobody_receives(short):
    """The host waits, with our limit."""
    with raises_everywhere(mpisgd.CollectiveTimeout) as caught:
        mpisgd.send(on_gpu(mpisgd.rank()), ring()[1], short)
    everyone(f"send to rank {ring()[1]}" in caught.text, caught.text)
    place = room()
    mpisgd.recv(place, ring()[0], short)
    equal(place, given(ring()[0]))


def test_a_lost_sender_is_an_error_where_the_host_waits_for_the_gpu(idle_world, short, silent, opened):
    """The last test: it takes all groups that NCCL has connected."""
    close_group(opened)
    place = received_from_nobody(short)
    timer = threading.Timer(0.3, lambda: waiting.cancel_all(PeerLost(LOST)))
    timer.start()
    is_woken(place, LIMIT_S)
    timer.join()
    referee().barrier()
    waiting.allow_waits()
    fails(PeerLost, LOST, short)
