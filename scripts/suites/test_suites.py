"""Run suites of others on mpisgd: the work behind `./scripts/test_suites`.

    ./scripts/test_suites                                     all of them, whole
    ./scripts/test_suites --suite torch --ranks 2             one of them, at two ranks
    ./scripts/test_suites --quick                             two ranks, without what is slow or known to fail
    ./scripts/test_suites --horovod-source ~/horovod          also the examples of a checkout of Horovod

They run in an environment of their own, `.venv-suites`, that reads the packages of this Python too, with the
versions of scripts/suites/suites.toml. That file also gives the reason for each test that does not pass: the
exit code is 1 if another one fails, or if one of these passes.
"""

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SUITES = Path(__file__).resolve().parent
ROOT = SUITES.parents[1]
sys.path[:0] = [str(SUITES), str(SUITES.with_name("testing"))]
from jobs import CannotRun, Outcome, Runner  # noqa: E402
from suite_environment import horovod_tests, job_settings, make_environment  # noqa: E402

OUTPUT = ROOT / "runs" / "suites"
PROGRAMS = {
    "torch": "torch_distributed.py",
    "torch_on_cpu": "torch_on_cpu.py",
    "accelerate": "accelerate_scripts.py",
    "lightning": "lightning_trainers.py",
    "frameworks": "framework_programs.py",
    "horovod": "horovod_torch.py",
}
NOT_QUICK = "not in the short form"


@dataclass(frozen=True)
class Suite:
    """A suite of others, as suites.toml describes it.

    Attributes:
        name: of its table in the file.
        about: what it is.
        packages: what it needs, with versions.
        ranks: the numbers of ranks that it runs at.
        limit_s: for each test.
        slow: tests that the short form leaves out.
        fails: tests that do not pass, and why.
        left_out: tests that are not started, and why.
        apart: each test needs processes of its own.
        source: what pip downloads to have its tests.
        beside: packages that only a test which looks for them may see.
    """

    name: str
    about: str
    packages: list[str]
    ranks: list[int]
    limit_s: float
    slow: list[str]
    fails: dict[str, Any]
    left_out: dict[str, Any]
    apart: bool = False
    source: str = ""
    beside: list[str] = field(default_factory=list)

    def reason(self, kind: str, test: str, size: int) -> str:
        """Why a test is expected to fail ("fails") or not started ("left_out") at that size; else nothing."""
        found = getattr(self, kind).get(test, "")
        if isinstance(found, str):
            return found
        return str(found["reason"]) if size in found["ranks"] else ""


@dataclass
class Result:
    """What became of a suite at one number of ranks."""

    suite: str
    ranks: int
    seconds: float = 0.0
    tests: list[Outcome] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    problem: str = ""

    def count(self, outcome: str) -> int:
        """How many tests have that outcome."""
        return sum(test.outcome == outcome for test in self.tests)


def read_suites() -> dict[str, Suite]:
    """The suites of suites.toml."""
    text = (SUITES / "suites.toml").read_text()
    return {name: Suite(name=name, **table) for name, table in tomllib.loads(text).items()}


# -- running them --------------------------------------------------------------------------------------


def run_suite(
    suite: Suite, size: int, python: Path, extra: Sequence[str], *, quick: bool, only: str
) -> Result:
    """Run a suite at one number of ranks."""
    start = time.monotonic()
    result = Result(suite.name, size)
    command = [str(python), *extra, str(SUITES / PROGRAMS[suite.name])]
    runner = Runner(command, size, suite.limit_s, OUTPUT / suite.name, job_settings(python))
    try:
        names = runner.names()
        result.unexpected += stale(suite, names)
        result.tests = outcomes(suite, runner, [name for name in names if only in name], quick=quick)
    except CannotRun as exc:
        result.problem = str(exc)
    result.unexpected += unexpected(suite, size, result.tests)
    result.seconds = round(time.monotonic() - start, 1)
    return result


def outcomes(suite: Suite, runner: Runner, names: list[str], *, quick: bool) -> list[Outcome]:
    """Run what is to run: what is expected to fail in jobs of its own, the others together."""
    found = [
        Outcome(name, "left out", why)
        for name in names
        if (why := suite.reason("left_out", name, runner.size))
    ]
    if quick:
        found += [
            Outcome(name, "left out", NOT_QUICK)
            for name in names
            if name in suite.slow or suite.reason("fails", name, runner.size)
        ]
    left = [name for name in names if name not in {one.test for one in found}]
    alone = [name for name in left if suite.apart or suite.reason("fails", name, runner.size)]
    found += runner.run([name for name in left if name not in alone])
    for name in alone:
        found += runner.run([name])
    return sorted(found, key=lambda one: names.index(one.test))


def stale(suite: Suite, names: Iterable[str]) -> Iterable[str]:
    """What suites.toml names, and the suite does not have."""
    for name in sorted({*suite.fails, *suite.left_out, *suite.slow} - set(names)):
        yield f"there is no test {name}, which suites.toml names"


def unexpected(suite: Suite, size: int, tests: Iterable[Outcome]) -> Iterable[str]:
    """What contradicts suites.toml."""
    for test in tests:
        expected = suite.reason("fails", test.test, size)
        if test.outcome == "failed" and not expected:
            yield f"{test.test} fails: {test.reason}"
        if test.outcome == "passed" and expected:
            yield f"{test.test} passes; suites.toml says that it fails: {expected}"


# -- telling -------------------------------------------------------------------------------------------


def show(results: Sequence[Result], suites: dict[str, Suite]) -> None:
    """Print the table, and the reason for each test that does not pass."""
    print(f"\n{'suite':<12}{'ranks':>5}{'passed':>8}{'failed':>8}{'left out':>10}{'seconds':>9}")
    for one in results:
        counts = [one.count(outcome) for outcome in ("passed", "failed", "left out")]
        print(f"{one.suite:<12}{one.ranks:>5}{counts[0]:>8}{counts[1]:>8}{counts[2]:>10}{one.seconds:>9.1f}")
    for one in results:
        print(f"\n{one.suite}, {one.ranks} ranks")
        for test in one.tests:
            if test.outcome == "failed" and (why := suites[one.suite].reason("fails", test.test, one.ranks)):
                print(f"  fails, as known: {test.test}: {why}")
        reasons = Counter(test.reason for test in one.tests if test.outcome == "left out")
        for reason, number in reasons.most_common():
            print(f"  {number} left out: {reason}")
        for text in [*one.unexpected, *filter(None, [one.problem])]:
            print(f"  UNEXPECTED: {text}")


def main(
    suite: Annotated[
        list[str], typer.Option(help="torch, torch_on_cpu, accelerate, lightning, frameworks or horovod")
    ] = [],  # noqa: B006
    quick: Annotated[bool, typer.Option("--quick", help="two ranks, without what is slow")] = False,
    ranks: Annotated[list[int], typer.Option(help="numbers of ranks, instead of the suite's own")] = [],  # noqa: B006
    only: Annotated[str, typer.Option(help="tests whose name contains this")] = "",
    here: Annotated[bool, typer.Option("--here", help="use this Python as it is; install nothing")] = False,
    horovod: Annotated[
        Path | None,
        typer.Option("--horovod-source", help="a checkout of Horovod, for its tests and examples"),
    ] = None,
    report: Annotated[Path, typer.Option("--json", help="where the results go")] = OUTPUT / "results.json",
) -> None:
    """Run suites of others on mpisgd and compare what fails with what is known to fail."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # jobs end with this program
    suites = read_suites()
    if wrong := set(suite) - set(suites):
        raise typer.BadParameter(f"no suite {', '.join(wrong)}; there are {', '.join(suites)}")
    chosen = [suites[name] for name in suite or suites]
    results = []
    try:
        wanted = {package for one in chosen for package in one.packages}
        beside = {package for one in chosen for package in one.beside}
        python = Path(sys.executable) if here else make_environment(wanted, beside)
        for one in chosen:
            extra: list[str] = []
            if one.name == "horovod":
                os.environ["HOROVOD_SOURCE"] = str(horovod or horovod_tests(python, one.source))
                extra = ["-m", "mpisgd.horovod"]
            for size in ranks or ([2] if quick else one.ranks):
                result = run_suite(one, size, python, extra, quick=quick, only=only)
                print(f"{one.name}, {size} ranks: {result.count('passed')} passed", flush=True)
                results.append(result)
    except CannotRun as exc:
        sys.exit(f"test_suites: {exc}")
    show(results, suites)
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps([asdict(one) for one in results], indent=1))
    sys.exit(any(one.unexpected or one.problem for one in results))


if __name__ == "__main__":
    typer.run(main)
