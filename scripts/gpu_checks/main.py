"""Run all checks on the GPUs of this machine, one job after the other: what `./scripts/gpu_check` does."""

import argparse
import datetime
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpu_checks.catalog import CHECKS, Setting, planned, settings
from gpu_checks.gpu import FAILS, LEFT_OUT, Finding
from gpu_checks.jobs import (
    BENCH_LIMIT_S,
    BENCHES,
    LOG,
    RANK,
    SUITE_LIMIT_S,
    environment,
    launch,
    run_bench,
    run_check,
    run_suite,
    tail,
)
from gpu_checks.machine import commit
from gpu_checks.rank import FACTS
from gpu_checks.report import Report, Result
from mpisgd.tools.bench.jobs import mpirun

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "runs" / "gpu_check"
LIMIT_S = 20 * 60.0
FACTS_LIMIT_S = 60.0
SIMULATED_GPUS = 2
SUITE = "tests"
NAMES = (SUITE, *CHECKS, *BENCHES)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description="Check mpisgd on the GPUs of this machine, measure it there, and write a report.",
    )
    parser.add_argument(
        "--simulated", action="store_true", help="on the GPUs that tests/simulated_gpu simulates"
    )
    parser.add_argument(
        "--quick", action="store_true", help="less of everything: to see that the checks work"
    )
    parser.add_argument("--only", metavar="NAMES", default=",".join(NAMES), help="some checks, by commas")
    parser.add_argument("--list", action="store_true", help="print the names and exit")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="S", help=f"of all together (default: {LIMIT_S:g})"
    )
    parser.add_argument(
        "--output", type=Path, default=FOLDER, metavar="FOLDER", help=f"default: {_short(FOLDER)}"
    )
    options = parser.parse_args(arguments)
    options.names = options.only.split(",")
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(f"--only: {', '.join(unknown)}: expected some of {', '.join(NAMES)}")
    return options


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def without_output(words: Sequence[str]) -> list[str]:
    """The words of the command line but for `--output`: a report names no folder of the user's."""
    left, words_left = [], iter(words)
    for word in words_left:
        if word == "--output":
            next(words_left, None)
        elif not word.startswith("--output="):
            left.append(word)
    return left


class Run:
    """One run of the command.

    Attributes:
        report: grows with every job.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._folder: Path = options.output.resolve()
        self._end = time.monotonic() + options.limit
        self._flags = ["--simulated"] * options.simulated + ["--quick"] * options.quick
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        command = " ".join(["./scripts/gpu_check", *without_output(sys.argv[1:])])
        self.report = Report({"command": command, "when": when, "commit": commit()})

    def all(self) -> None:
        """Do what was asked for; what has been found so far is in the files at any time."""
        facts = self._facts()
        num_gpus = SIMULATED_GPUS if self._options.simulated else facts.get("num_gpus", 0)
        for name, what, setting, reason, job, limit_s in self._jobs(num_gpus):
            if not num_gpus:
                reason = f"torch sees no GPU: {facts.get('gpus', 'the job that looks for them failed')}"
            left_s = self._end - time.monotonic()
            if not reason and left_s < min(limit_s, 30.0):
                reason = f"no time left of the {self._options.limit:g} s (--limit)"
            if reason:
                self._add(Result(name, what, setting.size, setting.transport, Finding(LEFT_OUT, "", reason)))
                continue
            folder = self._folder / f"{name}-{setting}".replace(" ", "-")
            finding, took_s = job(setting, folder, min(limit_s, left_s))
            if finding.verdict == FAILS and left_s < limit_s and time.monotonic() >= self._end:
                seen = f"cut off by the {self._options.limit:g} s of all (--limit)"
                finding = Finding(LEFT_OUT, finding.expected, seen)
            log = tail(folder / LOG) if finding.verdict == FAILS else []
            self._add(Result(name, what, setting.size, setting.transport, finding, took_s, log))

    def _facts(self) -> dict[str, Any]:
        folder = self._folder / FACTS
        folder.mkdir()
        command = [*mpirun(), "-n", "1", sys.executable, *RANK, FACTS, str(folder), *self._flags]
        problem = launch(command, environment(1), folder / LOG, FACTS_LIMIT_S)
        file = folder / "facts.json"
        if file.exists():
            facts = json.loads(file.read_text())
            # Not what this command has set for its jobs.
            given = {name: text for name, text in facts["set_before"].items() if os.environ.get(name) == text}
            self.report.facts = {**facts, "set_before": given}
        if problem:
            log = tail(folder / LOG)
            finding = Finding(FAILS, "the job that looks at the machine comes to its end", problem)
            self._add(Result(FACTS, "versions, driver, GPUs, MPI", 1, "-", finding, 0.0, log))
        return self.report.facts

    def _jobs(self, num_gpus: int) -> Iterator[tuple[str, str, Setting, str, Callable[..., Any], float]]:
        """Name, property, setting, reason to leave it out or "", what runs it, and its limit."""
        names, quick = self._options.names, self._options.quick
        found = settings(max(1, num_gpus), quick=quick)
        if SUITE in names:
            for setting in found:
                yield SUITE, "all tests of tests/gpu", setting, "", run_suite, SUITE_LIMIT_S
        checks = [check for name, check in CHECKS.items() if name in names]
        for check, setting, reason in planned(checks, found):

            def run(
                where: Setting, folder: Path, limit_s: float, check: Any = check
            ) -> tuple[Finding, float]:
                return run_check(check, where, folder, limit_s, self._flags)

            yield check.name, check.what, setting, reason, run, check.limit_s
        for name, bench in ((name, bench) for name, bench in BENCHES.items() if name in names):
            for setting in found:

                def measure(
                    where: Setting, folder: Path, limit_s: float, name: str = name, bench: Any = bench
                ) -> tuple[Finding, float]:
                    how = {"simulated": self._options.simulated, "quick": quick}
                    finding, took_s, record = run_bench(bench, where, folder, limit_s, **how)
                    if record is not None:
                        self.report.records[f"{name} {where}"] = record
                    return finding, took_s

                yield name, bench.what, setting, "", measure, BENCH_LIMIT_S

    def _add(self, result: Result) -> None:
        self.report.results.append(result)
        found = result.finding
        where = f"{result.name}, {result.ranks} rank{'s' * (result.ranks > 1)}, {result.by}"
        print(f"{where:<34}{found.verdict:<9}{result.seconds:6.1f} s  {found.seen}", flush=True)
        self.report.write(self._folder)


def main() -> int:
    """Run the command; the exit code."""
    options = parse()
    if options.list:
        benches = {name: bench.what for name, bench in BENCHES.items()}
        known = {SUITE: "all tests of tests/gpu", **{c.name: c.what for c in CHECKS.values()}, **benches}
        print(*(f"{name:<20}{what}" for name, what in known.items()), sep="\n")
        return 0
    run = Run(options)
    run.all()
    print("", run.report.as_text(), f"to paste: {_short(options.output)}/report.txt, report.json", sep="\n")
    return run.report.exit_code()


if __name__ == "__main__":
    sys.exit(main())
