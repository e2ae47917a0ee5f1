"""What `LocalSGD` takes: every `sync_every` steps the mean of the parameters, or of their changes."""

from collections.abc import Iterator

from mpisgd.methods.cost_kit import HOST, Alloc, Check, Collective, Cycle, Free, Move, Op, Sizes, Wait, World
from mpisgd.methods.cost_steps import changes_any, kept, mean_of_parameters, reduced, unsent_step, update
from mpisgd.methods.local_sgd.local_sgd import LocalSGD

__all__ = ["cost", "cycle"]


def cost(method: LocalSGD, sizes: Sizes, world: World, step: int) -> Iterator[Op]:
    """Yield what a step takes."""
    compresses = changes_any(sizes, world)
    if not step:
        yield from kept(sizes)
        if compresses:  # the mean before
            yield Alloc("strategy", sizes.nbytes)
            yield Alloc("compression", sum(world.wire.kept_bytes(each, world) for each in sizes.packed))
        return
    if step <= method.warmup_steps:
        yield from reduced(sizes, world, step)
        yield from update()
        return
    yield from unsent_step(sizes)
    since = _since_mean(method, step - method.warmup_steps)
    if not since:
        changes = sizes.nbytes if compresses else 0
        if compresses:
            yield Alloc("strategy", changes)
            yield Move(3 * changes, "changes", fresh_bytes=changes)
        yield from mean_of_parameters(sizes, world, step)
        if compresses:
            yield Move(5 * changes, "mean")
            yield Free("strategy", changes)
        yield from _mean_of_state(method, sizes)
    elif method.is_due_on_host(since) and world.ranks_per_host > 1 and world.hosts > 1:
        yield from mean_of_parameters(sizes, world, step, group=HOST)
        yield from _mean_of_state(method, sizes, HOST)


def _since_mean(method: LocalSGD, step: int) -> int:
    """Return how many steps there were since the last mean of all ranks; 0: it is due."""
    period = method.period
    while step > period and method.growth > 1:
        step, period = step - period, method.next_period(period)
    return step % period


def _mean_of_state(method: LocalSGD, sizes: Sizes, group: str = "all") -> Iterator[Op]:
    if method.average_state and sizes.state_bytes:
        yield Check(group)
        yield Collective("all_reduce", sizes.state_bytes, group, sizes.itemsize)
        yield Wait()


def cycle(method: LocalSGD, world: World) -> Cycle:
    """Return the steps from one mean to the next; of periods that grow the last, or the first without one."""
    first, period = method.warmup_steps, method.period
    while method.max_sync_every is not None and method.next_period(period) > period:
        first, period = first + period, method.next_period(period)
    return Cycle(first, period)
