"""`run` as root: Open MPI would print a box that names another option."""

import os

import pytest

from mpisgd.errors import JobError
from mpisgd.tools.cli import run


@pytest.mark.parametrize(
    ("user", "variables", "words", "starts"),
    [
        (0, (), ["mpirun"], False),
        (0, run.ROOT_VARIABLES[:1], ["mpirun"], False),
        (0, run.ROOT_VARIABLES, ["mpirun"], True),
        (0, (), ["mpirun", "--allow-run-as-root"], True),
        (1000, (), ["mpirun"], True),
    ],
)
def test_as_root_open_mpi_must_be_told_to_start(user, variables, words, starts, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(run, "is_open_mpi", lambda _: True)
    for name in run.ROOT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in variables:
        monkeypatch.setenv(name, "1")
    if starts:
        assert run._launcher(words, 1, None, False)[: len(words)] == words
        return
    with pytest.raises(JobError, match="export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"):
        run._launcher(words, 1, None, False)
