"""What `Offload` takes: blocks of files in memory, and what a step reads and writes of them.

Source: Rajbhandari et al. 2021, "ZeRO-Infinity", sections 5.1 and 6.1. Of the state of an optimizer each
rank reads and writes its part once in a step. Where the parameters are in files, too, a layer is in memory
while it computes, forward and backward:

    forward    read the rank's part of a layer | all-gather | compute | drop
    backward   read, all-gather, compute | reduce-scatter the gradients | write the rank's part of them | drop
    step       read values, gradients, state | write values, state

What is read ahead is not taken to hide anything: ranks gather a layer when it is about to compute.
"""

from collections.abc import Iterator

from mpisgd.errors import InvalidArgument
from mpisgd.methods.cost_kit import (
    Alloc,
    Bucket,
    Check,
    Collective,
    Compute,
    Disk,
    Free,
    Op,
    Sizes,
    Wait,
    World,
)
from mpisgd.methods.cost_steps import update
from mpisgd.sharding.offload.description import Offload

__all__ = ["block_bytes", "layerwise_cost"]

FILES = 3  # of parameters, gradients and state


def block_bytes(offload: Offload) -> int:
    """Return the memory for the blocks of a file: in use, read ahead, and still to be written."""
    return 2 * (offload.prefetch + 1) * offload.block_bytes


def layerwise_cost(offload: Offload, sizes: Sizes, world: World, step: int) -> Iterator[Op]:
    """Yield what a step takes with parameters, gradients and state in files.

    Raises:
        InvalidArgument: the layers are not known.
    """
    if not sizes.layers:
        raise InvalidArgument(f"{offload} is not planned without the layers of the model")
    if not step:
        yield Alloc("parameters", sizes.module_bytes)
        yield Alloc("optimizer", FILES * block_bytes(offload))
        return
    n = world.size
    yield Alloc("activations", sizes.activation_bytes)
    for layer in sizes.layers:
        yield from _into_memory(layer, n)
        yield Free("parameters", layer.nbytes)
    yield Compute("forward")
    for layer in reversed(sizes.layers):
        yield from _into_memory(layer, n)
        yield Alloc("gradients", layer.nbytes)
        yield Alloc("buffers", layer.nbytes)  # the same side by side
        yield Check()
        yield Collective("reduce_scatter", layer.nbytes, itemsize=layer.itemsize)
        yield Wait()
        yield Disk(layer.nbytes / n)
        yield Free("buffers", layer.nbytes)
        yield Free("gradients", layer.nbytes)
        yield Free("parameters", layer.nbytes)
    yield Compute("backward")
    yield Free("activations", sizes.activation_bytes)
    yield Disk((3 * sizes.nbytes + 2 * sizes.state_bytes) / n)
    yield from update(1 / n)


def _into_memory(layer: Bucket, num_ranks: int) -> Iterator[Op]:
    yield Alloc("parameters", layer.nbytes)
    yield Disk(layer.nbytes / num_ranks)
    yield Check()
    yield Collective("all_gather", layer.nbytes)
    yield Wait()
