"""The pretended hosts: what one of them is, what mpirun makes of them, and that nothing is left of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import progress
import pytest
from clusters import COMMAND, ROOT, run_on
from launcher import python


def shell(script: str) -> list[str]:
    """The command line of a script that takes a while: Open MPI's mpirun may never see the end of one that
    is over in a tenth of a second, and without MPI (open-mpi/ompi#10586).
    """
    return ["sh", "-c", f"{script}; code=$?; sleep 0.5; exit $code"]


def test_ranks_fill_the_hosts_in_order():
    done = run_on("2,1", *shell('echo "$OMPI_COMM_WORLD_RANK $(hostname) $TMPDIR"'))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "0 node1 /run/stage/node1/tmp",
        "1 node1 /run/stage/node1/tmp",
        "2 node2 /run/stage/node2/tmp",
    ]


def test_hosts_have_cores_of_their_own():
    cores = "import os; print(os.sched_getaffinity(0), flush=True)"
    done = run_on("1,1", python(), "-c", cores)
    expected = 2 if len(os.sched_getaffinity(0)) > 1 else 1
    assert len(set(done.stdout.splitlines())) == expected, done.stdout + done.stderr


def test_hosts_see_no_network_but_theirs():
    done = run_on("1,1", *shell("ip -brief address"))
    seen = {line.split("@")[0].split()[0] for line in done.stdout.splitlines()}
    assert seen == {"lo", "eth0"}, done.stdout + done.stderr
    assert {f"10.0.0.{i}/24" for i in (1, 2)} <= set(done.stdout.split())


def test_another_host_gets_only_what_mpirun_hands_on():
    """As with ssh; ranks on mpirun's own host do have its environment."""
    env, show = {"PAINT": "red"}, shell('echo "$(hostname) ${PAINT:-unset}"')
    kept = run_on("1,1", *show, env=env)
    assert sorted(kept.stdout.splitlines()) == ["node1 red", "node2 unset"], kept.stderr
    handed_on = run_on("1,1", *show, env=env, options="-x PAINT")
    assert sorted(handed_on.stdout.splitlines()) == ["node1 red", "node2 red"], handed_on.stderr


def test_exit_code_is_the_programs():
    assert run_on("1,1", *shell("(exit 7)")).returncode == 7


def test_what_hangs_is_ended():
    started = time.monotonic()
    command = [*COMMAND, "--hosts", "1,1", "--time-limit", "2", "--", "sleep", "1000"]
    done = progress.run(command)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (124, "cluster: no end within 2 s")
    assert time.monotonic() - started < 60


def running(mark: str) -> list[str]:
    """The processes whose command line has `mark` in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if mark in command:
            found.append(command)
    return found


def wait_until(condition, limit_s: float = 20.0) -> bool:
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_it_is_killed(number):
    """A namespace lives as long as its processes, its links, mounts and files as long as the namespace."""
    mark = f"{1000 + number}.{os.getpid()}"
    ranks = f"sleep {mark}"
    process = subprocess.Popen([*COMMAND, "--hosts", "2,2", "--", "sleep", mark], stderr=subprocess.DEVNULL)
    try:
        assert wait_until(lambda: sum(text.startswith(ranks) for text in running(mark)) == 4)
    finally:
        process.send_signal(number)
        process.wait(timeout=20)
    assert wait_until(lambda: not running(mark)), running(mark)
    assert "node1" not in subprocess.run(["ip", "link"], capture_output=True, text=True).stdout


@pytest.mark.long
def test_two_clusters_at_once_do_not_meet():
    command = [*COMMAND, "--hosts", "1,1", "--time-limit", "60", "--", "hostname"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [sorted(one.communicate(timeout=210)[0].split()) for one in both] == [["node1", "node2"]] * 2


@pytest.mark.parametrize(
    "arguments", [[], ["--hosts", "2,0", "--", "true"], ["--hosts", "two", "--", "true"]]
)
def test_usage_errors_are_said_at_once(arguments):
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=10)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: " in done.stderr


@pytest.mark.long
def test_links_carry_their_rate_and_no_more(tmp_path):
    """Mbit/s of payload; headers take 4 to 5 %, and a busy machine may take more, so the floor is low."""
    script = str(ROOT / "scripts" / "emulation" / "link_rate.py")
    done = run_on("2,1", python(), script, "--json", str(tmp_path / "links"), rate="200mbit")
    assert done.returncode == 0, done.stderr
    (link,) = json.loads((tmp_path / "links").read_text())
    assert link["hosts"] == ["node1", "node2"]
    assert 100e6 / 8 < link["bytes_per_s"] < 200e6 / 8
    assert 60e6 / 8 < link["both_ways_bytes_per_s"] < 200e6 / 8
    assert 0 < link["one_way_s"] < 0.1
