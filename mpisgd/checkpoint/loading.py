"""`load` and `latest`: the first rank reads and checks the file, and the others get what they need of it."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpisgd.arguments import as_path, check_flag, has_state_dict, printable
from mpisgd.checkpoint import rank_state, rng_state
from mpisgd.checkpoint.at_root import ROOT, agree, at_root
from mpisgd.checkpoint.fetching import Fetched, Needs, fetch
from mpisgd.checkpoint.newest import newest_intact, newest_seen
from mpisgd.checkpoint.serialization import WRONG_TREE, decode
from mpisgd.checkpoint.storage import Location, as_location
from mpisgd.collectives.objects import Allocate
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, InvalidArgument
from mpisgd.job.lifecycle import group_or_world
from mpisgd.optim.broadcast import undo_casts
from mpisgd.optim.distributed import DistributedOptimizer
from mpisgd.sharding.module_parts import load_parts, needed_parts_of, tensors_of
from mpisgd.sharding.needed_parts import NeededPart
from mpisgd.sharding.offload.error_agreement import raised_on_every_rank
from mpisgd.sharding.offload.mapped_memory import MappedMemory

__all__ = ["Loaded", "latest", "load"]

MAX_LINES = 5  # of what does not fit


class Loaded(dict[str, Any]):
    """The plain values of a checkpoint, by name.

    Attributes:
        path: path of the file on the host of the first rank, or its URL as a str.
        step: the step that was given to `save`.
        ranks: the number of ranks that saved it.
    """

    def __init__(self, path: Path | str, step: int, ranks: int, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.path, self.step, self.ranks = path, step, ranks

    def __repr__(self) -> str:
        return f"Loaded({str(self.path)!r}, step={self.step}, ranks={self.ranks}, {super().__repr__()})"


def latest(folder: str | os.PathLike[str], *, group: Group | None = None) -> Path | str | None:
    """Return the newest intact checkpoint of a folder, the same on every rank; None if there is none.

    Collective. The first rank reads it and compares the checksums. It skips damaged files and prints a line
    on stderr for each. A missing folder has no checkpoint.

    Args:
        folder: as given to `save`.
        group: defaults to all processes of the job.

    Raises:
        CheckpointError: the folder cannot be read, or is not shared between the hosts; on every rank.
    """
    group, folder = group_or_world(group), as_location("checkpoint.latest", "folder", folder)
    seen = newest_seen(group, "checkpoint.latest", folder)

    def choose() -> Location | None:
        found = newest_intact(folder, seen or [], ())
        return None if found is None else found.path

    return at_root(group, Operation("checkpoint.latest", root=ROOT), choose)


def load(
    path: str | os.PathLike[str],
    *,
    rng: bool = True,
    group: Group | None = None,
    scratch: str | os.PathLike[str] | None = None,
    **objects: Any,
) -> Loaded:
    """Load a checkpoint into objects; return the plain values in it.

    Collective: all ranks of `group` call it with the same names. The first rank reads; the others need no
    access to the file. The number of ranks may differ from that at the save. Nothing in the file is executed.

    Args:
        path: a checkpoint, or a folder, of which the newest intact one is loaded; see `latest`. Or its URL,
            see `save`.
        rng: also restore the random number generators of each rank, if they were saved. Ranks without a saved
            state get generators that are seeded from the saved states and their rank.
        group: defaults to all processes of the job.
        scratch: a folder on a disk of each host, for a checkpoint that is larger than memory: the data lies
            in a private file there until the objects have loaded it.
        objects: by the name they were saved under; those left out are not loaded.

    Raises:
        InvalidArgument: something without `load_state_dict`; found locally, before anything is sent.
        CheckpointError: no such file, no intact one in the folder, or an object's `load_state_dict` raised;
            this and the next two on every rank.
        CheckpointDamaged: the file is damaged. Nothing was loaded.
        CheckpointMismatch: names, parameters or shapes are not those of the objects. Nothing was loaded.

    Cost: one broadcast of the loaded bytes, which are in memory twice during the load. Of a state that the
        ranks divide, as with `Sharded` and `ParameterServer`, each is sent its own part only.
    """
    path = as_location("checkpoint.load", "path", path)
    check_flag("checkpoint.load", "rng", rng)
    folder = None if scratch is None else as_path("checkpoint.load", "scratch", scratch)
    for name, value in objects.items():
        if not has_state_dict(value):
            raise InvalidArgument(
                f"checkpoint.load: {name} is a {type(value).__name__}, without load_state_dict(); plain "
                "values are in what load returns"
            )
    group = group_or_world(group)
    for value in objects.values():
        if isinstance(value, DistributedOptimizer):
            value.synchronizer.end_failed_step()  # in which it has other parameters
    empty = _memory(group, folder)
    needs = _needs(group, objects)
    found = fetch(group, path, objects, needs, empty)
    _check_names(found, objects)
    common, values, states = _decoded(found, objects)
    parts = _shares(group, found, common, objects)
    state, replicas = rank_state.give_back(group, parts, common, empty)
    needs = {name: needs[name] for name in found.divided}
    problems = [
        line
        for name, value in objects.items()
        for line in _misfits(name, value, state[name], needs.get(name))
    ]
    problem = f"{found.path} does not fit: {'; '.join(problems)}" if problems else None
    agree(group, Operation("checkpoint.load", extra="fits"), problem, CheckpointMismatch)
    _fill(group, state, objects, needs)
    rank_state.load_replicas(objects, replicas)
    if rng and states:
        rng_state.restore(states, group.rank)
    return Loaded(found.path, found.document.step, found.document.ranks, values)


# --- from the file to all ranks -----------------------------------------------------------------------


def _memory(group: Group, folder: Path | None) -> Allocate:
    """Return a function that allocates memory for what is read. Collective where that is in files."""
    if folder is None:
        return lambda shape, dtype: torch.empty(shape, dtype=dtype)
    with raised_on_every_rank(group):
        return MappedMemory(folder, f"what rank {group.rank} loads").empty


def _needs(group: Group, objects: Mapping[str, Any]) -> Needs:
    """Return the parts that this rank needs of the objects that the ranks divide."""
    found: dict[str, Any] = {}
    for name, value in objects.items():
        if group.size > 1 and isinstance(value, DistributedOptimizer):
            found[name] = value._needed_parts(group)
        elif group.size > 1 and isinstance(value, nn.Module):
            found[name] = needed_parts_of(value, group)
    return {name: parts for name, parts in found.items() if parts is not None}


def _check_names(found: Fetched, objects: Mapping[str, Any]) -> None:
    """Raise CheckpointMismatch where the file has no state of an object; on every rank alike."""
    kinds = found.document.kinds
    missing = [name for name in objects if name not in kinds]
    if missing:
        has, lacks = ", ".join(kinds), ", ".join(missing)
        raise CheckpointMismatch(printable(f"checkpoint.load: {found.path} has no {lacks}; it has {has}"))
    values = [name for name in objects if kinds[name] == "value"]
    if values:
        raise CheckpointMismatch(
            f"checkpoint.load: {', '.join(values)} was saved as plain data: it is in what load returns"
        )


def _shares(
    group: Group,
    found: Fetched,
    common: Mapping[str, Any],
    objects: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return each rank's share of the entries of single ranks, on the root. Collective."""
    parts: list[dict[str, Any]] = []
    problem = None
    try:
        parts = rank_state.shares(group, found.of_ranks, found.document.ranks, common, objects)
    except WRONG_TREE as exc:
        problem = printable(f"{found.path} is no checkpoint of mpisgd: {type(exc).__name__}, {exc}")
    agree(group, Operation("checkpoint.load", extra="own"), problem, CheckpointDamaged)
    return parts


def _decoded(found: Fetched, objects: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Return the states of the objects, the plain values, and the generators of all ranks."""
    document, tensors = found.document, found.tensors
    values = [name for name, kind in document.kinds.items() if kind == "value"]
    try:
        return (
            {name: decode(document.state[name], tensors) for name in objects},
            {name: decode(document.state[name], tensors) for name in values},
            [decode(tree, tensors) for tree in document.rng],
        )
    except WRONG_TREE as exc:  # on every rank alike
        raise CheckpointDamaged(
            printable(f"{found.path} is no checkpoint of mpisgd: {type(exc).__name__}, {exc}")
        ) from exc


# --- from the state to the objects --------------------------------------------------------------------


def _misfits(name: str, value: Any, saved: Any, needed: Mapping[Any, NeededPart] | None) -> list[str]:
    if isinstance(value, nn.Module):
        if not isinstance(saved, dict):
            return [f"{name} is a {type(saved).__name__} in it, no state of a module"]
        tensors = value.state_dict() if needed is None else tensors_of(value, needed)
        lines = [printable(f"{name}.{line}") for line in _differences(saved, tensors)]
        more = len(lines) - MAX_LINES
        return lines if more <= 0 else [*lines[:MAX_LINES], f"and {more} more"]
    if isinstance(value, torch.optim.Optimizer):
        try:
            theirs = [len(group["params"]) for group in saved["param_groups"]]
            saved["state"].items()
        except WRONG_TREE:
            return [f"{name} is no state of an optimizer in it"]
        ours = [len(group["params"]) for group in value.param_groups]
        return [f"{name} has {ours} parameters in its groups, not {theirs}"] if ours != theirs else []
    return []


def _differences(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    lines = [f"{name} is not in it" for name in ours if name not in saved]
    lines += [f"{name} is not in the model" for name in saved if name not in ours]
    for name in ours:
        here, there = (getattr(state.get(name), "shape", None) for state in (ours, saved))
        if name in saved and here != there:
            lines.append(f"{name} is {_shape(here)}, not {_shape(there)} as in it")
    return lines


def _shape(shape: torch.Size | None) -> str:
    return "no tensor" if shape is None else str(list(shape))


def _fill(group: Group, state: Mapping[str, Any], objects: Mapping[str, Any], needs: Needs) -> None:
    """Load every object; raise on every rank if one `load_state_dict` raises. Collective.

    Models whose parameters the ranks share come first: what others load may look at these, and they are there
    when all ranks have loaded their parts.
    """
    shared = {n: value for n, value in objects.items() if n in needs and isinstance(value, nn.Module)}
    if shared:
        _load_all(group, state, shared, needs, "shared parameters")
    _load_all(group, state, {n: v for n, v in objects.items() if n not in shared}, needs, "loaded")


def _load_all(
    group: Group, state: Mapping[str, Any], objects: Mapping[str, Any], needs: Needs, what: str
) -> None:
    problem = None
    for name, value in objects.items():
        try:
            if name in needs:
                _load_parts(value, state[name], needs[name])
                continue
            value.load_state_dict(state[name])
            if isinstance(value, torch.optim.Optimizer):
                undo_casts(value, state[name]["state"])
        except Exception as exc:
            problem = f"{name}.load_state_dict() raised {type(exc).__name__}: {exc}"
            break
    agree(group, Operation("checkpoint.load", extra=what), problem, CheckpointError)


def _load_parts(
    value: DistributedOptimizer | nn.Module, state: Any, needed: Mapping[Any, NeededPart]
) -> None:
    """Load a state of which this rank has what it needs."""
    if isinstance(value, nn.Module):
        load_parts(value, state, needed)
    else:
        value._load_parts(state, needed)
