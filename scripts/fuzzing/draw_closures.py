"""`with_closures`: programs whose optimizer calls its closure twice, drawn apart from the rest."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

import mpisgd
from mpisgd.methods.catalogue import text_of
from mpisgd.tools.verification.programs.events import Backward, Clip, Event, SetGradient, Step, Synchronize
from mpisgd.tools.verification.programs.program import ONE_BIT, Program

__all__ = ["with_closures"]

CLOSURES_SHARE = 0.1  # of the programs whose gradients depend on parameters, but all with LBFGS
MASTERS_SHARE = 0.5  # of those that divide
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
        keeps = chance.random() < MASTERS_SHARE
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
