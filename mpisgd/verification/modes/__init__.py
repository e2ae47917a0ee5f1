"""All modes that are verified, by family."""

from mpisgd.verification.mode import Mode
from mpisgd.verification.modes.compressions import COMPRESSIONS
from mpisgd.verification.modes.pipelines import PIPELINES
from mpisgd.verification.modes.strategies import STRATEGIES
from mpisgd.verification.modes.synchronous import SYNCHRONOUS
from mpisgd.verification.modes.torch_programs import TORCH_PROGRAMS

__all__ = ["MODES"]

MODES: tuple[Mode, ...] = (*SYNCHRONOUS, *TORCH_PROGRAMS, *PIPELINES, *STRATEGIES, *COMPRESSIONS)
