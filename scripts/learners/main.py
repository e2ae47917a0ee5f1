"""What stops and losses of learners cost `DiLoCo(quorum=)`.

    python scripts/learners/main.py --cases 4x1:30:1 4x6:10:20 --seeds 5 --json runs/learners.json
    python scripts/learners/main.py --cases 4x6:10:20 --seconds 600 --mpirun --rate 100mbit
    python scripts/bench/record_table.py runs/learners.json benchmarks/learners.md

A case is hosts x learners of each : stops : kills; with `--host-learners`, hosts x ranks of each, and the
ranks of a host are one learner. Each case is trained twice: with learners that are stopped for some seconds
and go on, and others that are killed for good; and without, over as many examples. Time is simulated, and
ranks are threads; with `--mpirun` they are processes on emulated hosts. Prints a line of JSON for each
training, and how both compare.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from learners.training import Acts, Case, Seen, drawn, learn

ROOT = Path(__file__).resolve().parents[2]
LINK = {"latency_s": 0.0002, "bytes_per_s": 12.5e6}  # 100 Mbit/s
FOREVER_S = 1e6
COLUMNS = ["hosts x learners of each", "stops", "kills", "seeds", "throughput: median", "least"]
COLUMNS += ["loss: median", "largest", "longest wait, s", "grace, s", "outer steps without some"]


@dataclass(frozen=True)
class Training:
    """One training: sums over all learners, and what the first one has seen.

    Attributes:
        steps: of all.
        rate: steps in a second of a learner that is there.
        waited: the share of the time in which learners waited for outer steps.
        longest_s: the longest step.
        outer_steps, without_some, loss: see `Seen`.
    """

    steps: int
    rate: float
    waited: float
    longest_s: float
    outer_steps: int
    without_some: int
    loss: float


@dataclass(frozen=True)
class Comparison:
    """A training with faults, as a multiple of that without.

    Attributes:
        case: what was tried.
        throughput: of a learner that is there.
        loss: at equal examples.
        longest_s: the longest step of a learner.
        without_some: the share of outer steps without a part of some learner.
    """

    case: Case
    throughput: float
    loss: float
    longest_s: float
    without_some: float


def simulated(case: Case) -> list[Seen]:
    """Train on threads, in simulated time."""
    import mpisgd
    from mpisgd.job.threads_as_ranks import lose_ranks, run_ranks
    from mpisgd.threads.scheduling import sleep
    from mpisgd.transport.loopback.links import Links

    seen: dict[int, Seen] = {}

    def tell(one: Seen) -> None:
        seen[one.rank] = one

    def be_one() -> None:
        learn(case, drawn(case), Acts(sleep, lambda: lose_ranks(mpisgd.rank()), tell))

    run_ranks(
        case.size,
        be_one,
        seed=case.seed,
        ranks_per_host=[case.learners] * case.hosts,
        timeout_s=FOREVER_S,
        limit_s=FOREVER_S,
        losses=[],
        links=Links(**LINK),
    )
    return list(seen.values())


def on_hosts(case: Case, rate: str) -> list[Seen]:
    """Train on emulated hosts."""
    program = ROOT / "scripts" / "emulation" / "virtual_cluster.py"
    command = [sys.executable, str(program), "--hosts", ",".join([str(case.learners)] * case.hosts)]
    command += ["--rate", rate, "--cores", "all", "--mpirun", "--with-ft ulfm", "--"]
    command += [sys.executable, __file__, "--learner", json.dumps(case._asdict())]
    limit_s = 20 * case.seconds + 600
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    seen = {line["rank"]: Seen(**line) for line in lines}
    if 0 not in seen:
        raise SystemExit(done.stdout + done.stderr)
    return list(seen.values())


def be_learner(case: Case) -> None:
    """Be one of the processes of mpirun."""
    import torch

    import mpisgd
    from mpisgd.errors import LearnerLost

    def stop(seconds: float) -> None:
        goes_on = f"sleep {seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", goes_on], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)

    def tell(one: Seen) -> None:
        print(json.dumps(one._asdict()), flush=True)

    torch.set_num_threads(1)
    mpisgd.init()
    with contextlib.suppress(LearnerLost):
        learn(case, drawn(case), Acts(stop, lambda: os.kill(os.getpid(), signal.SIGKILL), tell))
    os._exit(0)  # the end of a job that has lost ranks is an error


def summed(seen: Sequence[Seen]) -> Training:
    """Return what all learners have seen together."""
    (first,) = (one for one in seen if one.rank == 0)
    there_s = sum(one.there_s for one in seen)
    return Training(
        steps=sum(one.steps for one in seen),
        rate=sum(one.steps for one in seen) / there_s,
        waited=sum(one.waited_s for one in seen) / there_s,
        longest_s=max(one.longest_s for one in seen),
        outer_steps=first.outer_steps,
        without_some=first.without_some,
        loss=first.loss,
    )


def compare(case: Case, rate: str | None) -> Comparison:
    """Train with faults and without, and print both. `rate` None: in simulated time."""

    def train(one: Case, name: str) -> Training:
        began_s = time.monotonic()
        found = summed(simulated(one) if rate is None else on_hosts(one, rate))
        took_s = round(time.monotonic() - began_s)
        print(json.dumps({name: asdict(found), "seed": one.seed, "took_s": took_s}), flush=True)
        return found

    disturbed = train(case, "disturbed")
    equal = case._replace(stops=0, kills=0, steps=disturbed.steps // case.size)
    undisturbed = train(equal, "undisturbed")
    found = Comparison(
        case,
        disturbed.rate / undisturbed.rate,
        disturbed.loss / undisturbed.loss,
        disturbed.longest_s,
        disturbed.without_some / disturbed.outer_steps,
    )
    print(json.dumps(asdict(found)), flush=True)
    return found


def rows(found: Sequence[Comparison]) -> Iterator[list[str]]:
    """Yield a row for each case, over its seeds."""
    cases = dict.fromkeys(one.case._replace(seed=0) for one in found)
    for case in cases:
        mine = [one for one in found if one.case._replace(seed=0) == case]
        rates, losses = [one.throughput for one in mine], [one.loss for one in mine]
        yield [
            f"{case.hosts} x {case.learners}{', each host one learner' if case.together else ''}",
            *map(str, (case.stops, case.kills, len(mine))),
            *(f"{value:.3f}" for value in (statistics.median(rates), min(rates))),
            *(f"{value:.3f}" for value in (statistics.median(losses), max(losses))),
            f"{max(one.longest_s for one in mine):.2f}",
            f"{case.grace_s:g}",
            f"{statistics.median(one.without_some for one in mine):.0%}",
        ]


def record_of(args: argparse.Namespace, found: Sequence[Comparison]) -> dict[str, Any]:
    """Return what `record_table.py` makes a table of."""
    from mpisgd.tools.cli.provenance import provenance

    first = args.options
    more = ', learners="host"' if first.together else ""
    strategy = f"DiLoCo({first.sync_every}, quorum={first.quorum}, grace_s={first.grace_s:g}{more})"
    who = "ranks" if first.together else "learners"
    where = "processes on emulated hosts" if args.mpirun else "threads, and time is simulated"
    return {
        "kind": "learners",
        **provenance(),
        "notes": [
            f"{who} are {where}; {args.seconds:g} s with faults, links of 100 Mbit/s, {strategy}, "
            f"steps of {first.step_s:g} s, AdamW, a learning rate "
            + ("that falls to 0 by the end" if first.decays else "that is constant"),
            "throughput and loss are multiples of those of a training without faults, over as many "
            "examples: steps in a second of a learner that is there, and the loss on other data at the end",
        ],
        "columns": COLUMNS,
        "cells": list(rows(found)),
    }


def case_of(text: str, options: Case) -> Case:
    """Return the case of such a text as 4x6:10:20, of these options."""
    shape, stops, kills = text.split(":")
    hosts, learners = shape.split("x")
    return options._replace(hosts=int(hosts), learners=int(learners), stops=int(stops), kills=int(kills))


def main() -> None:
    """Compare, or be one of the learners."""
    default = Case()
    parser = argparse.ArgumentParser(description="Stop and kill learners of DiLoCo.")
    parser.add_argument("--cases", nargs="+", default=["4x1:6:1"], help="hosts x learners : stops : kills")
    parser.add_argument("--seconds", type=float, default=default.seconds, help="of training with faults")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--quorum", type=int, default=default.quorum)
    parser.add_argument("--grace", type=float, default=default.grace_s, help="seconds")
    parser.add_argument("--sync-every", type=int, default=default.sync_every, help="steps")
    parser.add_argument("--step", type=float, default=default.step_s, help="seconds of a step")
    parser.add_argument("--decay", action="store_true", help="the learning rate falls to 0 by the end")
    parser.add_argument("--host-learners", action="store_true", help="the ranks of a host are one learner")
    parser.add_argument("--mpirun", action="store_true", help="on emulated hosts, instead of threads")
    parser.add_argument("--rate", default="100mbit", help="of the hosts' links, with --mpirun")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, without --mpirun")
    parser.add_argument("--json", type=Path, help="where the record goes")
    parser.add_argument("--learner", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.learner:
        be_learner(Case(**json.loads(args.learner)))
        return
    args.options = default._replace(
        seconds=args.seconds,
        quorum=args.quorum,
        grace_s=args.grace,
        sync_every=args.sync_every,
        step_s=args.step,
        decays=args.decay,
        together=args.host_learners,
    )
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    cases = [case_of(text, args.options)._replace(seed=seed) for text in args.cases for seed in seeds]
    if args.mpirun:
        found = [compare(case, args.rate) for case in cases]
    else:
        with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
            found = list(pool.map(compare, cases, [None] * len(cases)))
    record = record_of(args, found)
    for name, *cells in zip(record["columns"], *record["cells"], strict=True):
        print(f"{name}: {', '.join(cells)}")
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
