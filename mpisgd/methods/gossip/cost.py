"""What `Gossip` takes: messages to neighbours and their weighted sum; or a copy, while a thread exchanges."""

from collections.abc import Iterator

from mpisgd.methods.cost_kit import Alloc, Check, Collective, Cycle, Free, Move, Op, Sizes, Wait, World
from mpisgd.methods.cost_steps import kept, unsent_step
from mpisgd.methods.gossip.gossip import Gossip

__all__ = ["cost", "cycle"]

MOST_PHASES = 8  # of a graph that never repeats


def cost(method: Gossip, sizes: Sizes, world: World, step: int) -> Iterator[Op]:
    """Yield what a step takes."""
    if not step:
        yield from kept(sizes)
        yield Alloc("strategy", _copies(method) * sizes.nbytes)
        return
    if step == 1 and method.consensus_step is not None:
        yield from _first_copies(method, sizes)
    yield from unsent_step(sizes)
    if method.style == "asynchronous":
        yield Move(6 * sizes.nbytes, "exchange with the model")
        if step % method.every == 0:  # half of the ranks ask the others, where their last mean has come back
            yield Collective("pairs", sizes.nbytes, meets=False)
    elif step % method.every == 0:
        mix = _mix_messages if method.consensus_step is not None else _mix
        number, phases = step // method.every - 1, method.graph.num_phases(world.size)
        yield from mix(method, sizes, world, number if phases is None else number % phases)


def _copies(method: Gossip) -> int:
    """Return how many copies of the parameters are kept: by AD-PSGD x, z and three more; by CHOCO h and s."""
    return 5 if method.style == "asynchronous" else 2 if method.consensus_step is not None else 0


def _mix(method: Gossip, sizes: Sizes, world: World, phase: int) -> Iterator[Op]:
    """Yield a mean with the neighbours: everyone sends all parameters to each of them."""
    wire = world.wire.cast_itemsize(sizes.itemsize)
    assert wire is not None  # what it goes with
    yield Move(2 * sizes.small_bytes, tensors=len(sizes.parameters))
    yield Check()
    for nbytes in sizes.messages:
        nbytes = nbytes * wire // sizes.itemsize
        yield Collective("exchange", nbytes, graph=method.graph, phase=phase)
    yield Wait()
    _, degree = method.graph.degrees(world.size, phase)
    # Messages go one after the other: what came with one is let go of when there is room for the next.
    # A cast adds what travels, what that has left out, and each term as wide as the sum.
    narrow = wire / sizes.itemsize
    copies = min(2, len(sizes.messages)) * degree if narrow == 1 else 2 + narrow + (1 + narrow) * degree
    fresh = copies * max(sizes.messages)
    yield Alloc("strategy", fresh)
    # The first term is scaled, each further one added to it, and the result copied.
    yield Move((2 + 3 * degree + 2) * sizes.nbytes, "weighted sum")
    yield Free("strategy", fresh)


def _first_copies(method: Gossip, sizes: Sizes) -> Iterator[Op]:
    """Yield the exchange of what changes are counted from: whole, and in float32 at least."""
    yield Check()
    for bucket in sizes.packed:
        nbytes = bucket.numel * max(4, bucket.itemsize)
        yield Collective("exchange", nbytes, graph=method.graph)
    yield Wait()


def _mix_messages(method: Gossip, sizes: Sizes, world: World, phase: int) -> Iterator[Op]:
    """Yield CHOCO-SGD's exchange of compressed changes."""
    yield Alloc("strategy", 2 * sizes.nbytes)
    yield Move(4 * sizes.nbytes, "changes", fresh_bytes=2 * sizes.nbytes)
    yield Check()
    for bucket in sizes.packed:
        yield from world.wire.exchange(bucket, world, method.graph, phase)
    yield Wait()
    yield Move(6 * sizes.nbytes, "mean")
    yield Free("strategy", 2 * sizes.nbytes)


def cycle(method: Gossip, world: World) -> Cycle:
    """Return the steps in which each phase of the graph comes once."""
    if method.style == "asynchronous":
        return Cycle(0, method.every)
    return Cycle(
        0 if method.consensus_step is None else 1,
        method.every * (method.graph.num_phases(world.size) or MOST_PHASES),
    )
