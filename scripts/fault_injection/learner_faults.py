"""What stops and losses of learners cost `DiLoCo(quorum=)`, on emulated hosts.

    python scripts/fault_injection/learner_faults.py --hosts 4 --seconds 120 --stops 6 --kills 2

Trains twice: with learners that are stopped for some seconds and go on, and others that are killed for good;
and without, over as many examples. Prints, as one line of JSON each, what was done and how both compare. A
step takes STEP_S, of which little is computing: so a learner is as fast when others leave it their cores.
Learner 0 has the outer parameters, and is neither stopped nor killed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

STEP_S, BATCH, SYNC_EVERY = 0.02, 64, 100
SHORTEST_S, LONGEST_S = 2.0, 6.0  # of a stop
ROOT = Path(__file__).parents[2]


class Fault(NamedTuple):
    """What happens to a learner, so many seconds after the beginning; `stop_s` 0: it is killed."""

    learner: int
    at_s: float
    stop_s: float = 0.0


def faults_of(args: argparse.Namespace) -> list[Fault]:
    """Draw who is killed when, and stops of learners that are there then, one after another."""
    dice = random.Random(args.seed)
    killed = {
        learner: args.seconds * dice.uniform(0.3, 0.9)
        for learner in dice.sample(range(1, args.hosts), args.kills)
    }
    faults = [Fault(learner, at_s) for learner, at_s in killed.items()]
    room_s = args.seconds / max(1, args.stops)
    for place in range(args.stops):
        stop_s = dice.uniform(SHORTEST_S, min(LONGEST_S, 0.8 * room_s))
        at_s = place * room_s + dice.uniform(0, room_s - stop_s)
        there = [i for i in range(1, args.hosts) if killed.get(i, 1e9) > at_s + stop_s + 1]
        if there:
            faults.append(Fault(dice.choice(there), at_s, stop_s))
    return faults


def run(args: argparse.Namespace, *options: str) -> dict[str, Any]:
    """Train once; return the sums over all learners, and what the first one has."""
    command = [str(ROOT / "scripts" / "cluster"), "--hosts", ",".join("1" * args.hosts)]
    command += ["--rate", args.rate, "--cores", "all", "--mpirun", "--with-ft ulfm", "--"]
    command += [sys.executable, __file__, "--learner", *options]
    for name in ("hosts", "seconds", "seed", "quorum", "grace"):
        command += [f"--{name}", str(getattr(args, name))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20 * args.seconds + 300)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not any(line["learner"] == 0 for line in lines):
        raise SystemExit(done.stdout + done.stderr)
    latest = {line["learner"]: line for line in lines}
    steps, there_s = (sum(line[name] for line in latest.values()) for name in ("steps", "there_s"))
    first = latest[0]
    return {
        "steps": steps,
        "steps_per_s_of_a_learner": steps / there_s,
        "waited": sum(line["waited_s"] for line in latest.values()) / there_s,
        "longest_wait_s": max(line["longest_wait_s"] for line in latest.values()),
        "outer_steps": first["outer_steps"],
        "outer_steps_without_some": first["outer_steps_without_some"],
        "loss": first["loss"],
    }


def compare(args: argparse.Namespace) -> None:
    """Train with faults and without, and print both."""
    counts = ["--stops", str(args.stops), "--kills", str(args.kills)]
    disturbed = run(args, *counts)
    print(json.dumps({"disturbed": disturbed}), flush=True)
    undisturbed = run(args, "--stops", "0", "--kills", "0", "--steps", str(disturbed["steps"] // args.hosts))
    print(json.dumps({"undisturbed": undisturbed}), flush=True)
    rate = "steps_per_s_of_a_learner"
    result = {
        "throughput": disturbed[rate] / undisturbed[rate],
        "loss": disturbed["loss"] / undisturbed["loss"],
        "longest_wait_s": disturbed["longest_wait_s"],
        "grace_s": args.grace,
    }
    print(json.dumps(result), flush=True)


def learn(args: argparse.Namespace) -> None:
    """Be a learner."""
    import torch

    import mpisgd
    from mpisgd.event_log import EventLog

    torch.set_num_threads(1)
    mpisgd.init()
    rank = mpisgd.rank()
    torch.manual_seed(0)
    teacher = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    optimizer: Any = mpisgd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.002),
        strategy=mpisgd.DiLoCo(SYNC_EVERY, quorum=args.quorum, grace_s=args.grace),
    )
    optimizer.synchronizer.outer_events = EventLog()

    def loss_of(draw: torch.Generator, count: int) -> Any:
        inputs = torch.randn(count, 32, generator=draw)
        with torch.no_grad():
            labels = teacher(3 * inputs).argmax(1)
        return torch.nn.functional.cross_entropy(model(inputs), labels)

    def tell(steps: int, **more: Any) -> None:
        line = {"learner": rank, "steps": steps, "longest_wait_s": longest_s, "waited_s": waited_s, **more}
        there_s = time.monotonic() - started_s - stopped_s
        print(json.dumps({**line, "there_s": there_s}), flush=True)

    mine = sorted((f for f in faults_of(args) if f.learner == rank), key=lambda each: each.at_s)
    mpisgd.barrier()
    draw = torch.Generator().manual_seed(1 + rank)
    started_s, stopped_s, longest_s, waited_s, step = time.monotonic(), 0.0, 0.0, 0.0, 0
    while step < args.steps if args.steps else time.monotonic() - started_s < args.seconds:
        if mine and time.monotonic() - started_s >= mine[0].at_s:
            fault = mine.pop(0)
            if not fault.stop_s:
                tell(step)
                os.kill(os.getpid(), signal.SIGKILL)
            began_s = time.monotonic()
            goes_on = f"sleep {fault.stop_s}; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", goes_on], start_new_session=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            stopped_s += time.monotonic() - began_s
        began_s = time.monotonic()
        optimizer.zero_grad()
        loss_of(draw, BATCH).backward()
        time.sleep(max(0.0, STEP_S - (time.monotonic() - began_s)))
        began_s = time.monotonic()
        optimizer.step()
        took_s, step = time.monotonic() - began_s, step + 1
        longest_s = max(longest_s, took_s * (step > 1))
        waited_s += took_s * (step % SYNC_EVERY == 0)
    trained_s = time.monotonic()
    optimizer.synchronizer.finish()
    started_s += time.monotonic() - trained_s  # the wait at the end is nobody's training
    outer = [len(set(entry.ranks)) for entry in optimizer.synchronizer.outer_events.entries]
    with torch.no_grad():
        loss = float(loss_of(torch.Generator().manual_seed(99), 20_000))
    few = sum(count < args.hosts for count in outer)
    tell(step, loss=loss, outer_steps=len(outer), outer_steps_without_some=few)
    time.sleep(1)
    os._exit(0)


def main() -> None:
    """Compare, or be one of the learners."""
    parser = argparse.ArgumentParser(description="Stop and kill learners of DiLoCo on emulated hosts.")
    parser.add_argument("--hosts", type=int, default=4, help="one learner on each")
    parser.add_argument("--seconds", type=float, default=120.0, help="of training")
    parser.add_argument("--stops", type=int, default=6)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--quorum", type=int, default=2)
    parser.add_argument("--grace", type=float, default=0.5, help="seconds")
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, help="of each learner, instead of --seconds")
    parser.add_argument("--learner", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    learn(args) if args.learner else compare(args)


if __name__ == "__main__":
    main()
