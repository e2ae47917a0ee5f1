"""torch's store between hosts that have addresses of their own."""

from __future__ import annotations

from clusters import run_code


def test_every_host_reads_what_every_other_has_set():
    code = """
        import mpisgd
        from mpisgd.job.lifecycle import world
        from mpisgd.transport.tcp_store.store import open_store
        mpisgd.init()
        store = open_store(world().queue.communicator, world().topology, 20)
        store.set(f"from {mpisgd.rank()}", f"host {mpisgd.node_rank()}")
        seen = [store.get(f"from {rank}").decode() for rank in range(mpisgd.size())]
        assert seen == ["host 0", "host 0", "host 1"], seen
        print("seen", flush=True)
        mpisgd.barrier()
    """
    done = run_code("2,1", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["seen"] * 3
