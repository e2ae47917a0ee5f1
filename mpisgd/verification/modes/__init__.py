"""All modes that are verified, by family."""

from mpisgd.verification.mode import Mode
from mpisgd.verification.modes.asynchronous import ASYNCHRONOUS
from mpisgd.verification.modes.bfloat16 import BFLOAT16
from mpisgd.verification.modes.compressions import COMPRESSIONS
from mpisgd.verification.modes.horovod import HOROVOD
from mpisgd.verification.modes.layouts import LAYOUTS
from mpisgd.verification.modes.one_bit_optimizers import ONE_BIT_OPTIMIZERS
from mpisgd.verification.modes.pairs import PAIRS
from mpisgd.verification.modes.pipelines import PIPELINES
from mpisgd.verification.modes.resumption import RESUMPTION
from mpisgd.verification.modes.strategies import STRATEGIES
from mpisgd.verification.modes.synchronous import SYNCHRONOUS
from mpisgd.verification.modes.torch_programs import TORCH_PROGRAMS

__all__ = ["MODES"]

MODES: tuple[Mode, ...] = (
    *SYNCHRONOUS,
    *HOROVOD,
    *RESUMPTION,
    *TORCH_PROGRAMS,
    *LAYOUTS,
    *PIPELINES,
    *STRATEGIES,
    *ASYNCHRONOUS,
    *COMPRESSIONS,
    *PAIRS,
    *ONE_BIT_OPTIMIZERS,
    *BFLOAT16,
)
