"""The simulated device does what CUDA and torch do, and late: what is not waited for is not seen."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from gpu_under_test import DEVICE, gpu
from simulated_gpu.allocator import GARBAGE
from torch import Tensor, nn


@pytest.fixture
def side() -> torch.Stream:
    return gpu.Stream()


def late(stream: torch.Stream, value: float) -> Tensor:
    """A tensor that holds `value` when `stream` is there, and 0 before."""
    tensor = torch.zeros(5, device=DEVICE)
    gpu.synchronize()
    with stream:
        tensor.fill_(value)
    return tensor


def test_nothing_orders_two_streams_but_an_event(simulated, side):
    x = late(side, 1.0)
    assert (x + 1).tolist() == [1.0] * 5  # the default stream does not wait
    gpu.current_stream().wait_stream(side)
    assert (x + 1).tolist() == [2.0] * 5


def test_an_event_stands_for_what_was_queued_before_it(simulated, side):
    x = late(side, 1.0)
    event = side.record_event()
    with side:
        x.fill_(2.0)
    event.synchronize()
    assert event.query()
    assert not side.query()
    assert x.tolist() == [1.0] * 5
    side.synchronize()
    assert x.tolist() == [2.0] * 5


def test_what_nobody_waits_for_begins_by_itself(simulated, side):
    simulated.device.streams.latency_s = 0.0
    x = late(side, 1.0)
    for _ in range(1000):
        if side.query():
            break
        threading.Event().wait(0.01)
    assert side.query()
    assert x.tolist() == [1.0] * 5


def test_the_host_waits_for_copies_that_are_not_to_pinned_memory(simulated):
    x = torch.zeros(5, device=DEVICE)
    x += 1
    assert x.cpu().tolist() == [1.0] * 5
    pinned, pageable = simulated.pinned(5, torch.float32).fill_(7.0), torch.zeros(5)
    pinned.copy_(x, non_blocking=True)
    assert pinned.tolist() == [7.0] * 5
    gpu.current_stream().synchronize()
    assert pinned.tolist() == [1.0] * 5
    pageable.copy_(x, non_blocking=True)
    assert pageable.tolist() == [1.0] * 5


def test_a_copy_from_pinned_memory_reads_it_late_and_one_from_other_memory_at_once(simulated):
    x, y = torch.zeros(5, device=DEVICE), torch.zeros(5, device=DEVICE)
    pinned, pageable = simulated.pinned(5, torch.float32).fill_(1.0), torch.ones(5)
    x.copy_(pinned, non_blocking=True)
    y.copy_(pageable, non_blocking=True)
    pinned.fill_(2.0)
    pageable.fill_(2.0)
    assert (x.tolist(), y.tolist()) == ([2.0] * 5, [1.0] * 5)


def test_freed_memory_is_handed_out_while_another_stream_uses_it(simulated, side):
    """Unless the allocator is told."""
    for tell in (False, True):
        x = torch.ones(5555, device=DEVICE)
        gpu.synchronize()
        address, seen = x.data_ptr(), torch.zeros(5555, device=DEVICE)
        gpu.synchronize()
        with side:
            seen.copy_(x)
        if tell:
            x.record_stream(side)
        del x
        gc.collect()
        y = torch.full((5555,), 7.0, device=DEVICE)
        gpu.current_stream().synchronize()
        side.synchronize()
        assert (y.data_ptr() == address) is not tell
        assert seen.tolist() == [1.0 if tell else 7.0] * 5555


def test_fresh_memory_holds_no_zeros(simulated):
    assert (torch.empty(77777, dtype=torch.uint8, device=DEVICE) == GARBAGE).all()


def test_a_new_thread_begins_on_device_0_and_its_default_stream(simulated, side):
    before = gpu.current_device()
    gpu.set_device(1)
    with gpu.Stream():
        found: list[object] = []
        thread = threading.Thread(
            target=lambda: found.extend([gpu.current_device(), gpu.current_stream().stream_id])
        )
        thread.start()
        thread.join()
    gpu.set_device(before)
    assert found == [0, 0]


def test_a_future_with_devices_makes_its_consumers_wait_and_one_without_does_not(simulated, side):
    x, other = late(side, 1.0), gpu.Stream()
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[x.device])
    plain: torch.futures.Future[Tensor] = torch.futures.Future()
    with side:
        future.set_result(x)
        plain.set_result(x)
    with other:
        missed = plain.wait() * 1
        other.synchronize()
        seen = future.then(lambda done: done.value() * 3).wait() * 1
        other.synchronize()
    assert (missed.tolist(), seen.tolist()) == ([0.0] * 5, [3.0] * 5)


def test_backward_runs_on_a_thread_of_the_device_and_on_the_streams_of_forward(simulated, side):
    model = nn.Linear(3, 2).to(DEVICE)
    found: list[object] = []
    model.weight.register_post_accumulate_grad_hook(
        lambda _: found.extend([threading.current_thread(), gpu.current_device(), gpu.current_stream()])
    )
    with side:
        model(torch.ones(1, 3, device=DEVICE)).sum().backward()
    assert found[0] is not threading.current_thread()
    assert found[1] == gpu.current_device()
    side.synchronize()
    assert model.weight.grad.tolist() == [[1.0] * 3] * 2


def test_training_equals_the_cpu(simulated):
    torch.manual_seed(3)
    ours = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1))
    theirs = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 1)).to(DEVICE)
    theirs.load_state_dict(ours.state_dict())
    losses: list[list[float]] = [[], []]
    for losses_of, model in zip(losses, (ours, theirs), strict=True):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for step in range(4):
            inputs = torch.arange(8.0).view(2, 4).sin().add(step).to(next(model.parameters()).device)
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            losses_of.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_random_numbers_are_drawn_at_the_launch(simulated, side):
    torch.manual_seed(5)
    expected = [torch.randn(3, device=DEVICE).tolist() for _ in range(2)]
    torch.manual_seed(5)
    with side:
        first = torch.randn(3, device=DEVICE)
    second = torch.randn(3, device=DEVICE).tolist()
    side.synchronize()
    assert [first.tolist(), second] == expected


def test_shapes_that_depend_on_the_data_are_waited_for(simulated):
    x = torch.arange(4.0, device=DEVICE)
    assert torch.nonzero(x > 1).flatten().tolist() == [2, 3]
    assert torch.equal(x, x.clone())
    assert x[x > 1].tolist() == [2.0, 3.0]


def test_memory_that_is_freed_while_memory_is_freed_is_handed_out_once(simulated, monkeypatch):
    """Garbage is collected at any time, in the thread that has the allocator's lock."""
    allocator, streams = simulated.device.allocator, simulated.device.streams
    first, second, busy = (allocator.allocate(4444, streams.get(0, 0)) for _ in range(3))
    real, garbage = streams.query, [second]
    busy.users.add(streams.get(0, 1))

    def query(event: object) -> bool:
        if garbage:
            allocator.free(garbage.pop())
        return real(event)

    monkeypatch.setattr(streams, "query", query)
    allocator.free(first)
    allocator.free(busy)  # whose users are asked
    assert not garbage
    taken = [allocator.allocate(4444, streams.get(0, 0)) for _ in range(5)]
    assert len({block.address for block in taken}) == 5
    for block in taken:
        allocator.free(block)


class CollectingLock:
    """A lock. Who has it collects garbage when it makes its first object, its second, and so on in turn."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock, self._depth, self._turn = lock, 0, 0
        self._lists: list[object] = []

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._turn += 1
            self._lists.append(
                [[] for _ in range(100)]
            )  # Python keeps as many, for which it collects nothing
            gc.set_threshold(gc.get_count()[0] + self._turn % 8)
            gc.enable()

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            gc.disable()
            self._lists.clear()
        self._lock.release()


def test_no_memory_is_lost_or_handed_out_twice_whenever_garbage_is_collected(simulated, side, monkeypatch):
    """And with it tensors that are in reference cycles."""
    allocator, before = simulated.device.allocator, gc.get_threshold()
    monkeypatch.setattr(simulated.device.streams, "lock", CollectingLock(simulated.device.streams.lock))
    gc.disable()
    try:
        for number in range(400):
            tensors = [torch.empty(333 + n % 3 * 512, device=DEVICE) for n in range(4)]
            for tensor in tensors[number % 2 :]:
                tensor.record_stream(side)
            cycles: list[object] = [[tensors.pop()], [tensors.pop()]]
            for cycle in cycles:
                cycle.append(cycle)
            del tensor, tensors
            del cycle, cycles
    finally:
        gc.enable()
        gc.set_threshold(*before)
    gc.collect()
    gpu.synchronize()
    free = [block for blocks in allocator._free.values() for block in blocks]
    known = [*free, *(block for block, _ in allocator._waiting), *allocator._in_use.values()]
    assert len({block.address for block in known}) == len(known)
    assert sum(block.size for block in known) == sum(allocator.reserved.values())
    assert sum(block.size for block in allocator._in_use.values()) == sum(allocator.allocated.values())


def test_training_with_sparse_gradients_equals_the_cpu(simulated):
    torch.manual_seed(3)
    tables = [nn.Embedding(7, 4, sparse=True), nn.Embedding(7, 4, sparse=True).to(DEVICE)]
    tables[1].load_state_dict(tables[0].state_dict())
    for table in tables:
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.5)
        for step in range(3):
            optimizer.zero_grad()
            words = torch.tensor([1, 2, 2, 3 + step], device=table.weight.device)
            table(words).square().sum().backward()
            assert table.weight.grad.is_sparse
            optimizer.step()
    mine, theirs = (table.weight.grad.coalesce() for table in tables)
    assert theirs.device.type == DEVICE
    assert theirs.indices().tolist() == mine.indices().tolist()
    torch.testing.assert_close(tables[1].weight.cpu(), tables[0].weight)


def test_parts_of_a_sparse_tensor_stay_late_until_somebody_looks_at_them(simulated, side):
    values = late(side, 2.0)
    at = torch.arange(5, device=DEVICE).unsqueeze(0)
    made = torch.sparse_coo_tensor(at, values, (5,), check_invariants=False)
    assert not side.query()
    assert made.to_dense().tolist() == [0.0] * 5  # the default stream does not wait for that one
    side.synchronize()
    assert made.to_dense().tolist() == [2.0] * 5


def test_what_the_device_has_not_is_refused_by_its_name(simulated):
    bag = nn.EmbeddingBag(7, 3).to(DEVICE)
    with pytest.raises(NotImplementedError, match="no EmbeddingBag"):
        bag(torch.zeros(2, 2, dtype=torch.int64, device=DEVICE))
