"""Emulated hosts: which command starts a job there, and what is said where none can."""

from __future__ import annotations

import sys

import pytest

from mpisgd.errors import JobError
from mpisgd.tools.verification.hosts import checked, find_cluster, on_hosts


def test_a_checkout_has_a_command_of_its_own():
    words = find_cluster("")
    assert words[0] == sys.executable
    assert words[1].endswith("scripts/emulation/virtual_cluster.py")


def test_another_command_may_be_named_or_none():
    assert find_cluster("sudo ./scripts/cluster") == ["sudo", "./scripts/cluster"]
    assert find_cluster("none") == []


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("", ""),
        ("raise SystemExit('no namespaces')", "no namespaces"),
        ("raise SystemExit(3)", "exit code 3"),
    ],
)
def test_what_is_in_the_way_is_said(program, said):
    assert checked([sys.executable, "-c", program]) == said


def test_without_a_command_an_option_is_named():
    assert "--cluster" in checked([])
    with pytest.raises(JobError, match="--cluster: cannot start no-such-program"):
        checked(["no-such-program"])


def test_a_job_is_told_of_its_hosts_and_settings(monkeypatch):
    monkeypatch.setenv("MPISGD_TIMEOUT", "9")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    words = on_hosts(["cluster"], (2, 1), ["python", "-m", "mpisgd"])
    assert words[:3] == ["cluster", "--hosts", "2,1"]
    assert words[3].startswith("--mpirun=-x MPISGD_")
    assert "-x MPISGD_TIMEOUT" in words[3]
    assert words[4:] == ["--", "python", "-m", "mpisgd"]
