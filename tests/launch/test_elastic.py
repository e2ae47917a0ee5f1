"""Ranks are lost, and the training goes on as if the others had begun at the last commit by themselves."""

from __future__ import annotations

import json
import random
import re
import socket
import sys
from pathlib import Path

import pytest
import torch
from launcher import run_python

PROGRAMS = Path(__file__).parent / "programs"
sys.path.insert(0, str(PROGRAMS))
import elastic_training as program  # noqa: E402

WITH_FT = ("--with-ft", "ulfm")


def train(folder: Path, num_ranks: int, options=WITH_FT, **env: str):
    """Run the program; what it said, and the lines it wrote."""
    path = folder / "lines"
    done = run_python(
        str(PROGRAMS / "elastic_training.py"), str(path), num_ranks=num_ranks, options=options, env=env
    )
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return done, lines


class OneProcess:
    """The same training in this process, for any number of ranks."""

    def __init__(self) -> None:
        self.model, self.data = program.make_model(), program.make_data()
        self.optimizer = program.make_optimizer(self.model)
        self.epoch = self.processed = self.step = 0
        self.commit()

    def commit(self) -> None:
        state = (self.model.state_dict(), self.optimizer.state_dict())
        self.kept = (
            [json.dumps(None), *map(copied, state)],
            (self.epoch, self.processed, self.step),
        )

    def restore(self) -> None:
        (_, model, optimizer), (self.epoch, self.processed, self.step) = self.kept
        self.model.load_state_dict(copied(model))
        self.optimizer.load_state_dict(copied(optimizer))

    def share_out(self, size: int) -> None:
        """Share out what is left of the epoch, as after a start of the training function."""
        order = list(range(len(self.data)))
        random.Random(self.epoch).shuffle(order)
        left = order[self.processed :]
        whole = [left[i % len(left)] for i in range(-(-len(left) // size) * size)]
        self.shards = [whole[rank::size] for rank in range(size)]
        self.first_step = self.step

    def take_step(self, size: int) -> float:
        at = (self.step - self.first_step) * program.BATCH
        losses = [
            program.loss_of(self.model, self.data, shard[at : at + program.BATCH]) for shard in self.shards
        ]
        loss = torch.stack(losses).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.processed += program.BATCH * size
        self.step += 1
        return loss.item()

    def finish_step(self) -> None:
        """Commit where the program does, and begin a new epoch where one is over."""
        if self.step % program.STEPS_BETWEEN_COMMITS == 0:
            self.commit()
        if (self.step - self.first_step) * program.BATCH >= len(self.shards[0]):
            self.epoch += 1
            self.processed = 0
            self.share_out(len(self.shards))
            self.commit()


def copied(tree):
    return torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


def check_curve(lines, sizes: list[int]) -> None:
    """See that every loss is that of one process which went back to the last commit at each loss of ranks."""
    alone, worst = OneProcess(), 0.0
    alone.share_out(lines[0]["size"])
    seen = [lines[0]["size"]]
    for line in lines:
        if line["size"] != seen[-1] or line["step"] != alone.step + 1:
            alone.restore()
            alone.share_out(line["size"])
            seen.append(line["size"])
        assert line["step"] == alone.step + 1  # nothing that was committed is done twice, nothing left out
        worst = max(worst, abs(alone.take_step(line["size"]) - line["loss"]))
        alone.finish_step()
    print(f"worst difference {worst:.1e}")
    assert worst < 1e-12
    assert seen == sizes


HOW = [
    pytest.param({}, id="own copies"),
    pytest.param({"SHARE": "1"}, id="shared parameters"),
    pytest.param({"STAGE": "2"}, id="shards"),
]


@pytest.mark.parametrize("how", HOW)
def test_two_losses_leave_the_curve_of_the_remaining_ranks(tmp_path, how):
    done, lines = train(tmp_path, 4, KILLS="7:2,13:0", **how)
    assert done.returncode == 0, done.stderr
    *steps, end = lines
    check_curve(steps, [4, 3, 2])
    assert end["resets"] == [3, 2]
    # at the second loss the pieces were those of three ranks, one of which had taken over a lost one's
    assert sorted(end["shared_out"]) == ["0", "1", "2"]
    assert end["tickets"][0] == 0 + 1 + 2 + 3  # which came from its buddy: it had no other copy
    told = [line for line in done.stderr.splitlines() if "mpisgd" in line]
    assert len(told) == 2
    assert "rank 2 is lost; 3 ranks go on" in told[0]
    assert "rank 0 is lost" in told[1]


def train_by_run(folder: Path, num_ranks: int, **env: str):
    """As `train`, by our own launcher, which knows how a program ended that had replaced ranks.

    With metrics: the lost rank has served them, and one that joins measures what the others do.
    """
    path = folder / "lines"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    options = ("--elastic", "--metrics-port", port, "-n", str(num_ranks))
    options = (*options, str(PROGRAMS / "elastic_training.py"), str(path))
    done = run_python("-m", "mpisgd", "run", *options, env=env, quiet_s=300)
    return done, [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("how", HOW)
def test_lost_ranks_are_replaced(tmp_path, how):
    done, lines = train_by_run(tmp_path, 3, KILLS="6:0", REGROW="1", **how)
    assert done.returncode == 0, done.stderr
    *steps, end = lines
    check_curve(steps, [3, 3])
    assert "1 of them new" in done.stderr
    assert end["tickets"][0] == 0 + 1 + 2
    served = re.findall(r"mpisgd: metrics of host .*", done.stderr)
    assert len(served) == 2, (
        done.stderr
    )  # by the first world and by the last, and not by ranks that wait to join
    assert len(set(served)) == 1
    assert [end["metrics"][f"steps_total/rank{rank}"] > 0 for rank in range(3)] == [True] * 3


@pytest.mark.parametrize(("killed", "left"), [(0, 1 + 2), pytest.param(1, 0 + 2, marks=pytest.mark.long)])
def test_a_loss_before_the_first_commit_leaves_the_undisturbed_curve_of_the_others(tmp_path, killed, left):
    """There is no commit to go back to: the state begins anew, from the rank that is the first now."""
    done, lines = train(tmp_path, 3, KILLS=f"begin:{killed}")
    assert done.returncode == 0, done.stderr
    *steps, end = lines
    assert (tmp_path / f"killed-begin:{killed}").exists()
    check_curve(steps, [2])
    assert end["resets"] == [2]
    assert end["tickets"][0] == left  # nobody has a commit of the lost one's


LATE = """
import atexit, os, signal, sys, time
from pathlib import Path
import torch
import mpisgd
from mpisgd.elastic import joining

mpisgd.init()
joining.JOIN_TIMEOUT_S = 1.0
mark = Path(sys.argv[1])
if joining.is_joiner():
    atexit.register(mark.touch)
    time.sleep(3)

@mpisgd.elastic.run(regrow=True)
def train(state):
    while state.step < 5:
        if state.step == 2 and (mpisgd.rank(), mpisgd.size()) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        state.step += 1
        state.commit()

state = mpisgd.elastic.State(step=0)
train(state)
while not mark.exists():
    time.sleep(0.1)
print(state.step, "steps with", mpisgd.size(), flush=True)
"""


def test_new_ranks_that_come_too_late_are_gone_on_without_and_end(tmp_path):
    (tmp_path / "prog.py").write_text(LATE)
    done = run_python(str(tmp_path / "prog.py"), str(tmp_path / "mark"), num_ranks=3, options=WITH_FT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("5 steps with 2") == 2
    assert done.stderr.count("no new ranks: they have not come to elastic.run within 1 s") == 1
    assert done.stderr.count("a new rank ends: the others have gone on without it") == 1


STUCK = """
import os, signal, time
import mpisgd
import mpisgd.job.startup_timeout
mpisgd.init(timeout_s=4.0)
mpisgd.job.startup_timeout.LEAST_S = 4.0

@mpisgd.elastic.run
def train(state):
    if mpisgd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if mpisgd.rank() == 2:
        time.sleep(100)
    if mpisgd.rank() == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    mpisgd.barrier()

train(mpisgd.elastic.State(step=0))
"""


@pytest.mark.long
def test_a_rank_that_does_not_come_to_the_recovery_ends_the_job_in_the_end(tmp_path):
    (tmp_path / "prog.py").write_text(STUCK)
    done = run_python(str(tmp_path / "prog.py"), num_ranks=4, options=WITH_FT)
    assert done.returncode != 0
    assert "in the agreement of the remaining ranks for 4 s" in done.stderr
    assert "inside MPI's Shrink" in done.stderr


def test_too_few_ranks_end_the_job(tmp_path):
    done, lines = train(tmp_path, 3, KILLS="6:1", MIN_RANKS="3")
    assert done.returncode == 75
    assert done.stderr.count("2 of 3 ranks are left (of the world before: 0, 2); min_ranks=3") == 1
    assert lines[-1]["step"] == 6


def test_without_fault_tolerance_it_says_so_and_trains(tmp_path):
    done, lines = train(tmp_path, 2, options=())
    assert done.returncode == 0, done.stderr
    check_curve(lines[:-1], [2])
    assert done.stderr.count("mpirun --with-ft ulfm") == 1


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_replacements_may_be_lost_too(tmp_path):
    # None at step 6, which follows a commit: that it goes back there could not be seen.
    done, lines = train_by_run(tmp_path, 4, KILLS="1:3,2:0,3:3,4:1,7:2,8:3,9:2", REGROW="1")
    assert done.returncode == 0, done.stderr
    check_curve(lines[:-1], [4] * 8)
