"""Where the gradients and the optimizer state of divided parameters are: one state each, and what may follow.

Gradients, of all parameters of an optimizer:

              an optimizer that updates piece by piece     released: reset, or made anew by backward
    LOCAL ------------------------------------> DEFERRED --------------------------------------> LOCAL
      |                                            | somebody asks for them: clipping, a closure
      |          all others                        v
      +----------------------------------------> OWNED ----------------------------------------> LOCAL

    LOCAL      p.grad is this rank's own, or None
    DEFERRED   p.grad is a `ShardedGradient`; each rank has its own still, which the step combines
    OWNED      p.grad is a `ShardedGradient`; each owner has the combined gradients of its pieces

Optimizer state, between steps:

    WHOLE ----- the first step, which takes this rank's part -----> PIECES
      ^                                                                |
      +------------- a state dict is loaded ----------- (from either) -+

    WHOLE      with the optimizer, of all parameters
    PIECES     with the pieces of this rank; the optimizer has none
"""

import enum

__all__ = ["GradientPlace", "StatePlace"]


class GradientPlace(enum.Enum):
    """Where the gradients are; see above."""

    LOCAL = "with each rank"
    DEFERRED = "with each rank, until the step"
    OWNED = "with their owners"

    def to(self, place: "GradientPlace") -> "GradientPlace":
        """Return the next place, which must be one that may follow."""
        assert (self, place) in _GRADIENTS, f"gradients {self.value} cannot be {place.value} next"
        return place


class StatePlace(enum.Enum):
    """Where the optimizer state is; see above."""

    WHOLE = "with the optimizer"
    PIECES = "with the pieces"

    def to(self, place: "StatePlace") -> "StatePlace":
        """Return the next place, which must be one that may follow."""
        assert (self, place) != (StatePlace.PIECES, StatePlace.PIECES), "the state was taken over already"
        return place


_GRADIENTS = {
    (GradientPlace.LOCAL, GradientPlace.LOCAL),
    (GradientPlace.LOCAL, GradientPlace.DEFERRED),
    (GradientPlace.LOCAL, GradientPlace.OWNED),
    (GradientPlace.DEFERRED, GradientPlace.OWNED),
    (GradientPlace.DEFERRED, GradientPlace.LOCAL),
    (GradientPlace.OWNED, GradientPlace.LOCAL),
}
