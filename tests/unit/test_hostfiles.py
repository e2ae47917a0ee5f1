from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

HOSTFILES = Path(__file__).resolve().parents[2] / "hostfiles"
EXPECTED = {
    "localhost-2": {"localhost": 2},
    "localhost-4": {"localhost": 4},
    "localhost-8": {"localhost": 8},
    "two-nodes": {"node1": 4, "node2": 4},
    "uneven": {"node1": 2, "node2": 1},
}


BATCH_SCRIPTS = {"slurm", "slurm-requeue"}


def parse(text: str) -> dict[str, int]:
    """Open MPI's format: `host slots=n` on each line, comments after #."""
    slots: dict[str, int] = {}
    for line in text.splitlines():
        content = line.partition("#")[0].strip()
        if content:
            match = re.fullmatch(r"([\w.-]+) slots=([1-9]\d*)", content)
            assert match, f"not a host and its slots: {line!r}"
            assert match[1] not in slots, f"{match[1]} stands there twice"
            slots[match[1]] = int(match[2])
    return slots


def test_every_hostfile_is_listed_here():
    assert {path.name for path in HOSTFILES.iterdir()} == {*EXPECTED, *BATCH_SCRIPTS}


@pytest.mark.parametrize("name", sorted(BATCH_SCRIPTS))
def test_a_batch_script_is_one_for_bash_and_slurm(name: str):
    text = (HOSTFILES / name).read_text()
    assert text.startswith("#!/bin/bash\n# ")
    assert re.findall(r"^#SBATCH --nodes=\d+$", text, re.MULTILINE)
    assert subprocess.run(["bash", "-n", HOSTFILES / name]).returncode == 0


@pytest.mark.parametrize("name", EXPECTED)
def test_hostfile_gives_its_hosts_and_slots(name: str):
    assert parse((HOSTFILES / name).read_text()) == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_hostfile_begins_by_saying_what_it_is_for(name: str):
    assert (HOSTFILES / name).read_text().startswith("# ")


@pytest.mark.parametrize("line", ["node1 slot=2", "node1 slots=0", "node1:4", "node1 slots=2\nnode1 slots=2"])
def test_parser_refuses_what_open_mpi_would_not_mean(line: str):
    with pytest.raises(AssertionError):
        parse(line)
