"""Whose memory counts how, and what a watch sees."""

import os
import subprocess
import sys
import time

import pytest

from mpisgd.tools.bench.memory.peak import MemorySampler, highest, memory_rows
from mpisgd.tools.bench.memory.process_memory import ProcessMemory, estimate, read_memory, together

MIB = 2**20

# Says when it has touched its memory, keeps it until told.
HOLDER = "import sys; held = bytearray(b'1') * ({mib} << 20); print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def holder():
    """Start processes that hold some MiB."""
    started = []

    def start(mib):
        command = [sys.executable, "-c", HOLDER.format(mib=mib)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        process.communicate()


def test_private_memory_is_seen_from_outside(holder):
    small, large = holder(1), holder(65)
    difference = read_memory(large.pid).private - read_memory(small.pid).private
    assert difference == pytest.approx(64 * MIB, abs=MIB)
    assert estimate(large.pid, 2) - estimate(small.pid, 2) == pytest.approx(64 * MIB, abs=MIB)


def test_shared_memory_counts_once_for_all_that_map_it(tmp_path):
    code = "import mmap, os, sys; m = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0); sum(m[::4096])"
    code += "; print('ready', flush=True); sys.stdin.read()"
    name = f"/dev/shm/mpisgd-test-{os.getpid()}"
    with open(name, "wb") as file:
        file.write(b"1" * 32 * MIB)
    command = [sys.executable, "-c", code, name]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for process in both:
            assert process.stdout.readline() == b"ready\n"
        shares = [read_memory(process.pid) for process in both]
        assert together(shares).shared == pytest.approx(32 * MIB, abs=MIB)
    finally:
        os.unlink(name)
        for process in both:
            process.communicate()


def test_of_files_the_largest_counts():
    assert together([ProcessMemory(1, 2, 30), ProcessMemory(4, 5, 20)]) == ProcessMemory(5, 7, 30)
    assert together([ProcessMemory(1, 2, 30), ProcessMemory(4, 5, 20)]).total == 42


def test_who_has_ended_takes_nothing():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    assert read_memory(done.pid) is None
    assert estimate(done.pid, 1) == 0


def test_the_highest_point_is_that_of_the_sum():
    samples = [
        {"a": ProcessMemory(10), "b": ProcessMemory(1)},
        {"a": ProcessMemory(10), "b": ProcessMemory(15)},
    ]
    assert highest(samples) == ProcessMemory(20)


def test_a_watch_waits_for_all_ranks_and_keeps_the_peak(holder, tmp_path):
    first, second = holder(40), holder(20)
    sampler = MemorySampler(tmp_path, 2)
    (tmp_path / "rank-0.pid").write_text(str(first.pid))
    sampler.sample()
    assert sampler.peak == ProcessMemory()
    (tmp_path / "rank-1.pid").write_text(str(second.pid))
    sampler.sample()
    peak = sampler.peak
    assert peak.private > 60 * MIB
    first.communicate()
    time.sleep(0.01)
    sampler.sample()
    assert sampler.peak == peak


def test_rows_compare_with_the_training_without():
    peaks = {
        "none": [ProcessMemory(600 * MIB), ProcessMemory(500 * MIB), ProcessMemory(700 * MIB)],
        "none, MPI started": [ProcessMemory(620 * MIB)],
        "mpisgd": [ProcessMemory(600 * MIB, 40 * MIB, 22 * MIB)],
        "mpisgd, shared parameters": [ProcessMemory(570 * MIB)],
    }
    none, started, ours, shared = memory_rows("mlp, SGD", peaks, ranks=2, sharable=50 * MIB)
    assert (none["ratio_to_bound"], started["ratio_to_bound"]) == (None, None)
    assert (ours["ratio_to_bound"], shared["ratio_to_bound"]) == (pytest.approx(662 / 620), 1.0)
    assert (none["ratio_to_none"], none["extra_bytes_per_rank"]) == (1.0, 0.0)
    assert (none["min_bytes"], none["max_bytes"], none["repeats"]) == (500 * MIB, 700 * MIB, 3)
    assert ours["ratio_to_none"] == pytest.approx(662 / 600)
    assert ours["extra_bytes_per_rank"] == 31 * MIB
    assert ours["ratio_to_allowed"] == pytest.approx(1.0)  # 1.05 x 600 + 2 x 16
    assert (ours["private_bytes"], ours["shared_bytes"], ours["files_bytes"]) == (
        600 * MIB,
        40 * MIB,
        22 * MIB,
    )
