"""What an operation may write before the ranks have agreed on it is looked at, where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from mpisgd import config
from mpisgd.collectives.staging_check import run_first_part
from mpisgd.interfaces.host_transport import HostTransport, Steps


class Staging(HostTransport):
    """Two buffers of one rank, of which the first one is in use."""

    name = "test"
    spans_hosts = False

    def __init__(self) -> None:
        self.current, self.coming = torch.full((4,), float("nan")), torch.zeros(4)

    @property
    def memory(self) -> None:
        return None

    @property
    def digest_exchange(self) -> None:
        return None

    def guarded(self, *, alone: bool = False) -> Sequence[Tensor]:
        return [self.current]


def steps(first: Callable[[], object], rest: Callable[[], object] = lambda: None) -> Steps:
    first()
    yield
    rest()


def test_the_coming_half_may_be_written():
    staging, flat = Staging(), torch.full((4,), float("nan"))
    run = steps(lambda: staging.coming.copy_(flat), lambda: flat.fill_(1.0))
    run_first_part(partial(next, run, None), staging, [flat])
    assert staging.coming.isnan().all()
    assert flat.isnan().all()
    assert next(run, None) is None
    assert flat.eq(1.0).all()


def test_a_transport_that_writes_into_the_half_in_use_is_found():
    staging, flat = Staging(), torch.ones(4)
    with pytest.raises(AssertionError, match="'test' has written into staging buffer 0 of those"):
        run_first_part(partial(next, steps(lambda: staging.current[1:2].fill_(3.0))), staging, [flat])


@pytest.mark.parametrize("flat", [torch.ones(4), torch.ones(4, 4).t(), torch.ones(()), torch.ones(2).bool()])
def test_a_transport_that_writes_into_a_tensor_of_the_call_is_found(flat):
    staging = Staging()
    with pytest.raises(AssertionError, match="'test' has written into a tensor of the call"):
        run_first_part(partial(next, steps(lambda: flat.zero_())), staging, [torch.ones(3), flat])


def test_an_operation_without_steps_or_elements_is_none():
    run_first_part(lambda: None, Staging(), [torch.ones(1, dtype=torch.int16).expand(0), torch.ones(2, 0)])


def test_it_is_off_unless_it_is_asked_for():
    assert not config.check_staging({})
    assert config.check_staging({"MPISGD_CHECK_STAGING": "1"})
    with pytest.raises(config.InvalidArgument, match="MPISGD_CHECK_STAGING='yes': expected 0 or 1"):
        config.check({"MPISGD_CHECK_STAGING": "yes"})
