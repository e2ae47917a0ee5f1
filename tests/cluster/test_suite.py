"""The tests of tests/mpi, where ranks are on several hosts.

All of them would take minutes for each shape: of those that repeat one body for every dtype and group, a
part runs here. What concerns a single host, or no other rank at all, is left to one host, and so is what is
refused before anything is sent.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from clusters import run_on
from launcher import python

# What does not depend on the algorithm, and runs whole in the short form.
MOVEMENT = [
    "test_collectives and world and (float32 or bfloat16)",
    "test_algorithms and float32",
    "test_consistency and (shape or root or order or skips or part)",
    "test_groups and not (topology or test_dist_groups)",  # here test_topology.py has where ranks are
    "test_groups_that_are_destroyed",
    "test_objects and world",
    "test_window and (world or mistakes or lock)",
    "test_parameter_server and (1-1-0.9 or push_is_applied or ahead)",
    "(one_bit or zero_one or adasum) and equals_the_simulation",
    "test_horovod_movement",
    "test_horovod_training and test_arguments",
    # Of torch's own programs, one of each kind.
    "test_dist_messages",
    "test_training_equals_one_process_and_the_state_is_shared_out",
    "test_trains_as_one_process",
    "test_copies_of_shards_train_as_one_process",
    "test_a_schedule_equals_one_process",
    "test_stage_outputs_of_several_mebibytes",
]

# One of each kind of step, and of what Horovod's engine waits for; shared parameters in the smallest pieces.
SHORT = [
    "test_optimizers and fused and (momentum or sparse_gradients or added_later or Tensor-None)",
    "test_shared_parameters and cut and (accumulated or partial or clipping or True-adam or nobody_updates)",
    "test_horovod_names and (order_of_its_own or threads or steady)",
    "test_horovod_process_sets and (every_operation or overlap or removed)",
    "test_horovod_join and (training or adasum or process_sets)",
    "test_horovod_engine and (go_on or wake_up or shutdown)",
    "test_a_transformer_trains_as_in_one_process and AdamW",
    "test_what_some_ranks_saved_others_load and (copies-all or half-copies)",
]
WHOLE = [
    "test_optimizers and not (the_comparison or instance or overlapped)",
    "test_shared_parameters and cut and not (every_optimizer or the_bits or refused)",
    "test_horovod_names",
    "test_horovod_process_sets",
    "test_horovod_join",
    "test_horovod_engine",
    "test_a_transformer_trains_as_in_one_process",
    "test_what_some_ranks_saved_others_load",
]

FOLDERS = ("core", "collectives", "job", "optim", "horovod", "torch_backend")

# Each rank is a pytest of its own and writes a log of its own.
RANK = 'log=$1; shift; exec "$@" >"$log/rank-$OMPI_COMM_WORLD_RANK" 2>&1'


def run_tests(hosts: str, logs: Path, *arguments: str) -> None:
    """Run tests of tests/mpi on a cluster; where they fail, the first failing rank's log is the reason."""
    pytest_command = [python(), "-m", "pytest", "--with-mpi", "-q", "-p", "no:cacheprovider"]
    pytest_command += ["-m", "not long"]
    done = run_on(hosts, "sh", "-c", RANK, "sh", str(logs), *pytest_command, *arguments, logs=[logs])
    summaries = {path.name: path.read_text(errors="replace") for path in sorted(logs.iterdir())}
    for name, text in summaries.items():
        last = text.splitlines()[-1] if text else "nothing"
        assert " passed" in last, f"{name} said {text[-3000:]}\n{done.stderr}"
        assert "failed" not in last, f"{name} said {text[-3000:]}\n{done.stderr}"
    assert done.returncode == 0, done.stderr
    assert len(summaries) == sum(map(int, hosts.split(",")))


LONG = pytest.mark.long


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("hosts", "more"),
    [
        pytest.param("2,1", SHORT, id="2,1"),
        *(pytest.param(hosts, WHOLE, marks=LONG, id=f"{hosts} whole") for hosts in ("2,1", "2,2", "1,1,1")),
    ],
)
def test_what_matters_of_the_suite_passes(hosts, more, tmp_path):
    folders = [f"tests/mpi/{folder}" for folder in FOLDERS]
    run_tests(hosts, tmp_path, *folders, "-k", " or ".join([*MOVEMENT, *more]))
