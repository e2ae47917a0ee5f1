"""What operations of a step are of: parameters and the buckets in which they travel, by sizes alone."""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

__all__ = ["Bucket", "Parameter", "Sizes"]


class Parameter(NamedTuple):
    """A parameter that is trained.

    Attributes:
        place: in the optimizer's list.
        shape: of it.
        itemsize: bytes of an element.
        state_bytes: what the optimizer keeps of it, copies in a higher precision included.
        alone: whether its gradient is large enough to travel from where it lies.
        work: what an update of it as a whole takes; None: it is not known, or each element is updated by
            itself.
    """

    place: int
    shape: tuple[int, ...]
    itemsize: int
    state_bytes: int = 0
    alone: bool = False
    work: float | None = None

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes, of its gradient, too."""
        return self.numel * self.itemsize


class Bucket(NamedTuple):
    """Parameters whose gradients, or changes, travel together.

    Attributes:
        number: among its kind.
        parameters: in the order in which they lie there.
        padded_bytes: with what lies between them.
    """

    number: int
    parameters: tuple[Parameter, ...]
    padded_bytes: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return sum(each.nbytes for each in self.parameters)

    @property
    def numel(self) -> int:
        """Elements without padding."""
        return sum(each.numel for each in self.parameters)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.parameters[0].itemsize

    @property
    def packed_bytes(self) -> int:
        """Bytes that are copied to travel together."""
        return 0 if len(self.parameters) == 1 and self.parameters[0].alone else self.nbytes


@dataclass(frozen=True)
class Sizes:
    """A model, as a step is counted of it.

    Attributes:
        parameters: that are trained, in the order in which their gradients become complete.
        buckets: of gradients, in the order in which they become complete.
        packed: buckets of parameters that are compressed together.
        cap_bytes: of a bucket, at the most.
        frozen_bytes: of parameters without a gradient.
        module_bytes: of the buffers of modules.
        activation_bytes: what is kept for the backward pass at most.
        cuts: whether the optimizer updates each element by itself, so that ranks may own parts of parameters.
        layers: parameters that compute together, in the order of forward; (): it is not known which.
    """

    parameters: tuple[Parameter, ...]
    buckets: tuple[Bucket, ...]
    packed: tuple[Bucket, ...] = ()
    cap_bytes: int = 25 * 2**20
    frozen_bytes: int = 0
    module_bytes: int = 0
    activation_bytes: float = 0.0
    cuts: bool = True
    layers: tuple[Bucket, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters that are trained, and of their gradients."""
        return sum(each.nbytes for each in self.parameters)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        return sum(each.state_bytes for each in self.parameters)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest parameter."""
        return max((each.nbytes for each in self.parameters), default=0)

    @property
    def small_bytes(self) -> int:
        """Bytes of the parameters that are copied to travel together."""
        return sum(each.nbytes for each in self.parameters if not each.alone)

    @property
    def messages(self) -> list[int]:
        """Bytes of the messages of all parameters: large ones alone, the others together."""
        small = self.small_bytes
        return [*(each.nbytes for each in self.parameters if each.alone), *([small] if small else [])]

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the first parameter."""
        return self.parameters[0].itemsize if self.parameters else 0
