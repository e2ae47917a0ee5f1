"""Programs that use torch.distributed and know nothing of mpisgd but the backend's name."""

from __future__ import annotations

import re
import textwrap

import pytest
from launcher import run_python


@pytest.fixture
def start(tmp_path):
    """Run a program's text; warnings are errors there."""

    def run(text: str, num_ranks: int | None = None, fresh: bool = False, **env: str):
        program = tmp_path / "prog.py"
        program.write_text(textwrap.dedent(text))
        return run_python("-W", "error", str(program), num_ranks=num_ranks, env=env, fresh=fresh)

    return run


def said(done) -> list[str]:
    """The lines of all ranks, in no order, of a run without complaints."""
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(done.stdout.splitlines())


def test_the_backend_is_known_where_ours_is_imported_before_torch(start):
    """`mpisgd.dtypes` imports torch, which imports the backend, which once wanted `mpisgd.dtypes` whole."""
    done = start(
        """
        from mpisgd import ReduceOp
        import torch.distributed as dist
        print("mpisgd" in dist.Backend.backend_list)
        """,
        fresh=True,
    )
    assert said(done) == ["True"]


def test_every_way_to_begin_and_to_begin_again(start):
    """Wrongly, bare, mpi://, as torchrun's programs do it, other ranks, a store, beside gloo; and no end."""
    done = start(
        """
        import os
        import torch, sys
        assert "mpi4py" not in sys.modules  # `import torch` starts nothing
        import torch.distributed as dist
        assert "RANK" not in os.environ
        import mpisgd
        mpisgd.init()  # for programs that read the variables before anything else
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        assert os.environ["LOCAL_RANK"] == str(rank) and os.environ["LOCAL_WORLD_SIZE"] == str(size)

        def attempt(name, **ranks):
            try:
                dist.init_process_group("mpisgd", **ranks)
            except ValueError as exc:
                print(name, rank, exc)
                assert not dist.is_initialized()

        def use(how, wanted_rank):
            assert dist.get_rank() == wanted_rank and dist.get_world_size() == size
            everyone = [None] * size
            dist.all_gather_object(everyone, 10 * wanted_rank)
            x = torch.full((3,), wanted_rank + 1.0)
            dist.broadcast(x, 1)
            half = dist.new_group([1])
            assert dist.get_rank(half) == (0 if wanted_rank == 1 else -1)
            print(how, rank, everyone, x.tolist())

        attempt("size", rank=rank, world_size=3)
        attempt("twice", rank=0, world_size=2)
        dist.init_process_group("mpisgd")
        use("bare", rank)
        dist.destroy_process_group()
        dist.init_process_group("cpu:mpisgd", init_method="mpi://", group_name="mine")
        use("mpi://", rank)
        dist.destroy_process_group()
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
        dist.init_process_group("mpisgd", rank=rank, world_size=size)
        use("torchrun", rank)
        dist.destroy_process_group()
        dist.init_process_group(backend="mpisgd", init_method="env://", rank=size - 1 - rank, world_size=size)
        use("other ranks", size - 1 - rank)
        dist.destroy_process_group()
        dist.init_process_group("mpisgd", store=dist.HashStore(), rank=rank, world_size=size)
        use("own store", rank)
        dist.destroy_process_group()
        meeting_place = "file://" + os.path.join(os.path.dirname(__file__), "gloo")
        dist.init_process_group("gloo", init_method=meeting_place, rank=rank, world_size=size)
        ours = dist.new_group(backend="mpisgd")
        dist.all_reduce(x := torch.ones(1), group=ours)
        print("under gloo", rank, dist.get_backend(ours), x.item())
        dist.destroy_process_group()
        dist.init_process_group("mpisgd")
        """,
        2,
    )
    lines = said(done)
    refused = [line for line in lines if line.startswith(("size", "twice"))]
    assert [line.split()[:2] for line in refused] == [
        ["size", "0"],
        ["size", "1"],
        ["twice", "0"],
        ["twice", "1"],
    ]
    assert all("world_size=3, but this job has 2 rank(s)" in line for line in refused[:2])
    assert all("call themselves [0, 0]" in line for line in refused[2:])
    under_gloo = [line for line in lines if line.startswith("under gloo")]
    assert under_gloo == [f"under gloo {rank} mpisgd 2.0" for rank in (0, 1)]
    ways = ("bare", "mpi://", "other ranks", "own store", "torchrun")
    assert [line for line in lines if line not in refused + under_gloo] == [
        f"{way} {rank} [0, 10] [2.0, 2.0, 2.0]" for way in ways for rank in (0, 1)
    ]


def test_alone_the_world_is_one_process(start):
    """Also with torch's look-up of entry points turned off; `import torch` costs no MPI."""
    done = start(
        """
        import sys, os
        import torch
        import torch.distributed as dist
        assert "mpisgd" not in sys.modules and "mpisgd" not in dist.Backend.backend_list
        import mpisgd.torch_backend
        assert "mpi4py" not in sys.modules and "RANK" not in os.environ
        dist.init_process_group("mpisgd")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(4, 2)).sum().backward()
        print(dist.get_rank(), dist.get_world_size(), model.module.bias.grad.item())
        dist.destroy_process_group()
        """,
        fresh=True,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert said(done) == ["0 1 4.0"]


def test_an_exception_on_one_rank_ends_the_job_with_one_traceback(start):
    """torch has put a hook of its own around ours."""
    done = start(
        """
        import torch
        import torch.distributed as dist
        dist.init_process_group("mpisgd")
        if dist.get_rank() == 1:
            raise ZeroDivisionError("by rank 1")
        dist.all_reduce(torch.ones(3))
        """,
        2,
    )
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.count("ZeroDivisionError: by rank 1") == 1
    assert "rank 1 of 2" in done.stderr


def test_a_gloo_group_and_spawned_workers_beside_ours(start):
    """gloo's group meets through our store; a loader's workers import torch and are no ranks."""
    done = start(
        """
        import os
        import torch
        import torch.distributed as dist
        from torch.utils.data import DataLoader, TensorDataset

        def main():
            dist.init_process_group("mpisgd")
            rank, size = dist.get_rank(), dist.get_world_size()
            gloo = dist.new_group(backend="gloo")
            few = dist.new_group([0, 1], backend="gloo", use_local_synchronization=True) if rank < 2 else None
            x, y, z = (torch.full((4,), rank + 1.0) for _ in range(3))
            work = dist.all_reduce(x, async_op=True)
            dist.all_reduce(y, group=gloo)
            work.wait()
            dist.monitored_barrier(gloo)
            if few is not None:
                dist.all_reduce(z, group=few)
            data = TensorDataset(torch.arange(6.0) + 10 * rank)
            loader = DataLoader(data, batch_size=3, num_workers=1, multiprocessing_context="spawn")
            total = sum(batch.sum() for batch, in loader)
            dist.all_reduce(total)
            print(rank, x[0].item(), y[0].item(), z[0].item(), total.item())

        if __name__ == "__main__":
            main()
        """,
        3,
    )
    assert said(done) == ["0 6.0 6.0 3.0 225.0", "1 6.0 6.0 3.0 225.0", "2 6.0 6.0 3.0 225.0"]


def test_time_limits_name_the_ranks_that_do_not_come(start):
    done = start(
        """
        from datetime import timedelta
        import torch
        import torch.distributed as dist
        from mpisgd import CollectiveTimeout
        from mpisgd.torch_backend import monitored_barrier

        dist.init_process_group("mpisgd", timeout=timedelta(seconds=20))
        rank, x = dist.get_rank(), torch.ones(2)
        assert dist.group.WORLD.mpisgd_group.queue.consistency.timeout_s == 20
        limited = dist.new_group(timeout=timedelta(seconds=0.5))
        changed = dist.new_group()
        changed.set_timeout(timedelta(seconds=0.6))
        watched, later = dist.new_group(), dist.new_group(timeout=timedelta(seconds=0.4))

        def attempt(name, call):
            try:
                call()
            except CollectiveTimeout as exc:
                print(name, rank, str(exc).split("has waited ")[1], flush=True)

        if rank != 1:
            attempt("limited", lambda: dist.all_reduce(x, group=limited))
            attempt("again", lambda: dist.all_reduce(x, group=limited))
            attempt("changed", lambda: dist.barrier(changed))
        if rank == 0:
            attempt("watched", lambda: monitored_barrier(watched, timedelta(seconds=0.3)))
            attempt("later", lambda: dist.all_reduce(x, group=later, async_op=True).wait())
            attempt("message", lambda: dist.irecv(x, 1).wait(timedelta(seconds=0.2)))
        dist.barrier()
        print("world", rank, flush=True)
        dist.barrier()  # the first to leave ends the job: all have said their lines by then
        """,
        3,
    )
    waited = {tuple(line.split()[:2]): " ".join(line.split()[2:]) for line in done.stdout.splitlines()}
    missing = r"[\d.]+ s for (rank 1|ranks 0, 1|ranks 1, 2)\b"  # the others come, but maybe late
    for rank in "02":
        assert re.match(missing, waited["limited", rank])
        assert waited["again", rank] == waited["limited", rank]  # a group that was left behind stays so
        assert re.match(missing, waited["changed", rank])
    assert re.match(r"[\d.]+ s for ranks 1, 2\b", waited["watched", "0"])
    assert re.match(r"[\d.]+ s for ranks 1, 2\b", waited["later", "0"])
    assert "the other side has not called its part" in waited["message", "0"]
    assert [("world", rank) in waited for rank in "012"] == [True] * 3
    assert done.returncode == 1  # what was started in those groups never ended: no clean exit
    assert done.stderr.count("raised, the job ends") == 1


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_a_group_that_timed_out_and_was_destroyed_ends_cleanly(start, shared_memory):
    """As with gloo: who has timed out waits for nobody, and the others are not left waiting for it."""
    done = start(
        """
        from datetime import timedelta
        import torch
        import torch.distributed as dist

        dist.init_process_group("mpisgd")
        rank, short = dist.get_rank(), timedelta(seconds=0.4)
        everyones, late = dist.new_group(timeout=short), dist.new_group(timeout=short)
        pair = dist.new_group([0, 1], timeout=short)

        def time_out(group):
            try:
                dist.all_reduce(torch.ones(2), group=group)
            except RuntimeError as exc:
                print("caught", type(exc).__name__, flush=True)

        if rank == 0:
            time_out(everyones)
        dist.barrier()
        dist.destroy_process_group(everyones)
        if rank == 1:
            time_out(pair)
        if rank == 2:
            dist.irecv(torch.ones(2), 0, late)  # never comes
            time_out(late)
        dist.all_reduce(x := torch.ones(2))
        print("goes on", x.tolist(), flush=True)
        if rank == 1:
            dist.destroy_process_group(pair)
        if rank == 2:
            dist.destroy_process_group(late)  # the others just come to the end of the program
        """,
        3,
        MPISGD_SHARED_MEMORY=shared_memory,
    )
    assert sorted(done.stdout.splitlines()) == ["caught CollectiveTimeout"] * 3 + ["goes on [3.0, 3.0]"] * 3
    assert done.returncode == 0, done.stderr  # the timeouts are reported there, and nothing else
    assert "the job ends" not in done.stderr


def test_a_monitored_barrier_says_what_gloos_says(start):
    """In all its forms; who is missing is told by group rank 0, in ranks of the group."""
    done = start(
        """
        import warnings
        from datetime import timedelta
        import torch.distributed as dist

        dist.init_process_group("mpisgd")
        from torch.distributed import monitored_barrier
        rank, short = dist.get_rank(), timedelta(seconds=0.3)
        two, one, all_late, at_once = (dist.new_group() for _ in range(4))
        reversed_pair = dist.new_group([2, 0], sort_ranks=False)

        def attempt(name, call):
            try:
                call()
            except RuntimeError as exc:
                assert isinstance(exc, TimeoutError), exc
                print(name, rank, str(exc).splitlines()[0], flush=True)

        for passes in (
            lambda: monitored_barrier(),
            lambda: dist.monitored_barrier(dist.group.WORLD, timedelta(seconds=20)),
            lambda: monitored_barrier(two, 20),
            lambda: monitored_barrier(two, 20.0, wait_all_ranks=True),
            lambda: monitored_barrier(timeout=timedelta(seconds=20)),
            lambda: dist.group.WORLD.monitored_barrier(),
            lambda: one.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True),
            lambda: one.monitored_barrier(wait_all_ranks=True, timeout=20.0),
        ):
            passes()
        dist.barrier()
        if rank != 1:
            attempt("two", lambda: monitored_barrier(two, 0.3))
        if rank == 0:
            attempt("one", lambda: one.monitored_barrier(short))
            attempt("all", lambda: all_late.monitored_barrier(short, wait_all_ranks=True))
            attempt("at once", lambda: at_once.monitored_barrier(timedelta(0)))
        if rank == 2:
            attempt("pair", lambda: monitored_barrier(reversed_pair, 0.3))
        if rank == 1:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                monitored_barrier(reversed_pair, 0.3)
            print("passes by", len(seen), flush=True)
        dist.barrier()
        dist.destroy_process_group()
        """,
        3,
    )
    assert sorted(done.stdout.splitlines()) == [
        "all 0 [Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 300 ms",
        "at once 0 [Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms.",
        "one 0 [Rank 0]: Rank 1 failed to pass monitoredBarrier in 300 ms",
        "pair 2 [Rank 0]: Rank 1 failed to pass monitoredBarrier in 300 ms",
        "passes by 1",
        "two 0 [Rank 0]: Rank 1 failed to pass monitoredBarrier in 300 ms",
        "two 2 [Rank 2]: Rank 2 successfully reached monitoredBarrier, but received errors while waiting for "
        "send/recv from rank 0. Please check rank 0 logs for faulty rank.",
    ]
    assert done.returncode == 0, done.stderr
