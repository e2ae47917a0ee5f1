"""What ranks agree on: the description of an operation and the history it is folded into."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from mpisgd.core.consistency import Operation, _digest, fold

BASE = Operation("all_reduce", "SUM", "float32", (2, 3), 1, "algorithm=ring")
operations = st.builds(
    Operation,
    st.sampled_from(["all_reduce", "broadcast"]),
    st.sampled_from(["", "SUM"]),
    st.sampled_from(["", "float32"]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(-1, 2),
    st.text(max_size=3),
    when=st.text(max_size=3),
)


def test_every_field_counts():
    others = [
        BASE._replace(kind="reduce"),
        BASE._replace(op="AVG"),
        BASE._replace(dtype="float64"),
        BASE._replace(shape=(3, 2)),
        BASE._replace(shape=(6,)),
        BASE._replace(root=2),
        BASE._replace(extra=""),
        BASE._replace(when="step 1"),
    ]
    assert len({fold(0, operation) for operation in [BASE, *others]}) == len(others) + 1


@given(st.lists(operations, max_size=4), st.lists(operations, max_size=4))
def test_equal_history_and_nothing_else_gives_equal_hashes(first, second):
    hashes = []
    for history in (first, second):
        digest = 0
        for operation in history:
            digest = fold(digest, operation)
        hashes.append(digest)
    assert (hashes[0] == hashes[1]) == (first == second)


def test_the_hash_is_the_same_in_every_process():
    program = f"from mpisgd.core.consistency import Operation, fold\nprint(fold(1234, {BASE!r}))"
    other = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert other.stdout.strip() == str(fold(1234, BASE))
    assert fold(0, BASE).bit_length() <= 64


def test_an_operation_prints_what_it_has():
    assert str(BASE) == "all_reduce(op=SUM, dtype=float32, shape=[2, 3], root=1, algorithm=ring)"
    assert str(Operation("barrier")) == "barrier()"
    assert str(Operation("broadcast_object", root=0)) == "broadcast_object(root=0)"
    assert str(BASE._replace(when="step 1")).endswith("algorithm=ring, step 1)")


def test_an_operation_of_every_step_is_digest_once():
    """The step number was part of `extra`: every call missed the cache, and drove out what comes again."""
    fold(0, BASE)
    misses = _digest.cache_info().misses
    assert len({fold(0, BASE._replace(when=f"step {step}")) for step in range(10)}) == 10
    assert _digest.cache_info().misses == misses
