"""Changes of a drawn program, each of which most programs are left without."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import mpisgd
from fuzzing.choices import CHUNK_TOP_K, COMPRESSORS, LOCAL, SPARSE_LOCO
from mpisgd.methods.catalogue import text_of
from mpisgd.tools.verification.programs.events import (
    Clip,
    EndJoin,
    Join,
    RunOut,
    SetGradient,
    Step,
    Synchronize,
)
from mpisgd.tools.verification.programs.program import Program

__all__ = ["by_chunks", "started_apart", "with_a_quorum", "with_changes", "with_pauses", "with_uneven_data"]

UNEVEN_SHARE = 0.2
CHUNKS_SHARE = 0.08  # of the programs that compress, or train locally
CHANGES_SHARE = 0.7  # of the programs in which ranks run out of data
APART_SHARE = 0.06  # of the programs of several ranks, which begin with different parameters
QUORUM_SHARE = 0.1  # of the programs that train locally
PAUSE_SHARE = 0.1  # of the programs in which parameters are used now and then


def by_chunks(program: Program, chance: random.Random) -> Program:
    """Return the program with another strategy or compressor, or as it is, mostly."""
    if chance.random() > CHUNKS_SHARE:
        return program
    optimizers = []
    for optimizer in program.optimizers:
        options = dict(optimizer.options)
        if options.get("strategy") in LOCAL:
            options["strategy"] = chance.choice(SPARSE_LOCO)
        elif options.get("compression") in COMPRESSORS:
            options["compression"] = chance.choice(CHUNK_TOP_K)
        optimizers.append(replace(optimizer, options=tuple(options.items())))
    return replace(program, optimizers=tuple(optimizers))


def with_pauses(program: Program, chance: random.Random) -> Program:
    """Return the program with layers that every second backward uses; or as it is, mostly."""
    if chance.random() > PAUSE_SHARE:
        return program
    layers = [
        replace(layer, used_by="odd") if layer.used_by == "all" and chance.random() < 0.5 else layer
        for layer in program.layers
    ]
    return replace(program, layers=tuple(layers))


def with_a_quorum(program: Program, chance: random.Random) -> Program:
    """Return the program whose ranks are learners that meet at the first rank; or as it is, mostly."""
    if chance.random() > QUORUM_SHARE:
        return program
    weights = chance.choice(("equal", "tokens"))
    strategy = text_of(mpisgd.DiLoCo(chance.choice((1, 2, 3)), quorum="all", weights=weights))
    optimizers = []
    for optimizer in program.optimizers:
        options = dict(optimizer.options)
        if options.get("strategy") in LOCAL:
            options["strategy"] = strategy
        optimizers.append(replace(optimizer, options=tuple(options.items())))
    return replace(program, optimizers=tuple(optimizers))


def started_apart(program: Program, chance: random.Random) -> Program:
    """Return the program whose ranks begin with different parameters; or as it is, mostly."""
    if program.ranks == 1 or chance.random() > APART_SHARE:
        return program
    return replace(program, apart=chance.choice(("before", "after")))


def with_uneven_data(program: Program, chance: random.Random) -> Program:
    """Return the program with a part inside `join()` in which ranks run out of data; or as it is, mostly."""
    steps = [place for place, event in enumerate(program.events) if isinstance(event, Step)]
    if len(steps) < 2 or program.ranks == 1 or program.is_resized or chance.random() > UNEVEN_SHARE:
        return program
    first = chance.randrange(len(steps) - 1)
    last = chance.randrange(first + 1, len(steps))
    left = chance.sample(range(program.ranks), program.ranks)
    events = [*program.events[: steps[first] + 1], Join()]
    for before, step in itertools.pairwise(steps[first : last + 1]):
        if len(left) > 1 and chance.random() < 0.6:
            events.append(RunOut((left.pop(),)))
        events += program.events[before + 1 : step + 1]
    return replace(program, events=(*events, EndJoin(), *program.events[steps[last] + 1 :]))


def with_changes(program: Program, chance: random.Random) -> Program:
    """Return the program with a gradient that is set and clipped while ranks have no data, or as it is."""
    there = [i for i, layer in enumerate(program.layers) if (layer.kind, layer.used_by) == ("dense", "all")]
    ends = [place for place, event in enumerate(program.events) if isinstance(event, EndJoin)]
    if not ends or not there or chance.random() > CHANGES_SHARE:
        return program
    last = max(place for place in range(ends[0]) if isinstance(program.events[place], Step))
    changes = (SetGradient(chance.choice(there)), Clip(0.5, float("inf")))
    events = (*program.events[:last], Synchronize(), *changes, *program.events[last:])
    return replace(program, events=events)
