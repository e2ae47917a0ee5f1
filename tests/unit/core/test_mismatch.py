"""The sentence that says what ranks disagree about."""

from __future__ import annotations

import re

import pytest

from mpisgd.core.mismatch import COMPARED, Intention, mismatch_of, summary


def intention(
    kind: str, text: str = "", number: int = 7, exit_code: int = 0, detail: str = "", **fields: str
) -> Intention:
    values = tuple(fields.get(name, "") for name in COMPARED)
    return Intention(exit_code, number, 0, kind, values, f"{kind}({text})", "train.py:3", detail)


ENDED, STEP = intention("shutdown"), intention("gradients", when="step 5, reduction 0")


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({0: ENDED, 1: STEP}, "rank 0 has ended its program, rank 1 reduces gradients; the usual cause is"),
        ({0: STEP, 1: ENDED, 2: ENDED}, "rank 0 reduces gradients, ranks 1, 2 have ended their program; the"),
        (
            {0: ENDED, 1: intention("barrier")},
            "rank 0 has ended its program, rank 1 calls barrier; the usual cause",
        ),
        (
            {0: intention("broadcast"), 1: intention("barrier")},
            "rank 0 calls broadcast, rank 1 calls barrier",
        ),
        (
            {0: intention("all_reduce", shape="[3]"), 1: intention("all_reduce", shape="[4]")},
            "shape of all_reduce differs: [3] on rank 0, [4] on rank 1",
        ),
        (
            {0: intention("broadcast", root="0"), 1: intention("broadcast")},
            "root of broadcast differs: 0 on rank 0, none on rank 1",
        ),
        ({0: STEP, 1: STEP}, ""),  # what they have done before differs
        (
            {0: intention("new_group", "ranks=[0, 1]"), 1: intention("new_group", "ranks=[0]")},
            "the arguments of new_group differ: ranks=[0, 1] on rank 0, ranks=[0] on rank 1",
        ),
        ({0: intention("gradients", "1 of plan ab"), 1: intention("gradients", "1 of plan cd")}, ""),
        (
            {0: intention("optimizer", detail="#1 a"), 1: intention("optimizer", detail="#1 b")},
            "optimizer: the parameters differ",
        ),
    ],
)
def test_what_differs_is_said_in_a_sentence(told, sentence):
    assert summary(told).startswith(sentence)
    assert bool(summary(told)) == bool(sentence)
    if sentence.endswith(("barrier", "rank 1")):
        assert summary(told) == sentence


def test_the_error_has_the_exit_code_the_sentence_and_what_each_was_about_to_do():
    told = {
        0: intention("gradients", detail="#1 a: [2]\n#2 b: [3]"),
        1: intention("shutdown", exit_code=3),
        2: intention("gradients", detail="#1 a: [2]\n#2 b: [3]"),
    }
    error = mismatch_of("world", told)
    lines = str(error).splitlines()
    assert lines[0] == "rank 1 left the program by sys.exit(3)"
    assert lines[1] == "ranks 0, 2 reduce gradients, rank 1 has ended its program"  # and no other cause
    assert lines[2] == "the ranks of group 'world' do not agree on what comes next:"
    assert lines[3] == "  ranks 0, 2 at train.py:3: operation 7, gradients()"
    assert "      #2 b: [3]" in lines
    assert error.exit_code == 3


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        (("2 entries, hash ab", "1 entries, hash cd"), ("2 entries", "1 entries")),
        (("2 entries, hash ab", "2 entries, hash cd"), ("2 entries, hash ab", "2 entries, hash cd")),
        (("x of plan ab-cd, step 1", "x of plan ab-cd, step 2"), ("x, step 1", "x, step 2")),
        (("a, b, c, d, e, f, k=1", "a, b, c, d, e, f, k=[2, 3]"), ("k=1, ...", "k=[2, 3], ...")),
    ],
)
def test_hashes_and_what_all_ranks_have_alike_are_left_out_where_something_else_differs(texts, shown):
    told = {rank: intention("gradients", text) for rank, text in enumerate(texts)}
    lines = str(mismatch_of("world", told)).splitlines()[-2:]
    assert [re.search(r"gradients\((.*)\)", line)[1] for line in lines] == list(shown)


def test_a_variable_shows_everything(monkeypatch):
    monkeypatch.setenv("MPISGD_FULL_TRACEBACK", "1")
    told = {rank: intention("gradients", f"step {rank}, hash ab") for rank in range(2)}
    assert "gradients(step 1, hash ab)" in str(mismatch_of("world", told))
