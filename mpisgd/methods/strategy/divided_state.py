"""`DividedState`: stands for an optimizer's state between steps, where that is divided among ranks."""

from collections import defaultdict
from typing import Any, NoReturn

from torch import Tensor

from mpisgd.errors import InvalidArgument

__all__ = ["DividedState"]


class DividedState(defaultdict[Any, Any]):
    """Is empty, and says so where a program looks for the state of a parameter, or changes it.

    Iteration finds nothing, as for an optimizer that has not stepped: libraries move what they find to a
    device. What fills it for `state_dict()` uses `update`.
    """

    def __init__(self, *_: Any) -> None:
        super().__init__(dict)

    def _refuse(self) -> NoReturn:
        raise InvalidArgument(
            "DistributedOptimizer: the state of the parameters is divided among the ranks between steps. "
            "Read it by optimizer.state_dict(), on all ranks, and change it by optimizer.load_state_dict()"
        )

    def __missing__(self, key: Any) -> Any:
        """Refuse."""
        self._refuse()

    def __setitem__(self, key: Any, value: Any) -> None:
        """Refuse."""
        self._refuse()

    def __contains__(self, key: Any) -> bool:
        """Return whether it has something; refuse where it is asked for a parameter that it does not have."""
        has = super().__contains__(key)
        if not has and isinstance(key, Tensor):
            self._refuse()
        return has

    def get(self, key: Any, default: Any = None) -> Any:
        """Return its entry of a parameter; refuse where it has none."""
        has = key in self
        return self[key] if has else default

    def pop(self, key: Any, *default: Any) -> Any:
        """Refuse."""
        self._refuse()

    def clear(self) -> None:
        """Refuse."""
        self._refuse()
