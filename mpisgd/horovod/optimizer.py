"""`DistributedOptimizer` with Horovod's arguments, methods and messages.

The optimizer that is passed in stays the same object, with its state, and becomes an instance of a class made
of `_DistributedOptimizer` and its own: schedulers and scalers that know it go on working.
"""

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.arguments import check_flag, shown
from mpisgd.horovod.adasum_optimizer import AdasumOptimizer
from mpisgd.horovod.arguments import check_compression, check_optimizer
from mpisgd.horovod.compression import Compression, Compressor
from mpisgd.horovod.gradients import ExchangeOptions, GradientExchange
from mpisgd.horovod.ops.reduce_ops import Adasum, Average, name_of
from mpisgd.horovod.process_sets import ProcessSet, global_process_set, serial_of_new
from mpisgd.job import rank_info
from mpisgd.methods.strategy.goes_with import averages_by_itself
from mpisgd.optim.grad_scaler import HANDLES, has_unscaled
from mpisgd.optim.step_hooks import StepArguments, register_step_hooks, step_noting_depth, wrap_closure
from mpisgd.sharding.layerwise.in_files import check_in_memory

__all__ = ["DistributedOptimizer", "begin_anew", "forget_step"]

ENTRY, SPARSE_DIMS = "horovod", "sparse"  # of a state: the dimensions, by the place of the parameter
ZEROED = (
    "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
    "optimizer.synchronize(). This is prohibited as it can cause a race condition."
)
UNSCALED = (
    "scaler.unscale_(optimizer) was called after loss.backward() but before optimizer.synchronize(). "
    "Gradients may have been sent with the scale by then, and each rank has looked for infinities of its "
    "own. Call optimizer.synchronize() first, and scaler.step(optimizer) inside optimizer.skip_synchronize()."
)
TWICE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
    "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() context "
    "if you use optimizer.synchronize() in your code."
)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    keep_none: bool = False,
) -> Any:
    """Make `optimizer` step with the gradients of all ranks of a process set. Collective over them.

    Buckets of gradients are sent during backward between hosts, and in `step()` on one host. A missing
    gradient counts as zero.

    Args:
        optimizer: any torch optimizer; it is changed in place and returned.
        named_parameters: names for messages, usually `model.named_parameters()`.
        compression: `Compression.none`, `.fp16`, `.bf16` or one of your own.
        backward_passes_per_step: number of `backward()` calls over which gradients are summed locally.
        op: Average, Sum or Adasum.
        gradient_predivide_factor: with Average, divide by this before the sum and by size / factor after it.
        num_groups: older name of `groups` as a number.
        groups: lists of parameters whose gradients are sent together, or the number of such lists.
        sparse_as_dense: send sparse gradients as dense ones.
        process_set: the ranks that train together.
        keep_none: if no rank has used a parameter, leave its gradient None, as in one process. Not in
            Horovod, which sets zeros.

    Raises:
        ValueError: invalid arguments; before anything is sent.
    """
    check_optimizer("DistributedOptimizer", optimizer)
    if averages_by_itself(optimizer):
        raise ValueError(f"{type(optimizer).__name__} averages by itself in step(); use it as it is")
    check_compression("DistributedOptimizer", compression)
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"process_set={shown(process_set)}; expected an hvd.ProcessSet")
    for what, flag in (("sparse_as_dense", sparse_as_dense), ("keep_none", keep_none)):
        check_flag("DistributedOptimizer", what, flag)
    named = _named(optimizer, named_parameters)
    _check(backward_passes_per_step, op, gradient_predivide_factor)
    if not isinstance(num_groups, int) or num_groups < 0:
        raise ValueError(f"num_groups={shown(num_groups)}; expected 0 or more")
    _indices(groups, [param for _, param in named])
    if num_groups and op != Adasum:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, 2)
        groups = num_groups if groups is None else groups
    check_in_memory("DistributedOptimizer", named)
    options = ExchangeOptions(
        op, compression, gradient_predivide_factor, sparse_as_dense, keep_none, process_set
    )
    own, kind = AdasumOptimizer if op == Adasum else _DistributedOptimizer, type(optimizer)
    optimizer.__class__ = type(kind.__name__, (own, kind), step_noting_depth(kind))
    assert isinstance(optimizer, AdasumOptimizer | _DistributedOptimizer)
    optimizer._set_up(named, groups, backward_passes_per_step, options)
    return optimizer


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> list[tuple[str, Tensor]]:
    """Return (name, parameter) of every parameter of the optimizer."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if named_parameters is None:
        return [(f"noname.{index}", param) for index, param in enumerate(params)]
    listed = isinstance(named_parameters, Iterable) and not isinstance(named_parameters, Tensor)
    given: list[Any] = list(named_parameters) if listed else [named_parameters]
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in given):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in given]
    if duplicates := sorted(name for name, times in Counter(names).items() if times > 1):
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: " + ", ".join(duplicates)
        )
    by_id = {id(param): name for name, param in given}
    if unnamed := [param for param in params if id(param) not in by_id]:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            + ", ".join(f"one of shape {list(param.shape)}" for param in unnamed)
        )
    return [(by_id[id(param)], param) for param in params]


def _check(passes: int, op: int, factor: float) -> None:
    if not isinstance(passes, int) or passes <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise ValueError(f"gradient_predivide_factor={shown(factor)}; expected a positive number")
    if factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    name_of(op)


class _DistributedOptimizer(torch.optim.Optimizer):
    """What `DistributedOptimizer` adds to the wrapped class."""

    def _set_up(
        self,
        named: list[tuple[str, Tensor]],
        groups: int | Sequence[Sequence[Tensor]] | None,
        passes: int,
        options: ExchangeOptions,
    ) -> None:
        self._parameter_names = {param: name for name, param in named}
        self._groups, self._options = groups, options
        self._label = f"gradients.{serial_of_new(options.process_set)}"
        self.backward_passes_per_step = passes
        self._synchronized = self._synchronized_for_scaler = False
        self._should_synchronize = True
        self._exchanges: list[GradientExchange] = []
        self._loaded_dims: dict[Tensor, int] = {}  # of parameters whose gradients nothing exchanges yet
        register_step_hooks(self, _before_step)
        self._cover_new_ones()

    def _cover_new_ones(self) -> None:
        """Exchange the gradients of those parameters that are trained and not covered yet."""
        if not self._options.process_set.included() or rank_info.size() == 1:
            return
        known = {id(param) for exchange in self._exchanges for _, param in exchange.named}
        params = [param for group in self.param_groups for param in group["params"]]
        new = [param for param in params if param.requires_grad and id(param) not in known]
        if new:
            label = self._label + f".{len(self._exchanges)}" * bool(self._exchanges)
            named = [(self._parameter_names[param], param) for param in new]
            indices, passes = _indices(self._groups, new), self.backward_passes_per_step
            self._exchanges.append(GradientExchange(label, named, indices, self._options, passes))
            self._hand_out_sparse()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sum gradients locally over so many `backward()`s from now on."""
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self.backward_passes_per_step = passes
        self._count_passes_anew()

    def _count_passes_anew(self) -> None:
        for exchange in self._exchanges:
            exchange.count_passes(self.backward_passes_per_step)

    @property
    def _is_underway(self) -> bool:
        return any(exchange.is_underway for exchange in self._exchanges)

    def synchronize(self) -> None:
        """Wait until every gradient is that of all ranks; send those that have not been sent."""
        for exchange in self._exchanges:
            exchange.send()
        for exchange in self._exchanges:
            exchange.receive()
        self._count_passes_anew()
        self._synchronized = True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What `GradScaler.step` asks for before it looks whether the gradients are finite.

        So they are made those of all ranks then: else one rank would leave out a step that the others take.
        """
        known = (self._synchronized or self._synchronized_for_scaler) and not self._is_underway
        if self._should_synchronize and not known:
            if self._is_underway and has_unscaled(self):
                raise AssertionError(UNSCALED)
            self.synchronize()
            self._synchronized, self._synchronized_for_scaler = False, True
        return bool(self.__dict__.get(HANDLES, getattr(super(), HANDLES, False)))

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step()` take the gradients as they are, after `synchronize()`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the wrapped optimizer does."""
        if self._is_underway:
            raise AssertionError(ZEROED)
        self._end_step()  # one that a scaler has left out
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as the wrapped optimizer does.

        If some gradients have been sparse, the entry "horovod" says which; other optimizers ignore it.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        known = self._known_sparse()
        sparse = {number: known[param] for number, param in enumerate(params) if param in known}
        return {**super().state_dict(), **({ENTRY: {SPARSE_DIMS: sparse}} if sparse else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; what is left of a step that has failed is forgotten."""
        super().load_state_dict(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        sparse = state_dict.get(ENTRY, {}).get(SPARSE_DIMS, {})
        self._forget_step({params[int(number)]: dims for number, dims in sparse.items()})

    def _known_sparse(self) -> dict[Tensor, int]:
        """Return the sparse dimensions of the gradients that were sparse on any rank, by parameter."""
        known = dict(self._loaded_dims)
        for exchange in self._exchanges:
            known |= {exchange.named[index][1]: dims for index, dims in exchange.sparse_dims.items()}
        return known

    def _hand_out_sparse(self) -> None:
        """Tell the exchanges which of their gradients were sparse, as a state that was loaded says."""
        for exchange in self._exchanges:
            params = [param for _, param in exchange.named]
            dims = {i: self._loaded_dims.pop(p) for i, p in enumerate(params) if p in self._loaded_dims}
            if dims:  # otherwise a step may be under way
                exchange.know_sparse(dims)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters later. All ranks add the same ones."""
        super().add_param_group(param_group)
        if not hasattr(self, "_parameter_names"):
            return
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in enumerate(params):
            self._parameter_names.setdefault(param, f"noname.{index}")
        self._cover_new_ones()

    def _forget_step(self, sparse_dims: Mapping[Tensor, int]) -> None:
        """Begin anew, where some gradients have been sparse."""
        for exchange in self._exchanges:
            exchange.forget()
        self._loaded_dims = dict(sparse_dims)
        self._hand_out_sparse()
        self._count_passes_anew()
        self._end_step()

    def _synchronized_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure of a step, after which the gradients are those of all ranks."""

        def synchronized() -> Any:
            loss = closure()
            if self._should_synchronize:
                self.synchronize()
                self._end_step()
            return loss

        return synchronized

    def _end_step(self) -> None:
        self._synchronized = self._synchronized_for_scaler = False


def forget_step(optimizer: torch.optim.Optimizer) -> None:
    """Let a distributed optimizer exchange gradients as one that has just loaded the state of this one."""
    if isinstance(optimizer, _DistributedOptimizer):
        optimizer._forget_step(optimizer._known_sparse())


def begin_anew(optimizer: torch.optim.Optimizer) -> None:
    """Let a distributed optimizer go on with the ranks that there are now; what is under way is forgotten.

    One that was made where its rank was alone has exchanged nothing until now. New ranks learn which
    gradients have been sparse with the state, before the first step.
    """
    if isinstance(optimizer, _DistributedOptimizer):
        optimizer._forget_step(optimizer._known_sparse())
        optimizer._cover_new_ones()


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> StepArguments | None:
    """Wait for the gradients, unless the program or the scaler has seen to it; after the closure, if any."""
    assert isinstance(optimizer, _DistributedOptimizer)
    changed = wrap_closure(args, kwargs, optimizer._synchronized_closure)
    if changed is None:
        known = optimizer._synchronized_for_scaler and not optimizer._is_underway
        if optimizer._should_synchronize and not known:
            if optimizer._synchronized:
                warnings.warn(TWICE, UserWarning, 4)
            optimizer.synchronize()
        optimizer._end_step()
    return changed


def _indices(groups: int | Sequence[Sequence[Tensor]] | None, params: Sequence[Tensor]) -> list[list[int]]:
    """Return the groups as places in `params`."""
    if groups is None:
        return []
    if not _are_groups(groups):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    if not groups:
        return []
    if isinstance(groups, int):
        cuts = torch.arange(len(params)).tensor_split(min(groups, max(len(params), 1)))
        return [cut.tolist() for cut in cuts]
    place = {id(param): index for index, param in enumerate(params)}
    listed = [[place[id(param)] for param in group if id(param) in place] for group in groups]
    flat = [index for group in listed for index in group]
    if len(set(flat)) < len(flat):
        raise ValueError("A parameter can only appear once in groups.")
    return [group for group in listed if group]


def _are_groups(groups: object) -> bool:
    if isinstance(groups, int):
        return groups >= 0
    return isinstance(groups, Sequence) and all(
        isinstance(group, Sequence) and all(isinstance(param, Tensor) for param in group) for group in groups
    )
