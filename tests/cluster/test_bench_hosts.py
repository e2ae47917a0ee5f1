"""`python -m mpisgd bench` where ranks are on several hosts. Nothing here looks at speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from clusters import run_on
from launcher import python


def bench(hosts: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a quick benchmark on a cluster; its record."""
    file = folder / "record.json"
    command = [python(), "-m", "mpisgd", "bench", *arguments, "--quick", "--json", str(file)]
    done = run_on(hosts, *command)
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(file.read_text())
    return record


@pytest.mark.parametrize("hosts", ["2,1", pytest.param("1,1,1", marks=pytest.mark.long)])
def test_collectives_are_measured_beside_the_link_and_a_ping_pong(hosts, tmp_path):
    record = bench(hosts, tmp_path, "collectives", "--only", "all_reduce", "--peers", "none")
    assert (record["size"], record["hosts"]) == (3, hosts.count(",") + 1)
    assert record["left_out"] == []
    for nbytes in (4, 65536):
        rows = {row["variant"]: row for row in record["rows"] if row["bytes"] == nbytes}
        assert rows.keys() == {"mpisgd", "MPI", "ping-pong", "limit"}
        assert rows["limit"]["ratio_to_limit"] == rows["ping-pong"]["ratio_to_ping_pong"] == 1.0
        median_s = {name: row["median_s"] for name, row in rows.items()}
        assert rows["mpisgd"]["ratio_to_ping_pong"] == median_s["mpisgd"] / median_s["ping-pong"]


def test_a_step_between_hosts_is_measured_beside_its_parts(tmp_path):
    record = bench("1,1", tmp_path, "overlap", "--batch", "3", "--peers", "none")
    assert {row["batch_per_rank"] for row in record["rows"]} == {3, 12}
    for batch in (3, 12):
        rows = {row["variant"]: row for row in record["rows"] if row["batch_per_rank"] == batch}
        assert rows.keys() == {"compute alone", "limit", "all_reduce alone", "mpisgd", "bound"}
        assert rows["bound"]["ratio_to_bound"] == rows["limit"]["ratio_to_link"] == 1.0
        assert min(rows[part]["ratio_to_larger"] for part in ("limit", "compute alone")) <= 1.0
        assert max(rows[part]["ratio_to_larger"] for part in ("limit", "compute alone")) == 1.0
        assert rows["bound"]["median_s"] > rows["limit"]["median_s"]


@pytest.mark.long
def test_the_batch_is_found_where_none_is_given(tmp_path):
    record = bench("1,1", tmp_path, "overlap", "--peers", "none", "--share", "1000")
    first, second = sorted({row["batch_per_rank"] for row in record["rows"]})
    assert second == 4 * first
    assert first > 1
