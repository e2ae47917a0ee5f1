"""`Stash` and `Pop`: skip connections between layers that may be on different stages.

    nn.Sequential(
        Down(), mpisgd.pipeline.Stash("fine"),
        ...
        mpisgd.pipeline.Pop("fine", torch.add), Up(),
    )

`Stash` passes its input on and keeps it; `Pop` joins it with its own input. In a pipeline the tensor goes
from the stage of the one directly to that of the other, past those between, and its gradient goes back the
same way. Outside of a pipeline the model works as it is, in any number of threads.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from mpisgd.arguments import check_callable, check_text
from mpisgd.errors import InvalidArgument

__all__ = ["Pop", "Stash", "popped_names", "skips_between", "stashed_names", "stashing"]

_stashed = threading.local()


def _tensors() -> dict[str, Tensor]:
    if not hasattr(_stashed, "tensors"):
        _stashed.tensors = {}
    tensors: dict[str, Tensor] = _stashed.tensors
    return tensors


@contextlib.contextmanager
def stashing(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Let `Stash` put into these tensors and `Pop` take from them."""
    before, _stashed.tensors = _tensors(), tensors
    try:
        yield tensors
    finally:
        _stashed.tensors = before


class Stash(nn.Module):
    """Return the input, and keep it for the `Pop` of the same name.

    Args:
        name: name of the connection, unique in the model.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        check_text("Stash", "name", name)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """Keep `x` and return it."""
        _tensors()[self.name] = x
        return x


class Pop(nn.Module):
    """Return the input joined with the tensor that the `Stash` of the same name has kept.

    Args:
        name: name of the connection.
        join: a function of the input and the kept tensor that returns the output; by default their sum.
    """

    def __init__(self, name: str, join: Callable[[Tensor, Tensor], Tensor] = torch.add) -> None:
        super().__init__()
        check_text("Pop", "name", name)
        check_callable("Pop", "join", join)
        self.name = name
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        """Take the kept tensor and return the join."""
        tensors = _tensors()
        if self.name not in tensors:
            raise InvalidArgument(f"Pop: nothing was stashed as {self.name!r}; is there a Stash before it?")
        return self.join(x, tensors.pop(self.name))


def stashed_names(module: nn.Module) -> list[str]:
    """Return the names that a stage keeps tensors under."""
    return sorted(each.name for each in module.modules() if isinstance(each, Stash))


def popped_names(module: nn.Module) -> list[str]:
    """Return the names that a stage takes tensors from."""
    return sorted(each.name for each in module.modules() if isinstance(each, Pop))


def skips_between(
    stashed: list[list[str]], popped: list[list[str]]
) -> dict[tuple[int, int], tuple[str, ...]]:
    """Return the names of the tensors that go from one stage to another, by (from, to).

    Args:
        stashed: names of each stage.
        popped: names of each stage.

    Raises:
        InvalidArgument: a name is stashed or popped twice, or only one of the two, or popped before.
    """
    sources, targets = _stage_of("Stash", stashed), _stage_of("Pop", popped)
    if sources.keys() != targets.keys():
        alone = sorted(sources.keys() ^ targets.keys())
        raise InvalidArgument(
            f"pipeline: {', '.join(map(repr, alone))}: a Stash without a Pop, or the reverse"
        )
    found: dict[tuple[int, int], list[str]] = {}
    for name, src in sorted(sources.items()):
        if targets[name] < src:
            raise InvalidArgument(
                f"pipeline: {name!r} is popped on stage {targets[name]} and stashed on stage {src}, after it"
            )
        if targets[name] > src:
            found.setdefault((src, targets[name]), []).append(name)
    return {pair: tuple(names) for pair, names in found.items()}


def _stage_of(kind: str, names: list[list[str]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for stage, own in enumerate(names):
        for name in own:
            if name in found:
                raise InvalidArgument(f"pipeline: two {kind}s have the name {name!r}")
            found[name] = stage
    return found
