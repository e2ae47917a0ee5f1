"""`Participant`: an optimizer inside `join()`: it steps on ranks without data as it does on the others.

These have the same gradients, reduced, and the same settings. What a program does to gradients between their
reduction and the step, by clipping say, it does where there is data: so a rank without takes over the
gradients of one that has some, where they were changed.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd.collectives.coalesced import broadcast_coalesced
from mpisgd.collectives.objects import broadcast_object
from mpisgd.core.owner import Owner, owned_by
from mpisgd.core.uneven_data import Performer, Told, UnevenData, refuse
from mpisgd.gradients.accumulation import AccumulationWindow
from mpisgd.gradients.uneven_window import LOSS, REDUCE, Begun, UnevenWindow
from mpisgd.gradients.weight import why_not_weighted
from mpisgd.methods.strategy.example_counts import StepExamples
from mpisgd.methods.strategy.strategy import Strategy, Synchronizer
from mpisgd.optim.grad_scaler import scaler_around
from mpisgd.parameters.fingerprint import fingerprints
from mpisgd.sharding.reduction.sharded_gradient import UNSCALE, ShardedGradient

__all__ = ["CLIP", "STEP", "Participant", "performers_of"]

STEP, CLIP = "step", "clip_grad_norm_"
CHANGED, SETTINGS, SCALER = 1, 2, 4  # what a rank notes of a step
SCALING = ("grad_scale", "found_inf")  # what a GradScaler tells optimizers that take care of it themselves


class _Gradient(NamedTuple):
    """What a parameter has on the rank whose gradients are taken over.

    Attributes:
        is_dense: it follows.
        stays: as it is: each rank has its own pieces.
        sparse: the parts of a sparse one. torch keeps sparse tensors that were pickled until its next
            `torch.load`, which warns of them then (from torch 2.14 on).
    """

    is_dense: bool = False
    stays: bool = False
    sparse: "_SparseParts | None" = None


class _SparseParts(NamedTuple):
    """What makes a sparse tensor."""

    indices: Tensor
    values: Tensor
    size: tuple[int, ...]
    is_coalesced: bool

    def tensor(self) -> Tensor:
        """Return it again."""
        return torch.sparse_coo_tensor(
            self.indices, self.values, self.size, is_coalesced=self.is_coalesced, check_invariants=False
        )


class Participant:
    """One optimizer, from the beginning of a `join()` to its end.

    Args:
        optimizer: the wrapped one.
        window: when its gradients are reduced.
        synchronizer: the working part of its strategy.
        strategy: see `DistributedOptimizer`.
        owner: of its operations.

    Attributes:
        number: by which ranks name the optimizer to each other.
        window: as given.
        synchronizer: as given.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        window: AccumulationWindow,
        synchronizer: Synchronizer,
        strategy: Strategy,
        owner: Owner,
    ) -> None:
        self.number = owner.number
        self.window, self.synchronizer = window, synchronizer
        self._optimizer, self._strategy, self._owner = optimizer, strategy, owner
        self._data: UnevenData
        self._follows: Sequence[Any] | None = None
        self._act: contextlib.ExitStack | None = None  # of the step that is under way
        self._settings: Any = None  # after the latest step
        self._examples = 0  # of the batches since the latest step
        self._seen: list[int] | None = None  # the gradients as they were reduced
        self._weighted = window.gradients

    @property
    def why_not(self) -> str:
        """Why it cannot take part, "" if it can."""
        goes = self._strategy.goes_with.uneven_data
        if not goes.goes:
            return f"{self._strategy}: {goes.words}"
        compressor = self.synchronizer.training.options.compression
        return self.window.why_not_uneven or why_not_weighted(compressor)

    @property
    def params(self) -> list[Tensor]:
        """The parameters; in a step the optimizer may have other ones."""
        return [param for _, param in self.synchronizer.training.named]

    # -- from the beginning to the end --------------------------------------------------------------

    def enter(self, data: UnevenData, follows: Sequence[Any] | None) -> None:
        """Begin; alike on all ranks."""
        self._data, self._follows = data, follows
        self._settings = self._comparable()
        self.window.uneven = UnevenWindow(data, self.number, self._optimizer.zero_grad, self._note_reduced)
        self._weighted = self.window.gradients
        self._weighted.set_weighted(True)

    def leave(self) -> None:
        """End."""
        self.end_failed_step()
        self.window.uneven = None
        self._weighted.set_weighted(False)

    @property
    def settings(self) -> list[dict[str, Any]]:
        """The options of the parameter groups."""
        return [
            {name: value for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]

    def take_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Take over those of a rank that has data."""
        for group, taken in zip(self._optimizer.param_groups, settings, strict=True):
            for name, value in taken.items():
                if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value

    def _comparable(self) -> str:
        return repr(
            [
                {k: v.tolist() if isinstance(v, Tensor) else v for k, v in options.items()}
                for options in self.settings
            ]
        )

    # -- a step -------------------------------------------------------------------------------------

    def begin_step(self, *, has_closure: bool) -> None:
        """Tell the others of a step, whose gradients are reduced. Collective; `end_step` follows."""
        self.end_failed_step()
        stack = contextlib.ExitStack()
        key = (self.number, has_closure)
        with stack:
            told = stack.enter_context(self._data.act(STEP, *key, detail=self._detail, note=self._note()))
            if told is not None:
                self._agree(told)
            self._act = stack.pop_all()

    @contextlib.contextmanager
    def clipping(self, *arguments: Any) -> Iterator[None]:
        """Tell the others of what is done to the reduced gradients, which they have to have. Collective."""
        note = CHANGED if self._are_changed else 0
        with self._data.act(CLIP, self.number, *arguments, note=note) as told:
            if told is not None:
                self._agree(told)
            yield

    def end_step(self) -> None:
        """Note that a step is over."""
        self.end_failed_step()
        self._examples = 0
        self._settings = self._comparable()

    def end_failed_step(self) -> None:
        """Note that a step that has raised is over."""
        stack, self._act = self._act, None
        if stack is not None:
            stack.close()

    def next_batch(self, examples: int) -> None:
        """Note that the next backward passes of this rank are over so many examples."""
        self._examples += examples
        assert self.window.uneven is not None
        if self.window.gradients.is_weighted:
            self.window.uneven.next_batch(self.params, examples)

    @property
    def step_examples(self) -> StepExamples:
        """What this rank has stepped with."""
        data = self._data
        assert data.last is not None
        is_given = data.last.is_given
        examples = self._examples if is_given else 1
        return StepExamples(examples if data.has_data else 0, is_given, is_uneven=True)

    def _note(self) -> int:
        if not self._data.has_data:
            return 0
        note = CHANGED if self._are_changed else 0
        if self._follows is None and self._settings != self._comparable():
            note |= SETTINGS
        scaler = scaler_around()
        if scaler is not None and not any(each is scaler for each in self._follows or ()):
            note |= SCALER
        return note

    @property
    def _are_changed(self) -> bool:
        """Whether this rank's gradients may be others than those that were reduced.

        Where all had data at the reduction nobody has noted anything, and who has none now takes them over.
        """
        if not self._data.has_data or not self.window.gradients.combines:
            return False
        return self._seen is None or self._seen != self._fingerprints()

    def _detail(self) -> Any:
        scaling = {name: getattr(self._optimizer, name) for name in SCALING if hasattr(self._optimizer, name)}
        return self.settings, scaling

    def _agree(self, told: Told) -> None:
        """Refuse what only ranks with data would do; share gradients where some have none. Collective."""
        if told.noted(SCALER):
            refuse(
                "a GradScaler", "ranks without data do not see its scale change; pass join(follow=[scaler])"
            )
        if told.noted(SETTINGS):
            refuse(
                "a change of the optimizer's settings",
                "a scheduler counts steps on ranks with data only; pass join(follow=[scheduler]), or "
                "follow=[] where nothing keeps count",
            )
        if told.is_short and (changed := told.noted(CHANGED)):
            self._share_gradients(changed[0], takes=not self._data.has_data)

    def _fingerprints(self) -> list[int]:
        grads = [param.grad for param in self.params]
        plain = [g for g in grads if g is not None and not isinstance(g, ShardedGradient)]
        values = iter(fingerprints(plain))
        return [0 if g is None else 1 if isinstance(g, ShardedGradient) else next(values) for g in grads]

    def _note_reduced(self) -> None:
        """Note the gradients as they were reduced, where some rank has no data."""
        last = self._data.last
        self._seen = self._fingerprints() if last is not None and last.is_short else None

    def _share_gradients(self, place: int, *, takes: bool, resets: bool = False) -> None:
        """Let ranks without data have the gradients of one that has some. Collective.

        Args:
            place: of that one.
            takes: whether this rank is without.
            resets: whether it resets its own first, unless that one still has pieces, as all ranks do then.
        """
        group, params = self._data.group, self.params
        src = group.ranks[place]
        told: list[_Gradient] = broadcast_object([_form(param.grad) for param in params], src, group)
        if resets and not any(form.stays for form in told):
            self._optimizer.zero_grad()
        dense = [param for param, form in zip(params, told, strict=True) if form.is_dense]
        mine = group.rank == place
        room = [_grad_of(param) if mine else torch.empty_like(param) for param in dense]
        broadcast_coalesced(room, src, group)
        arrived = iter(room)
        for param, form in zip(params, told, strict=True) if takes else ():
            if not form.stays:
                sparse = None if form.sparse is None else form.sparse.tensor()
                param.grad = next(arrived) if form.is_dense else sparse

    def take_gradients(self, begins: bool, place: int, *, takes: bool) -> None:
        """Go on from the gradients of a rank that has trained longest, after the block. Collective.

        Args:
            begins: whether it has begun a window since its last reduction.
            place: of this rank.
            takes: whether this one has run out of data before.
        """
        if not self.window.gradients.combines or not self._data.last or not self._data.last.is_short:
            return
        self._share_gradients(place, takes=takes, resets=takes and begins)

    # -- on a rank without data ---------------------------------------------------------------------

    def perform_reduce(self, _: Told, begun: Begun) -> None:
        """Reduce gradients with the others."""
        assert self.window.uneven is not None
        self.window.uneven.others = begun
        self.window.reduce()

    def perform_step(self, told: Told, detail: Any, has_closure: bool) -> None:
        """Step with the others."""
        settings, scaling = detail
        self._agree(told)
        self.take_settings(settings)
        own = self._hide_own_gradients()
        for name, value in scaling.items():
            setattr(self._optimizer, name, value)
        try:
            if has_closure:
                self._optimizer.step(lambda: 0.0)
            else:
                self._optimizer.step()
        finally:
            for name in scaling:
                vars(self._optimizer).pop(name, None)
            for param, grad in own:
                param.grad = grad
        self._settings = self._comparable()

    def _hide_own_gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Take away what a rank that trains by itself has of its last batch, which it has stepped with."""
        if self.window.gradients.combines:
            return []
        own = [(param, param.grad) for param in self.params if param.grad is not None]
        for param, _ in own:
            param.grad = None
        return own

    def perform_clip(self, told: Told, _: Any, *arguments: Any) -> None:
        """Clip with the others."""
        self._agree(told)
        with owned_by(self._owner):
            self.synchronizer.clip_grad_norm_(*arguments)

    def perform_unscale(self, dtype: torch.dtype, factor: float, shape: tuple[int, ...]) -> None:
        """Unscale with the others."""
        sharded: Any = self.synchronizer  # a `ShardedSynchronizer`: others tell of no unscaling
        device = self.params[0].device
        found_inf = torch.zeros(shape, device=device)
        sharded.unscale(dtype, found_inf, torch.tensor(factor, device=device))

    def perform_loss(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return everyone's loss."""
        device = self.params[0].device
        return self.window.combine_loss(torch.zeros(shape, dtype=dtype, device=device))


def _grad_of(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad


def _form(grad: Tensor | None) -> _Gradient:
    if isinstance(grad, ShardedGradient):
        return _Gradient(stays=True)
    if grad is None or not grad.is_sparse:
        return _Gradient(is_dense=grad is not None)
    parts = _SparseParts(grad._indices(), grad._values(), tuple(grad.shape), grad.is_coalesced())
    return _Gradient(sparse=parts)


def performers_of(participants: Mapping[int, Participant]) -> dict[str, Performer]:
    """Return the function of a rank without data for each act of some optimizers, by their numbers."""

    def of(perform: Callable[..., Any], *, told: bool = False) -> Performer:
        def performer(heard: Told, detail: Any, number: int, *key: Any) -> Any:
            given = (heard, detail) if told else ()
            return perform(participants[number], *given, *key)

        return performer

    return {
        REDUCE: of(Participant.perform_reduce, told=True),
        STEP: of(Participant.perform_step, told=True),
        CLIP: of(Participant.perform_clip, told=True),
        UNSCALE: of(Participant.perform_unscale),
        LOSS: of(Participant.perform_loss),
    }
