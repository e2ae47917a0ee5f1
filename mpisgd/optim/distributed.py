"""`DistributedOptimizer`: any torch optimizer, trained by all ranks together.

The optimizer that is passed in stays the same object and becomes an instance of a class made of this one and
its own, so schedulers, GradScaler and checkpoints that know it go on working. Its own `step` is not touched:
by the time it runs, `backward()` has returned with the gradients reduced.
"""

import contextlib
import copyreg
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpisgd.arguments import check_flag, check_positive
from mpisgd.collectives.objects import broadcast_object
from mpisgd.compress.compressor import Choosing, Compressor
from mpisgd.core.group import Group
from mpisgd.core.owner import OPTIMIZER, Owner, new_owner, owned_by
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument, PeerLost
from mpisgd.gradients.accumulation import AccumulationWindow
from mpisgd.gradients.micro_batches import MicroBatchWindow
from mpisgd.gradients.options import DEFAULT_BUCKET_CAP_BYTES, ReductionOptions, check_options
from mpisgd.gradients.sparse import empty_sparse
from mpisgd.job.lifecycle import group_or_world
from mpisgd.methods.adasum.adasum import AdaptiveSum
from mpisgd.methods.auto.compression_choice import with_chosen_compression
from mpisgd.methods.strategy.buffers import Buffers
from mpisgd.methods.strategy.goes_with import check_goes_with
from mpisgd.methods.strategy.state_keeper import StateKeeper
from mpisgd.methods.strategy.strategy import Strategy, Synchronizer
from mpisgd.methods.strategy.training import Training
from mpisgd.methods.synchronous.synchronous import Synchronous
from mpisgd.optim.choices import check_choices, in_one_order, resolve_reduction, summary
from mpisgd.optim.grad_scaler import HANDLES, has_unscaled, look_again
from mpisgd.optim.join import Join, join
from mpisgd.optim.living import add_living
from mpisgd.optim.participant import Participant
from mpisgd.optim.saved_state import SavedState
from mpisgd.optim.step_cycle import StepCycle
from mpisgd.optim.step_hooks import keep_last
from mpisgd.optim.wrapped_class import signature_of, turned_into, wrapped_class
from mpisgd.parameters.parameter_names import agree_on, name_buffers, name_parameters

__all__ = ["DistributedOptimizer"]


class DistributedOptimizer(SavedState):
    """Wrap `optimizer` so that every step uses the gradients of all ranks.

    Collective: all ranks of `group` wrap the same optimizer over the same parameters. Start them equal with
    `broadcast_parameters` and `broadcast_optimizer_state`.

    When `backward()` returns, the gradients have been reduced, so clipping, GradScaler and everything else
    that reads them see the same numbers on every rank. If no rank has used a parameter, its gradient stays
    None; if only some ranks have used it, the gradient of the others counts as zero. With `step(closure)` the
    optimizer gets the closure's loss averaged over the ranks. A copy or a pickle of the result is a plain
    optimizer of the wrapped class.

    Args:
        optimizer: any torch optimizer; it is changed in place and returned.
        named_parameters: names for messages, usually `model.named_parameters()`.
        strategy: what the ranks exchange, and how often; `Synchronous()` by default: the gradients, in every
            step. The same on all ranks. docs/how-to/extending.md shows how to write one.
        op: how gradients are combined. AVG: their mean, which equals one process on the joined batch if the
            ranks have equal shares of it; SUM; or `mpisgd.Adasum`, the adaptive sum of each parameter's
            gradients. A name, such as "sum", works too.
        compression: `Compression.fp16` or `.bf16` send 16 bits for each element of a gradient;
            `mpisgd.compress.TopK(ratio=0.01)` and the other compressors of `mpisgd.compress` send less, and
            approximate the gradients; "auto" measures some of them on this link and chooses, see
            `mpisgd.compress.Auto`. Or a `Compressor` of your own. The same on all ranks.
        backward_passes_per_step: the gradients of this many calls of `backward()` are summed on each rank, as
            torch does, and the sum is reduced in the last one. Divide the loss by this number for a mean over
            the passes. If `step()` is called after fewer passes, it reduces what has been summed; call
            `synchronize()` first if something reads the gradients before `step()` (clipping, `unscale_()`).
        reproducible: "ranks": the gradients of all micro-batches, each one call of `backward()`, are added
            along one tree, so that 1, 2, 4 ... ranks give the same bits. With M micro-batches in a step give
            `backward_passes_per_step=M // size`; AVG is then the mean over all M, and the loss is not
            divided. For a power of two of ranks. See docs/how-to/one-order.md.
        gradient_predivide_factor: with AVG, divide by this before the sum and by size / factor after it.
        bucket_cap_bytes: gradients are sent together in buckets of at most this many bytes.
        overlap: whether buckets are sent while backward still computes the other gradients; None: only
            between hosts, where that can save time. Ignored if the group has several optimizers.
        error_if_nonfinite: raise on every rank if a gradient is infinite or NaN. The error names the rank and
            the parameters, in the order of backward. Takes one more pass over the gradients of this rank. Do
            not combine it with GradScaler, which skips such steps itself.
        check_in_sync_every: compare the parameters of all ranks bit by bit after every this many steps; 0:
            never. See `mpisgd.check_in_sync`.
        share_parameters: keep one copy of the parameters per host, in shared memory; each rank of the host
            updates a part of it. Saves time and memory, but the program must not read gradients: see
            docs/how-to/shared-parameters.md. The parameters must be on the CPU, and take the values of each
            host's first rank.
        elementwise: with `share_parameters` or `Sharded`, for an optimizer that is not torch's: True if it
            updates each element of a parameter independently of the others, with state of the parameter's
            shape or scalar state. A rank may then own a part of a parameter. mpisgd knows this of torch's
            optimizers (SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop).
        named_buffers: usually `model.named_buffers()`. Strategies that average parameters then also average
            the floating-point buffers, such as the statistics of BatchNorm.
        check_start: whether the first step raises if the ranks have different parameters, or different
            settings such as the learning rate. Where gradients are combined, both are compared again every
            100 steps: settings that differ then raise, parameters that differ give a warning. Pass False if
            the difference is intended.
        group: the ranks that train together, all of the job by default.

    Attributes:
        strategy: as given.
        compression: the compressor; with "auto" the one that was chosen.
        spans_job: whether all ranks of the job train together: no group was chosen.

    Raises:
        InvalidArgument, UnsupportedTensor: found locally, before anything is sent.
        CollectiveMismatch: the ranks' parameters differ; raised on every rank, names what differs. From
            `backward()` or `step()`: ranks are at different steps, or have frozen different parameters.
        NonFiniteGradients: from `backward()` or `step()`; gradients are reduced.
        OutOfSync: from `step()`, after it.
    """

    if not TYPE_CHECKING:  # editors show the arguments of __init__ then

        def __new__(cls, optimizer, *args, **options):
            """Turn `optimizer` itself into an instance of this class and of its own."""
            return turned_into(cls, optimizer, args, options)

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
        *,
        strategy: Strategy | None = None,
        op: ReduceOp | AdaptiveSum | str = ReduceOp.AVG,
        compression: Compressor | str | None = None,
        backward_passes_per_step: int = 1,
        reproducible: str | None = None,
        gradient_predivide_factor: float = 1.0,
        bucket_cap_bytes: int = DEFAULT_BUCKET_CAP_BYTES,
        overlap: bool | None = None,
        error_if_nonfinite: bool = False,
        check_in_sync_every: int = 0,
        share_parameters: bool = False,
        elementwise: bool = False,
        named_buffers: Iterable[tuple[str, Tensor]] | None = None,
        check_start: bool = True,
        group: Group | None = None,
    ) -> None:
        try:
            strategy = Synchronous() if strategy is None else strategy
            options = ReductionOptions(
                *resolve_reduction(op, compression),
                gradient_predivide_factor,
                bucket_cap_bytes,
                overlap,
                check_flag("gradients", "error_if_nonfinite", error_if_nonfinite),
            )
            check_options(options)
            check_choices(strategy, check_in_sync_every)
            check_positive("gradients", "backward_passes_per_step", backward_passes_per_step, whole=True)
            shares = check_flag("DistributedOptimizer", "share_parameters", share_parameters)
            elementwise = check_flag("DistributedOptimizer", "elementwise", elementwise)
            named = name_parameters(optimizer, named_parameters)
            members = group_or_world(group)
            options, tree = in_one_order(options, reproducible, backward_passes_per_step, members)
            buffers = name_buffers(named_buffers)
            training = Training(
                weakref.ref(optimizer),
                named,
                members,
                options,
                shares,
                elementwise,
                check_in_sync_every,
                Buffers(buffers),
            )
            check_goes_with(strategy, strategy.goes_with, training)
            strategy.check(training)
            checks_start = check_flag("DistributedOptimizer", "check_start", check_start)
            text = f"{summary(strategy, training, backward_passes_per_step)}, check_start={check_start}"
            self._owner = _new_owner(optimizer, named, members)
            with owned_by(self._owner):
                agree_on("DistributedOptimizer", [*named, *buffers], members, extra=text)
                options = with_chosen_compression(training.params, members, options)
                self._synchronizer = strategy.synchronizer(training._replace(options=options))
                self._synchronizer.open()
                self._keeper = StateKeeper(self._synchronizer)
                make: Callable[..., AccumulationWindow] = AccumulationWindow
                if tree is not None:
                    make = partial(MicroBatchWindow, tree=tree)
                self._window = make(
                    self._synchronizer.gradients,
                    backward_passes_per_step,
                    trained=[param for _, param in named],
                    group=self._synchronizer.model_group,
                    owner=self._owner,
                )
            self.strategy = strategy
            self._chooses_compression = isinstance(training.options.compression, Choosing)
        except BaseException:
            optimizer.__class__ = wrapped_class(type(optimizer))
            raise
        self._summary, self.spans_job = text, group is None
        self._cycle = StepCycle(
            self._window,
            self._synchronizer,
            self._keeper,
            strategy,
            self._owner,
            checks_start=checks_start,
        )
        self._cycle.attach(self)
        add_living(self)

    @property
    def synchronizer(self) -> Synchronizer:
        """The working part of the strategy; some have further methods, such as `finish()`."""
        return self._synchronizer

    @property
    def compression(self) -> Compressor:
        """The compressor of gradients or of differences of models."""
        return self._synchronizer.training.options.compression

    def synchronize(self) -> None:
        """Reduce the gradients that were accumulated and not reduced yet, if there are any. Collective."""
        self._window.flush()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether it does what a scaler leaves to it: `GradScaler.step` asks, and looks at gradients next.

        So they are made those of all ranks first: collective. The answer is the wrapped optimizer's, or the
        strategy's.
        """
        window: AccumulationWindow | None = vars(self).get("_window")  # none while this is being made
        if window is not None and (window.uneven is None or window.uneven.data.has_data):
            if window.lacks_reduction and has_unscaled(self):
                raise InvalidArgument(
                    "DistributedOptimizer: scaler.unscale_() has divided gradients that the ranks have not "
                    "combined yet, after fewer passes than backward_passes_per_step or inside no_sync(). "
                    "Call optimizer.synchronize() before unscale_()"
                )
            window.flush_before_use()
            if window.has_flushed:
                look_again(self)
        return bool(vars(self).get(HANDLES, getattr(super(), HANDLES, False)))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, handles: bool) -> None:
        vars(self)[HANDLES] = handles

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as the wrapped optimizer does, and begin a new accumulation window."""
        had: list[tuple[int, Tensor]] = []
        if not set_to_none:
            named = enumerate(self._synchronizer.training.named)
            had = [(index, param) for index, (_, param) in named if param.grad is not None]
        self._synchronizer.before_zero_grad()
        for index, param in had:
            if param.grad is None:  # a step without a backward decays weights and goes on with momentum
                dims = self._window.gradients.sparse_dims.get(index)
                param.grad = torch.zeros_like(param) if dims is None else empty_sparse(param, dims)
        super().zero_grad(set_to_none)
        self._window.restart()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale the reduced gradients so that their norm is at most `max_norm`; return the norm before.

        Does what `torch.nn.utils.clip_grad_norm_` does with all parameters of the optimizer. Where gradients
        are divided, with `share_parameters` and with `Sharded`, it is the only way to clip, and collective.

        Raises:
            InvalidArgument: found locally, before anything is sent.
            RuntimeError: with `error_if_nonfinite`, the norm is not finite; raised on every rank.
        """
        check_positive("clip_grad_norm_", "max_norm", max_norm)
        check_positive("clip_grad_norm_", "norm_type", norm_type)
        self._window.flush_before_use()
        arguments = float(max_norm), float(norm_type), error_if_nonfinite
        is_uneven = self._window.uneven is not None
        inside = self._cycle.participant.clipping(*arguments) if is_uneven else contextlib.nullcontext()
        with inside, owned_by(self._owner):
            return self._synchronizer.clip_grad_norm_(*arguments)

    def register_step_pre_hook(self, hook: Any) -> torch.utils.hooks.RemovableHandle:
        """Register a hook that is called before the update, and may read or change reduced gradients."""
        handle = super().register_step_pre_hook(hook)
        keep_last(self)
        return handle

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters later. Collective: all ranks add the same ones."""
        self._check_not_inside_join("add_param_group")
        self._synchronizer.end_failed_step()
        num_groups = len(self.param_groups)
        super().add_param_group(param_group)
        training = self._synchronizer.training
        named = [*training.named, *name_parameters(self, None)[len(training.named) :]]
        with owned_by(self._owner):
            try:
                agree_on("add_param_group", named, training.group)
            except (InvalidArgument, PeerLost):  # after a loss a commit is restored that knows nothing of it
                del self.param_groups[num_groups:]
                raise
            try:
                self._synchronizer.extend(named)
            except InvalidArgument:  # which is raised before anything has changed
                del self.param_groups[num_groups:]
                raise
            self._keeper.extended()
            self._window.use(self._synchronizer.gradients)
            self._window.cover(named)

    def rebuild(self, group: Group | None = None) -> None:
        """Continue the training with other ranks. Collective over `group`; gradients are dropped.

        `mpisgd.elastic` calls this when the ranks have changed.

        Args:
            group: the ranks that train together, all of the job by default.

        Raises:
            InvalidArgument: the strategy cannot train on these ranks, or cannot continue on other ranks.
        """
        members = group_or_world(group)
        whole = "" if self._synchronizer.has_whole_state else ", with a part of the state"
        named = self._synchronizer.training.named
        self.strategy.check_ranks(self._synchronizer.training._replace(group=members))
        self._owner = _new_owner(self, named, members)
        with owned_by(self._owner):
            agree_on("rebuild", named, members, extra=self._summary + whole)
            if why := self._synchronizer.why_fixed or self._window.why_fixed:
                raise InvalidArgument(f"rebuild: the ranks change, and {why}")
            if self._chooses_compression:  # new ranks may have chosen another one
                self._synchronizer.use_compression(broadcast_object(self.compression, group=members))
            self._synchronizer.move_to(members)
            self._keeper.moved()
            self._window.move_to(self._synchronizer.gradients, members, self._owner)
        self.spans_job = group is None
        self._cycle.begin_anew(self._owner)
        for told in ("grad_scale", "found_inf"):  # by a GradScaler, which takes it away after a step alone
            vars(self).pop(told, None)
        super().zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def consensus(self) -> Iterator[None]:
        """Within this context, replace this rank's model by the consensus of all ranks.

        Collective; use it to evaluate or to save. For most strategies the consensus is the mean of the
        parameters and buffers; for `DiLoCo` it is the outer parameters, for `ElasticAveraging` the centre,
        and with `Synchronous` every rank's model is the consensus. Afterwards each rank has its own model
        again. Do not train inside.
        """
        with owned_by(self._owner):
            values, tensors = self._synchronizer.consensus(), self._synchronizer.averaged
        own = [tensor.clone() for tensor in tensors]
        _overwrite(tensors, values)
        try:
            yield
        finally:
            _overwrite(tensors, own)

    def join(
        self,
        *,
        follow: Sequence[Any] | None = None,
        throw_on_early_termination: bool = False,
        enable: bool = True,
    ) -> Join:
        """Return a context in which ranks may have unequal numbers of batches; see `mpisgd.join`."""
        return join(self, follow=follow, throw_on_early_termination=throw_on_early_termination, enable=enable)

    def participant(self) -> Participant:
        """Return the object that takes part in `join()`, to which the optimizer then reports its steps."""
        made = Participant(self, self._window, self._synchronizer, self.strategy, self._owner)
        self._cycle.participant = made
        return made

    def _end_failed_step(self) -> None:
        """Clean up after a step that has raised; called by the class that `turned_into` makes."""
        self._cycle.end_failed_step()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Within this context `backward()` sums gradients locally; the next one outside reduces the sum."""
        return self._window.muted()

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """Within this context `step()` uses the gradients as they are, such as after `synchronize()`."""
        return self._window.skipping()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle as the wrapped optimizer: a copy belongs to no job."""
        state = self.__getstate__()
        return copyreg._reconstructor, (wrapped_class(type(self)), object, None), state  # type: ignore[attr-defined]


def _overwrite(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def _new_owner(optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, Tensor]], group: Group) -> Owner:
    """Return the owner of the operations of a distributed optimizer."""
    type_name, names = wrapped_class(type(optimizer)).__name__, [name for name, _ in named]
    return new_owner(group.num_owners, OPTIMIZER, type_name, names)


DistributedOptimizer.__signature__ = signature_of(DistributedOptimizer)  # type: ignore[attr-defined]
