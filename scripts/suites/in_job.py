"""Run tests of somebody else in an MPI job, and write down what became of each.

Every rank writes lines of JSON into a file of its own: one when a test starts, one when it has ended. So the
program that has started the job knows which test ended it. Ranks meet before and after each test by files,
not by MPI: what is tested must not be what the test relies on. A test that fails on any rank ends the job,
since it may have left the ranks apart; the remaining ones run in the next job.
"""

import faulthandler
import functools
import json
import os
import re
import runpy
import sys
import time
import traceback
import unittest
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpisgd.config import launcher_rank, launcher_size

if TYPE_CHECKING:
    import torch

Tests = Mapping[str, Callable[[], object]]
IN_FOLDERS: dict[str, Callable[[Path], None]] = {}
AFTER_FAILURE = 9  # exit code of a job whose last test has failed
ERROR = re.compile(r"^\w[\w.]*(?:: .*)?$", re.MULTILINE)  # in a traceback, the exception
# After a failure the other ranks have so long to say what they have found.
GRACE_S = 5.0


class Recorder:
    """What became of the tests of a job, rank by rank.

    Args:
        folder: empty, of this job, seen by all of its ranks.
        limit_s: a test that takes longer ends the job, with the stack of each thread in the rank's log.
    """

    def __init__(self, folder: Path, limit_s: float) -> None:
        self.rank = launcher_rank() or 0
        self.size = launcher_size() or 1
        self._folder, self._limit_s = folder, limit_s
        self._lines = (folder / f"rank-{self.rank}.jsonl").open("a")
        self._num_meetings = 0
        self._first_failure = 0.0

    def run(self, tests: Tests) -> None:
        """Run the tests in turn; does not return after one that has failed."""
        for name, test in tests.items():
            self._write(test=name, outcome="started")
            self.meet()
            start = time.perf_counter()
            faulthandler.dump_traceback_later(self._limit_s, exit=True)
            outcome, reason = outcome_of(test)
            faulthandler.cancel_dump_traceback_later()
            if outcome == "failed":
                (self._folder / "failed").touch()
            self._write(test=name, outcome=outcome, reason=reason, seconds=time.perf_counter() - start)
            self.meet()

    def meet(self) -> None:
        """Wait for all ranks; leave if a test has failed, or a rank does not come."""
        self._num_meetings += 1
        meeting = self._folder / f"meeting-{self._num_meetings}"
        with meeting.open("ab") as arrived:
            arrived.write(b".")
        until = time.monotonic() + 2 * self._limit_s
        while meeting.stat().st_size < self.size and time.monotonic() < until:
            if (self._folder / "failed").exists():
                until = min(until, self._failed_at() + GRACE_S)
            time.sleep(0.005)

        if meeting.stat().st_size < self.size or (self._folder / "failed").exists():
            leave()

    def _failed_at(self) -> float:
        self._first_failure = self._first_failure or time.monotonic()
        return self._first_failure

    def _write(self, **line: object) -> None:
        print(json.dumps(line), file=self._lines, flush=True)


def outcome_of(test: Callable[[], object]) -> tuple[str, str]:
    """Run a test: "passed", "skipped" or "failed", and why; a traceback goes to stderr."""
    try:
        test()
    except unittest.SkipTest as exc:
        return "skipped", str(exc) or "no reason given"
    except BaseException as exc:  # SystemExit too: a test must not end the job as if all were well
        traceback.print_exc()
        sys.stderr.flush()
        return "failed", f"{type(exc).__name__}: {exc}".partition("\n")[0][:300]
    return "passed", ""


def of_case(case: unittest.TestCase) -> None:
    """Run a case of unittest, with its setUp and tearDown; raise SkipTest or AssertionError."""
    result = unittest.TestResult()
    case.run(result)
    for _, reason in result.skipped:
        raise unittest.SkipTest(reason)
    for _, text in result.errors + result.failures:
        print(text, file=sys.stderr, flush=True)
        raise AssertionError((ERROR.findall(text) or [text])[-1])


def run_program(path: Path, options: Sequence[str] = ()) -> None:
    """Run a program with these options; SkipTest where it needs a package that is not there."""
    sys.argv = [str(path), *options]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except ModuleNotFoundError as exc:
        raise unittest.SkipTest(f"needs the package {exc.name}") from exc
    except SystemExit as exc:
        if exc.code:
            raise


def check_equal_weights(model: "torch.nn.Module") -> None:
    """Raise unless all ranks have the same finite weights."""
    import torch

    import mpisgd

    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert weights.isfinite().all()
    everywhere = [torch.empty_like(weights) for _ in range(mpisgd.size())]
    mpisgd.all_gather(everywhere, weights)
    assert all(torch.equal(one, weights) for one in everywhere), "the weights differ"


def in_folder(test: Callable[[Path], None]) -> Callable[[Path], None]:
    """Put a test into the table of those that are given a folder of their own."""
    IN_FOLDERS[test.__name__] = test
    return test


def tests_in_folders() -> Tests:
    """Those tests by their names; the ranks share a folder of each."""
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])

    def run(name: str, test: Callable[[Path], None]) -> None:
        (folder / name).mkdir(parents=True, exist_ok=True)
        test(folder / name)

    return {name: functools.partial(run, name, test) for name, test in IN_FOLDERS.items()}


def leave() -> None:
    """End this process at once, whatever its threads wait for."""
    sys.stdout.flush()
    os._exit(AFTER_FAILURE)


def main(tests: Callable[[], Tests], arguments: Sequence[str]) -> None:
    """Be a program: `--list` prints the names of all tests, `FOLDER LIMIT_S NAME ...` runs some of them."""
    if list(arguments) == ["--list"]:
        print(*tests(), sep="\n")
        return
    folder, limit_s, *names = arguments
    recorder = Recorder(Path(folder), float(limit_s))
    found = tests()
    recorder.run({name: found[name] for name in names})
