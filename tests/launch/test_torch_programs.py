"""Programs written for torchrun and gloo, as torch's tutorials are: only the backend's name changes."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest
from launcher import run_python

PROGRAMS = Path(__file__).with_name("programs")
MESSAGES = ("point_to_point", "group_all_reduce")
# What each prints in front of its losses.
TRAINING = {
    "averaged_gradients": "averaged",
    "ddp_accumulation": "accumulated",
    "ddp_toy": "toy",
    "fsdp2": "fsdp2",
    "tensor_parallel": "tensor parallel",
    "pipeline": "pipeline",
}
TOLERANCE = 1e-12  # of losses of about 1; measured: 1e-14, the last digit that is printed


def run(*names: str, num_ranks: int | None) -> list[str]:
    """What the programs print, one after the other in one job: starting torch takes longer than they do."""
    all_of_them = str(PROGRAMS / "all_of_them.py")
    done = run_python("-W", "error", all_of_them, "mpisgd", *names, num_ranks=num_ranks)
    assert (done.returncode, done.stderr) == (0, "")
    return sorted(done.stdout.splitlines())


def losses_in(lines: list[str]) -> dict[str, list[float]]:
    found = defaultdict(list)
    for line in lines:
        name, loss = re.fullmatch(r"(.+): (?:step|epoch) \d+ (\S+)", line).groups()
        found[name].append(float(loss))
    return found


@pytest.fixture(scope="module")
def together() -> list[str]:
    """What all of them print at two ranks."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    return run(*MESSAGES, *TRAINING, num_ranks=2)


def test_messages_and_a_group_of_some_ranks(together):
    assert [line for line in together if "rank" in line] == [
        *(f"blocking: rank {rank} has [1.0, 1.0, 1.0]" for rank in (0, 1)),
        *(f"group: rank {rank} has [3.0, 3.0]" for rank in (0, 1)),
        *(f"immediate: rank {rank} has [2.0, 2.0, 2.0]" for rank in (0, 1)),
    ]


def test_training_programs_at_two_ranks_print_the_losses_of_one_process(together):
    alone = losses_in(run(*TRAINING, num_ranks=None))
    joined = losses_in([line for line in together if "rank" not in line])
    assert alone.keys() == joined.keys() == set(TRAINING.values())
    for name, losses in alone.items():
        assert len(losses) >= 3
        assert losses[0] != losses[-1]
        largest = max(abs(a - b) for a, b in zip(losses, joined[name], strict=True))
        print(f"{name}: max difference {largest:.1e}")
        assert largest < TOLERANCE
