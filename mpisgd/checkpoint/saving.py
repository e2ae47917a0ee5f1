"""`save`: collect the state of all ranks and write it on the first."""

import hashlib
import operator
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from mpisgd import config
from mpisgd.arguments import as_index, check_flag, has_state_dict, shown
from mpisgd.checkpoint import format, rank_state, rng_state
from mpisgd.checkpoint.at_root import ROOT, at_root, gather_at_root, merge_problems
from mpisgd.checkpoint.serialization import Encoded, encode
from mpisgd.checkpoint.storage import Location, as_location, name_of, remove_older, storage_at
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.dtypes import SAFETENSORS_DTYPES
from mpisgd.errors import CheckpointError, InvalidArgument
from mpisgd.job.lifecycle import group_or_world
from mpisgd.optim.distributed import DistributedOptimizer
from mpisgd.optim.own_state import split_own
from mpisgd.sharding.module_parts import state_dict_at

__all__ = ["Content", "check_mode", "check_save_arguments", "collect", "save", "to_disk"]

KIND = "checkpoint.save"


class Content(NamedTuple):
    """The content of a file; the tensors still belong to the program."""

    document: format.Document
    tensors: dict[str, Tensor]


def save(
    folder: str | os.PathLike[str],
    step: int,
    *,
    keep_last: int | None = None,
    rng: bool = True,
    mode: int | None = None,
    group: Group | None = None,
    **state: Any,
) -> Path | str:
    """Write a checkpoint; when this returns, it is complete and on the disk.

    Collective: all ranks of `group` call it with the same step and the same names. The state of the first
    rank is saved, and only this rank accesses the folder. Two kinds of state are saved for every rank: the
    random number generators, and what differs between the ranks of a `DistributedOptimizer`: residuals of
    compressors, and parameters and optimizer state if the ranks' models differ.

    Args:
        folder: created if it does not exist; the file in it is `step-00000300.safetensors`. A URL, such as
            "s3://bucket/runs/a", is written by fsspec; the first rank must have access. There, too, the file
            appears only when it is complete.
        step: the number of the checkpoint; the largest is the newest. A file of the same step is replaced.
        keep_last: how many checkpoints up to this step to keep; older ones are removed after the write.
        rng: also save the random number generators (torch, numpy, Python) of each rank.
        mode: permissions of the file, such as 0o600; by default those of the file that is replaced, or those
            that the umask allows.
        group: defaults to all processes of the job.
        state: by name, objects that have `state_dict()` and `load_state_dict()`, or plain data: numbers,
            strings, None, tensors, arrays, and lists, tuples, sets and dicts of them.

    Returns:
        The path of the file, or its URL as a str, on every rank.

    Raises:
        InvalidArgument: an invalid argument; found locally, before anything is sent.
        CheckpointError: a value needs pickle or is sharded over ranks, the folder cannot be written, or the
            disk is full. On every rank; older checkpoints are unchanged.
        CollectiveMismatch: ranks have different steps, names, or tensors of other names, shapes or dtypes.

    Cost: one checksum of the state (several GB/s) and one write to the disk. State that differs by rank, or
        that the ranks divide, is sent to the first rank, which has all of it in memory until it is written.
    """
    group = group_or_world(group)
    check_flag(KIND, "rng", rng)
    folder = check_save_arguments(KIND, folder, step, keep_last, state)
    check_mode(KIND, mode, folder)
    content = collect(group, step, state, rng=rng)
    operation = Operation(KIND, root=ROOT, extra="written")
    return at_root(group, operation, lambda: to_disk(folder, content, keep_last, mode))


def check_save_arguments(
    kind: str, folder: object, step: object, keep_last: object, state: Mapping[str, Any]
) -> Location:
    """Return the folder, or raise InvalidArgument."""
    path = as_location(kind, "folder", folder)
    try:
        is_count = as_index(step) >= 0
    except TypeError:
        is_count = False
    if not is_count:
        raise InvalidArgument(f"{kind}: step={shown(step)}; expected a number, 0 or more")
    if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
        raise InvalidArgument(
            f"{kind}: keep_last={shown(keep_last)}; expected 1 or more, or None to keep all"
        )
    if not state:
        raise InvalidArgument(f"{kind}: nothing to save; give it model=model and the like")
    return path


def check_mode(kind: str, mode: object, folder: Location) -> None:
    """Raise InvalidArgument unless `mode` is None or permissions that let the owner read and write."""
    if mode is not None and isinstance(folder, str):
        raise InvalidArgument(f"{kind}: mode={shown(mode)}; what is at a URL has no permissions of files")
    if mode is not None and (type(mode) is not int or not 0o600 <= mode <= 0o777):
        raise InvalidArgument(
            f"{kind}: mode={shown(mode)}; expected permissions with which the owner can read and write, such "
            "as 0o600, or None"
        )


def collect(group: Group, step: int, state: Mapping[str, Any], *, rng: bool) -> Content | None:
    """Return the content of the file on the root, None elsewhere. Collective.

    Args:
        group: of the ranks that save.
        step: of this checkpoint.
        state: by name.
        rng: whether to gather the states of all generators.
    """
    step = operator.index(step)
    encoded, mine, own, elsewhere = _encode(state, group)
    problems = "; ".join([*encoded.problems, *mine.problems]) or None
    report = _Report(problems, rng_state.capture() if rng else None, bool(own))
    asked = Operation(KIND, root=ROOT, extra=f"step {step}, {', '.join(state)}")
    reports = gather_at_root(group, asked, report)
    some_own = at_root(
        group, Operation(KIND, root=ROOT, extra="checked"), lambda: _check_reports(group, reports)
    )
    # The tensors of all ranks are alike, since the file has those of one.
    tensors = rank_state.alike_tensors(encoded, [*elsewhere, *(name for name in own if "state" in own[name])])
    lines = [f"{name}: {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items()]
    digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
    alike = Operation(KIND, extra=f"{len(lines)} tensors, hash {digest}")
    group.queue.run(alike, lambda: None, detail=lambda: "\n".join(lines))
    all_own = rank_state.gather_own(group, mine) if some_own else mine
    if reports is None or all_own is None:
        return None
    kinds = {name: "object" if has_state_dict(value) else "value" for name, value in state.items()}
    kinds |= dict.fromkeys(all_own.tree, rank_state.KIND)
    states = encode({"rng": [each.rng for each in reports if rng]})
    document = format.Document(
        step, group.size, {**encoded.tree, **all_own.tree}, kinds, states.tree["rng"][1:]
    )
    return Content(document, {**encoded.tensors, **all_own.tensors, **states.tensors})


class _Report(NamedTuple):
    """What a rank tells the root: why it cannot be saved, its generators, whether it has something own."""

    problem: str | None
    rng: Any
    has_own: bool


def _encode(
    state: Mapping[str, Any], group: Group
) -> tuple[Encoded, Encoded, dict[str, Any], Collection[str]]:
    """Return the entries common to all ranks, this rank's own, and those by name, not encoded.

    And names of optimizers of whose state ranks other than the root may have a part only.
    """
    elsewhere: list[str] = []
    values: dict[str, Any] = {}
    own: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in state.items():
        try:
            if isinstance(value, DistributedOptimizer):
                values[name], is_elsewhere = value._state_dict_at(ROOT, group)
                elsewhere += [name] if is_elsewhere else []
            elif isinstance(value, nn.Module):
                values[name] = state_dict_at(value, ROOT, group)
            else:
                values[name] = value.state_dict() if has_state_dict(value) else value
            values[name], mine = split_own(value, values[name])
            if mine is not None:
                own[name] = mine
        except Exception as exc:
            problems.append(f"{name}.state_dict() raised {type(exc).__name__}: {exc}{_hint(value)}")
    encoded, encoded_own = rank_state.encode_all(values, own, group.rank)
    unknown = [
        f"{name} is a tensor of {tensor.dtype}"
        for name, tensor in {**encoded_own.tensors, **encoded.tensors}.items()
        if tensor.dtype not in SAFETENSORS_DTYPES
    ]
    return encoded._replace(problems=[*problems, *encoded.problems, *unknown]), encoded_own, own, elsewhere


def _hint(value: Any) -> str:
    divided = any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(value).__mro__)
    return "; it is divided among ranks: use torch.distributed.checkpoint" if divided else ""


def _check_reports(group: Group, reports: list[_Report] | None) -> bool:
    """Return whether a rank has something of its own; raise CheckpointError if one reports a problem."""
    assert reports is not None
    if text := merge_problems(group, [each.problem for each in reports]):
        raise CheckpointError(
            f"{KIND}: cannot be saved without pickle: {text}. Save plain data, or an object with "
            "state_dict() and load_state_dict()"
        )
    return any(each.has_own for each in reports)


def to_disk(folder: Location, content: Content | None, keep_last: int | None, mode: int | None) -> Location:
    """Write a checkpoint and remove older ones. On the root.

    Raises:
        OSError: nothing was written.
    """
    assert content is not None
    storage, name = storage_at(folder), name_of(content.document.step)
    storage.prepare()
    plain = {  # contiguous memory of the CPU; no copy where it is that already
        name: tensor.resolve_conj().resolve_neg().cpu().contiguous()
        for name, tensor in content.tensors.items()
    }
    storage.put(name, lambda file: format.write(file, content.document, plain), mode)
    config.note(f"checkpoint {storage.at(name)}")
    if keep_last is not None:
        remove_older(storage, name, keep_last)
    return storage.at(name)
