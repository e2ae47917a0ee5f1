"""`ShardedSynchronizer`: every rank updates its own pieces of the parameters, and nothing else.

backward    the gradients of the pieces come to their owner           `ToOwners`
step        the wrapped optimizer has this rank's pieces only         `HiddenParameters`, `PieceStates`
after it    everyone gets what the others have updated                `Publication`
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.collectives.all_reduce import all_reduce
from mpisgd.core.uneven_data import acting
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.reducer import GradientReducer
from mpisgd.methods.sharded.coded_publication import CodedPublication
from mpisgd.methods.sharded.divide_parameters import divide_parameters
from mpisgd.methods.sharded.forward_overlap import ForwardOverlap
from mpisgd.methods.sharded.optimizer_state import OptimizerState
from mpisgd.methods.sharded.publication import Publication
from mpisgd.methods.strategy.hidden_parameters import HiddenParameters
from mpisgd.methods.strategy.replicated import KeptByCompressors, reducer_of
from mpisgd.methods.strategy.strategy import Synchronizer
from mpisgd.methods.strategy.training import Training
from mpisgd.sharding.elementwise import is_known_elementwise
from mpisgd.sharding.grad_norm import clip_grad_norm_
from mpisgd.sharding.masters import RefreshMasters
from mpisgd.sharding.needed_parts import NeededPart
from mpisgd.sharding.offload.description import Offload
from mpisgd.sharding.offload.file_store import FileStore
from mpisgd.sharding.piece_update import PieceUpdate
from mpisgd.sharding.reduction.coded_reduction import MakeShardCode, check_codable
from mpisgd.sharding.reduction.sharded_gradient import UNSCALE, ShardedGradient
from mpisgd.sharding.reduction.to_owners import ToOwners

__all__ = ["ShardedSynchronizer"]


class ShardedSynchronizer(Synchronizer):
    """Lets the wrapped optimizer see and update this rank's pieces, nothing else.

    Between steps the optimizer has all parameters in its groups, as programs expect, and no state; during one
    it has this rank's pieces and the state of these. A state that is loaded is whole until the next step,
    which drops what belongs to others; see `StatePlace` and `OptimizerState`.

    Args:
        training: what it works on.
        stage: see `Sharded`, as for `master_dtype`, `overlap_forward` and `offload`; 0: every host updates
            everything, and its ranks divide that among themselves.
        make_code: of the sums of gradients that travel between hosts; None: they travel as they are.
        make_parameter_code: of parameters that travel between hosts, likewise.
    """

    gathers_state = True
    gradients: GradientReducer

    def __init__(
        self,
        training: Training,
        *,
        stage: int = 0,
        master_dtype: torch.dtype | None = None,
        overlap_forward: bool = False,
        offload: Offload | None = None,
        make_code: MakeShardCode | None = None,
        make_parameter_code: MakeShardCode | None = None,
    ) -> None:
        super().__init__(training)
        self._make_code, self._make_parameter_code = make_code, make_parameter_code
        self._stage, self._master_dtype, self._offload = stage, master_dtype, offload
        self.commits_shards = stage > 0
        self.state = KeptByCompressors()
        self._is_known = is_known_elementwise(training.optimizer)
        self._hidden = HiddenParameters(training.optimizer)
        self._runs_closure = False
        self._updated: Sequence[bool] = ()
        self._overlap = ForwardOverlap(training.named) if overlap_forward else None

    def open(self) -> None:
        """Divide the parameters, as they are now, and make what works on the pieces. Collective."""
        training, offload = self.training, self._offload
        make_code = self._make_parameter_code
        self._parameters = divide_parameters(
            training, self._stage, self._master_dtype, offload, keeps_masters=make_code is not None
        )
        self._optimizer_state = OptimizerState(training, self._parameters, offload, self._hidden)
        cap_bytes = training.options.bucket_cap_bytes
        if make_code is None:
            self._publication: Publication = Publication(self._parameters, cap_bytes, self._overlap)
        else:
            self._publication = CodedPublication(self._parameters, cap_bytes, make_code)
        self._destination = ToOwners(
            self._parameters,
            self._optimizer_state.of_pieces,
            defers=self._is_known,
            unscale=self._unscale,
            synchronize=self._synchronize,
            stage=self._stage,
            make_code=self._make_code,
            rounds=self._make_code is not None or self._make_parameter_code is not None,
        )
        self.gradients = reducer_of(training, self.state.compression, self._destination)

    def close(self) -> None:
        """See `Synchronizer`. What ranks were sending that are lost does not arrive any more."""
        if self._overlap is not None:
            self._overlap.forget()
        self._show_all()
        self._parameters.leave_memory()  # others may still read, or take along, what was shared

    @property
    def method(self) -> str:
        """See `Synchronizer`: where parameters and state lie is no other method."""
        return "Synchronous"

    @property
    def has_whole_state(self) -> bool:  # type: ignore[override]  # what others say once
        """See `Synchronizer`."""
        return self._optimizer_state.is_whole

    def tensors(self) -> dict[str, Tensor]:
        """Return nothing: what compressors keep follows the buckets."""
        return {}

    def state_file(self) -> int:
        """Return a descriptor of the file with this rank's optimizer state, which safetensors can read.

        Raises:
            InvalidArgument: the state is in memory.
        """
        store = self._optimizer_state.store
        if not isinstance(store, FileStore):
            raise InvalidArgument("state_file: the optimizer's state is in memory; see mpisgd.Offload")
        return store.flush()

    def _before_update(self, then: Callable[[], None] | None = None) -> None:
        """Wait until this rank's pieces may be updated, and do something then. Collective.

        Nobody else reads this rank's memory, where each has a copy of the parameters.
        """
        if then is not None or self._parameters.one_copy:
            self._parameters.barrier("about to be updated", then or (lambda: None))

    # -- a step -------------------------------------------------------------------------------------

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Let all ranks finish their updates before the closure reads the parameters."""
        self._runs_closure = True
        is_again = False

        def when_all_are_updated() -> Any:
            nonlocal is_again
            ranges, was_called, is_again = self._parameters.ranges, is_again, True
            if self._optimizer_state.is_hidden:
                self._write_back()
                self._publication.publish(self._updated)
            try:
                loss = closure()
            except BaseException:
                self._show_all()  # the step ends here
                raise
            self._settle()
            if was_called and self._parameters.ranges is not ranges:  # on all ranks
                self._show_all()
                raise InvalidArgument(
                    "DistributedOptimizer: gradients have become sparse in a step whose closure is called "
                    "several times. Parameters are divided among ranks in another way then, and the "
                    "optimizer is in the middle of updating the former parts: use dense gradients with it"
                )
            if not self._optimizer_state.is_hidden:
                self._destination.divide_for_step()
                self._optimizer_state.hide()
            self._show_pieces()
            return loss

        return when_all_are_updated

    def before_step(self) -> None:
        """Wait until nobody reads the parameters, and show the optimizer this rank's pieces only. Collective.

        Where it can update one piece after the other, that is done here, and it finds nothing left to do.
        """
        runs_closure, self._runs_closure = self._runs_closure, False
        if self._overlap is not None:
            self._overlap.check_used()
        self.wait()
        self.end_failed_step()
        if not runs_closure:
            self._destination.check_there()
        self._parameters.check_in_place()
        self._destination.divide_for_step()
        self._optimizer_state.take_over()
        updates_later = runs_closure and self._offload is not None  # what is to be updated with is not there
        if not updates_later:
            self._optimizer_state.hide()
        if not self._destination.is_deferred:
            self._before_update()
        elif runs_closure or not self._destination.is_untouched():
            self._before_update(self._destination.settle)
        else:
            self._update(lambda update: self._before_update(lambda: self._destination.run(update)))
        if not updates_later:
            self._show_pieces()

    def _update(self, hand_over: Callable[[PieceUpdate], None]) -> None:
        """Update one piece after the other, as `hand_over` gives them to its argument. Collective."""
        store = self._optimizer_state.store
        with store.shared_errors(self.training.group):
            update = PieceUpdate(self.training.optimizer, store)
            hand_over(update)
            update.raise_error()

    def _settle(self) -> None:
        """Have the gradients of the pieces reduced, if that was left for later. Collective."""
        self._destination.check_there()
        if self._destination.is_deferred:
            self._parameters.barrier("gradients of pieces", self._destination.settle)

    def _show_pieces(self) -> None:
        """Let the optimizer see what it is to update: the pieces that have a gradient now."""
        self._updated = self._present
        self._optimizer_state.of_pieces.split(self._updated)
        groups = self.training.optimizer.param_groups
        for group in groups:
            group["params"].clear()
        if not self._destination.is_untouched():  # there may be hundreds of them, and each would be asked
            self._destination.check_own()
            for piece in self._parameters.pieces:
                piece.grad = self._destination.grad_of(piece)
        if self._offload is not None:  # the optimizer finds nothing left to do
            self._update(self._hand_over)
            return
        if self._parameters.has_masters:
            RefreshMasters()(piece for piece in self._parameters.pieces if piece.grad is not None)
        for piece in self._parameters.pieces:
            piece.show_grad()
            if piece.grad is not None:
                groups[piece.group]["params"].append(piece.tensor)

    def _hand_over(self, update: PieceUpdate) -> None:
        """Have all pieces updated that have a gradient."""
        self._parameters.hand_over(update)
        self._destination.used()
        self._optimizer_state.store.end_step()

    @property
    def _present(self) -> list[bool]:
        """Whether there is a gradient, for each parameter."""
        return [param.grad is not None for _, param in self.training.named]

    def _write_back(self) -> None:
        """Round the masters that the optimizer has just updated."""
        for piece in self._parameters.pieces:
            if piece.grad is not None:
                piece.write_back()

    def after_step(self, num_steps: int) -> None:
        """Show the optimizer all parameters again, and wait until all are updated. Collective."""
        self._write_back()
        self._show_all()
        torch.autograd.graph.increment_version(self.training.params)
        self._parameters.note_updated()
        period = self.training.check_in_sync_every
        compares = bool(period) and num_steps % period == 0
        self._publication.publish(self._updated, in_background=not compares)

    def _show_all(self) -> None:
        """Give the optimizer all its parameters back, if they are hidden."""
        if self._optimizer_state.show():
            self._destination.stand_in_again()

    def end_failed_step(self) -> None:
        """Show the optimizer all parameters, which are hidden in a step."""
        self._show_all()

    def before_zero_grad(self) -> None:
        """Forget the gradients that ranks have pieces of; in a closure all: the optimizer sees pieces."""
        self.gradients.forget_backward()
        self._destination.reset()
        if self._optimizer_state.is_hidden:
            for _, param in self.training.named:
                param.grad = None

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """Clip by the norm of all gradients, of which each rank has its pieces. Collective."""
        self._settle()
        self._destination.check_own()
        self._optimizer_state.of_pieces.split(self._present)
        pieces = [self._destination.grad_of(piece) for piece in self._parameters.pieces]
        grads = _values([grad for grad in pieces if grad is not None])
        scaled = _values(self._destination.sources())
        owners, group = self._parameters.owners.once, self.training.group
        return clip_grad_norm_(grads, scaled, owners, group, max_norm, norm_type, error_if_nonfinite)

    def _unscale(self, sharded: Sequence[ShardedGradient], found_inf: Tensor, factor: Tensor) -> None:
        """Do for all gradients of a dtype what a GradScaler asks for. Collective."""
        assert self.owner is not None
        form = sharded[0].dtype, float(factor), tuple(found_inf.shape)
        with acting(self.training.group, UNSCALE, self.owner.number, *form):
            self.unscale(sharded[0].dtype, found_inf, factor)

    def unscale(self, dtype: torch.dtype, found_inf: Tensor, factor: Tensor) -> None:
        """Multiply the gradients of a dtype, and note whether some are not finite. Collective."""
        self._settle()
        grads = [p.grad for p in self._parameters.pieces if p.grad is not None and p.grad.dtype == dtype]
        if grads:
            torch._amp_foreach_non_finite_check_and_unscale_(_values(grads), found_inf, factor)
        all_reduce(found_inf, ReduceOp.MAX, self.training.group)

    # -- the wrapped optimizer's state, which lies with the pieces: to be divided is this method's work ---

    def wait(self) -> None:
        """Return when all parameters have arrived that are on their way with `overlap_forward`."""
        if self._overlap is not None:
            self._overlap.wait()

    def _synchronize(self) -> None:
        """Return when all ranks have ended the latest step: until then they read this rank's gradients."""
        if self._overlap is not None:
            self._overlap.wait_for_first()

    def consensus(self) -> Sequence[Tensor]:
        """Return the parameters as they are, all of them."""
        self.wait()
        return [tensor.clone() for tensor in self.averaged]

    def state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the state of all parameters, of which each rank has its pieces. Collective."""
        self._end_update()
        return self._optimizer_state.state_dict(make)

    def contribute_state(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """See `Synchronizer`."""
        self._end_update()
        return self._optimizer_state.state_dict(make, is_wanted=False)

    def loaded(self, state_dict: Mapping[str, Any]) -> None:
        """Note that the optimizer has the state of all parameters."""
        if self._parameters.has_wider_masters:  # torch has cast what they keep to the parameters' precision
            params = [param for _, param in self.training.named]
            for index, entries in state_dict["state"].items():
                if isinstance(index, int):
                    self.training.optimizer.state[params[index]] = dict(entries)
        self._optimizer_state.loaded()

    def needed_parts(self) -> Mapping[int, NeededPart] | None:
        """See `Synchronizer`."""
        return self._optimizer_state.needed_parts()

    def load_parts(self) -> None:
        """See `Synchronizer`."""
        self._optimizer_state.load_parts()

    def shard_state_dict(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the state of this rank's pieces, and the options of all groups."""
        self._end_update()
        return self._optimizer_state.to_shard(make)

    def load_shards(
        self,
        shards: Sequence[Mapping[str, Any]],
        load: Callable[[dict[str, Any]], Any],
        *,
        held: bool = False,
    ) -> None:
        """Take this rank's part of what the ranks of a run had."""
        self._show_all()
        self._optimizer_state.load_shards(shards, load, self._parameters.ranges if held else None)

    def _end_update(self) -> None:
        """Wait until all parameters have arrived, and show the optimizer all of them."""
        self.wait()
        self._show_all()

    def extend(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Share further parameters, too, and leave those that are shared where they are."""
        if self._make_code is not None or self._make_parameter_code is not None:
            check_codable(named)
        self.wait()
        super().extend(named)
        self._parameters.extend(named, self.training.optimizer.param_groups)
        self._optimizer_state.extend(named)
        if self._overlap is not None:
            self._overlap.cover(named)


def _values(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return where the numbers are in memory: a sparse gradient that was reduced has each element once."""
    return [grad._values() if grad.is_sparse else grad for grad in grads]
