"""What `DiLoCo` takes: every `sync_every` steps, by fragment, the mean of the changes and an outer step."""

from collections.abc import Iterator
from dataclasses import replace

from mpisgd.errors import InvalidArgument
from mpisgd.methods.cost_kit import Alloc, Bucket, Cycle, Free, Move, Op, Parameter, Sizes, World
from mpisgd.methods.cost_steps import arrived_mean, kept, mean_of_parameters, unsent_step
from mpisgd.methods.diloco.diloco import DiLoCo

__all__ = ["cost", "cycle"]

# What an outer step reads and writes, in multiples of the parameters: SGD with Nesterov's momentum, and the
# copy back.
OUTER_MOVED = 9 + 2


def cost(method: DiLoCo, sizes: Sizes, world: World, step: int) -> Iterator[Op]:
    """Yield what a step takes."""
    if method.quorum is not None:
        raise InvalidArgument(f"plan: {method} is not planned: when learners arrive depends on time")
    if not step:
        yield from kept(sizes)
        momentum = method.chosen_options.get("momentum", 0) > 0
        yield Alloc("strategy", (1 + momentum) * sizes.nbytes)
        yield Alloc("compression", sum(world.wire.kept_bytes(each, world) for each in sizes.packed))
        return
    yield from unsent_step(sizes)
    period, overlap = method.sync_every, method.overlap_steps
    for number, fragment in enumerate(_fragments(sizes, method.fragments)):
        since = step - number * period // method.fragments
        if overlap and since >= overlap + (not number) and since % period == overlap:
            yield from arrived_mean(fragment, world, key=f"fragment {number}")
            yield from _outer_step(fragment)
        if since >= 0 and since % period == 0:
            yield Alloc("strategy", fragment.nbytes)
            yield Move(3 * fragment.nbytes, "changes", fresh_bytes=fragment.nbytes)
            yield from mean_of_parameters(
                fragment, world, step, key=f"fragment {number}" if overlap else None
            )
            if not overlap:
                yield from _outer_step(fragment)


def _outer_step(fragment: Sizes) -> Iterator[Op]:
    yield Alloc("strategy", fragment.largest_bytes)  # Nesterov's gradient, one after the other
    yield Move(OUTER_MOVED * fragment.nbytes, "outer step", tensors=len(fragment.parameters))
    yield Free("strategy", fragment.largest_bytes)
    yield Free("strategy", fragment.nbytes)


def _fragments(sizes: Sizes, count: int) -> list[Sizes]:
    """Cut into fragments of about as many bytes, in the order of the optimizer's list."""
    if count == 1:
        return [sizes]
    parts: list[list[Parameter]] = [[] for _ in range(count)]
    begin = 0
    for parameter in sorted(sizes.parameters):
        parts[begin * count // sizes.nbytes].append(parameter)
        begin += parameter.nbytes
    return [replace(sizes, parameters=tuple(part), packed=_within(sizes.packed, part)) for part in parts]


def _within(buckets: tuple[Bucket, ...], part: list[Parameter]) -> tuple[Bucket, ...]:
    """Return the elements of a part in each bucket."""
    inside = set(part)
    cut = [each._replace(parameters=tuple(p for p in each.parameters if p in inside)) for each in buckets]
    return tuple(each for each in cut if each.parameters)


def cycle(method: DiLoCo, world: World) -> Cycle:
    """Return as many steps as from one outer step to the next, the first of which begins one."""
    return Cycle(method.sync_every - 1, method.sync_every)
