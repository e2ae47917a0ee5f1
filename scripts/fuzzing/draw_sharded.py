"""What `Sharded` is asked for, drawn apart: the rest of a seed's program stays what it was without it."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import replace

import torch

import mpisgd
from fuzzing.choices import CODED, HALVES, SHARDED
from mpisgd.methods.catalogue import text_of
from mpisgd.tools.verification.programs.program import Optimizer, Program

__all__ = ["in_files", "with_codes", "with_masters"]

CODED_SHARE = 0.5  # of the programs that divide gradients between hosts
MASTERS_SHARE = 0.7  # of the exact ones that divide
FILES_SHARE = 0.3  # of all that divide


def with_codes(program: Program, chance: random.Random) -> Program:
    """Return the program with sums of gradients that travel as codes, or as it is."""
    if not 0 < program.ranks_per_host < program.ranks or chance.random() > CODED_SHARE:
        return program
    optimizers = []
    for optimizer in program.optimizers:
        options = dict(optimizer.options)
        if options.get("strategy") in SHARDED and "compression" not in options:
            stage = 2 if "stage=2" in options["strategy"] else 1
            options["strategy"] = f"mpisgd.Sharded(stage={stage}, {chance.choice(CODED)})"
        optimizers.append(replace(optimizer, options=tuple(options.items())))
    return replace(program, optimizers=tuple(optimizers))


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
    optimizers = []
    for optimizer in program.optimizers:
        options = dict(optimizer.options)
        if _divides(optimizer):
            strategy = optimizer.strategy
            assert isinstance(strategy, mpisgd.Sharded)
            options["strategy"] = text_of(change(strategy))
        optimizers.append(replace(optimizer, options=tuple(options.items())))
    return replace(program, optimizers=tuple(optimizers))
