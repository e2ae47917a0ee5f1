"""`shrink`: the smallest program that fails in the same way, by taking parts away as long as it does."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

from mpisgd.tools.verification.programs.contract import violation
from mpisgd.tools.verification.programs.events import (
    AddGroup,
    Backward,
    Convert,
    Event,
    FailedBackward,
    Lose,
    Reload,
    SetFrozen,
    SetGradient,
    Step,
)
from mpisgd.tools.verification.programs.program import ONE_BIT, Layer, Optimizer, Program


def shrink(program: Program, kind: str, fails: Callable[[Program], str], *, max_runs: int) -> Program:
    """Return a program from which nothing can be taken away.

    Args:
        program: one that fails.
        kind: how.
        fails: runs a program and returns how it fails, or anything else where it does not.
        max_runs: how many programs are tried at most.
    """
    runs, tried = 0, {program}
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in candidates(program):
            if smaller in tried or violation(smaller):
                continue
            if runs >= max_runs:
                return program
            tried.add(smaller)
            runs += 1
            if fails(smaller) == kind:
                program, is_smaller = smaller, True
                break
    return program


def candidates(program: Program) -> Iterator[Program]:
    """Yield programs that are smaller by one part, those without much of it first."""
    yield from _with_fewer_events(program)
    yield from _with_fewer_ranks(program)
    yield from _with_fewer_layers(program)
    yield from _with_fewer_optimizers(program)
    yield from _with_simpler_parts(program)


def _with_fewer_events(program: Program) -> Iterator[Program]:
    events = program.events
    length = len(events) // 2
    while length:
        for start in range(0, len(events), length):
            yield replace(program, events=events[:start] + events[start + length :])
        length //= 2


def _with_fewer_ranks(program: Program) -> Iterator[Program]:
    for ranks in range(1, program.ranks):
        yield replace(program, ranks=ranks)
    if program.ranks_per_host:
        yield replace(program, ranks_per_host=0)
    if program.group != "world":
        yield replace(program, group="world")


def _with_fewer_layers(program: Program) -> Iterator[Program]:
    for gone in reversed(range(len(program.layers))):
        layers = program.layers[:gone] + program.layers[gone + 1 :]
        optimizers = tuple(
            replace(o, layers=tuple(i - (i > gone) for i in o.layers if i != gone))
            for o in program.optimizers
        )
        events = tuple(
            replace(event, layer=event.layer - (event.layer > gone)) if _has_layer(event) else event
            for event in program.events
            if not (_has_layer(event) and event.layer == gone)
        )
        if layers:
            yield replace(program, layers=layers, optimizers=optimizers, events=events)


def _has_layer(event: Event) -> bool:
    return isinstance(event, (AddGroup, SetFrozen, SetGradient, Convert))


def _with_fewer_optimizers(program: Program) -> Iterator[Program]:
    if len(program.optimizers) > 1:
        for gone in range(len(program.optimizers)):
            kept = program.optimizers[:gone] + program.optimizers[gone + 1 :]
            events = tuple(
                replace(event, optimizer=0) if isinstance(event, AddGroup) else event
                for event in program.events
            )
            yield replace(program, optimizers=kept, events=events)


def _with_simpler_parts(program: Program) -> Iterator[Program]:
    if program.forgotten:
        yield replace(program, forgotten=program.forgotten - 1)
    if program.apart:
        yield replace(program, apart="")
    if program.scaler:
        finite = [replace(e, overflow=()) if isinstance(e, Backward) else e for e in program.events]
        yield replace(program, scaler=False, events=tuple(finite))
    for place, optimizer in enumerate(program.optimizers):
        for simpler in _simpler_optimizers(optimizer):
            optimizers = (*program.optimizers[:place], simpler, *program.optimizers[place + 1 :])
            yield replace(program, optimizers=optimizers)
    for place, layer in enumerate(program.layers):
        for plainer in _simpler_layers(layer):
            yield replace(program, layers=(*program.layers[:place], plainer, *program.layers[place + 1 :]))
    for place, event in enumerate(program.events):
        for lighter in _simpler_events(event):
            yield replace(program, events=(*program.events[:place], lighter, *program.events[place + 1 :]))


def _simpler_optimizers(optimizer: Optimizer) -> Iterator[Optimizer]:
    for gone in range(len(optimizer.options)):
        yield replace(optimizer, options=optimizer.options[:gone] + optimizer.options[gone + 1 :])
    settings = dict(optimizer.settings)
    if optimizer.name != "SGD":
        yield replace(optimizer, name="SGD", settings=(("lr", 0.5),))
    if optimizer.name in ONE_BIT:
        settings = {}  # which belong together
    for name in sorted(settings.keys() - {"lr"}):
        kept = tuple((key, value) for key, value in optimizer.settings if key != name)
        yield replace(optimizer, settings=kept)
    if optimizer.names != "model":
        yield replace(optimizer, names="model")


def _simpler_layers(layer: Layer) -> Iterator[Layer]:
    for name, default in Layer().__dict__.items():
        if getattr(layer, name) != default and name not in ("shape", "kind"):
            yield replace(layer, **{name: default})
    if layer.kind != "dense":
        yield replace(layer, kind="dense")
    elif not layer.transposed:
        for shape in ((1,), (3,), (129,)):
            if layer.shape != shape and len(layer.shape) + sum(layer.shape) > len(shape) + sum(shape):
                yield replace(layer, shape=shape)


def _simpler_events(event: Event) -> Iterator[Event]:
    if isinstance(event, (Backward, FailedBackward)) and len(event.data) > 1:
        yield replace(event, data=event.data[:1])
    if isinstance(event, Backward):
        if event.skipped:
            yield replace(event, skipped=())
        for fewer in (
            itertools.combinations(event.skipped, len(event.skipped) - 1) if len(event.skipped) > 1 else ()
        ):
            yield replace(event, skipped=fewer)
        if event.no_sync:
            yield replace(event, no_sync=False)
        if event.overflow:
            yield replace(event, overflow=())
    if isinstance(event, Reload) and event.ranks:
        yield replace(event, ranks=0)
    if isinstance(event, Lose):
        for gone in event.ranks if len(event.ranks) > 1 else ():
            yield replace(event, ranks=tuple(rank for rank in event.ranks if rank != gone))
        if len(event.ranks) == 1 and event.ranks != (0,):
            yield replace(event, ranks=(0,))
        for fewer in {0, event.waits // 2, event.waits - 1} if event.waits else ():
            yield replace(event, waits=fewer)
    if isinstance(event, Step) and event.closure:
        yield Step()
