"""What is trained where memory is measured: named here, without torch, for a parent that must stay small."""

from dataclasses import dataclass

__all__ = ["BATCHES", "NONE", "OURS", "SHARED", "STARTED", "VARIANTS", "Trial"]

# The models, and examples of one rank; enough work for a step that is not all communication.
BATCHES = {"mlp": 32, "deep": 32, "transformer": 4}

NONE, STARTED, OURS, SHARED = "none", "none, MPI started", "mpisgd", "mpisgd, shared parameters"
VARIANTS = (NONE, STARTED, OURS, SHARED)


@dataclass(frozen=True)
class Trial:
    """One training.

    Attributes:
        variant: one of VARIANTS.
        model: one of BATCHES.
        momentum: whether the optimizer keeps a state.
        steps: how many.
        threads: of torch.
        small: a miniature of the model.
    """

    variant: str
    model: str
    momentum: bool
    steps: int
    threads: int
    small: bool
