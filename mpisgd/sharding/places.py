"""Where the gradients and the optimizer state of divided parameters are: one state each, and what may follow.

Gradients, of all parameters of an optimizer:

              an optimizer that updates piece by piece     released: reset, or made anew by backward
    LOCAL ------------------------------------> DEFERRED --------------------------------------> LOCAL
      |                                            | somebody asks for them: clipping, a closure
      |          all others                        v
      +----------------------------------------> OWNED ----------------------------------------> LOCAL
                                                   | a step with offload, which frees them piece by piece
                                                   v
                                                 USED -----------------------------------------> LOCAL

    LOCAL      p.grad is this rank's own, or None
    DEFERRED   p.grad is a `ShardedGradient`; each rank has its own still, which the step combines
    OWNED      p.grad is a `ShardedGradient`; each owner has the combined gradients of its pieces
    USED       p.grad is a `ShardedGradient`; no rank has the gradients any more

Optimizer state:

              the first step, or parts are loaded                a step begins
    WHOLE ----------------------------------------> PIECES -----------------------> STEP
      ^                                               |  ^                            |
      +------------- a state dict is loaded ----------+  +------- the step ends ------+

    WHOLE      the optimizer has that of all parameters
    PIECES     this rank has that of its pieces; the optimizer has none
    STEP       the optimizer has that of the pieces, and no parameters but these
"""

import enum

__all__ = ["GradientPlace", "StatePlace"]


class GradientPlace(enum.Enum):
    """Where the gradients are; see above."""

    LOCAL = "with each rank"
    DEFERRED = "with each rank, until the step"
    OWNED = "with their owners"
    USED = "nowhere any more: a step has used them"

    def to(self, place: "GradientPlace") -> "GradientPlace":
        """Return the next place, which must be one that may follow."""
        legal = place is GradientPlace.LOCAL or (self, place) in _GRADIENTS
        assert legal, f"gradients that are {self.value} are {place.value} next"
        return place


class StatePlace(enum.Enum):
    """Where the optimizer's state is; see above."""

    WHOLE = "with the optimizer"
    PIECES = "with the pieces"
    STEP = "with the optimizer, in a step"

    def to(self, place: "StatePlace") -> "StatePlace":
        """Return the next place, which must be one that may follow."""
        is_step = StatePlace.STEP in (self, place)
        assert not is_step or (self, place) in _STEPS, f"a state that is {self.value} is {place.value} next"
        return place


_GRADIENTS = {
    (GradientPlace.LOCAL, GradientPlace.DEFERRED),
    (GradientPlace.LOCAL, GradientPlace.OWNED),
    (GradientPlace.DEFERRED, GradientPlace.OWNED),
    (GradientPlace.OWNED, GradientPlace.USED),
}
_STEPS = {(StatePlace.PIECES, StatePlace.STEP), (StatePlace.STEP, StatePlace.PIECES)}
