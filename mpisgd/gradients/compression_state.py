"""`CompressionState`: what the reducers of compressed buckets keep when plans, programs or ranks change."""

from collections.abc import Mapping
from typing import Any

from mpisgd.gradients.plan import Plan

__all__ = ["CompressionState"]


class CompressionState:
    """States of bucket reducers, by the parameters of the bucket.

    A state goes to a bucket of the same parameters, in a later plan or a later run. One for whose parameters
    there is no such bucket any more is dropped: the reducer begins anew, as at the first step.
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._waiting: dict[str, Mapping[str, Any]] = {}

    def move_to(self, plan: Plan) -> None:
        """Give the reducers of a new plan what those of the old one keep."""
        self._waiting = self.state_dict()
        self._plan = plan
        self._hand_out(plan)

    def _hand_out(self, plan: Plan) -> None:
        waiting, self._waiting = self._waiting, {}
        for slot in plan.slots:
            if (state := waiting.get(_key(slot.bucket.indices))) is not None:
                slot.reducer.load_state_dict(state)

    def state_dict(self) -> dict[str, Mapping[str, Any]]:
        """Return this rank's states; {} where no reducer keeps anything."""
        slots = () if self._plan is None else self._plan.slots
        states = {_key(slot.bucket.indices): slot.reducer.state_dict() for slot in slots}
        return {**self._waiting, **{key: state for key, state in states.items() if state}}

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what `state_dict()` has returned, now or as soon as there is a plan."""
        self._waiting = dict(states)
        if self._plan is not None:
            self._hand_out(self._plan)


def _key(indices: tuple[int, ...]) -> str:
    return ",".join(map(str, indices))
