"""What happens in a training program, as data: backward passes, steps, changes, losses of ranks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "AddGroup",
    "Backward",
    "Broadcast",
    "Clip",
    "Commit",
    "Convert",
    "EndJoin",
    "Event",
    "FailedBackward",
    "Join",
    "Lose",
    "Reload",
    "RunOut",
    "SetFrozen",
    "SetGradient",
    "SetRate",
    "Step",
    "Synchronize",
    "ZeroGrad",
]


@dataclass(frozen=True)
class Backward:
    """A backward pass of the joint loss of some data, by default on all ranks.

    Attributes:
        data: numbers of what the loss is computed from: one is a micro-batch; several are joined.
        skipped: ranks without this pass.
        no_sync: whether it is inside `no_sync()`.
        overflow: ranks whose loss is infinite.
    """

    data: tuple[int, ...]
    skipped: tuple[int, ...] = ()
    no_sync: bool = False
    overflow: tuple[int, ...] = ()


@dataclass(frozen=True)
class FailedBackward:
    """A backward pass that raises on all ranks, in the middle; the gradients are reset after it."""

    data: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """A step of all optimizers, in their order.

    Attributes:
        closure: what a closure computes the gradients from, after it has reset them; (): there is none.
        as_they_are: inside `skip_synchronize()`.
    """

    closure: tuple[int, ...] = ()
    as_they_are: bool = False


@dataclass(frozen=True)
class ZeroGrad:
    """A reset of all gradients: by the optimizers, or by the model, which tells no optimizer."""

    set_to_none: bool = True
    by_model: bool = False


@dataclass(frozen=True)
class Clip:
    """Clipping, by `optimizer.clip_grad_norm_` or by torch's own function, for each optimizer in turn.

    Attributes:
        max_norm: or the largest absolute value.
        norm_type: of the norm.
        by_torch: by `torch.nn.utils.clip_grad_norm_`.
        by_value: by `torch.nn.utils.clip_grad_value_`, element by element.
    """

    max_norm: float = 1.0
    norm_type: float = 2.0
    by_torch: bool = False
    by_value: bool = False


@dataclass(frozen=True)
class SetGradient:
    """`p.grad = ...` of a layer, by the program, alike on all ranks; or None."""

    layer: int
    exists: bool = True


@dataclass(frozen=True)
class Synchronize:
    """`optimizer.synchronize()` of all optimizers."""


@dataclass(frozen=True)
class SetFrozen:
    """`requires_grad_()` of a layer."""

    layer: int
    frozen: bool = True


@dataclass(frozen=True)
class AddGroup:
    """`add_param_group` of an optimizer with a layer that no optimizer has had; its gradient is None."""

    layer: int
    optimizer: int = 0


@dataclass(frozen=True)
class Reload:
    """New optimizers over the same parameters, which load the states of the former ones; gradients are reset.

    With another number of ranks these go on from the consensus of the former ones' models, and a rank
    that is new loads the state of rank 0.

    Attributes:
        clears: whether the former ones are deleted before the new ones are made.
        ranks: how many train from now on; 0: as many as before.
        forgets: whether what is each rank's own is taken out of the states.
    """

    clears: bool = True
    ranks: int = 0
    forgets: bool = False


@dataclass(frozen=True)
class SetRate:
    """All learning rates are multiplied by a factor, as a scheduler does."""

    factor: float


@dataclass(frozen=True)
class Broadcast:
    """Parameters and states of one rank become everyone's."""

    src: int = 0


@dataclass(frozen=True)
class Convert:
    """`Module.to` of a layer: another dtype, or channels last."""

    layer: int
    dtype: str = ""
    channels_last: bool = False


@dataclass(frozen=True)
class Commit:
    """A commit of elastic training, to which ranks go back where some are lost."""


@dataclass(frozen=True)
class Lose:
    """A loss of ranks, all at once; the others go on from a commit.

    Attributes:
        ranks: which, as they were numbered at the beginning.
        waits: how many waits and messages the first of them comes to before.
    """

    ranks: tuple[int, ...]
    waits: int = 0


@dataclass(frozen=True)
class Join:
    """The beginning of a block of `join()`; see `examples_of` for what each rank's batches count in it."""


@dataclass(frozen=True)
class RunOut:
    """The end of the data of some ranks, inside a `join()`: these come to the end of the block."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class EndJoin:
    """The end of the block for all others."""


Event = (
    Backward
    | FailedBackward
    | Step
    | ZeroGrad
    | Clip
    | SetGradient
    | Synchronize
    | SetFrozen
    | AddGroup
    | Reload
    | SetRate
    | Broadcast
    | Convert
    | Commit
    | Lose
    | Join
    | RunOut
    | EndJoin
)
