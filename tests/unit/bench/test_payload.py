"""The closed forms against the definitions of the collectives, and that a wrong result is seen."""

import pytest
import torch

from mpisgd.tools.bench.cases import COLLECTIVES, ITEM_BYTES, case_of
from mpisgd.tools.bench.measure import WrongResult
from mpisgd.tools.bench.payload import Payload, expected, given


def by_definition(case, rank):
    """What `rank` gets, from everyone's input; the root is rank 0."""
    inputs = [given(case, other).double() for other in range(case.size)]
    total, joined = torch.stack(inputs).sum(0), torch.cat(inputs)
    piece = slice(rank * case.count, (rank + 1) * case.count)
    return {
        "all_reduce": lambda: total,
        "reduce": lambda: total if rank == 0 else None,
        "broadcast": lambda: inputs[0],
        "reduce_scatter": lambda: total[piece],
        "all_gather": lambda: joined,
        "all_to_all": lambda: torch.cat([one[piece] for one in inputs]),
        "gather": lambda: joined if rank == 0 else None,
        "scatter": lambda: inputs[0][piece],
    }[case.collective]()


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_expected_is_what_the_collective_is_defined_to_give(collective, size, dtype):
    case = case_of(collective, dtype, 300, size)
    for rank in range(size):
        wanted, found = by_definition(case, rank), expected(case, rank)
        assert (wanted is None) == (found is None)
        if wanted is not None:
            assert found.dtype is getattr(torch, dtype)
            assert torch.equal(found.double(), wanted)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_doing_nothing_is_a_wrong_result(collective):
    case = case_of(collective, "float32", 256, 2)
    payloads = [Payload(case, rank) for rank in range(2)]
    wrong = 0
    for payload in payloads:
        payload.reset()
        try:
            payload.verify()
        except WrongResult:
            wrong += 1
    assert wrong >= 1


def test_one_wrong_element_is_named():
    payload = Payload(case_of("broadcast", "float32", 64, 2), 0)
    payload.reset()
    payload.verify()
    payload.output[5] += 1
    with pytest.raises(WrongResult, match=r"rank 0: element 5 of 16 is 7\.0, expected 6\.0"):
        payload.verify()


def test_the_root_goes_round_and_starts_at_rank_0():
    payload = Payload(case_of("broadcast", "float32", 64, 3), 0)
    assert [payload.next_root() for _ in range(4)] == [0, 1, 2, 0]
    payload.reset()
    assert payload.next_root() == 0
