"""Operations find each other by name: in any order, from any thread, whenever somebody asks for them."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from closed_form import given
from reductions import near
from verdicts import everyone, referee

import mpisgd.horovod as hvd
from mpisgd.horovod.engine import request as requests

F64 = torch.float64


def operations(prefix: str) -> dict[str, tuple]:
    """Name -> (how it is submitted, what it must give)."""
    rank, size = hvd.rank(), hvd.size()
    found = {}
    for i in range(6):
        xs = [given(r + i, F64, (i + 1, 2)) for r in range(size)]
        x, root = xs[rank], i % size
        wide = [given(r, F64, (size, i)) for r in range(size)]
        found |= {
            f"{prefix}.sum.{i}": (lambda n, x=x: hvd.allreduce_async(x, name=n, op=hvd.Sum), sum(xs)),
            f"{prefix}.max.{i}": (
                lambda n, x=x: hvd.allreduce_async_(x.clone(), name=n, op=hvd.Max),
                torch.stack(xs).amax(0),
            ),
            f"{prefix}.gather.{i}": (lambda n, x=x: hvd.allgather_async(x, n), torch.cat(xs)),
            f"{prefix}.cast.{i}": (lambda n, x=x, root=root: hvd.broadcast_async(x, root, n), xs[root]),
            f"{prefix}.all.{i}": (
                lambda n, x=wide[rank]: hvd.alltoall_async(x, name=n),
                torch.stack([w[rank] for w in wide]),
            ),
            f"{prefix}.scatter.{i}": (
                lambda n, x=wide[rank]: hvd.reducescatter_async(x, n, hvd.Sum),
                sum(wide)[rank : rank + 1],
            ),
        }
    return found


def shuffled(items, seed: int) -> list:
    return random.Random(f"{seed} {hvd.rank()}").sample(sorted(items), len(items))


@pytest.mark.parametrize("seed", [1, 2])
def test_every_rank_in_an_order_of_its_own(seed):
    """Twice under the same names: the second time they are known."""
    todo = operations("order")
    for turn in (0, 1):
        handles = {}
        for name in shuffled(todo, seed + 10 * turn):
            handles[name] = todo[name][0](name)
            if random.random() < 0.1:
                time.sleep(0.003)  # so that some cycles begin in between
        for name in shuffled(handles, seed + 20 * turn):
            near(hvd.synchronize(handles[name]), todo[name][1])


def test_from_several_threads_at_once():
    """Each thread waits for every operation before its next one."""
    wrong = []

    def work(number: int) -> None:
        for name, (submit, right) in list(operations(f"thread.{number}").items())[:8]:
            try:
                near(hvd.synchronize(submit(name)), right)
            except BaseException as exc:
                wrong.append((name, exc))

    threads = [threading.Thread(target=work, args=(number,)) for number in shuffled(range(4), 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everyone(not wrong, f"{wrong}")


def test_operations_without_a_name_are_counted():
    xs = [torch.tensor([float(hvd.rank() + i)]) for i in range(5)]
    handles = [hvd.allreduce_async(x, op=hvd.Sum) for x in xs]
    for i, handle in reversed(list(enumerate(handles))):
        assert hvd.synchronize(handle).item() == sum(rank + i for rank in range(hvd.size()))


def test_counting_is_by_process_set_and_leaves_out_what_was_refused():
    """Some ranks do more than others; the next operation without a name is the same one for all."""
    alone = hvd.global_process_set if hvd.size() == 1 else hvd.add_process_set([0])
    if hvd.rank() == 0:
        for _ in range(3):
            hvd.allreduce(torch.ones(1), process_set=alone)
        for call in (
            lambda: hvd.alltoall(torch.ones(1), [2] * hvd.size()),
            lambda: hvd.broadcast(torch.ones(1), -1),
            lambda: hvd.allgather(torch.tensor(1.0)),
            lambda: hvd.reducescatter(torch.tensor(1.0)),
        ):
            with pytest.raises(ValueError):
                call()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    hvd.remove_process_set(alone)


def test_the_same_name_again_when_the_first_is_done_and_for_other_kinds_at_once():
    for turn in range(3):
        x = torch.tensor([float(turn + hvd.rank())])
        handles = [
            hvd.allreduce_async(x, name="again", op=hvd.Sum),
            hvd.allgather_async(x, "again"),
            hvd.broadcast_async(x, 0, "again"),
        ]
        total, gathered, first = map(hvd.synchronize, handles)
        everyones = [float(turn + rank) for rank in range(hvd.size())]
        assert (total.item(), gathered.tolist(), first.item()) == (sum(everyones), everyones, everyones[0])


@pytest.mark.mpi(min_size=2)
def test_the_same_name_for_two_kinds_may_come_in_any_order_and_in_different_cycles():
    x = torch.full((2,), 1.0 + hvd.rank())
    calls = [lambda: hvd.allreduce_async(x, name="both", op=hvd.Sum), lambda: hvd.allgather_async(x, "both")]
    last = hvd.rank() == hvd.size() - 1
    handles = []
    for call in reversed(calls) if last else calls:
        handles.append(call())
        hvd.barrier()  # by then all ranks know of it
    total, gathered = map(hvd.synchronize, reversed(handles) if last else handles)
    everyones = [1.0 + rank for rank in range(hvd.size())]
    assert total.tolist() == [sum(everyones)] * 2
    assert gathered.tolist() == [value for value in everyones for _ in range(2)]


@pytest.mark.mpi(min_size=2)
def test_a_name_that_is_pending_is_refused_and_the_first_is_not_harmed():
    x = torch.ones(2)
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(x, name="pending", op=hvd.Sum)
        with pytest.raises(ValueError, match=r"'pending'.*same name as another tensor"):
            hvd.allreduce_async(x, name="pending", op=hvd.Sum)
        with pytest.raises(ValueError, match="same name"):
            hvd.grouped_allreduce([x], name="pending")
    referee().Barrier()
    if hvd.rank() != 0:
        handle = hvd.allreduce_async(x, name="pending", op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 2


@pytest.mark.mpi(min_size=2)
def test_poll_tells_whether_it_is_done():
    x = torch.ones(1)
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(x, name="polled")
        time.sleep(0.02)
        before = hvd.poll(handle)
        referee().Barrier()
    else:
        referee().Barrier()
        handle = hvd.allreduce_async(x, name="polled")
        before = False
    everyone(not before, "done before the others had submitted it")
    deadline = time.monotonic() + 20
    while not hvd.poll(handle) and time.monotonic() < deadline:  # nobody waits for it
        time.sleep(0.001)
    everyone(hvd.poll(handle), "never done")
    hvd.synchronize(handle)


def test_handles_that_are_unknown_or_used_up():
    handle = hvd.allreduce_async(torch.ones(1), name="used up")
    assert hvd.synchronize(handle).item() == 1
    assert hvd.synchronize(handle) is None
    assert hvd.synchronize(10**9) is None
    for unknown in (handle, 10**9):
        with pytest.raises(ValueError, match="was not given out, or has been synchronized"):
            hvd.poll(unknown)


def test_handles_that_nobody_synchronizes():
    """Their tensors live until they are done, though nobody else knows them."""
    x = torch.zeros(3)
    hvd.allreduce_async_(x, name="forgotten", op=hvd.Sum)
    for i in range(20):
        hvd.allreduce_async(torch.full((50,), float(i)), name=f"forgotten.{i}")
    hvd.barrier()
    assert hvd.allreduce(torch.ones(1), name="forgotten.0").item() == 1


def test_a_steady_loop_tells_of_known_names_by_a_bit_each(monkeypatch):
    names, said = [f"steady.{i}" for i in range(70)], []
    everything = requests.all_gather_object
    x = torch.ones(3)
    for turn in range(3):
        if turn == 1:
            monkeypatch.setattr(requests, "all_gather_object", lambda *a: said.append(a) or everything(*a))
        for handle in [hvd.allreduce_async(x, name=name, op=hvd.Sum) for name in shuffled(names, turn)]:
            assert hvd.synchronize(handle).tolist() == [hvd.size()] * 3
    everyone(not said, f"{len(said)} cycles told of new requests")
    hvd.allreduce(torch.ones(4), name="steady.0")
    everyone(len(said) >= 1, "a new shape was taken for the known one")
