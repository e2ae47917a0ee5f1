"""What a reference allows, and what is none."""

from __future__ import annotations

import torch

from mpisgd.tools.verification.matrix import Selection
from mpisgd.tools.verification.mode import Reference, between_orders, flaw_of
from mpisgd.tools.verification.modes import all_modes
from mpisgd.tools.verification.modes.synchronous import equal_to_one_process
from mpisgd.tools.verification.problem import standard_problem
from mpisgd.tools.verification.sabotage import Sabotage


def test_a_step_allows_a_hundredth_of_what_it_moved_at_most():
    expected = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.5, 0.25]])
    allowed = Reference(expected, 0.007, "").allowed(torch.zeros(2))
    assert allowed.tolist() == [0.007, 0.007, 0.005]  # the second moved nothing: as the one before


def test_nothing_is_allowed_before_anything_moved():
    assert Reference(torch.ones(2, 3), 0.1, "").allowed(torch.ones(3)).tolist() == [0.0, 0.0]


def test_of_ranks_with_models_of_their_own_the_one_that_moved_most_counts():
    expected = torch.stack([torch.zeros(1, 2), torch.ones(1, 2)])
    assert Reference(expected, 1.0, "").allowed(torch.zeros(2)).tolist() == [0.01]


def test_what_is_not_finite_is_no_reference():
    for value in (float("nan"), float("inf")):
        expected = torch.zeros(3, 2)
        expected[1, 1] = value
        assert "from step 1" in flaw_of(expected)
        assert "from step 1" in flaw_of(torch.stack([torch.zeros(3, 2), expected]))
    assert flaw_of(torch.zeros(3, 2)) == ""


def test_what_is_random_is_no_reference():
    problem = standard_problem(1, 2, torch.float64)
    made = between_orders(lambda problem, order: torch.rand(2, 3), repeats=True)(problem)
    assert "random" in made.flaw
    assert between_orders(lambda problem, order: torch.ones(2, 3), repeats=True)(problem).flaw == ""


def test_what_many_modes_of_a_problem_are_equal_to_is_computed_once():
    made = []

    def make(params):
        made.append(params)
        return torch.optim.SGD(params, lr=0.5)

    problems = [standard_problem(2, 2, torch.float64) for _ in range(3)]
    first, again, _ = (equal_to_one_process(make)(problem) for problem in problems)
    assert again is first
    computed = len(made)
    other = equal_to_one_process(make)(standard_problem(2, 3, torch.float64))
    assert len(made) == 2 * computed
    assert other.expected.shape[0] == 3
    assert equal_to_one_process(make, 0.01)(problems[0]).expected.ne(first.expected).any()


def test_a_job_that_loses_a_rank_has_all_modes_that_lose_one():
    """It loads those alone, and not torch's parallelism for each rank that is to be killed."""
    losing = Selection(losing=Sabotage.NONE).modes()
    assert [mode.name for mode in losing if mode.loses_rank] == [m.name for m in all_modes() if m.loses_rank]
