"""Training frameworks under mpirun, with a model so small that the time is that of importing them."""

import importlib.util
import re
from pathlib import Path

import pytest
from launcher import run_python

PROGRAMS = Path(__file__).with_name("programs")
NUM_RANKS = 2
# Each rank's output to a file of its own: what is to appear once must not be looked for in a mixture.
APART = 'exec "$@" >"$FOLDER/${OMPI_COMM_WORLD_RANK:-$PMI_RANK}.txt" 2>&1'
# Of the frameworks, about torch's newer names for things; every rank of any launcher prints them.
THEIR_WARNINGS = ("-W", "ignore::FutureWarning")


@pytest.fixture
def outputs(tmp_path):
    """Run a program, if the package it needs is there; return what each rank said."""

    def run(program: str, package: str, *args: str) -> list[str]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; pip install mpisgd[{package}]")
        done = run_python(
            *THEIR_WARNINGS,
            str(PROGRAMS / program),
            *args,
            num_ranks=NUM_RANKS,
            options=("sh", "-c", APART, "rank"),
            env={"FOLDER": str(tmp_path)},
        )
        said = [(tmp_path / f"{rank}.txt").read_text() for rank in range(NUM_RANKS)]
        assert done.returncode == 0, "\n".join([*said, done.stderr])
        return said

    return run


def differences(said: str) -> list[float]:
    """The differences from one process that a rank has measured; equal up to rounding is 1e-16 here."""
    found = re.findall(r"max difference (\S+)", said)
    print("max difference", *found)
    return list(map(float, found))


def test_lightning_trains_like_one_process_and_speaks_once(outputs, tmp_path):
    said = outputs("lightning_ddp.py", "lightning", str(tmp_path))
    for rank, text in enumerate(said):
        assert f"rank {rank} of 2 took 4 steps" in text
        # What is logged for an epoch is averaged over the ranks, and so is its int64 count of batches.
        assert "validated: 3.5" in text
        trained, saved = differences(text)
        assert max(trained, saved) < 1e-13
        assert "refused: Trainer: devices=5, but mpirun has started 2 rank(s) on 1 host(s)" in text
        assert "refused: Trainer: num_nodes=3, but mpirun" in text
    assert "Epoch 0" in said[0]
    assert said[0].count("a checkpoint is written") == 1
    first_words = [line.partition(":")[0] for line in said[1].splitlines()]
    assert first_words == ["rank 1 of 2 took 4 steps", "validated", "trained", "saved", "refused", "refused"]


def test_accelerate_trains_like_one_process(outputs):
    said = outputs("accelerate_ddp.py", "accelerate")
    for rank, text in enumerate(said):
        first, second = text.splitlines()
        assert first == f"rank {rank} of 2 took 4 steps over mpisgd with ranks [0, 1]"
        assert max(differences(second)) < 1e-13
