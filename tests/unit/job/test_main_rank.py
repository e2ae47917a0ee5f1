"""`is_main` and `print0`: one rank, also before the job has begun."""

from __future__ import annotations

import mpisgd
from mpisgd.job import rank_info
from mpisgd.job.threads_as_ranks import run_ranks


def test_rank_0_is_the_one(capsys):
    def program():
        mpisgd.print0("loss", 0.5, sep="=")
        return mpisgd.is_main()

    assert run_ranks(3, program) == [True, False, False]
    assert capsys.readouterr().out == "loss=0.5\n"


def test_before_the_job_the_launcher_says_who_it_is(monkeypatch):
    monkeypatch.setattr(rank_info, "is_initialized", lambda: False)
    for rank, expected in (("0", True), ("2", False)):
        monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
        assert mpisgd.is_main() is expected
