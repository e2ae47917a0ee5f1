"""What the ranks agree on before RPC starts: names, options, devices; each is told every rank's mistakes."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from mpisgd.arguments import ranks_text, shown
from mpisgd.core.consistency import Operation
from mpisgd.errors import AlreadyInitialized, InvalidArgument, MpisgdError
from mpisgd.job.world import Job
from mpisgd.rpc.tensorpipe import AgentOptions, Devices, available, divide_devices, is_running, own_options

__all__ = ["Agreement", "Request", "agree"]

NAME = re.compile(r"[A-Za-z0-9_:-]{1,127}")  # as torch has it


class Request(NamedTuple):
    """The arguments of `init_rpc` on one rank."""

    name: Any
    backend: Any
    rank: Any
    world_size: Any
    options: Any


class Agreement(NamedTuple):
    """What RPC starts with on this rank.

    Attributes:
        names: of all workers, by rank.
        options: of this rank's agent.
        devices: of this rank's agent.
    """

    names: tuple[str, ...]
    options: AgentOptions
    devices: Devices


class _Checked(NamedTuple):
    """What one rank tells the others: its wishes, or what is wrong with them."""

    name: str
    options: AgentOptions
    num_devices: int
    error: MpisgdError | None = None


_NO_OPTIONS = AgentOptions(1, 0.0, {}, [])


def agree(job: Job, request: Request) -> Agreement:
    """Agree on the names and options with which RPC starts. Collective over the job.

    Raises:
        MpisgdError: a rank's arguments make no sense, or not together; on every rank.
    """
    checked = _exchange(job, _check(job, request))
    names = [rank.name for rank in checked]
    _check_distinct(names)
    options = [rank.options for rank in checked]
    try:
        devices = divide_devices(names, options, [rank.num_devices for rank in checked], job.world.rank)
    except ValueError as exc:
        raise _of_all_ranks(InvalidArgument(f"init_rpc: {exc}")) from exc
    return Agreement(tuple(names), options[job.world.rank], devices)


def _check(job: Job, request: Request) -> _Checked:
    """Check this rank's arguments. An error is not raised before the others are told of it."""
    try:
        api = available()
        if is_running():
            raise AlreadyInitialized("init_rpc: RPC runs already; call mpisgd.rpc.shutdown() first")
        if request.backend not in (None, api.BackendType.TENSORPIPE):
            backend = shown(request.backend)
            raise InvalidArgument(f"init_rpc: backend={backend}; expected BackendType.TENSORPIPE or None")
        _check_place(job, request)
        name = _check_name(f"worker{job.world.rank}" if request.name is None else request.name)
        options = own_options(request.options, job.timeout_s)
        return _Checked(name, options, torch.cuda.device_count())
    except MpisgdError as exc:
        return _Checked("", _NO_OPTIONS, 0, exc)


def _check_place(job: Job, request: Request) -> None:
    rank, size = job.world.rank, job.world.size
    if request.rank not in (-1, rank) or request.world_size not in (None, size):
        raise InvalidArgument(
            f"init_rpc: rank={shown(request.rank)}, world_size={shown(request.world_size)}, but MPI says "
            f"rank {rank} of {size}; leave both out"
        )


def _check_name(name: Any) -> str:
    if isinstance(name, str) and NAME.fullmatch(name):
        return name
    raise InvalidArgument(f"init_rpc: name={shown(name)}; expected up to 127 letters, digits and _ : -")


def _exchange(job: Job, mine: _Checked) -> list[_Checked]:
    """Gather the checked requests of all ranks; raise the error of the first rank that has one."""
    found: list[_Checked] = []
    queue = job.world.queue
    queue.run(Operation("init_rpc"), lambda: found.extend(queue.communicator.all_gather_object(mine)))
    wrong = {rank: checked.error for rank, checked in enumerate(found) if checked.error is not None}
    for error in wrong.values():
        where = "" if len(wrong) == len(found) else f" ({ranks_text(wrong)})"
        raise _of_all_ranks(type(error)(f"{error}{where}"))
    return found


def _check_distinct(names: Sequence[str]) -> None:
    for name in names:
        ranks = [rank for rank, other in enumerate(names) if other == name]
        if len(ranks) > 1:
            raise _of_all_ranks(
                InvalidArgument(f"init_rpc: {ranks_text(ranks)} have the name {name!r}; give each its own")
            )


def _of_all_ranks(error: MpisgdError) -> MpisgdError:
    """Mark an error that all ranks raise: one of them prints it."""
    error.on_every_rank = True
    return error
