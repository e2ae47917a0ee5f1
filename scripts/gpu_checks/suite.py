"""tests/gpu as a check: the same tests as in CI, on the GPU of this machine."""

from __future__ import annotations

import time
from pathlib import Path

import run_tests
from suite_stages import Stage

from gpu_checks.catalog import Setting
from gpu_checks.finding import FAILS, Finding
from gpu_checks.jobs import environment, launch
from mpisgd.tools.bench.jobs import mpirun

__all__ = ["LIMIT_S", "run_suite"]

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0
NAMED = 5  # failed tests, in the report


def run_suite(setting: Setting, folder: Path, limit_s: float) -> tuple[Finding, float]:
    """Run the tests; what they have found, and the seconds it took."""
    folder.mkdir(parents=True)
    # Nothing is captured: what ends a job in the middle of a test says why.
    options = ("-m", "not long", "-s")
    stage = Stage(f"gpu {setting}", (str(ROOT / "tests" / "gpu"),), setting.size, options=options)
    words = run_tests.command(stage)
    env = {**environment(setting.size, setting.transport), "MPISGD_TEST_OUTPUT": str(folder)}
    env["COLUMNS"] = "250"  # pytest cuts its summary there, and with it what each failed test says
    begun = time.monotonic()
    of_clone = ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
    problem = launch([*mpirun(), *words[1:], *of_clone], env, folder / "log.txt", limit_s)
    took_s = time.monotonic() - begun
    if (said := folder / "rank-0.log").exists():  # the ranks have the same outcomes
        with (folder / "log.txt").open("a") as log:
            log.write(said.read_text(errors="replace"))
    reports = sorted(folder.glob("rank-*.xml"))
    found = run_tests.worst(map(run_tests.outcomes, reports))
    failed = [name.rpartition(".")[2] for name, outcome in found.items() if outcome == "failed"]
    expected = "all tests pass"
    if len(reports) < setting.size:
        missing = f"{setting.size - len(reports)} of {setting.size} ranks left no report"
        return Finding(FAILS, expected, f"{problem or 'exit code 0'}; {missing}"), took_s
    seen = " ".join(run_tests.count(found).split())
    if failed:
        seen += f": {', '.join(failed[:NAMED])}" + f" and {len(failed) - NAMED} more" * (len(failed) > NAMED)
    elif problem:
        seen += f"; then {problem}"
    return Finding.of(not failed and not problem, expected, seen), took_s
