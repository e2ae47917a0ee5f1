"""`OneBitLamb`: what it refuses; that it is its paper is in tests/unit/methods."""

from __future__ import annotations

import pytest
from given_losses import torch_parameters

import mpisgd
from mpisgd.errors import InvalidArgument


@pytest.fixture(autouse=True)
def way():
    """Once is enough: no test here is about how gradients travel."""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_coeff": 2.0, "max_coeff": 1.0}, "min_coeff=2.0 is above"),
        ({"coeff_beta": 1.0}, "coeff_beta=1.0"),
        ({"factor_threshold": 0}, "factor_threshold=0"),
    ],
)
def test_arguments_are_checked(options, said):
    with pytest.raises(InvalidArgument, match=said):
        mpisgd.OneBitLamb(torch_parameters(), freeze_step=3, **options)
