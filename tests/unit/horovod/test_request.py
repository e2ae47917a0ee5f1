"""What must be alike on all ranks, and what is said where it is not."""

from __future__ import annotations

import itertools

import pytest

from mpisgd.horovod.engine.request import Request, differences

PLAIN = Request("allreduce.x", "allreduce", 0, "Sum", ("float32",), ((2, 3),))

# A field, another value of it, and the words for both.
OTHERS = [
    ("kind", "allgather", "mismatched operation: ", "gave allreduce", "gave allgather"),
    ("dtypes", ("int64",), "mismatched dtype: ", "gave float32", "gave int64"),
    ("shapes", ((4,),), "mismatched shape: ", "gave [2, 3]", "gave [4]"),
    ("op", "Average", "mismatched reduction: ", "gave Sum", "gave Average"),
    ("root", 2, "mismatched root rank: ", "gave -1", "gave 2"),
    ("prescale", 0.5, "mismatched prescale factor: ", "gave 1.0", "gave 0.5"),
    ("postscale", 3.0, "mismatched postscale factor: ", "gave 1.0", "gave 3.0"),
    ("device", "cuda", "mismatched device: ", "gave cpu", "gave cuda"),
    ("ranks", (0, 2), "mismatched ranks: ", "gave ", "gave [0, 2]"),
    ("about", "a [1]", "mismatched parameter: ", "gave nothing", "gave a [1]"),
]


def test_equal_requests_do_not_differ():
    assert differences({0: PLAIN, 1: Request(*PLAIN), 5: PLAIN}) is None


@pytest.mark.parametrize(("field", "value", "word", "first", "second"), OTHERS)
def test_a_difference_names_tensor_ranks_and_both_values(field, value, word, first, second):
    other = PLAIN._replace(**{field: value})
    said = differences({2: PLAIN, 0: other, 1: PLAIN})
    assert said == f"tensor 'x': {word}rank 0 {second}, ranks 1, 2 {first}"


def test_what_is_said_does_not_depend_on_who_submitted_first():
    other = PLAIN._replace(shapes=((4,),), dtypes=("int64",))
    pairs = [(0, PLAIN), (1, other), (2, PLAIN)]
    said = {differences(dict(order)) for order in itertools.permutations(pairs)}
    assert len(said) == 1


def test_several_differences_are_told_together():
    said = differences({0: PLAIN, 1: PLAIN._replace(op="Max", prescale=2.0)})
    assert "mismatched reduction" in said
    assert "mismatched prescale" in said


def test_every_field_but_the_name_is_compared():
    told = {field for field, *_ in OTHERS}
    assert told == set(Request._fields) - {"name", "set_id"}


def test_of_two_lists_of_parameters_the_first_difference_is_told_and_nothing_that_follows_from_it():
    ours = PLAIN._replace(about="a [1]\nb [2]\nc [2]", shapes=((5,),))
    theirs = PLAIN._replace(about="a [1]\nc [2]\nb [2]", shapes=((9,),))
    said = differences({0: ours, 1: theirs, 2: ours})
    assert said == "tensor 'x': mismatched parameter: ranks 0, 2 gave b [2], rank 1 gave c [2]"


def test_shapes_of_several_tensors_are_shown_in_turn():
    two = PLAIN._replace(dtypes=("float32", "float32"), shapes=((2,), ()))
    assert "rank 0 gave [2], []" in differences({0: two, 1: two._replace(shapes=((2,), (1,)))})


def test_the_label_is_the_name_that_the_program_gave():
    assert PLAIN.label == "x"
    assert Request("allreduce.allreduce.x", "allreduce").label == "allreduce.x"
