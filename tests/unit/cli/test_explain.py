"""`mpisgd explain`, `--version`, and a reader that has gone."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import mpisgd
from mpisgd import errors
from mpisgd.tools.cli.main import app


def said(*words: str) -> str:
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_explained_by_the_name_in_its_message_and_by_its_class(name):
    kind = getattr(errors, name)
    short = errors.anchor(kind)
    text = said("explain", short)
    assert text.startswith(name)
    assert "Causes:" in text
    assert "What to do:" in text
    assert text == said("explain", name) == said("explain", f"[mpisgd:{short}]")


def test_without_a_name_all_are_listed():
    assert [line.split()[0] for line in said("explain").splitlines()] == [
        errors.anchor(getattr(errors, name)) for name in errors.__all__
    ]


def test_what_is_misspelt_is_suggested():
    with pytest.raises(errors.JobError, match=r"'dedlock'; did you mean deadlock\?"):
        said("explain", "dedlock")


def test_the_version():
    assert said("--version") == f"mpisgd {mpisgd.__version__}\n"


def test_a_reader_that_has_gone_is_no_error():
    command = f"{sys.executable} -m mpisgd explain | true; echo codes ${{PIPESTATUS[*]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert re.search(r"codes (141|0) 0", done.stdout), done.stdout
