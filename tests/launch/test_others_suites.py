"""The short form of the suites of others, with what is installed; ./scripts/test_suites runs them whole."""

from __future__ import annotations

import importlib.util
import json

import pytest
from launcher import run_python

# The least number of tests that pass: a suite that runs nothing would not fail.
SHORT = {"torch": ("expecttest", 90), "accelerate": ("accelerate", 1)}


# torch's takes half a minute; what it asks of the backend, tests/mpi/torch_backend asks at every size.
@pytest.mark.parametrize("suite", [pytest.param("torch", marks=pytest.mark.long), "accelerate"])
def test_the_short_form_passes(suite, tmp_path):
    package, least = SHORT[suite]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    report = tmp_path / "results.json"
    options = ("--suite", suite, "--quick", "--here", "--json", str(report))
    done = run_python("scripts/suites/test_suites.py", *options, fresh=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(report.read_text())
    assert sum(test["outcome"] == "passed" for test in result["tests"]) >= least
