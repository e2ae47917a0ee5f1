"""`Compressor` and `BucketReducer`: the form in which gradients are sent.

A compressor is what the user writes: a small frozen description, which prints, compares, and is agreed on by
all ranks. For every bucket it makes a reducer, the working part, which may keep state from one step to the
next: what compression left out (a residual), or a factor to start from.
"""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from mpisgd.arguments import as_written, call_text
from mpisgd.core.group import Group
from mpisgd.dtypes import FLOATING, ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.method_state import begun, names_of, restart

__all__ = [
    "BucketLayout",
    "BucketReducer",
    "Casting",
    "Choosing",
    "Codec",
    "Compressor",
    "Contraction",
    "HasMomentum",
    "Traits",
    "codec_of",
    "has_momentum",
    "inner_of",
    "is_contraction",
    "wire_dtype_of",
]


class BucketLayout(NamedTuple):
    """The parameters of a bucket, which lie side by side without padding.

    Attributes:
        shapes: the shapes of the parameters, in their order in the bucket. The dimensions of each are in the
            order of memory: a matrix whose memory is transposed has the transposed shape.
        dtype: dtype of all parameters.
        device: device of all parameters.
    """

    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")

    @property
    def numel(self) -> int:
        """Elements of the bucket."""
        return sum(shape.numel() for shape in self.shapes)


class BucketReducer(abc.ABC):
    """Combines one bucket of gradients over the ranks of a group, in every step.

    Attributes:
        state: what it keeps from step to step, a dataclass whose fields are marked as `alike` or `own` by
            `mpisgd.method_state`; None: nothing. If the parameters are grouped into other buckets, the value
            of a field decides what becomes of it: a tensor [layout.numel] is cut by parameter and joined
            again; a list with an entry for each of the layout's shapes is divided by parameter; a number,
            text or tuple is copied to all buckets; any other value is kept only for a bucket of the same
            parameters. A field is None before the first step, and in a bucket with new parameters.
        leads_alone: whether only some ranks, such as the first of each host, have the fields that are marked
            as `alike`.
        is_fresh: True before the first step, and after `state` was reset or loaded. A reducer that must
            act upon that sets it to False afterwards.
    """

    state: Any = None
    leads_alone: ClassVar[bool] = False
    is_fresh: bool = True

    @abc.abstractmethod
    def reduce(self, bucket: Tensor, group: Group, op: ReduceOp) -> None:
        """Replace this rank's bucket by the combination of those of all ranks, with compression.

        Called by all ranks of `group` in the same order, from the group's queue: blocking collectives that it
        calls on `group` run at once.

        Args:
            bucket: [layout.numel], contiguous, in the layout for which the reducer was made; overwritten.
            group: the ranks, at least two.
            op: AVG or SUM.
        """

    @abc.abstractmethod
    def bytes_on_the_wire(self, size: int) -> int:
        """Return how many bytes each of `size` ranks sends in one `reduce`.

        If the number depends on the data or on the step, it is that of the last step, if there was one.
        """

    def kept_apart(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return views of kept values of some elements of the bucket, by name, for tensors of another shape.

        If no rank has a gradient of a parameter, the values that are kept for it must not change. In tensors
        of `state` with the shape of the bucket they are found without this function. A reducer with tensors
        of another shape, such as those of the elements that this rank owns, returns views into these here.
        It is called before and after each `reduce`, also with a loaded state: a view whose name is returned
        both times gets its earlier values back, and other views are set to 0.

        Args:
            start: index of the first element in the bucket.
            stop: index after the last element.
        """
        return {}

    def reset(self) -> None:
        """Reset the state to that before the first step."""
        self.is_fresh = True
        restart(self.state)

    def state_dict(self) -> dict[str, Any]:
        """Return the fields of `state` that this rank has and that have changed since the beginning."""
        return begun(self.state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict()` has returned; missing fields are reset."""
        self.is_fresh = True
        restart(self.state)
        for name in names_of(self.state) & set(state):
            setattr(self.state, name, state[name])


class Codec(Protocol):
    """What one rank has, as equally many bytes on all ranks, and back; pure, it keeps nothing.

    Attributes:
        nbytes: of what a bucket becomes.
    """

    nbytes: int

    def compress(self, flat: Tensor, random: np.random.Generator) -> Tensor:
        """Return [nbytes] uint8 that stand for about `flat` [n], which is unchanged."""

    def decompress(self, message: Tensor, out: Tensor, sign: int = 1) -> None:
        """Add what a message stands for to `out` [n], or subtract it where `sign` is -1."""


@dataclass(frozen=True)
class Traits:
    """What becomes of gradients that a compressor sends, as far as it decides what the compressor goes with.

    Attributes:
        dtypes: of the buckets that it applies to; others are summed as they are.
        has_magnitudes: whether what arrives is about as large as what was sent, as models need it that are
            averaged.
        is_homogeneous: whether of gradients a times as large, a > 0, a times as much arrives, as of a mean.
            Elsewhere `gradient_predivide_factor` divides nothing, which would change what is sent.
        is_additive: whether R + g on every rank, R the same on all, becomes R plus what becomes of g, as a
            mean does, up to rounding, noise, and what is left out for later. Else gradients are not reduced
            twice.
        has_error_feedback: whether what it has not sent is added to the next bucket.
        fades: whether that becomes less from bucket to bucket, so that a part of it never arrives.
        replaces_op: what it does in place of a sum or mean, which sparse gradients cannot follow, or "".
    """

    dtypes: frozenset[torch.dtype] = frozenset(FLOATING)
    has_magnitudes: bool = True
    is_homogeneous: bool = True
    is_additive: bool = True
    has_error_feedback: bool = False
    fades: bool = False
    replaces_op: str = ""


@runtime_checkable
class Casting(Protocol):
    """The role of a compressor that casts every element, and does nothing else. It keeps nothing."""

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype on the wire of elements of `dtype`."""


@runtime_checkable
class Choosing(Protocol):
    """The role of a compressor that only measures others; one of them takes its place."""

    @property
    def candidates(self) -> Sequence["Compressor"]:
        """Those, of which the first changes gradients least."""

    @property
    def max_time_ratio(self) -> float:
        """How much of the time of those before it a candidate takes at most, to be preferred."""


@runtime_checkable
class Contraction(Protocol):
    """The role of a compressor with a codec C such that E |x - C(x)|^2 < |x|^2, as gossip needs it."""

    def codec(self, layout: BucketLayout) -> Codec | None:
        """Return the code of a bucket of one rank, float32 or float64.

        None: with these settings nothing does so well; of no layout then.
        """


@runtime_checkable
class HasMomentum(Protocol):
    """The role of a compressor whose momentum takes the place of the optimizer's, which must be off then.

    Attributes:
        momentum: 0 or more, below 1; 0: there is none.
    """

    momentum: float


@dataclass(frozen=True)
class Compressor(abc.ABC):
    """How buckets of gradients are sent. A subclass is a frozen dataclass with the same fields on all ranks.

    Subclasses with further abilities derive from `Casting`, `Contraction`, `HasMomentum` or `Choosing`.
    """

    @classmethod
    def examples(cls) -> Sequence["Compressor"]:
        """Return the instances that the fuzzer, `verify` and the documentation use; the simplest first."""
        return (cls(),)

    def __str__(self) -> str:
        return as_written(self)

    @property
    def short_name(self) -> str:
        """The compressor as a program would write it, without default arguments."""
        return call_text(self, lambda each: each.short_name if isinstance(each, Compressor) else repr(each))

    @cached_property
    def traits(self) -> Traits:
        """What becomes of gradients; by default a field `error_feedback` says whether it has that."""
        return Traits(has_error_feedback=bool(getattr(self, "error_feedback", False)))

    def changes(self, dtype: torch.dtype) -> bool:
        """Return whether buckets of `dtype` are compressed; others are summed unchanged."""
        return dtype in self.traits.dtypes

    @abc.abstractmethod
    def reducer(self, layout: BucketLayout) -> BucketReducer:
        """Return the reducer of a bucket; not collective."""

    def paper(self) -> Any:
        """Return the algorithm with these settings, a `mpisgd.methods.paper_kit.Paper`.

        Raises:
            InvalidArgument: there is none.
        """
        raise InvalidArgument(f"there is no paper of {self}")


def wire_dtype_of(compressor: Compressor, dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype to which every element is cast on the wire, None where that is not all."""
    if isinstance(compressor, Casting):
        return compressor.wire_dtype(dtype)
    return None if compressor.changes(dtype) else dtype


def codec_of(compressor: Compressor, layout: BucketLayout) -> Codec | None:
    """Return the codec of a `Contraction`; None of others."""
    return compressor.codec(layout) if isinstance(compressor, Contraction) else None


def inner_of(compressor: Compressor) -> list[Compressor]:
    """Return the compressors that one is made of: those among its fields."""
    return [value for value in vars(compressor).values() if isinstance(value, Compressor)]


def has_momentum(compressor: Compressor) -> bool:
    """Return whether a compressor has a momentum, or one that it is made of or may choose."""
    inside = compressor.candidates if isinstance(compressor, Choosing) else inner_of(compressor)
    own = isinstance(compressor, HasMomentum) and compressor.momentum > 0
    return own or any(map(has_momentum, inside))


def is_contraction(compressor: Compressor) -> bool:
    """Return whether it has a codec."""
    return codec_of(compressor, BucketLayout((torch.Size([1]),), torch.float32)) is not None
