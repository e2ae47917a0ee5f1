"""What `ParameterServer` takes: pushes and pulls of what all ranks hold; or one copy for each host."""

import math
from collections.abc import Iterator

from mpisgd.errors import InvalidArgument
from mpisgd.methods.cost_kit import Alloc, Collective, Cycle, Free, Op, Sizes, Wait, World
from mpisgd.methods.cost_steps import kept, trained, update
from mpisgd.methods.parameter_server.parameter_server import ParameterServer
from mpisgd.methods.sharded.cost import largest_load
from mpisgd.methods.shared_parameters import cost as shared_parameters

__all__ = ["cost", "cycle"]


def cost(method: ParameterServer, sizes: Sizes, world: World, step: int) -> Iterator[Op]:
    """Yield what a step takes."""
    if method.mode == "sync":
        yield from shared_parameters.cost(sizes, world, step)
        return
    if method.servers is not None or not method.locked:
        raise InvalidArgument(f"plan: {method} is not planned; expected servers=None and locked=True")
    version = sizes.nbytes + sizes.state_bytes
    # Parameters are not cut: some rank has the largest shard.
    both = [each.nbytes + each.state_bytes for each in sizes.parameters]
    shard = largest_load(both, world.size)
    if not step:
        yield from kept(sizes, state=0)  # which lies in the shards
        # Two versions of this rank's shard; of those on other hosts the one that is being made.
        yield Alloc("strategy", 2 * shard + (version if world.hosts > 1 else 0))
        return
    if step == 1:  # the first rank writes what all begin with, into a copy that it has read; and all read it
        yield Collective("access", 2 * version // world.size)
        yield Collective("access", version)
        yield Wait()
    yield from trained(sizes)
    yield Alloc("strategy", sizes.nbytes)  # gradients as they count
    accrued, one = (sizes.nbytes, sizes.largest_bytes) if method.push_every > 1 else (0, 0)
    yield Alloc("strategy", accrued + one)  # what waits for the next push, added up one after the other
    waits = method.mode == "ssp"
    if step % method.push_every == 0:  # reads a version of every shard, and writes the next one
        yield Collective("access", version, meets=waits)
        yield Collective("access", version, meets=waits)
    yield Free("strategy", accrued + one)
    yield from update()
    if step % (method.pull_every or method.push_every) == 0:
        read = min(version, 2 * shard)  # one is let go of when there is room for the next
        yield Alloc("strategy", read)
        yield Collective("access", version, meets=waits)
        yield Free("strategy", read)
    yield Wait()
    yield Free("strategy", sizes.nbytes)


def cycle(method: ParameterServer, world: World) -> Cycle:
    """Return the steps in which a rank pushes, and pulls."""
    if method.mode == "sync":
        return Cycle(world.wire.warmup_steps)
    return Cycle(1, math.lcm(method.push_every, method.pull_every or 1))
