"""`StepCycle`: what a distributed optimizer does before and after the step of the optimizer that it wraps."""

from collections.abc import Callable
from typing import Any

import torch

from mpisgd.call_site import warn_at_call_site
from mpisgd.core.owner import Owner, owned_by
from mpisgd.gradients.accumulation import AccumulationWindow
from mpisgd.methods.sharded.forward_overlap import wait_for_parameters
from mpisgd.methods.strategy.example_counts import StepExamples
from mpisgd.methods.strategy.state_keeper import StateKeeper
from mpisgd.methods.strategy.strategy import Strategy, Synchronizer
from mpisgd.optim.in_sync import check_tensors_in_sync
from mpisgd.optim.participant import Participant
from mpisgd.optim.step_hooks import StepArguments, register_step_hooks, wrap_closure
from mpisgd.parameters.starting_alike import SETTINGS_EVERY, check_alike

__all__ = ["StepCycle"]

IDLE_STEPS = 3  # without any gradient from the start on, after which that is taken for a mistake


class StepCycle:
    """Reduces what is left to reduce, lets the strategy do its part, and counts.

        hooks of step     the first: reduce | those of the program | the last: settle, check, before_step
                          | the wrapped step | after_step, compare, count

    Args:
        window: when gradients are reduced.
        synchronizer: the strategy's working part.
        keeper: of what that keeps.
        strategy: the description.
        owner: of the operations.
        checks_start: whether the ranks compare what they start with.

    Attributes:
        owner: as given; another one when the ranks have changed.
        participant: in `join()`, once there was one.
    """

    participant: Participant

    def __init__(
        self,
        window: AccumulationWindow,
        synchronizer: Synchronizer,
        keeper: StateKeeper,
        strategy: Strategy,
        owner: Owner,
        *,
        checks_start: bool,
    ) -> None:
        self._window, self._synchronizer, self._keeper = window, synchronizer, keeper
        self._strategy, self._checks_start = strategy, checks_start
        self.owner = owner
        self._has_started = self._has_warned = False
        self._idle_steps = 0

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer call this in each step."""
        register_step_hooks(optimizer, self._reduce, self._after, last=self._before)

    def begin_anew(self, owner: Owner) -> None:
        """Note that the ranks have changed."""
        self.owner, self._has_started = owner, False

    def _reduce(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Reduce what is left to reduce; where there is a closure that is done whenever it has run."""
        has_closure = wrap_closure(args, kwargs, lambda closure: closure) is not None
        uneven = self._window.uneven
        if not has_closure and (uneven is None or uneven.data.has_data):
            self._window.flush_before_step()

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> StepArguments | None:
        """Do what comes before the optimizer's step: in some methods that is the step itself.

        After the hooks of the program, which may clip gradients and change settings.
        """
        changed = wrap_closure(args, kwargs, self._window.around)
        if self._window.uneven is not None:
            self.participant.begin_step(has_closure=changed is not None)
        if changed is None:
            self._window.check_before_step()
            self._look_for_gradients()
        with owned_by(self.owner):
            self._keeper.settle()
            self._check_start(optimizer)
            if changed is not None:  # nothing comes between the two that may raise
                changed = wrap_closure(*changed, self._synchronizer.around)
                assert changed is not None
                changed = wrap_closure(*changed, self._owned)
            self._synchronizer.before_step()
        return changed

    def _check_start(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare what ranks must start with, and settings from time to time."""
        window, synchronizer = self._window, self._synchronizer
        training = synchronizer.training
        # Where ranks have models of their own, a state that was loaded goes on from these.
        goes_on = synchronizer.replicas_differ and synchronizer.num_steps > 0
        is_first = not self._has_started and not goes_on
        again = window.gradients.combines and window.steps % SETTINGS_EVERY == 0
        group = training.group if is_first else synchronizer.model_group
        checks = self._checks_start and group.size > 1 and self._strategy.starts_together
        if checks and (is_first or again):
            wait_for_parameters()
            in_memory = [
                (name, p) for name, p in training.named if p.untyped_storage().nbytes() or not p.numel()
            ]
            self._has_warned |= check_alike(
                "DistributedOptimizer",
                () if self._has_warned else in_memory,
                optimizer.param_groups,
                group,
                window.when,
                unless=", or pass check_start=False if that is meant",
                has_started=not is_first,
            )
        self._has_started = True

    def _look_for_gradients(self) -> None:
        """Warn where the first steps had nothing to apply: the optimizer has parameters of another model."""
        if self._idle_steps == IDLE_STEPS or self._window.uneven is not None:  # a rank may have no data there
            return
        training = self._synchronizer.training
        trained = [param for _, param in training.named if param.requires_grad]
        leave = self._strategy.updates_files(training)  # gradients, as soon as they are there
        if leave or not trained or any(param.grad is not None for param in trained):
            self._idle_steps = IDLE_STEPS
            return
        self._idle_steps += 1
        if self._idle_steps == IDLE_STEPS and training.group.rank == training.group.ranks[0]:
            warn_at_call_site(
                f"DistributedOptimizer: none of its parameters has had a gradient in {IDLE_STEPS} steps, so "
                "nothing is trained. Was the optimizer made for another model than the one that computes the "
                "loss, or before that model was replaced? Is backward() called?"
            )

    def _owned(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure, with what it communicates between its passes noted as the optimizer's."""

        def call() -> Any:
            with owned_by(self.owner):
                return closure()

        return call

    def _after(self, _: torch.optim.Optimizer, __: Any, ___: Any) -> None:
        window, synchronizer = self._window, self._synchronizer
        uneven = window.uneven is not None
        synchronizer.step_examples = self.participant.step_examples if uneven else StepExamples()
        with owned_by(self.owner):
            self._finish()
        if window.uneven is not None:
            self.participant.end_step()

    def end_failed_step(self) -> None:
        """Clean up after a step that has raised, wherever it did."""
        self._synchronizer.end_failed_step()
        if self._window.uneven is not None:
            self.participant.end_failed_step()

    def _finish(self) -> None:
        window, synchronizer = self._window, self._synchronizer
        synchronizer.num_steps += 1
        synchronizer.after_step(synchronizer.num_steps)
        window.end_step()
        window.use(synchronizer.gradients)
        period = synchronizer.training.check_in_sync_every
        if period and synchronizer.num_steps % period == 0:
            check_tensors_in_sync(synchronizer.training.named, synchronizer.training.group)
