"""How a job starts: alone, under mpirun, out of another communicator, after MPI, in children."""

from __future__ import annotations

import textwrap

import pytest
from launcher import run_python


@pytest.fixture
def start(tmp_path):
    """Run a program's text; warnings are errors there unless it says otherwise."""

    def run(text: str, num_ranks: int | None = None, options: tuple[str, ...] = (), **env: str):
        program = tmp_path / "prog.py"
        program.write_text(textwrap.dedent(text))
        return run_python("-W", "error", str(program), num_ranks=num_ranks, options=options, env=env)

    return run


def said(done) -> list[str]:
    """The lines of all ranks, in no order, of a run without complaints."""
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(done.stdout.splitlines())


def test_without_mpirun_the_world_is_one_process(start):
    """And `init()` comes by itself, at the first use."""
    done = start(
        """
        import torch, mpisgd
        assert not mpisgd.is_initialized()
        x = torch.ones(2)
        mpisgd.all_reduce(x)
        assert mpisgd.is_initialized()
        work = mpisgd.all_gather([x], x, async_op=True)
        work.wait()
        print(mpisgd.rank(), mpisgd.size(), mpisgd.local_size(), mpisgd.num_nodes(), x.tolist())
        """
    )
    assert said(done) == ["0 1 1 1 [1.0, 1.0]"]


def test_the_way_of_gpu_tensors_is_the_same_on_all_ranks(start):
    """By argument or by environment; a rank that differs ends the job, and every rank knows why."""
    done = start(
        """
        import os, mpisgd
        from mpisgd import config
        from mpisgd.job.lifecycle import current_job
        mpisgd.init(gpu="nccl" if os.environ["MPISGD_GPU"] == "auto" else None)
        mpisgd.init()
        try:
            mpisgd.init(gpu="mpi")
        except mpisgd.AlreadyInitialized:
            print(current_job().gpu)
        mpisgd.shutdown()
        os.environ["MPISGD_GPU"] = "mpi"
        try:
            mpisgd.init(gpu="auto" if config.launcher_rank() else None)
        except mpisgd.InvalidArgument as error:
            print(error)
        """,
        2,
        MPISGD_GPU="auto",
    )
    why = (
        "the ranks of the job want different transports for GPU tensors: rank 0 gpu='mpi', rank 1 gpu='auto'"
    )
    assert said(done) == [f"init: {why} [mpisgd:invalid-argument]"] * 2 + ["nccl"] * 2


def test_init_twice_and_again_after_shutdown(start):
    done = start(
        """
        import torch, mpisgd
        for again in range(3):
            mpisgd.init()
            mpisgd.init(timeout_s=5)
            x = torch.ones(1)
            group = mpisgd.new_group()
            mpisgd.all_reduce(x, group=group, async_op=True).wait()
            mpisgd.shutdown()
            mpisgd.shutdown()
            assert not mpisgd.is_initialized()
            try:
                mpisgd.barrier(group)
            except mpisgd.NotInitialized:
                print(again, int(x.item()))
        """,
        2,
    )
    assert said(done) == ["0 2", "0 2", "1 2", "1 2", "2 2", "2 2"]


def test_a_world_out_of_a_split_communicator(start):
    """MPI runs before us here; one rank says once which defaults came too late."""
    done = start(
        """
        import os, warnings, sys
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            from mpi4py import MPI
            import torch, mpisgd
            half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2, -MPI.COMM_WORLD.rank)
            mpisgd.init(half)
            mpisgd.init(half)
        late = [str(w.message) for w in caught if "too late" in str(w.message)]
        assert len(late) == (mpisgd.rank() == 0), late
        assert all("OMPI_MCA_osc" in text for text in late)
        x = torch.tensor([float(MPI.COMM_WORLD.rank)])
        mpisgd.all_reduce(x)
        print(MPI.COMM_WORLD.rank, mpisgd.rank(), mpisgd.size(), x.item())
        """,
        4,
    )
    assert said(done) == ["0 1 2 2.0", "1 1 2 4.0", "2 0 2 2.0", "3 0 2 4.0"]


def test_settings_of_the_user_stand_and_threads_are_shared(start):
    """Also where one rank alone asks for a number of them."""
    done = start(
        """
        import os, torch, mpisgd
        before = torch.get_num_threads()
        mpisgd.init()
        from mpisgd.cores import available_cores
        assert torch.get_num_threads() == before
        print(os.environ["OMPI_MCA_osc"], os.environ["OMPI_MCA_mpi_yield_when_idle"])
        mpisgd.shutdown()
        del os.environ["OMP_NUM_THREADS"]
        torch.set_num_threads(64)
        mpisgd.init()
        assert torch.get_num_threads() == max(1, available_cores() // 2), torch.get_num_threads()
        mpisgd.shutdown()
        mpisgd.init(num_threads=2 if os.environ["OMPI_COMM_WORLD_RANK"] == "1" else None)  # all meet for it
        mpisgd.barrier()
        """,
        2,
        OMP_NUM_THREADS="2",
        OMPI_MCA_osc="^ucx,rdma",
        OMPI_MCA_mpi_yield_when_idle="0",
    )
    assert said(done) == ["^ucx,rdma 0", "^ucx,rdma 0"]


def test_defaults_are_set_before_mpi_starts(start):
    done = start(
        """
        import os, mpisgd
        mpisgd.init()
        print(os.environ["OMPI_MCA_osc"], os.environ.get("OMPI_MCA_mpi_yield_when_idle"))
        """,
        4,
    )
    from mpisgd.cores import available_cores

    assert said(done) == [f"^ucx {'1' if available_cores() < 4 else None}"] * 4


def test_freed_memory_is_kept_unless_a_rank_is_told_not_to(start):
    program = """
        import sys, mpisgd
        from mpisgd.job.malloc_settings import describe
        try:
            mpisgd.init(keep_memory="all")
        except mpisgd.InvalidArgument as exc:
            assert "init: keep_memory='all'" in str(exc)
        mpisgd.init({})
        print(describe())
        mpisgd.shutdown()
        print(describe())
    """
    kept, returned = "kept until shutdown()", "not kept: shutdown() was called"
    off = "not kept: switched off"
    assert said(start(program.format(""))) == [kept, returned]
    assert said(start(program.format("keep_memory=False"))) == [off, off]
    assert said(start(program.format("keep_memory=True"), MPISGD_KEEP_MEMORY="0")) == [kept, returned]


def test_children_of_a_rank_cannot_be_ranks(start):
    """Forked: the groups are there and refuse. Spawned: the environment says rank 0, and init refuses."""
    done = start(
        """
        import multiprocessing, torch, mpisgd

        def forked(queue):
            try:
                mpisgd.all_reduce(torch.ones(1))
            except mpisgd.NotInitialized as exc:
                queue.put(f"forked: {'fork' in str(exc)}")

        def spawned(queue):
            try:
                mpisgd.init()
            except mpisgd.NotInitialized as exc:
                queue.put(f"spawned: {'mpirun' in str(exc)}")

        if __name__ == "__main__":
            mpisgd.init()
            for kind, target in (("fork", forked), ("spawn", spawned)):
                context = multiprocessing.get_context(kind)
                queue = context.SimpleQueue()
                child = context.Process(target=target, args=(queue,))
                child.start()
                child.join()
                print(queue.get())
            mpisgd.barrier()
        """,
        2,
    )
    assert said(done) == ["forked: True", "forked: True", "spawned: True", "spawned: True"]


def test_the_time_limit_of_the_environment_is_checked(start):
    done = start("import mpisgd; mpisgd.init()", MPISGD_TIMEOUT_S="soon")
    assert done.returncode == 1
    assert "MPISGD_TIMEOUT_S='soon'" in done.stderr


def test_a_temporary_directory_that_cannot_be_written_to_is_no_obstacle(start):
    done = start(
        """
        import tempfile
        def refuse(*args, **kwargs):
            raise PermissionError("read-only")
        tempfile.mkstemp = refuse
        import mpisgd
        mpisgd.init()
        mpisgd.barrier()
        print("ready")
        """,
        2,
    )
    assert said(done) == ["ready", "ready"]


def test_a_rank_on_which_mpi_fails_at_the_start_ends_the_job(tmp_path):
    """With fault tolerance mpirun lets the others wait for a rank that has left with a traceback."""
    program = tmp_path / "prog.py"
    program.write_text(
        textwrap.dedent("""
        import os
        import mpisgd
        from mpisgd.job import world

        def broken(communicator):
            from mpi4py import MPI
            raise MPI.Exception(MPI.ERR_OTHER)

        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            world.discover = broken
        mpisgd.init()
        """)
    )
    done = run_python(str(program), num_ranks=2, options=("--with-ft", "ulfm"))
    assert done.returncode == 1
    assert done.stderr.count("rank 1: MPI failed while the job was started") == 1
