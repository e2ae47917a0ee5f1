"""Checkpoints where the hosts have files of their own: the first one's count, and a trap is seen."""

from __future__ import annotations

from clusters import run_code


def test_only_the_first_host_needs_the_folder_and_a_newer_one_elsewhere_is_an_error(tmp_path):
    code = f"""
        from pathlib import Path
        import torch
        import mpisgd
        from mpisgd import checkpoint
        mpisgd.init(timeout_s=30)
        own = Path({str(tmp_path)!r}) / f"host-{{mpisgd.node_rank()}}"
        torch.manual_seed(mpisgd.rank())
        checkpoint.save(own, 5, model=torch.nn.Linear(3, 3))
        expected = torch.rand(3)
        assert own.exists() == (mpisgd.node_rank() == 0)
        assert checkpoint.latest(own).parent.name == "host-0"
        assert checkpoint.load(own, model=torch.nn.Linear(3, 3)).step == 5
        assert torch.equal(torch.rand(3), expected)

        if mpisgd.node_rank() == 1:  # as if rank 0 had been there the last time
            own.mkdir()
            (own / "step-00000009.safetensors").touch()
        mpisgd.barrier()
        try:
            checkpoint.load(own, model=torch.nn.Linear(3, 3))
        except mpisgd.CheckpointError as error:
            assert "on node2 has a checkpoint of step 9, on node1" in str(error), error
            print("seen", flush=True)
        mpisgd.barrier()
    """
    done = run_code("2,1", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["seen"] * 3
