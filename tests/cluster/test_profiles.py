"""`tune` on several hosts measures the kinds of groups a program may make there."""

from __future__ import annotations

import pytest
from clusters import run_code, run_on
from launcher import python

from mpisgd.tuning.profile import read


def test_uneven_hosts_give_a_profile_for_every_kind_of_group(tmp_path):
    out = tmp_path / "profile.json"
    arguments = ("tune", "--budget", "3", "--passes", "1", "--max-size", "1KiB", "--out", str(out))
    done = run_on("2,1", python(), "-m", "mpisgd", *arguments)
    assert done.returncode == 0, done.stderr
    model = read(out)
    assert [measured.ranks_per_host for measured in model.measured] == [(2, 1), (2,), (1, 1)]
    curves = [{(curve.algorithm, curve.num_leaders) for curve in one.curves} for one in model.measured]
    between = {(name, 1) for name in ("hierarchical", "mpi", "ring", "halving_doubling", "all_to_all")}
    curves[1] -= {("direct", 1)}  # where the ranks can
    assert curves == [between, {("node", 1), ("mpi", 1), ("all_to_all", 1)}, between]
    assert all(curve.points for one in model.measured for curve in one.curves)


@pytest.mark.long
def test_groups_are_judged_by_their_own_hosts():
    done = run_code(
        "2,1",
        """
        import mpisgd
        from mpisgd.job.lifecycle import world

        mpisgd.init()
        groups = [world(), mpisgd.new_group([0, 1]), mpisgd.new_group([1, 2])]
        print([group.costs.ranks_per_host for group in groups if group.rank >= 0])
        """,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[(2, 1), (1, 1)]",
        "[(2, 1), (2,), (1, 1)]",
        "[(2, 1), (2,)]",
    ]
