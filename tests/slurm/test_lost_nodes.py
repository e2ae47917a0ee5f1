"""A node is lost in the middle of an elastic training: the job goes on without it."""

from __future__ import annotations

import re


def test_an_elastic_job_goes_on_without_a_lost_node(cluster):
    program = 'exec python -m mpisgd run --elastic "$PROGRAMS/cut_off.py"'
    script = f"""
        await_end "$(submit --no-kill -N3 --ntasks-per-node=1 -J elastic --wrap '{program}')"
        until sinfo -hN -n node3 -o %T | grep -q down; do sleep 0.2; done
        sinfo -hN -p low -o '%N %T'
    """
    done, ended = cluster.run("1,1,1", script)
    said = re.findall(r"rank (\d) of (\d), then (\d): off by (\S+)", cluster.output("elastic"))
    assert sorted(rank for rank, *_ in said) == ["0", "1"], cluster.output("elastic")
    assert {(started, left) for _, started, left, _ in said} == {("3", "2")}
    assert all(float(worst) < 1e-12 for *_, worst in said)
    assert (ended[-1].state, ended[-1].code) == ("COMPLETED", "0:0")
    assert re.findall(r"node\d \w+", done.stdout) == ["node1 idle", "node2 idle", "node3 down"]
