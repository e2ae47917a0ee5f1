"""Changes of a drawn program, each of which most programs are left without.

They are drawn apart: the rest of a seed's program stays what it was before there were these.
"""

import itertools
import random
import tempfile
from collections.abc import Callable
from dataclasses import replace

import torch

import mpisgd
from fuzzing.choices import CHUNK_TOP_K, CODED, COMPRESSORS, HALVES, LOCAL, SHARDED, SPARSE_LOCO
from mpisgd.methods.catalogue import text_of
from mpisgd.tools.verification.programs.events import (
    Backward,
    Clip,
    EndJoin,
    Event,
    Join,
    RunOut,
    SetGradient,
    Step,
    Synchronize,
)
from mpisgd.tools.verification.programs.program import ONE_BIT, Optimizer, Program

UNEVEN_SHARE = 0.2
CHUNKS_SHARE = 0.08  # of the programs that compress, or train locally
CHANGES_SHARE = 0.7  # of the programs in which ranks run out of data
APART_SHARE = 0.06  # of the programs of several ranks, which begin with different parameters
QUORUM_SHARE = 0.1  # of the programs that train locally
PAUSE_SHARE = 0.1  # of the programs in which parameters are used now and then


def _with_options(program: Program, change: Callable[[Optimizer, dict[str, str]], None]) -> Program:
    """Return the program whose optimizers have options that `change` has changed in place."""
    optimizers = []
    for optimizer in program.optimizers:
        options = dict(optimizer.options)
        change(optimizer, options)
        optimizers.append(replace(optimizer, options=tuple(options.items())))
    return replace(program, optimizers=tuple(optimizers))


def by_chunks(program: Program, chance: random.Random) -> Program:
    """Return the program with another strategy or compressor, or as it is, mostly."""
    if chance.random() > CHUNKS_SHARE:
        return program

    def change(_: Optimizer, options: dict[str, str]) -> None:
        if options.get("strategy") in LOCAL:
            options["strategy"] = chance.choice(SPARSE_LOCO)
        elif options.get("compression") in COMPRESSORS:
            options["compression"] = chance.choice(CHUNK_TOP_K)

    return _with_options(program, change)


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

    def change(_: Optimizer, options: dict[str, str]) -> None:
        if options.get("strategy") in LOCAL:
            options["strategy"] = strategy

    return _with_options(program, change)


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


CODED_SHARE = 0.5  # of the programs that divide gradients between hosts
MASTERS_SHARE = 0.7  # of the exact ones that divide
FILES_SHARE = 0.3  # of all that divide


def with_codes(program: Program, chance: random.Random) -> Program:
    """Return the program with sums of gradients that travel as codes, or as it is."""
    if not 0 < program.ranks_per_host < program.ranks or chance.random() > CODED_SHARE:
        return program

    def change(_: Optimizer, options: dict[str, str]) -> None:
        if options.get("strategy") in SHARDED and "compression" not in options:
            stage = 2 if "stage=2" in options["strategy"] else 1
            options["strategy"] = f"mpisgd.Sharded(stage={stage}, {chance.choice(CODED)})"

    return _with_options(program, change)


def with_masters(program: Program, chance: random.Random) -> Program:
    """Return the program with parameters of lower precision that are updated by masters, or as it is."""
    if not program.exact or chance.random() > MASTERS_SHARE:
        return program
    master = chance.choice((torch.float32, torch.float32, torch.float64))
    dtypes = (*HALVES, "float32") if master is torch.float64 else HALVES
    divided = {layer for each in program.optimizers if _divides(each) for layer in each.layers}
    layers = list(program.layers)
    for place in sorted(divided):
        if "sparse" not in layers[place].kind and chance.random() < 0.7:
            layers[place] = replace(
                layers[place], dtype=chance.choice(dtypes[: 1 if program.scaler else None])
            )
    asked = _asking(program, lambda sharded: replace(sharded, master_dtype=master))
    return replace(asked, layers=tuple(layers))


def in_files(program: Program, chance: random.Random) -> Program:
    """Return the program with optimizer state in files, or as it is."""
    if chance.random() > FILES_SHARE or any(each.name == "LBFGS" for each in program.optimizers):
        return program
    block_bytes = chance.choice((4096, 4096, 16384))
    offload = mpisgd.Offload(tempfile.gettempdir(), block_bytes=block_bytes, io="buffered")
    return _asking(program, lambda sharded: replace(sharded, offload=offload))


def _divides(optimizer: Optimizer) -> bool:
    strategy = optimizer.strategy
    is_sharded = isinstance(strategy, mpisgd.Sharded)
    return is_sharded and strategy.gradients is None and strategy.parameters is None


def _asking(program: Program, change: Callable[[mpisgd.Sharded], mpisgd.Sharded]) -> Program:
    def change_options(optimizer: Optimizer, options: dict[str, str]) -> None:
        if _divides(optimizer):
            strategy = optimizer.strategy
            assert isinstance(strategy, mpisgd.Sharded)
            options["strategy"] = text_of(change(strategy))

    return _with_options(program, change_options)


CLOSURES_SHARE = 0.1  # of the programs whose gradients depend on parameters, but all with LBFGS
CLOSED_MASTERS_SHARE = 0.5  # of those that divide
OF_GRADIENTS = (Backward, Clip, SetGradient, Synchronize)


def with_closures(program: Program, chance: random.Random) -> Program:
    """Return the program with closures in all steps, each of which is called twice; or as it is, mostly."""
    (first, *others) = program.optimizers
    divides = isinstance(first.strategy, mpisgd.Sharded)
    if program.exact or others or first.name in ONE_BIT:
        return program
    if chance.random() > CLOSURES_SHARE and not (first.name == "LBFGS" and divides):  # which is refused
        return program
    options, layers = {**dict(first.options), "elementwise": "True"}, program.layers
    if divides:
        keeps = chance.random() < CLOSED_MASTERS_SHARE
        master = torch.float64 if keeps else None
        options["strategy"] = text_of(
            replace(first.strategy, master_dtype=master, offload=None, gradients=None, parameters=None)
        )
        narrow = [replace(each, dtype="float32") if chance.random() < 0.7 else each for each in layers]
        layers = tuple(narrow) if keeps else layers
    optimizer = replace(first, name="Extragradient", settings=(("lr", 0.1),), options=tuple(options.items()))
    events = tuple(
        _closed(event, 1 + place)
        for place, event in enumerate(program.events)
        if not isinstance(event, OF_GRADIENTS)
    )
    return replace(program, optimizers=(optimizer,), layers=layers, events=events, scaler=False)


def _closed(event: Event, data: int) -> Event:
    return Step((data,)) if isinstance(event, Step) else event
