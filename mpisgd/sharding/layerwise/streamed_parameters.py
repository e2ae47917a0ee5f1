"""`StreamedParameters`: a model whose parameters and gradients are in files, and in memory layer by layer.

    forward    read 0 | compute 0 | drop 0 | compute 1 | drop 1 | ...      what comes next is read meanwhile
    backward   read 2 | compute 2 | gradients of 2 to their file | drop 2 | read 1 | ...
    step       chunk by chunk: values, gradients and optimizer state are read, values and state written

Each rank keeps an equal part of each layer in its files. For a layer the ranks gather the parts, and its
gradients are combined and scattered in the same parts.

Source: Rajbhandari et al. 2021, ZeRO-Infinity, sections 5.1 (prefetch), 6.1 (partitioning of each parameter).
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from mpisgd.collectives.all_gather import all_gather_into_tensor
from mpisgd.collectives.all_reduce import all_reduce
from mpisgd.collectives.broadcast import broadcast
from mpisgd.collectives.point_to_point import irecv, isend
from mpisgd.collectives.reduce_scatter import reduce_scatter_tensor
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.sharding.layerwise.parameter_unit import Chunk, Unit
from mpisgd.sharding.needed_parts import LoadedPart, NeededPart, elements_of
from mpisgd.sharding.offload.description import Offload
from mpisgd.sharding.offload.disk_speed import blocks_of
from mpisgd.sharding.offload.error_agreement import raised_on_every_rank
from mpisgd.sharding.offload.file_store import FileStore
from mpisgd.sharding.state_exchange import runs_of

__all__ = ["GRADIENT", "VALUES", "StreamedParameters"]

VALUES, GRADIENT = "values", "gradient"
TAG = 30_004  # unlikely in a program's own messages


class StreamedParameters:
    """The parameters of a model in files.

    Args:
        offload: where the files are.
        group: the ranks that train together.
        nbytes: of all parameters.
        num_params: how many there are.

    Attributes:
        group: as given.
        units: what comes into memory together, in the order of forward.
        values: the parameters, by chunk.
        gradients: those of this rank's parts, by chunk, summed over backward passes.
        present: the parameters that have gradients there, on some rank.
        when_reset: called when gradients are reset.
    """

    def __init__(self, offload: Offload, group: Group, nbytes: int, num_params: int) -> None:
        num_chunks = num_params + nbytes // (group.size * offload.chunk_bytes)
        self._names: dict[Tensor, str] = {}
        self._param_names: dict[Tensor, str] = {}
        self.when_reset: Callable[[], None] = lambda: None
        self.offload, self.group = offload, group
        self.units: list[Unit] = []
        self.present: set[Tensor] = set()
        self._reader: int | None = None
        self._read_for_it: list[Unit] = []
        with raised_on_every_rank(group):
            values, gradients = (
                FileStore(offload, blocks_of(offload, f"{what} of rank {group.rank}"), self._name, num_chunks)
                for what in ("parameters", "gradients")
            )
            self.values, self.gradients = values, gradients

    def add(self, named: Sequence[tuple[str, Tensor]]) -> Unit:
        """Return a new unit of these parameters, which are in memory still. See `Unit`."""
        name, params = named[0][0], [param for _, param in named]
        self._param_names.update({param: key for key, param in named})
        unit = Unit(name, params, self.group.size, self.group.rank, self.offload.chunk_bytes)
        self.units.append(unit)
        self._names.update({chunk.key: f"{name}.chunk{i}" for i, chunk in enumerate(unit.chunks)})
        return unit

    def _name(self, key: Tensor) -> str:
        return self._names[key]

    # -- values --------------------------------------------------------------------------------------

    def first_values(self, unit: Unit) -> None:
        """Move what the first rank has for a unit to the files, and give the memory back. Collective."""
        broadcast(unit.flat, self.group.ranks[0], self.group)
        self.write(unit)
        self.release([unit], "made")

    def write(self, unit: Unit) -> None:
        """Bring the values that a unit has in memory to the files. Collective."""
        with self.shared_errors():
            for chunk, own in _in_chunks(unit, unit.own(unit.flat)):
                self.values[chunk.key] = {VALUES: own}
            self.values.end_step()

    def needed_parts(self) -> dict[Tensor, NeededPart]:
        """Return the parts that this rank needs of values that are loaded, by parameter; see `load_parts`."""
        found = {}
        for unit in self.units:
            runs = runs_of(member for chunk in unit.chunks for member in unit.members(chunk))
            for place, (param, layout) in enumerate(zip(unit.params, unit.layouts, strict=True)):
                found[param] = NeededPart.by_members(layout, runs.get(place, ()))
        return found

    @torch.no_grad()
    def load_parts(self, values: Mapping[Tensor, LoadedPart | Tensor]) -> None:
        """Bring what this rank needs of other values to the files, which may have failed. Collective."""
        self.release_all()
        with self.values.shared_errors(self.group):
            self.values.clear()
            for unit in self.units:
                for chunk in unit.chunks:
                    own = torch.zeros(chunk.numel, dtype=unit.flat.dtype)
                    for k, first, numel, at in unit.members(chunk):
                        found = elements_of(values[unit.params[k]], unit.layouts[k], first, numel)
                        own[at : at + numel].copy_(found)
                    self.values[chunk.key] = {VALUES: own}
            self.values.end_step()

    def acquire(self, units: Iterable[Unit], user: Hashable) -> None:
        """Have units in memory until `user` has released them. Collective where they are not.

        Raises:
            OffloadError: see `FileStore`; on every rank.
            InvalidArgument: the program has given a parameter other memory.
        """
        for unit in units:
            if not unit.users:
                unit.make_room()
                self._read(unit)
            unit.users.add(user)

    def release_all(self) -> None:
        """Give all memory back: the values in the files are about to change."""
        for unit in self.units:
            if unit.users:
                unit.users.clear()
                unit.drop()

    def release(self, units: Iterable[Unit], user: Hashable) -> None:
        """Give the memory of units back which nobody else uses."""
        for unit in units:
            if user in unit.users:
                unit.users.remove(user)
                if not unit.users:
                    unit.drop()

    def _read(self, unit: Unit) -> None:
        with torch.no_grad(), self.shared_errors():
            self._check_in_place(unit)
            for chunk, own in _in_chunks(unit, unit.own(unit.flat)):
                own.copy_(self.values[chunk.key][VALUES])
                self.values.release([chunk.key], changed=False)
        if self._reader is not None:
            self._read_for_it.append(unit)
            self._gather(unit, self._reader)
        elif self.group.size > 1:
            all_gather_into_tensor(unit.flat, unit.own(unit.flat), self.group)

    @contextmanager
    def values_at(self, reader: int) -> Iterator[None]:
        """Return a context in which one rank alone gets the values that are acquired, to save them.

        On the others they are arbitrary, and `copy_of` makes no copies. Collective.
        """
        self._reader = reader
        try:
            yield
        finally:
            self._reader = None
            for unit in self._read_for_it:  # where the program has raised, some are in memory still
                unit.users.clear()
                unit.drop()
            self._read_for_it.clear()

    def _gather(self, unit: Unit, reader: int) -> None:
        ranks = self.group.ranks
        if self.group.rank != reader:
            isend(unit.own(unit.flat), ranks[reader], self.group, TAG).wait()
            return
        parts = enumerate(torch.split(unit.flat, unit.part))
        works = [irecv(part, ranks[rank], self.group, TAG) for rank, part in parts if rank != reader]
        for work in works:
            work.wait()

    def copy_of(self, value: Tensor) -> Tensor:
        """Return a copy of a parameter that is in memory; see `values_at`."""
        if self._reader not in (None, self.group.rank):
            return torch.empty((), dtype=value.dtype).expand(value.shape)
        return self.values.copy_of(value)

    def _check_in_place(self, unit: Unit) -> None:
        for param in unit.moved():
            raise InvalidArgument(
                f"offload_parameters: {self._param_names[param]} has got other memory than what its file is "
                "read into; write to it by model.load_state_dict() instead of param.data = ..., and "
                "convert the model before its parameters are moved to files"
            )

    def shared_errors(self) -> AbstractContextManager[None]:
        """Return a context to work on the files in; all ranks raise what one of them does. Collective."""
        return raised_on_every_rank(self.group) if self.group.size > 1 else nullcontext()

    # -- gradients -----------------------------------------------------------------------------------

    def harvest(self, unit: Unit) -> None:
        """Add the gradients of a unit to those in the files; the parameters have none then. Collective."""
        mine = torch.tensor([param.grad is not None for param in unit.params], dtype=torch.uint8)
        here = self.on_some_rank(mine)
        if not any(here):
            return
        self.present.update(param for param, exists in zip(unit.params, here, strict=True) if exists)
        part = self._reduced(unit)
        with torch.no_grad(), self.shared_errors():
            for chunk, own in _in_chunks(unit, part):
                self._add(chunk, own)

    def harvest_rest(self, units: Sequence[Unit]) -> None:
        """Do the same for all units that have gradients in memory on some rank. Collective."""
        mine = [any(param.grad is not None for param in unit.params) for unit in units]
        here = self.on_some_rank(torch.tensor(mine, dtype=torch.uint8))
        for unit, exists in zip(units, here, strict=True):
            if exists:
                self.harvest(unit)

    def on_some_rank(self, mine: Tensor) -> list[bool]:
        """Return which flags are set on some rank, [n] of uint8, which are overwritten. Collective."""
        if self.group.size > 1:
            all_reduce(mine, ReduceOp.MAX, self.group)
        return [bool(flag) for flag in mine]

    @torch.no_grad()
    def _reduced(self, unit: Unit) -> Tensor:
        """Return this rank's part of the mean of all ranks' gradients."""
        flat = torch.zeros(unit.flat.shape, dtype=unit.flat.dtype)
        for param, view in zip(unit.params, unit.views(flat), strict=True):
            if param.grad is not None:
                view.copy_(param.grad)
                param.grad = None
        if self.group.size == 1:
            return flat
        part = torch.empty(unit.part, dtype=flat.dtype)
        reduce_scatter_tensor(part, flat, ReduceOp.AVG, self.group)
        return part

    def _add(self, chunk: Chunk, own: Tensor) -> None:
        if chunk.key in self.gradients:
            self.gradients[chunk.key][GRADIENT].add_(own)
            self.gradients.release([chunk.key])
        else:
            self.gradients[chunk.key] = {GRADIENT: own}

    def reset_gradients(self) -> None:
        """Forget the gradients, and a backward that was left by an exception."""
        self.when_reset()
        self.present.clear()
        for unit in self.units:
            for param in unit.params:
                param.grad = None
        if len(self.gradients):
            with self.gradients.held_errors():
                self.gradients.clear()


def _in_chunks(unit: Unit, part: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
    """Yield the chunks of a rank's part, and what is in them."""
    return ((chunk, part[chunk.start : chunk.start + chunk.numel]) for chunk in unit.chunks)
