"""`GradientExchange`: the gradients of some parameters, which the engine reduces in buckets.

On one host all are sent as one negotiated operation at the end of backward: no core is idle that could reduce
them before. Between hosts each bucket is sent when its last gradient is ready:

    one host     backward ................. | send all of them and wait
    hosts        backward ...[c d]...[b]... | send the rest and wait

Ranks may complete their buckets in any order, and one that has joined takes part with zeros. A gradient that
is missing at the end counts as zero, as in Horovod. Sparse gradients are sent apart.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd import tracing
from mpisgd.accelerator.runtime import on_device
from mpisgd.gradients.kinds import SPARSE
from mpisgd.gradients.sparse import empty_sparse
from mpisgd.gradients.trace_contents import contents
from mpisgd.gradients.unbucketed import copy_aliased
from mpisgd.horovod.compression import Compressor
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.gradient_plan import make_plan
from mpisgd.horovod.ops import handles, submission
from mpisgd.horovod.ops.allreduce import allreduce_async_
from mpisgd.horovod.ops.reduce_ops import Average, Sum, name_of
from mpisgd.horovod.ops.sparse import sparse_allreduce_async, sparse_dims_sent_by_others
from mpisgd.horovod.process_sets import ProcessSet
from mpisgd.horovod.state import engine

__all__ = ["ExchangeOptions", "GradientExchange"]


class ExchangeOptions(NamedTuple):
    """How gradients are combined.

    Attributes:
        op: Average or Sum.
        compression: what travels.
        predivide_factor: divide by this before the sum, and by size / factor after it (Average).
        sparse_as_dense: whether sparse gradients travel as dense ones.
        keep_none: whether a parameter without a gradient on any rank keeps None.
        process_set: who takes part.
    """

    op: int
    compression: type[Compressor]
    predivide_factor: float
    sparse_as_dense: bool
    keep_none: bool
    process_set: ProcessSet

    @property
    def factors(self) -> tuple[float, float]:
        """What is multiplied before and after the reduction."""
        if self.op != Average:
            return 1.0, 1.0
        return 1.0 / self.predivide_factor, self.predivide_factor


class _Sent(NamedTuple):
    """Buckets that were sent: which, the handle, what travels, and what `decompress` needs for each."""

    places: Sequence[int]
    handle: int
    wires: Sequence[Tensor]
    contexts: Sequence[Any]


class _StepState:
    """What has happened since the last `finish`.

    Attributes:
        num_ready: how many gradients are complete.
        missing: how many gradients each bucket waits for; None where none is sent before `send`.
        sent: the buckets that were sent.
        sparse: the number of sparse dimensions and the handle of each sparse gradient sent, by index.
        exist: the handle of what tells which gradients exist, and where it will be.
        addresses: of the gradients that travel from where they lie.
    """

    def __init__(self) -> None:
        self.num_ready = 0
        self.missing: list[int] | None = None
        self.sent: list[_Sent] = []
        self.sparse: dict[int, tuple[int, Any]] = {}
        self.exist: tuple[int, Tensor] | None = None
        self.addresses: set[int] = set()


class GradientExchange:
    """The gradients of some parameters, one step after the other.

    Args:
        label: what its operations are known by; of this exchange alone, and the same on all ranks.
        params: of which some may never have a gradient.
        names: theirs, which must be the same on all ranks too.
        groups: lists of indices that travel together; what is in none is packed by size.
        options: how.
    """

    def __init__(
        self,
        label: str,
        params: Sequence[Tensor],
        names: Sequence[str],
        groups: Sequence[Sequence[int]],
        options: ExchangeOptions,
    ) -> None:
        self._label = label
        self._params = params
        self._names = names
        self._groups = groups
        self._options = options
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Know of no sparse gradients: after a join, since those who had joined have not seen any."""
        self._plan = make_plan(self._params, self._names, self._groups, {})
        self._densified: dict[int, int] = {}
        self._num_steps = 0
        self._num_joins = engine().num_joins
        self._step = _StepState()

    # -- during backward ---------------------------------------------------------------------------------

    @property
    def is_underway(self) -> bool:
        """Whether gradients are complete that `finish` has not taken yet."""
        return self._step.num_ready > 0 or bool(self._step.sent)

    def ready(self, index: int) -> None:
        """Note that a gradient is complete, and send its bucket if it was the last one."""
        if not self._step.num_ready:
            self._begin_step()
        now = self._step
        now.num_ready += 1
        if now.missing is not None and (place := self._plan.place_of.get(index)) is not None:
            now.missing[place] -= 1
            if now.missing[place] == 0:
                self._send([place], f"{self._label}.{place}")

    def _begin_step(self) -> None:
        if engine().num_joins != self._num_joins:
            self._begin_anew()
        if self._sends_early():
            self._step.missing = [len(load.bucket.indices) for load in self._plan.loads]

    def _sends_early(self) -> bool:
        """Return whether gradients can be sent during backward without slowing it down."""
        set_id = self._options.process_set.process_set_id
        assert set_id is not None
        return engine().spans_hosts(set_id) or any(map(on_device, self._params))

    # -- at its end --------------------------------------------------------------------------------------

    @torch.no_grad()
    def send(self) -> None:
        """Send what has not been sent."""
        if not self._step.num_ready:
            self._begin_step()
        for index, sparse_dim in self._plan.sparse_dims.items():
            self._send_sparse(index, self._as_sparse(index, sparse_dim))
        gone = {place for sent in self._step.sent for place in sent.places}
        left = [place for place in range(len(self._plan.loads)) if place not in gone]
        if self._step.missing is None:
            self._send(left, self._label)
        else:
            for place in left:
                self._send([place], f"{self._label}.{place}")
        if self._options.keep_none:
            self._ask_which_exist()

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for everything that was sent, and give every parameter its gradient."""
        exists = self._exist_somewhere()
        for sent in self._step.sent:
            self._take(sent)
        self._take_part_in_sparse_ones()
        for load in self._plan.loads:
            indices = load.bucket.indices
            load.unload([self._params[index] for index in indices], [exists[index] for index in indices])
        for index in self._step.sparse:
            self._settle_sparse(index, exists[index])
        for index, sparse_dim in self._densified.items():
            if (grad := self._params[index].grad) is not None:
                self._params[index].grad = grad.to_sparse(sparse_dim)
        self._end_step()

    def _end_step(self) -> None:
        sparse_dims = {index: sparse_dim for index, (sparse_dim, _) in sorted(self._step.sparse.items())}
        self._num_steps += 1
        self._step = _StepState()
        if sparse_dims != self._plan.sparse_dims:
            self._plan = make_plan(self._params, self._names, self._groups, sparse_dims)

    def forget(self) -> None:
        """Forget what was sent: a step has failed, and the program starts over."""
        for sent in self._step.sent:
            handles.forget(sent.handle)
        self._begin_anew()

    # -- dense gradients ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _send(self, places: Sequence[int], name: str) -> None:
        """Send buckets as one operation."""
        if not places:
            return
        options = self._options
        pairs = [options.compression.compress(self._loaded(place)) for place in places]
        wires = [wire for wire, _ in pairs]
        prescale, postscale = options.factors
        request = submission.make_request(
            "allreduce",
            name,
            wires,
            options.process_set,
            in_place=True,
            op=name_of(options.op),
            prescale=prescale,
            postscale=postscale,
            about=self._plan.about,
        )
        named = None if tracing.sink is None else self._contents(places)
        handle = submission.submit(Entry(request, wires, wires, contents=named))
        self._step.sent.append(_Sent(places, handle, wires, [context for _, context in pairs]))

    def _contents(self, places: Sequence[int]) -> dict[str, Any]:
        """Return whose gradients are in some buckets, for the timeline."""
        indices = [index for place in places for index in self._plan.loads[place].bucket.indices]
        return contents((self._names[index], self._params[index]) for index in indices)

    def _loaded(self, place: int) -> Tensor:
        """Bring this rank's gradients into a bucket, and return what travels."""
        load = self._plan.loads[place]
        grads = [self._params[index].grad for index in load.bucket.indices]
        if self._options.sparse_as_dense:
            grads = [self._dense(index, grad) for index, grad in zip(load.bucket.indices, grads, strict=True)]
        kinds = load.load(copy_aliased(load, grads, self._step.addresses))
        if SPARSE in kinds:
            for index, grad in zip(load.bucket.indices, grads, strict=True):
                if grad is not None and grad.is_sparse:  # it sets out by itself
                    self._send_sparse(index, grad)
        return load.flat

    def _dense(self, index: int, grad: Tensor | None) -> Tensor | None:
        """Return a gradient in the form it travels in, and remember the form it has otherwise."""
        if grad is None:
            return None
        if not grad.is_sparse:
            self._densified.pop(index, None)
            return grad
        self._densified[index] = grad.sparse_dim()
        return grad.to_dense()

    def _take(self, sent: _Sent) -> None:
        handles.synchronize(sent.handle)
        for place, wire, context in zip(sent.places, sent.wires, sent.contexts, strict=True):
            flat = self._plan.loads[place].flat
            arrived = self._options.compression.decompress(wire, context)
            if arrived.data_ptr() != flat.data_ptr():
                flat.copy_(arrived)

    # -- which gradients there are -----------------------------------------------------------------------

    def _ask_which_exist(self) -> None:
        mine = torch.tensor([param.grad is not None for param in self._params])
        name = f"{self._label}.exist"
        handle = allreduce_async_(mine, None, name, Sum, process_set=self._options.process_set)
        self._step.exist = handle, mine

    def _exist_somewhere(self) -> Sequence[bool]:
        """Return which gradients some rank has, by index; where nobody asks, all of them."""
        if self._step.exist is None:
            return [True] * len(self._params)
        handle, exist = self._step.exist
        handles.synchronize(handle)
        return exist.tolist()

    # -- sparse gradients --------------------------------------------------------------------------------

    def _sparse_name(self, index: int) -> str:
        """Return what a sparse gradient is known by: in this step, since others may be in the next one."""
        return f"{self._label}.{self._names[index]}.{self._num_steps % 2}"

    def _send_sparse(self, index: int, grad: Tensor) -> None:
        name, options = self._sparse_name(index), self._options
        handle = sparse_allreduce_async(grad, name, options.op, options.process_set)
        self._step.sparse[index] = grad.sparse_dim(), handle

    def _as_sparse(self, index: int, sparse_dim: int) -> Tensor:
        """Return a gradient that was sparse on some rank before, in that form."""
        grad = self._params[index].grad
        if grad is None:
            return empty_sparse(self._params[index], sparse_dim)
        return grad if grad.is_sparse else grad.to_sparse(sparse_dim)

    def _take_part_in_sparse_ones(self) -> None:
        """Send an empty gradient of each parameter whose gradient is sparse elsewhere, but not here.

        Others have submitted theirs before the buckets of these parameters, which have arrived.
        """
        sent_by_others = sparse_dims_sent_by_others(self._options.process_set, f"{self._label}.")
        if not sent_by_others:
            return
        for index, param in enumerate(self._params):
            sparse_dim = sent_by_others.get(self._sparse_name(index))
            if sparse_dim is not None and index not in self._step.sparse:
                self._send_sparse(index, empty_sparse(param, sparse_dim))

    def _settle_sparse(self, index: int, exists: bool) -> None:
        """Give a parameter its sparse gradient, with what was dense on other ranks added."""
        param = self._params[index]
        total = handles.synchronize(self._step.sparse[index][1])
        dense = param.grad if index in self._plan.place_of else None
        if not exists:
            param.grad = None
        elif dense is not None and bool(dense.any()):
            param.grad = dense.add_(total)
        else:
            param.grad = total
