"""`ShardedSynchronizer`: each rank updates its shard of the parameters, and sends it to all others."""

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mpisgd.core.consistency import Operation
from mpisgd.core.work import Work
from mpisgd.gradients.bucketing import join_buckets
from mpisgd.sharding.divided_parameters import DividedParameters
from mpisgd.sharding.offload.description import Offload
from mpisgd.sharding.owners import Owners
from mpisgd.sharding.replicated_parameters import ReplicatedParameters
from mpisgd.sharding.scattering_reducer import ScatteringReducer
from mpisgd.sharding.shared_parameters import SharedParameters
from mpisgd.strategies.sharded.forward_overlap import ForwardOverlap
from mpisgd.strategies.sharded.piecewise import Piecewise
from mpisgd.strategies.training import Training

__all__ = ["ShardedSynchronizer"]


class ShardedSynchronizer(Piecewise):
    """Brings gradients to their owners, and parameters to everyone.

    Args:
        training: what it works on.
        stage: see `Sharded`, as for `master_dtype`, `overlap_forward` and `offload`.
    """

    commits_shards = True

    def __init__(
        self,
        training: Training,
        *,
        stage: int,
        master_dtype: torch.dtype | None,
        overlap_forward: bool,
        offload: Offload | None,
    ) -> None:
        self._stage, self._master_dtype = stage, master_dtype
        self._updated: list[bool] = []
        self._overlap = ForwardOverlap() if overlap_forward else None
        super().__init__(training, offload)

    def _make_parameters(self, training: Training, *, elementwise: bool) -> DividedParameters:
        kind = SharedParameters if training.share_parameters else ReplicatedParameters
        owners = Owners(training.group, of_host=False)
        return kind(
            training.named,
            training.optimizer.param_groups,
            owners,
            elementwise=elementwise,
            joins=self._stage == 1 and kind.one_copy and len(owners.nodes) == 1 < owners.size,
            master_dtype=self._master_dtype,
            cuts_alone=self._offload is not None,
        )

    def _make_reducer(self) -> ScatteringReducer:
        return ScatteringReducer(
            self.training.named,
            self.training.group,
            self.training.options,
            self._states,
            defers=self._is_known,
            unscale=self._unscale,
            stage=self._stage,
        )

    def _before_update(self, then: Callable[[], None] | None = None) -> None:
        if then is not None or self._parameters.one_copy:  # nobody else reads this rank's memory
            super()._before_update(then)

    def before_step(self) -> None:
        """Wait for what is still arriving."""
        if self._overlap is not None:
            self._overlap.check_used(self.training.named)
        self.wait()
        super().before_step()

    def _show_pieces(self) -> None:
        self._updated = self._present
        super()._show_pieces()

    # -- everyone gets the parameters ---------------------------------------------------------------

    def wait(self) -> None:
        """Return when all parameters have arrived that are on their way with `overlap_forward`."""
        if self._overlap is not None:
            self._overlap.wait()

    def consensus(self) -> Sequence[Tensor]:
        """Return the parameters as they are, all of them."""
        self.wait()
        return super().consensus()

    def _publish(self) -> None:
        if self.training.group.size > 1:
            self._send(range(len(self._updated)), "all", async_op=False)

    def _publish_after_step(self, num_steps: int) -> None:
        period = self.training.check_in_sync_every
        if self._overlap is None or not self._can_overlap or (period and num_steps % period == 0):
            self._publish()
            return
        for number, indices in enumerate(self._in_order_of_forward()):
            work = self._send(indices, f"part {number}", async_op=True)
            assert work is not None
            self._overlap.expect([self.training.named[i][1] for i in indices], work)

    @property
    def _can_overlap(self) -> bool:
        """Whether parameters are sent at all, and a thread may do that; the same on all ranks."""
        group, owners = self.training.group, self._parameters.owners
        sends = group.size > 1 and not (self._parameters.one_copy and len(owners.nodes) == 1)
        return sends and group.queue.threads_allowed

    def _in_order_of_forward(self) -> list[Sequence[int]]:
        """Return the updated parameters, those first that backward reaches last."""
        buckets = self._parameters.buckets
        inside = {index for bucket in buckets for index in bucket}
        rest = [index for index in range(len(self._updated)) if index not in inside]
        parts = [[i for i in bucket if self._updated[i]] for bucket in (rest, *reversed(buckets))]
        sizes = [sum(self.training.named[i][1].nbytes for i in part) for part in parts]
        joined = join_buckets(sizes, self.training.options.bucket_cap_bytes)
        together = [[index for place in places for index in parts[place]] for places in joined]
        return [part for part in together if part]

    def _send(self, indices: Iterable[int], what: str, *, async_op: bool) -> Work | None:
        """Bring updated parameters from their owners to everyone. Collective."""
        parameters, owners = self._parameters, self._parameters.owners
        sent = {index for index in indices if self._updated[index]}
        which = hashlib.blake2b(bytes(self._updated), digest_size=8).hexdigest()
        rooms = [
            [parameters.part(m) for range_ in ranges for m in range_.members if m.param in sent]
            for ranges in parameters.ranges
        ]
        return self.training.group.queue.run(
            Operation("shards of parameters", extra=f"{what} of updated {which}"),
            lambda: owners.exchange(rooms, one_copy=parameters.one_copy),
            async_op=async_op,
        )
