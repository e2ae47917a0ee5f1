"""`GradientExchange`: the gradients of some parameters, which the engine reduces in buckets.

On one host all are sent as one negotiated operation in `step()`: no core is idle that could reduce them
before. Between hosts each bucket is sent when its last gradient is ready:

    one host     backward ................. | send all of them and wait
    hosts        backward ...[c d]...[b]... | send the rest and wait

On one host, too, they are sent before the program waits for anything else, if all are complete: another rank
may step now, and come later to what this one waits for.

    rank 0       backward of A, of B | A.step(): send A, send B, wait for A
    rank 1       backward of A, of B | B.step(): send B, send A, wait for B

Ranks may complete their buckets in any order, and one that has joined takes part with zeros. A gradient that
is missing at the end counts as zero, as in Horovod. Sparse gradients are sent apart, uncompressed, and so are
all later ones of these parameters: which they are belongs to the optimizer's state.
"""

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd import tracing
from mpisgd.accelerator.buffers import ALONE_BYTES
from mpisgd.accelerator.runtime import on_device
from mpisgd.dtypes import dtype_name
from mpisgd.gradients.bucket_plan import BucketPlan, item_of, plain_slot
from mpisgd.gradients.bucketing import Bucket, plan_buckets
from mpisgd.gradients.fusion_buffer import layout_of
from mpisgd.gradients.gradient_flags import SPARSE
from mpisgd.gradients.hook_order import after_others
from mpisgd.gradients.in_flight import InFlightReduction
from mpisgd.gradients.launcher import trace_contents
from mpisgd.gradients.sparse import empty_sparse
from mpisgd.horovod.compression import Compressor
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.ops import handles, submission
from mpisgd.horovod.ops.allreduce import allreduce_async_
from mpisgd.horovod.ops.reduce_ops import Average, Sum, name_of
from mpisgd.horovod.ops.sparse import sparse_allreduce_async, sparse_dims_sent_by_others
from mpisgd.horovod.process_sets import ProcessSet
from mpisgd.horovod.state import engine, is_initialized

__all__ = ["ExchangeOptions", "GradientExchange"]

BUCKET_BYTES = 25 * 2**20
TOO_MANY = (
    "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
    "backward_passes_per_step to accumulate gradients locally."
)


CHANGED = (
    "Gradients were changed between backward() and step() after they had been sent to the other ranks, which "
    "has no effect. They are sent during backward() between hosts, and else before the program waits for any "
    "other operation. Call optimizer.synchronize() first, change them then, and step inside "
    "optimizer.skip_synchronize()."
)


class ExchangeOptions(NamedTuple):
    """How gradients are combined.

    Attributes:
        op: Average or Sum; Adasum where steps are combined.
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


class GradientExchange:
    """The gradients of some parameters, one step after the other.

    Args:
        label: what its operations are known by; of this exchange alone, and the same on all ranks.
        named: the parameters, of which some may never have a gradient, with names, the same on all ranks.
        groups: lists of indices that travel together; what is in none is packed by size.
        options: how.
        passes: after how many backward passes a gradient is complete.

    Attributes:
        named: as given.
    """

    def __init__(
        self,
        label: str,
        named: Sequence[tuple[str, Tensor]],
        groups: Sequence[Sequence[int]],
        options: ExchangeOptions,
        passes: int,
    ) -> None:
        self.named = named
        self._params = [param for _, param in named]
        self._label = label
        self._groups = groups
        self._options = options
        self.count_passes(passes)
        self._begin_anew()
        for index, param in enumerate(self._params):
            after_others(param, functools.partial(self._accumulated, index))

    def count_passes(self, passes: int) -> None:
        """Let every gradient be complete after so many backward passes from now on."""
        self._passes_left = [passes] * len(self._params)
        self._num_incomplete = len(self._params)

    def _begin_anew(self) -> None:
        """Know of no sparse gradients: after a join, since those who had joined have not seen any."""
        self._num_joins = engine().num_joins
        self._num_steps = 0
        self._densified: dict[int, int] = {}  # sparse dimensions, 0 for dense, before they were made dense
        self._sparse_dims: dict[int, int] = {}
        self._plan = _make_plan(self.named, self._groups, frozenset())
        self._reset_step()

    def _reset_step(self) -> None:
        engine().recall(self)
        self._in_flight: InFlightReduction | None = None
        self._is_sent = False
        self._sent_early: list[tuple[Tensor, int]] = []  # gradients, and their versions then
        self._sent: list[int] = []  # the handles of buckets
        self._sparse: dict[int, tuple[int, Any]] = {}  # dimensions and handle, of those that were sent
        self._exist: int | None = None  # the handle of what tells which gradients some rank has

    # -- what was sparse ---------------------------------------------------------------------------------

    @property
    def sparse_dims(self) -> dict[int, int]:
        """How many sparse dimensions the gradients had that were sparse on any rank, by parameter."""
        forgets = is_initialized() and engine().num_joins != self._num_joins
        return {} if forgets else dict(self._sparse_dims)

    def know_sparse(self, sparse_dims: Mapping[int, int]) -> None:
        """Take these for the gradients that were sparse. Nothing is under way; alike on all ranks."""
        self._sparse_dims = dict(sorted(sparse_dims.items()))
        self._plan = _make_plan(self.named, self._groups, frozenset(sparse_dims))

    # -- during backward ---------------------------------------------------------------------------------

    @property
    def is_underway(self) -> bool:
        """Whether gradients are complete that `receive` has not taken yet."""
        return self._in_flight is not None

    def _accumulated(self, index: int, _: Tensor) -> None:
        """Note that backward has added to a gradient; send its bucket if that was all it waited for."""
        left = self._passes_left[index] - 1  # hundreds of these run in a step
        if left < 0:
            raise AssertionError(TOO_MANY)
        self._passes_left[index] = left
        if not left:
            in_flight = self._in_flight or self._begin_step()
            in_flight.streams.note(self._params[index])
            if (place := in_flight.complete(index)) is not None:
                in_flight.streams.join()
                self._send(in_flight, [place])
                self._note_sent(in_flight, in_flight.slots[place].bucket.indices)
            self._num_incomplete -= 1
            if not self._num_incomplete:
                engine().defer(self, self._send_early)

    def _begin_step(self) -> InFlightReduction:
        if engine().num_joins != self._num_joins:
            self._begin_anew()
        if not self._plan.fits(self._params):  # the program has converted some
            self._plan = _make_plan(self.named, self._groups, frozenset(self._sparse_dims))
        self._in_flight = InFlightReduction(self._plan, in_background=self._sends_early())
        return self._in_flight

    def _sends_early(self) -> bool:
        """Return whether gradients can be sent during backward without slowing it down."""
        set_id = self._options.process_set.process_set_id
        assert set_id is not None
        return engine().spans_hosts(set_id) or any(map(on_device, self._params))

    # -- at its end --------------------------------------------------------------------------------------

    def _send_early(self) -> None:
        """Send what is complete before `step()`, since the program waits for something else."""
        self.send()
        assert self._in_flight is not None
        if not self._in_flight.in_background:
            self._note_sent(self._in_flight, range(len(self._params)))

    def _note_sent(self, in_flight: InFlightReduction, indices: Iterable[int]) -> None:
        """Note gradients that were sent before `step()`: from now on the program cannot change them."""
        grads = [self._params[index].grad for index in indices]
        self._sent_early += [
            (grad, grad._version)
            for grad in grads
            if grad is not None and (grad.is_sparse or grad.data_ptr() not in in_flight.addresses)
        ]

    @torch.no_grad()
    def send(self) -> None:
        """Send what has not been sent."""
        if self._is_sent:
            return
        self._is_sent = True
        engine().recall(self)
        in_flight = self._in_flight or self._begin_step()
        for index, sparse_dim in self._sparse_dims.items():
            grad = self._params[index].grad  # one that was sparse on some rank before is sent in that form
            if grad is None:
                grad = empty_sparse(self._params[index], sparse_dim)
            self._send_sparse(index, grad if grad.is_sparse else grad.to_sparse(sparse_dim))
        rest = in_flight.not_launched()
        together = [[place] for place in rest] if in_flight.in_background else [rest]
        for places in together:
            self._send(in_flight, places)
        if self._options.keep_none:
            mine = torch.tensor([param.grad is not None for param in self._params])
            name = f"{self._label}.exist"
            self._exist = allreduce_async_(mine, None, name, Sum, process_set=self._options.process_set)

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for everything that was sent, and give every parameter its gradient."""
        self._check_unchanged()
        exists = [True] * len(self._params)
        if self._exist is not None:
            exists = handles.synchronize(self._exist).tolist()
        for handle in self._sent:
            handles.synchronize(handle)
        self._take_part_in_sparse_ones()
        for slot in self._plan.slots:
            indices = slot.bucket.indices
            slot.storage.unload([self._params[i] for i in indices], [exists[i] for i in indices])
        for index in self._sparse:
            self._settle_sparse(index, exists[index])
        for index, sparse_dim in self._densified.items():
            if sparse_dim and (grad := self._params[index].grad) is not None:
                self._params[index].grad = grad.to_sparse(sparse_dim)
        sparse_dims = {index: sparse_dim for index, (sparse_dim, _) in sorted(self._sparse.items())}
        if sparse_dims != self._sparse_dims:
            self._sparse_dims = sparse_dims
            self._plan = _make_plan(self.named, self._groups, frozenset(sparse_dims))
        self._num_steps += 1
        self._reset_step()

    def _check_unchanged(self) -> None:
        """Warn where gradients were changed after they had been sent: that has no effect."""
        now = {id(param.grad) for param in self._params}
        if any(grad._version != version or id(grad) not in now for grad, version in self._sent_early):
            warnings.warn(CHANGED, RuntimeWarning, 2)

    def forget(self) -> None:
        """Forget what was sent: a step has failed, and the program starts over."""
        for handle in self._sent:
            handles.forget(handle)
        self._begin_anew()

    # -- dense gradients ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _send(self, in_flight: InFlightReduction, places: Sequence[int]) -> None:
        """Send buckets as one operation: a single one during backward or after it, or all there are."""
        if not places:
            return
        options = self._options
        flats = [self._loaded(in_flight, place) for place in places]
        pairs = [options.compression.compress(flat) for flat in flats]
        wires = [wire for wire, _ in pairs]

        def take(_: object) -> None:
            for flat, (wire, context) in zip(flats, pairs, strict=True):
                arrived = options.compression.decompress(wire, context)
                if arrived.data_ptr() != flat.data_ptr():
                    flat.copy_(arrived)

        factor = options.predivide_factor if options.op == Average else 1.0
        request = submission.make_request(
            "allreduce",
            f"{self._label}.{places[0]}" if in_flight.in_background else self._label,
            wires,
            options.process_set,
            in_place=True,
            op=name_of(options.op),
            prescale=1.0 / factor,
            postscale=factor,
            about=self._plan.name,
        )
        contents = None
        if tracing.sink is not None:
            indices = [index for place in places for index in self._plan.slots[place].bucket.indices]
            contents = trace_contents(self.named[index] for index in indices)
        self._sent.append(submission.submit(Entry(request, wires, wires, contents=contents, finish=take)))
        in_flight.launched.update(dict.fromkeys(places))

    def _loaded(self, in_flight: InFlightReduction, place: int) -> Tensor:
        """Bring this rank's gradients into a bucket, and return what travels."""
        storage = self._plan.slots[place].storage
        indices = storage.bucket.indices
        grads = [self._params[index].grad for index in indices]
        if self._options.sparse_as_dense:
            existing = [(index, grad) for index, grad in zip(indices, grads, strict=True) if grad is not None]
            self._densified.update((index, grad.sparse_dim()) for index, grad in existing)
            grads = [None if grad is None else grad.to_dense() for grad in grads]
        if SPARSE in storage.load(grads, in_flight.addresses):
            for index, grad in zip(indices, grads, strict=True):
                if grad is not None and grad.is_sparse:  # it is sent by itself
                    self._send_sparse(index, grad)
        return storage.flat

    # -- sparse gradients --------------------------------------------------------------------------------

    def _sparse_name(self, index: int) -> str:
        """Return the name of a sparse gradient in this step; the next step may have others."""
        return f"{self._label}.{self.named[index][0]}.{self._num_steps % 2}"

    def _send_sparse(self, index: int, grad: Tensor) -> None:
        name, options = self._sparse_name(index), self._options
        handle = sparse_allreduce_async(grad, name, options.op, options.process_set)
        self._sparse[index] = grad.sparse_dim(), handle

    def _take_part_in_sparse_ones(self) -> None:
        """Send an empty gradient of each parameter whose gradient is sparse elsewhere, but not here.

        Others have submitted theirs before the buckets of these parameters, which have arrived.
        """
        sent_by_others = sparse_dims_sent_by_others(self._options.process_set, f"{self._label}.")
        if not sent_by_others:
            return
        for index, param in enumerate(self._params):
            sparse_dim = sent_by_others.get(self._sparse_name(index))
            if sparse_dim is not None and index not in self._sparse:
                self._send_sparse(index, empty_sparse(param, sparse_dim))

    def _settle_sparse(self, index: int, exists: bool) -> None:
        """Give a parameter its sparse gradient, with what was dense on other ranks added."""
        param = self._params[index]
        total = handles.synchronize(self._sparse[index][1])
        dense = None if index in self._plan.sparse else param.grad
        if not exists:
            param.grad = None
        elif dense is not None and bool(dense.any()):
            param.grad = dense.add_(total)
        else:
            param.grad = total


def _make_plan(
    named: Sequence[tuple[str, Tensor]], groups: Sequence[Sequence[int]], sparse: frozenset[int]
) -> BucketPlan:
    """Return the plan of some parameters: the same on all ranks as long as these are.

    Its name is a line for each parameter, by which ranks compare their plans.
    """
    params = [param for _, param in named]
    dense = {i: item_of(i, param, param.device.type) for i, param in enumerate(params) if i not in sparse}
    rest = dense.keys() - {index for group in groups for index in group}
    buckets: list[Bucket] = []
    for group in groups:
        buckets += plan_buckets([dense[index] for index in group if index in dense], cap_bytes=2**62)
    buckets += plan_buckets([dense[i] for i in rest], cap_bytes=BUCKET_BYTES, alone_bytes=ALONE_BYTES)
    lines = [
        f"{name} {dtype_name(param.dtype)}{list(param.shape)}{_strides(param)}"
        + " sparse" * (index in sparse)
        for index, (name, param) in enumerate(named)
    ]
    slots = tuple(plain_slot(bucket, [params[index] for index in bucket.indices]) for bucket in buckets)
    return BucketPlan(tuple(range(len(named))), slots, sparse, "\n".join(lines))


def _strides(param: Tensor) -> str:
    """Return how the elements of a parameter follow each other, where they are not in the usual order."""
    return "" if param.is_contiguous() else f" with strides {list(layout_of(param).stride)}"
