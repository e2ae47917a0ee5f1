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

    def keep(self, plan: Plan | None) -> None:
        """Take over the states of a plan that is about to be replaced."""
        for slot in () if plan is None else plan.slots:
            if state := slot.reducer.state_dict():
                self._waiting[_key(slot.bucket.indices)] = state
        self._plan = None

    def hand_out(self, plan: Plan) -> None:
        """Give the reducers of a new plan what was kept for them."""
        self._plan = plan
        waiting, self._waiting = self._waiting, {}
        for slot in plan.slots:
            if (state := waiting.get(_key(slot.bucket.indices))) is not None:
                slot.reducer.load_state_dict(state)

    def state_dict(self) -> dict[str, Mapping[str, Any]]:
        """Return this rank's states; {} where no reducer keeps anything."""
        states = dict(self._waiting)
        for slot in () if self._plan is None else self._plan.slots:
            if state := slot.reducer.state_dict():
                states[_key(slot.bucket.indices)] = state
        return states

    def load_state_dict(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over what `state_dict()` has returned, now or as soon as there is a plan."""
        self._waiting = dict(states)
        if self._plan is not None:
            self.hand_out(self._plan)


def _key(indices: tuple[int, ...]) -> str:
    return ",".join(map(str, indices))
