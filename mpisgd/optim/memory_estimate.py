"""`estimate_memory`: what each rank will keep in memory for a training, by strategy, before it is started.

The numbers are those of the strategies' costs, at the moment of a step at which they are most. Activations
are left out: they depend on the batch.
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpisgd.arguments import call_text, check_positive
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.options import DEFAULT_BUCKET_CAP_BYTES
from mpisgd.layouts.layout import MeshLayout
from mpisgd.layouts.named_model import NamedModel
from mpisgd.methods.cast.cast import Compression
from mpisgd.methods.cost_kit import Bucket, Sizes, World
from mpisgd.methods.costs import MethodCost, cost_of, wire_of
from mpisgd.methods.peak_memory import peak_memory
from mpisgd.methods.sharded.sharded import Sharded
from mpisgd.methods.sizes import parameter, sizes_of
from mpisgd.methods.strategy.strategy import Strategy
from mpisgd.methods.synchronous.synchronous import Synchronous
from mpisgd.optim.distributed import DistributedOptimizer
from mpisgd.optim.wrapped_class import wrapped_class
from mpisgd.sharding.elementwise import KNOWN, is_known_step
from mpisgd.sharding.layerwise.layers import layers_of
from mpisgd.sharding.update_work import is_muon, work_of

__all__ = ["MemoryEstimate", "MemoryEstimates", "OptimizerLike", "estimate_memory", "state_bytes"]


OptimizerLike = torch.optim.Optimizer | Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def state_bytes(
    optimizer: OptimizerLike,
    params: Sequence[Tensor],
    dtype_of: Mapping[torch.dtype, torch.dtype],
    parts: Sequence[Tensor] | None = None,
) -> list[int]:
    """Return the bytes that the optimizer keeps for each of `params` after a step.

    Args:
        optimizer: over these parameters, which is unchanged; or what makes one, such as its class.
        params: all of them.
        dtype_of: the dtype in which parameters of a dtype are updated, where it is another one.
        parts: what a rank has of each of them; None: all.

    Raises:
        InvalidArgument: its step cannot be done without values.
    """
    if not params:
        return []
    blanks = [_blank(param, dtype_of.get(param.dtype, param.dtype)) for param in parts or params]
    try:
        twin = _twin(optimizer, params, blanks)
        twin.step()
    except Exception as exc:
        name = getattr(optimizer, "__name__", type(optimizer).__name__)
        raise InvalidArgument(
            f"estimate_memory: a step of {name} cannot be done without values ({exc}); pass "
            "state_per_parameter, the bytes that it keeps for each parameter"
        ) from exc
    return [sum(_nbytes(value) for value in twin.state.get(blank, {}).values()) for blank in blanks]


def works_of(optimizer: OptimizerLike | None, params: list[Tensor]) -> list[float | None]:
    """Return the bytes of an update of each of `params` as a whole, None where that is not known.

    Args:
        optimizer: see `state_bytes`; None: nobody knows yet.
        params: all of them.
    """
    if optimizer is None or not params or not (_declares(optimizer) or is_muon(_kind_of(optimizer))):
        return [None] * len(params)
    blanks = [_blank(param, param.dtype) for param in params]
    twin = _twin(optimizer, params, blanks)
    of_blank = {id(p): options for options in twin.param_groups for p in options["params"]}
    work = work_of(twin)
    return [work(blank, of_blank[id(blank)]) for blank in blanks]


def _kind_of(optimizer: OptimizerLike) -> Any:
    """Return the class of an optimizer, or what makes one."""
    if isinstance(optimizer, torch.optim.Optimizer):
        kind = type(optimizer)
        return wrapped_class(kind) if issubclass(kind, DistributedOptimizer) else kind
    return getattr(optimizer, "func", optimizer)  # of a functools.partial


def _declares(optimizer: OptimizerLike) -> bool:
    return hasattr(_kind_of(optimizer), "whole_update_work")


def _blank(param: Tensor, dtype: torch.dtype) -> Tensor:
    blank = torch.nn.Parameter(torch.empty(param.shape, dtype=dtype, device="meta"))
    blank.grad = torch.empty_like(blank)
    return blank


def _twin(optimizer: OptimizerLike, params: Sequence[Tensor], blanks: list[Tensor]) -> torch.optim.Optimizer:
    """Return an optimizer of the same kind and options over parameters without values."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer(blanks)
    blank_of = dict(zip(map(id, params), blanks, strict=True))
    kind = type(optimizer)
    twin = object.__new__(wrapped_class(kind) if issubclass(kind, DistributedOptimizer) else kind)
    twin.__dict__.update(vars(optimizer))
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [blank_of[id(p)] for p in group["params"] if id(p) in blank_of]}
        for group in optimizer.param_groups
    ]
    for name in [name for name in vars(twin) if name.endswith("_hooks")]:
        setattr(twin, name, OrderedDict())
    return twin


def _nbytes(value: Any) -> int:
    return value.nbytes if isinstance(value, Tensor) else 0


COLUMNS = ("strategy", "parameters", "gradients", "optimizer state", "buckets", "copies", "total")


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes that the rank which has most of them keeps.

    Attributes:
        strategy: what `DistributedOptimizer` is given.
        parameters: of the model, and its buffers; shared memory counts 1/m for each of m ranks.
        gradients: from the end of backward until the step.
        optimizer_state: copies in a higher precision included; of what is in files, the blocks in memory.
        buckets: gradients on their way, beside `gradients`, at the most.
        copies: of parameters, which the strategy keeps, or needs while it communicates.
    """

    strategy: str
    parameters: int
    gradients: int
    optimizer_state: int
    buckets: int
    copies: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self._parts)

    @property
    def _parts(self) -> tuple[int, ...]:
        return self.parameters, self.gradients, self.optimizer_state, self.buckets, self.copies

    @property
    def row(self) -> tuple[str, ...]:
        """A line of the table."""
        return (self.strategy, *map(as_size, (*self._parts, self.total)))

    def __str__(self) -> str:
        """The same in one line."""
        return f"{self.strategy}: " + ", ".join(map(" ".join, zip(COLUMNS[1:], self.row[1:], strict=True)))


@dataclass(frozen=True)
class MemoryEstimates:
    """One estimate for each strategy; iterates over them, and prints as a table.

    Attributes:
        ranks: how many train together.
        ranks_per_host: how many of them share a host.
        estimates: of the strategies.
    """

    ranks: int
    ranks_per_host: int
    estimates: tuple[MemoryEstimate, ...]

    def __iter__(self) -> Iterator[MemoryEstimate]:
        """Yield the estimates."""
        return iter(self.estimates)

    def __getitem__(self, strategy: str) -> MemoryEstimate:
        """Return the estimate of a strategy, as its line is called."""
        return next(estimate for estimate in self.estimates if estimate.strategy == strategy)

    def __str__(self) -> str:
        """A table, a strategy per line."""
        rows = [COLUMNS, *(estimate.row for estimate in self.estimates)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(_aligned(row, widths)) for row in rows]
        return "\n".join([f"each of {self.ranks} ranks, {self.ranks_per_host} per host", "", *lines])


def _aligned(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    yield row[0].ljust(widths[0])
    yield from (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))


def as_size(nbytes: float) -> str:
    """Return a number of bytes in powers of 1000, as papers give it."""
    units = ("B", "kB", "MB", "GB", "TB")
    power = next((i for i in range(4) if nbytes < 1000 ** (i + 1)), 4)
    return f"{nbytes / 1000**power:.4g} {units[power]}"


def estimate_memory(
    model: torch.nn.Module | Sequence[Tensor] | NamedModel,
    optimizer: OptimizerLike | None = None,
    *,
    ranks: int = 1,
    ranks_per_host: int | None = None,
    master_dtype: torch.dtype | None = None,
    state_per_parameter: float | None = None,
    bucket_cap_bytes: int = DEFAULT_BUCKET_CAP_BYTES,
    strategies: Sequence[Strategy | MeshLayout] | None = None,
) -> MemoryEstimates:
    """Estimate the memory of each rank, by strategy. Needs no job, and no memory for the model.

    Args:
        model: it may be on the device "meta" (`with torch.device("meta"):`), where a model of any size takes
            no memory. A `mpisgd.NamedModel` for layouts.
        optimizer: an optimizer of these parameters, which stays unchanged, or a function that makes one, such
            as `torch.optim.AdamW`. None: plain SGD, which has no state.
        ranks: how many train together.
        ranks_per_host: how many of them share a host; None: all.
        master_dtype: see `Sharded`; used in all lines, so that they can be compared.
        state_per_parameter: bytes of optimizer state per parameter, for an optimizer whose state cannot be
            found.
        bucket_cap_bytes: see `DistributedOptimizer`.
        strategies: a line for each, such as `mpisgd.Sharded(2, offload=mpisgd.Offload("/scratch"))`; by
            default `Synchronous()` and `Sharded` with both stages. With several ranks per host there is a
            further line with `share_parameters=True` for each that allows it. Also layouts of
            `ranks` ranks, such as `mpisgd.layout("batch:dp; hidden:tp", mesh="dp:2, tp:2")`.

    Returns:
        An estimate for each strategy; iterate over them, or print all as a table.

    Raises:
        InvalidArgument: an invalid number, an optimizer whose state cannot be found, a strategy without
            `cost`, or a layout that is not legal for the model.
    """
    check_positive("estimate_memory", "ranks", ranks, whole=True)
    here = ranks if ranks_per_host is None else ranks_per_host
    check_positive("estimate_memory", "ranks_per_host", here, whole=True)
    check_positive("estimate_memory", "bucket_cap_bytes", bucket_cap_bytes, whole=True)
    if here > ranks:
        raise InvalidArgument(f"estimate_memory: ranks_per_host={here} of ranks={ranks}")
    named = model if isinstance(model, NamedModel) else None
    if isinstance(model, NamedModel):
        model = model.model
    state = _State(optimizer, master_dtype, state_per_parameter)
    sizes = _sizes(model, state, bucket_cap_bytes)
    world = World(ranks // here, here, wire_of(Compression.none))
    placements = [world, world._replace(shares=True)] if here > 1 else [world]
    if strategies is None:
        strategies = (Synchronous(), Sharded(1), Sharded(2)) if ranks > 1 else (Synchronous(),)

    def cost(strategy: Strategy | MeshLayout) -> MethodCost:
        if isinstance(strategy, MeshLayout):
            return _cost_in_layout(named, strategy, state, ranks)
        return cost_of(strategy)

    estimates = (
        _estimate(_name(strategy), cost(strategy), sizes, each)
        for each in placements
        for strategy in strategies
        if not each.shares or _goes_shared(strategy)
    )
    return MemoryEstimates(ranks, here, tuple(estimates))


def _goes_shared(strategy: Strategy | MeshLayout) -> bool:
    return isinstance(strategy, Strategy) and strategy.goes_with.share_parameters.goes


def _name(strategy: Strategy | MeshLayout) -> str:
    if isinstance(strategy, MeshLayout):
        return strategy.text
    return f"Sharded(stage={strategy.stage})" if strategy == Sharded() else call_text(strategy)


def _estimate(name: str, method: MethodCost, sizes: Sizes, world: World) -> MemoryEstimate:
    found = peak_memory(method, sizes, world)
    copies = found.strategy + found.compression
    parts = (found.parameters, found.gradients, found.optimizer, found.buffers, copies)
    return MemoryEstimate(name + ", share_parameters" * world.shares, *map(math.ceil, parts))


def _cost_in_layout(named: NamedModel | None, layout: MeshLayout, state: "_State", ranks: int) -> MethodCost:
    if named is None:
        raise InvalidArgument(
            f"estimate_memory: {layout.text} of a model whose dimensions have no names; expected a "
            "mpisgd.NamedModel"
        )
    layout.check_ranks(ranks)
    if state.per_parameter is None and not state.is_elementwise:
        raise InvalidArgument(
            f"estimate_memory: {layout.text} with an optimizer that updates whole parameters; what it keeps "
            "of divided ones is not known: pass state_per_parameter"
        )
    params = [param for param in named.model.parameters() if param.requires_grad]
    cost = named.cost(layout)
    return cost.method(sum(state.bytes_of(params, cost.trained)))


def _sizes(model: torch.nn.Module | Sequence[Tensor], state: "_State", cap_bytes: int) -> Sizes:
    params = list(model.parameters() if isinstance(model, torch.nn.Module) else model)
    buffers = model.buffers() if isinstance(model, torch.nn.Module) else ()
    trained = [param for param in params if param.requires_grad]
    works = works_of(state.optimizer, trained)
    each = zip(trained, state.bytes_of(trained), works, strict=True)
    parameters = [parameter(i, p.shape, p.itemsize, kept, work) for i, (p, kept, work) in enumerate(each)]
    return sizes_of(
        parameters[::-1],
        cap_bytes,
        frozen_bytes=sum(param.nbytes for param in params if not param.requires_grad),
        module_bytes=sum(buffer.nbytes for buffer in buffers),
        layers=_layers(model) if isinstance(model, torch.nn.Module) else (),
        cuts=state.is_elementwise or state.declares_work,
    )


def _layers(model: torch.nn.Module) -> tuple[Bucket, ...]:
    """Return the modules whose parameters `offload_parameters` has in memory together."""
    layers = [list(layer.parameters(recurse=layer is not model)) for layer in layers_of(model)]
    return tuple(
        Bucket(number, tuple(parameter(0, p.shape, p.itemsize, 0) for p in params))
        for number, params in enumerate(layers)
    )


@dataclass(frozen=True)
class _State:
    """What the optimizer keeps of parameters, the copies in a higher precision included."""

    optimizer: OptimizerLike | None
    master_dtype: torch.dtype | None
    per_parameter: float | None

    def bytes_of(self, params: Sequence[Tensor], parts: Sequence[Tensor] | None = None) -> list[int]:
        """Return the bytes for each parameter, or for the part of it that a rank has."""
        kept, dtype = parts or params, self.master_dtype
        masters = {
            param.dtype: dtype
            for param in params
            if dtype is not None and param.is_floating_point() and param.dtype.itemsize < dtype.itemsize
        }
        if self.per_parameter is not None:
            states = [int(each.numel() * self.per_parameter) for each in kept]
        else:
            asked = self.optimizer
            states = [0] * len(kept) if asked is None else state_bytes(asked, params, masters, parts)
        copies = [
            each.numel() * masters[each.dtype].itemsize if each.dtype in masters else 0 for each in kept
        ]
        return [state + copy for state, copy in zip(states, copies, strict=True)]

    @property
    def is_elementwise(self) -> bool:
        """Whether ranks will own parts of parameters."""
        asked = self.optimizer
        if asked is None:
            return True
        kind = _kind_of(asked)
        return is_known_step(getattr(kind, "step", None)) or any(kind is known for known in KNOWN)

    @property
    def declares_work(self) -> bool:
        """Whether the optimizer says what it updates as a whole, and ranks own parts of the rest."""
        return self.optimizer is not None and _declares(self.optimizer)
