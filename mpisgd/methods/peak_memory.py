"""`peak_memory`: what a rank keeps at the moment at which it keeps most, by the operations of a cost."""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from mpisgd.methods.cost_kit import Alloc, Free, Op, Sizes, World
from mpisgd.methods.costs import MethodCost

__all__ = ["Memory", "peak_memory", "peak_of"]


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the moment at which it has most.

    Attributes:
        parameters: of the model, and its buffers; of shared memory this rank's share.
        gradients: of all of them, or of this rank's share.
        optimizer: its state.
        strategy: copies that the strategy keeps, and what it needs while it communicates; of a pipeline,
            older versions of the weights.
        compression: what compressors keep from step to step, and need meanwhile.
        buffers: gradients side by side; of a pipeline, messages.
        activations: what backward needs.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    strategy: float = 0.0
    compression: float = 0.0
    buffers: float = 0.0
    activations: float = 0.0

    @property
    def total(self) -> float:
        """All together."""
        return float(sum(getattr(self, field.name) for field in fields(self)))


def peak_memory(method: MethodCost, sizes: Sizes, world: World) -> Memory:
    """Return the peak memory of a rank in the steps that stand for all, in bytes."""
    first, length = method.cycle(world)
    steps = (0, *range(first + 1, first + length + 1))
    return peak_of(op for step in steps for op in method.cost(sizes, world, step))


def peak_of(ops: Iterable[Op]) -> Memory:
    """Return the peak memory of a rank in these operations, in bytes."""
    now = peak = Memory()
    for op in ops:
        if isinstance(op, (Alloc, Free)):
            more = op.nbytes if isinstance(op, Alloc) else -op.nbytes
            now = replace(now, **{op.what: getattr(now, op.what) + more})
            peak = max(peak, now, key=_total)
    return peak


def _total(memory: Memory) -> float:
    return memory.total
