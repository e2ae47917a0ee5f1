"""A job that has to leave saves its state, is queued again and has the curve of one that was left alone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

# Slurm starts a job again two minutes after it was queued again, unless told otherwise.
GO_ON = """
until squeue -h -j "$job" -o %r | grep -q BeginTime; do sleep 0.2; done
scontrol update JobId="$job" StartTime=now TimeLimit=10
await_end "$job"
"""
PREEMPT = 'await_end "$(submit -p high -N2 --ntasks-per-node=2 -J urgent --wrap "sleep 1")"'
ALONE = 'await_end "$(submit --ntasks-per-node=2 "$BATCH/slurm-requeue")"\n'


def curve(path: Path) -> list[dict[str, float]]:
    """What training has measured in each epoch, without the times."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "images_per_s"} for line in lines]


@pytest.mark.parametrize(
    ("options", "disturb"),
    [("", PREEMPT), ("--time=1 --signal=TERM@50", "")],
    ids=["preempted", "time limit"],
)
def test_a_job_queued_again_has_the_curve_of_an_undisturbed_one(cluster, options, disturb):
    script = f"""
        {ALONE}
        job=$(submit --ntasks-per-node=2 {options} "$BATCH/slurm-requeue")
        await_file "runs/$job/*.safetensors"
        {disturb}
        {GO_ON}
    """
    _, ended = cluster.run("2,2", script)
    said = cluster.output("mpisgd-2")
    assert ended[-1].state == "COMPLETED", said
    assert ended[-1].number == 2
    steps = [int(step) for step in re.findall(r"goes on after step (\d+)", said)]
    assert steps, said
    alone, disturbed = curve(cluster.folder / "runs/1.jsonl"), curve(cluster.folder / "runs/2.jsonl")
    assert len(alone) == 20
    assert disturbed == alone


def test_run_tells_when_slurm_has_ended_the_daemons_of_mpirun(cluster):
    """Open MPI 5.0.11 then returns 0, as if the program had come to its end."""
    program = "python -m mpisgd run scripts/train.py --checkpoint-folder runs/a"
    script = f"""
        job=$(submit --no-requeue -N2 --ntasks-per-node=2 -J run --wrap '{program}')
        await_file "runs/a/*.safetensors"
        scancel --signal=TERM "$job"
        await_end "$job"
    """
    _, ended = cluster.run("2,2", script)
    assert [job.state for job in ended] == ["FAILED"], cluster.output("run")
    # mpirun gives the ranks half a second: they have saved by then, or not.
    assert ended[0].code in ("85:0", "1:0"), cluster.output("run")
