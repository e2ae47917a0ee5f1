"""RPC between hosts that have addresses of their own."""

from __future__ import annotations

from clusters import run_code


def test_every_rank_calls_every_other_by_the_jobs_interface():
    code = """
        import socket, torch, mpisgd
        from mpisgd import rpc
        from mpisgd.rpc.admission import listening_endpoints
        mpisgd.init()
        before = listening_endpoints()
        rpc.init_rpc()
        there = listening_endpoints() - before
        assert there and not any(end.address.startswith(("127.", "0.")) for end in there), there
        large = torch.arange(1 << 18, dtype=torch.float64)
        for rank in range(mpisgd.size()):
            assert torch.equal(rpc.rpc_sync(rank, torch.neg, (large,)), -large)
            assert rpc.rpc_sync(rank, mpisgd.node_rank) == (0, 0, 1)[rank]
        everywhere = [None] * mpisgd.size()
        mpisgd.all_gather_object(everywhere, sorted(there))
        for address, port in everywhere[(mpisgd.rank() + 1) % mpisgd.size()]:
            with socket.socket() as stranger:  # nobody gets in once all are connected
                stranger.settimeout(0.5)
                try:
                    stranger.connect((address, port))
                except TimeoutError:
                    print("refused", flush=True)
        rpc.shutdown()
    """
    done = run_code("2,1", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused"] * 3
