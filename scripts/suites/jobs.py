"""Run the tests of a suite in as few MPI jobs as will do, and join what their ranks have written."""

import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import progress

SEVERITY = ("left out", "passed", "failed")
START_S = 120.0  # for starting a job on a slow machine


class CannotRun(Exception):
    """A job that ends before its first test: nothing is known of the suite."""


@dataclass(frozen=True)
class Outcome:
    """What became of a test: one of SEVERITY, why unless it has passed, and how long it took."""

    test: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Runner:
    """How the jobs of a suite are started.

    Attributes:
        command: of one rank; the folder, the time limit of a test and the tests' names follow.
        size: number of ranks.
        limit_s: of one test.
        folder: of all jobs' files.
        env: the environment.
    """

    command: Sequence[str]
    size: int
    limit_s: float
    folder: Path
    env: Mapping[str, str]

    def names(self) -> list[str]:
        """The names of all tests of the suite."""
        done = subprocess.run([*self.command, "--list"], env=self.env, capture_output=True, text=True)
        if done.returncode:
            raise CannotRun(done.stderr[-2000:])
        return done.stdout.split()

    def run(self, names: Sequence[str]) -> list[Outcome]:
        """Run these tests; another job goes on after one that a test has ended."""
        left, found = list(names), []
        while left:
            outcomes = self._run_job(left)
            if not outcomes:
                raise CannotRun(f"no test has started; see {self.folder}")
            found += outcomes
            left = left[len(outcomes) :]
        return found

    def _run_job(self, names: Sequence[str]) -> list[Outcome]:
        folder = self.folder / f"{self.size}-{names[0]}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command = [*self.command, str(folder), f"{self.limit_s:g}", *names]
        with (folder / "output.log").open("wb") as log:
            process = subprocess.Popen(
                ["mpirun", "-n", str(self.size), *command],
                env=self.env,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                end = f"exit code {progress.wait(process, [folder], 2 * self.limit_s + START_S)}"
            except progress.Hung as hung:
                end = str(hung)
        reports = [read(file) for file in sorted(folder.glob("rank-*.jsonl"))]
        return blame_the_end(join(names, reports, end), end)


def blame_the_end(outcomes: list[Outcome], end: str) -> list[Outcome]:
    """The outcomes of a job; its last test has failed if all is well but how the job has ended."""
    if end == "exit code 0" or any(one.outcome == "failed" for one in outcomes):
        return outcomes
    return [
        *outcomes[:-1],
        *(replace(one, outcome="failed", reason=f"after it: {end}") for one in outcomes[-1:]),
    ]


def read(file: Path) -> dict[str, Outcome | None]:
    """A rank's outcomes by test; None for one that has started and not ended."""
    found: dict[str, Outcome | None] = {}
    for text in file.read_text().splitlines():
        line = json.loads(text)
        name, outcome = line["test"], line["outcome"].replace("skipped", "left out")
        ended = outcome != "started"
        found[name] = Outcome(name, outcome, line["reason"], line["seconds"]) if ended else None
    return found


def join(names: Iterable[str], reports: Sequence[Mapping[str, Outcome | None]], end: str) -> list[Outcome]:
    """The outcomes of the tests that have started: the most severe of all ranks, "failed" without an end."""
    joined = []
    for name in names:
        if any(name in report for report in reports):
            ended = [outcome for report in reports if (outcome := report.get(name))]
            if len(ended) < len(reports):
                ended.append(Outcome(name, "failed", f"the job has ended in it: {end}"))
            worst = max(ended, key=lambda one: SEVERITY.index(one.outcome))
            joined.append(worst)
    return joined
