"""`TensorMean`: the mean over ranks of tensors that are not gradients, compressed where that is asked for."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.collectives.packing import Packer
from mpisgd.compress.compressor import BucketLayout, BucketReducer
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.dtypes import ReduceOp, dtype_name
from mpisgd.gradients.bucket_plan import item_of, name_devices
from mpisgd.gradients.bucketing import Bucket, plan_buckets
from mpisgd.gradients.compression_state import CompressionState
from mpisgd.gradients.options import ReductionOptions
from mpisgd.gradients.weight import Count, weight_of

__all__ = ["TensorMean"]


class _Slot(NamedTuple):
    """Tensors that are compressed together, what reduces them, and what each is called."""

    bucket: Bucket
    reducer: BucketReducer
    keys: tuple[str, ...]


class TensorMean:
    """Replaces tensors by their mean over a group, time and again.

    Args:
        tensors: of the shapes and dtypes that will be given, by their keys; where a program changes these
            alike on all ranks, what compressors keep goes over to buckets of the new ones.
        group: the ranks.
        options: of them `compression` and `bucket_cap_bytes`.
        state: what compressors keep.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        group: Group,
        options: ReductionOptions,
        state: CompressionState,
    ) -> None:
        self._group, self._options, self._state = group, options, state
        self._keys = list(tensors)
        self._slots: list[_Slot] = []
        self._lay_out(list(tensors.values()))

    def _lay_out(self, like: Sequence[Tensor]) -> None:
        """Divide tensors like these into buckets."""
        group, options, keys = self._group, self._options, self._keys
        self._forms = [_form(tensor) for tensor in like]
        changed = [i for i, tensor in enumerate(like) if options.compression.changes(tensor.dtype)]
        devices = name_devices([tensor.device for tensor in like])
        buckets = plan_buckets(
            [item_of(i, like[i], devices[like[i].device]) for i in changed if group.size > 1],
            cap_bytes=options.bucket_cap_bytes,
            align_bytes=1,
        )
        before, self._slots = (
            self._slots,
            [
                _Slot(b, _reducer([like[i] for i in b.indices], options), tuple(keys[i] for i in b.indices))
                for b in buckets
            ],
        )
        self._state.move_to(self._slots, instead_of=before)
        compressed = {index for bucket in buckets for index in bucket.indices}
        self._plain = [i for i in range(len(like)) if i not in compressed]

    @property
    def compresses(self) -> bool:
        """Whether any of the tensors travels as something else."""
        return bool(self._slots)

    @property
    def with_residual(self) -> frozenset[str]:
        """The keys of the tensors of which what is not sent is added to what is given the next time."""
        if not self._options.compression.traits.has_error_feedback:
            return frozenset()
        return frozenset(key for slot in self._slots for key in slot.keys)

    def start(
        self, tensors: Sequence[Tensor], counts: Sequence[Count] | None = None, *, async_op: bool = False
    ) -> Callable[[], None]:
        """Begin to replace `tensors` by their mean; return what waits until that is done. Collective.

        Args:
            tensors: as many as at first; nobody else touches them until then.
            counts: what each rank counts; None: all alike.
            async_op: return at once, and let the group's thread do it; else it is done on return.

        Raises:
            CollectiveMismatch: ranks do different things; raised on every rank.
        """
        if [_form(tensor) for tensor in tensors] != self._forms:
            self._lay_out(tensors)
        works: list[tuple[Work | None, Packer]] = []
        if counts is not None:
            self._weight(tensors, counts)
        for slot in self._slots:
            packer = Packer()
            flat = packer.write_as_one([tensors[i] for i in slot.bucket.indices], keep=True)
            works.append((self._submit(slot, flat, async_op), packer))
        if plain := [tensors[i] for i in self._plain]:
            op = ReduceOp.AVG if counts is None else ReduceOp.SUM
            works.append((all_reduce_coalesced(plain, op, self._group, async_op), Packer()))

        def wait() -> None:
            for work, packer in works:
                if work is not None:
                    work.wait()
                packer.finish()
            if counts is not None:
                weight = weight_of(counts, self._group.rank)
                while plain:  # what waits may be called again
                    weight.after(plain.pop())

        if not async_op:
            wait()
        return wait

    def _weight(self, tensors: Sequence[Tensor], counts: Sequence[Count]) -> None:
        """Weight this rank's tensors; of those that are compressed a mean is taken."""
        plain = set(self._plain)
        for place, tensor in enumerate(tensors):
            weight_of(counts, self._group.rank, averages=place not in plain).before(tensor)

    def _submit(self, slot: _Slot, flat: Tensor, async_op: bool) -> Work | None:
        operation = Operation("compressed mean", "AVG", dtype_name(flat.dtype), (flat.numel(),))
        return self._group.queue.run(
            operation,
            lambda: slot.reducer.reduce(flat, self._group, ReduceOp.AVG),
            tensors=[flat],
            async_op=async_op,
        )


def _form(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _reducer(tensors: Sequence[Tensor], options: ReductionOptions) -> BucketReducer:
    """Return the reducer of a bucket of `tensors`, which is sent from the memory of the host."""
    return options.compression.reducer(BucketLayout(tuple(t.shape for t in tensors), tensors[0].dtype))
