"""What goes with what: the options of `DistributedOptimizer` that a strategy may not be able to follow."""

from collections.abc import Callable, Mapping
from typing import Any

from mpisgd.errors import InvalidArgument
from mpisgd.methods.strategy.training import Training

__all__ = ["LOCAL_STEPS", "OPTIONS", "check_momentum", "refuse_momentum", "refuse_signs"]


def _unless(default: Any, value: Any) -> Any:
    return None if value == default else value


# What the user has chosen of each option, None where that is its default.
OPTIONS: Mapping[str, Callable[[Training], Any]] = {
    "share_parameters": lambda training: _unless(False, training.share_parameters),
    "op": lambda training: _unless("AVG", training.options.op.name),
    "gradient_predivide_factor": lambda training: _unless(1.0, training.options.predivide_factor),
    "error_if_nonfinite": lambda training: _unless(False, training.options.error_if_nonfinite),
    "check_in_sync_every": lambda training: _unless(0, training.check_in_sync_every),
    "compression": lambda training: _unless(None, _compression(training)),
    "named_buffers": lambda training: "..." if training.buffers else None,
}

# Of strategies whose ranks step with gradients of their own: there is no sum of gradients, and the ranks'
# parameters differ in between.
LOCAL_STEPS = frozenset(
    {"share_parameters", "op", "gradient_predivide_factor", "error_if_nonfinite", "check_in_sync_every"}
)


def _compression(training: Training) -> str | None:
    compresses = any(training.options.compression.changes(param.dtype) for _, param in training.named)
    return repr(training.options.compression) if compresses else None


def check_momentum(training: Training) -> None:
    """Raise where both the compression and the optimizer have a momentum: an update would have it twice.

    Raises:
        InvalidArgument: says which to leave out.
    """
    compression = training.options.compression
    if not compression.traits.has_momentum:
        return
    beta = max(float(options.get("momentum", 0.0)) for options in training.optimizer.param_groups)
    if beta:
        raise InvalidArgument(
            f"DistributedOptimizer: {compression} has a momentum, and so has the optimizer, {beta}; make it "
            "with momentum=0"
        )


def refuse_signs(strategy: object, training: Training) -> None:
    """Raise where signs alone travel of changes of parameters: all would be as large as 1.

    Raises:
        InvalidArgument: names both.
    """
    compression = training.options.compression
    if not compression.traits.has_magnitudes:
        raise InvalidArgument(
            f"DistributedOptimizer: compression={compression} does not go with {strategy}: it sends signs "
            "alone, so every parameter would move by 1; mpisgd.compress.OneBit has magnitudes, too"
        )


def refuse_momentum(strategy: object, training: Training) -> None:
    """Raise where the compression has a momentum and what travels is no gradient: it would overshoot.

    Raises:
        InvalidArgument: names both.
    """
    compression = training.options.compression
    if compression.traits.has_momentum:
        raise InvalidArgument(
            f"DistributedOptimizer: compression={compression} does not go with {strategy}: it has a "
            "momentum, with which parameters would go beyond their mean"
        )
