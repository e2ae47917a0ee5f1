"""All modes that are verified, by family."""

from functools import cache

from mpisgd.tools.verification.mode import Mode
from mpisgd.tools.verification.modes.asynchronous import ASYNCHRONOUS
from mpisgd.tools.verification.modes.bfloat16 import BFLOAT16
from mpisgd.tools.verification.modes.by_hand import BY_HAND
from mpisgd.tools.verification.modes.compressions import COMPRESSIONS
from mpisgd.tools.verification.modes.contexts import CONTEXTS
from mpisgd.tools.verification.modes.horovod import HOROVOD
from mpisgd.tools.verification.modes.layouts import LAYOUTS
from mpisgd.tools.verification.modes.matrix_optimizers import MATRIX_OPTIMIZERS
from mpisgd.tools.verification.modes.one_bit_optimizers import ONE_BIT_OPTIMIZERS
from mpisgd.tools.verification.modes.one_order import ONE_ORDER
from mpisgd.tools.verification.modes.pairs import pairs
from mpisgd.tools.verification.modes.pipelines import PIPELINES
from mpisgd.tools.verification.modes.resumption import RESUMPTION
from mpisgd.tools.verification.modes.strategies import STRATEGIES
from mpisgd.tools.verification.modes.synchronous import SYNCHRONOUS
from mpisgd.tools.verification.modes.torch_programs import TORCH_PROGRAMS

__all__ = ["all_modes", "quick_modes"]

_WITHOUT_PAIRS: tuple[Mode, ...] = (
    *SYNCHRONOUS,
    *ONE_ORDER,
    *HOROVOD,
    *RESUMPTION,
    *TORCH_PROGRAMS,
    *LAYOUTS,
    *CONTEXTS,
    *PIPELINES,
    *STRATEGIES,
    *ASYNCHRONOUS,
    *COMPRESSIONS,
    *ONE_BIT_OPTIMIZERS,
    *MATRIX_OPTIMIZERS,
    *BFLOAT16,
    *BY_HAND,
)


@cache
def all_modes() -> tuple[Mode, ...]:
    """Return the modes of the whole matrix."""
    return (*_WITHOUT_PAIRS, *pairs())


def quick_modes() -> tuple[Mode, ...]:
    """Return those of the quick form, which has no pairs: to make them takes longer than to run some."""
    return tuple(mode for mode in _WITHOUT_PAIRS if mode.quick)
