"""Checks of the arguments of public functions, before anything is sent."""

import operator
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from mpisgd.config import LONGEST_TIMEOUT_S
from mpisgd.errors import InvalidArgument, ShapeMismatch

__all__ = [
    "as_index",
    "as_path",
    "as_written",
    "call_text",
    "check_callable",
    "check_count",
    "check_flag",
    "check_objects",
    "check_positive",
    "check_ratio",
    "check_seed",
    "check_text",
    "check_timeout",
    "has_state_dict",
    "printable",
    "ranks_by_text",
    "ranks_text",
    "shown",
    "texts_with_ranks",
]

MAX_RANKS = 12  # that a message lists


def shown(value: Any) -> str:
    """Describe a value for a message: short, whatever was passed."""
    return reprlib.repr(value)


def call_text(value: Any, write: Callable[[Any], str] | None = None) -> str:
    """Return the call that makes a dataclass, without what is as by default.

    Args:
        value: the dataclass.
        write: of what is in it; by default `as_written`.
    """
    write = write or as_written
    given = [
        f"{field.name}={write(getattr(value, field.name))}"
        for field in fields(value)
        if getattr(value, field.name) != _default_of(field)
    ]
    return f"{type(value).__name__}({', '.join(given)})"


def _default_of(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def as_written(value: Any) -> str:
    """Return a value as Python source: a class by its name, a dataclass as by `call_text`."""
    if isinstance(value, type):
        return value.__qualname__
    # One with a `__repr__` of its own, which it says by repr=False, knows better.
    is_usual = is_dataclass(value) and type(value).__dataclass_params__.repr  # type: ignore[union-attr]
    return call_text(value) if is_usual else repr(value)


def printable(text: str) -> str:
    """Return a line for a terminal: control characters, which names in a file may have, are escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return `rank 3`, or `ranks 0, 2`; of many, the first ones."""
    listed = sorted(ranks)
    more = f" and {len(listed) - MAX_RANKS} more" if len(listed) > MAX_RANKS else ""
    return f"rank{'s' * (len(listed) != 1)} {', '.join(map(str, listed[:MAX_RANKS]))}{more}"


def ranks_by_text(ranks: Iterable[int], texts: Iterable[str | None]) -> dict[str, list[int]]:
    """Return which ranks have each text, of one text for each rank; None is none."""
    found: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts, strict=True):
        if text is not None:
            found.setdefault(text, []).append(rank)
    return found


def texts_with_ranks(ranks: Iterable[int], texts: Iterable[str | None]) -> str:
    """Return `rank 3: this; ranks 0, 2: that`, of one text for each rank; "" where there is none."""
    return "; ".join(f"{ranks_text(of)}: {text}" for text, of in ranks_by_text(ranks, texts).items())


def as_index(value: Any) -> int:
    """Return `value`, which names a rank, as an int; of numpy and torch too.

    Raises:
        TypeError: it is none. Nor is True: whoever passes it has mixed up arguments.
    """
    torch = sys.modules.get("torch")  # where nothing has loaded it there is no tensor
    if torch is not None and isinstance(value, torch.Tensor) and (value.dtype == torch.bool or value.is_meta):
        raise TypeError(f"{shown(value)} is no rank")
    if isinstance(value, bool):
        raise TypeError(f"{shown(value)} is no rank")
    return operator.index(value)


def as_path(name: str, what: str, value: Any) -> Path:
    """Return `value` as a path, or raise InvalidArgument; an empty text is none."""
    if not isinstance(value, (str, os.PathLike)) or not (text := os.fspath(value)):
        raise InvalidArgument(f"{name}: {what}={shown(value)}; expected a path")
    return Path(text)


def check_callable(name: str, what: str, value: Any) -> None:
    """Raise InvalidArgument unless `value` can be called."""
    if not callable(value):
        raise InvalidArgument(f"{name}: {what}={shown(value)}; expected a function")


def check_flag(name: str, what: str, value: Any) -> bool:
    """Return `value` as a bool, or raise InvalidArgument: a group or a tensor in its place is a mistake."""
    if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise InvalidArgument(f"{name}: {what}={shown(value)}; expected True or False")


def check_objects(name: str, what: str, value: Any, count: int, *, output: bool = False) -> None:
    """Raise ShapeMismatch unless `value` is a list of `count` objects; `output`: it will be written to."""
    kind = MutableSequence if output else Sequence
    if isinstance(value, (str, bytes)) or not isinstance(value, kind) or len(value) != count:
        length = f" of {len(value)} entries" if isinstance(value, Sequence) else ""
        raise ShapeMismatch(
            f"{name}: {what} is a {type(value).__name__}{length}; expected a list of {count}, one per rank"
        )


def check_positive(name: str, what: str, value: Any, *, whole: bool = False) -> None:
    """Raise InvalidArgument unless `value` is a positive number, `whole`: an integer."""
    number = isinstance(value, int if whole else (int, float)) and value > 0
    number = number and (isinstance(value, float) or value <= sys.float_info.max)
    if not number:
        expected = "a positive integer" if whole else "a positive number"
        raise InvalidArgument(f"{name}: {what}={shown(value)}; expected {expected}")


def check_timeout(name: str, what: str, value: Any) -> None:
    """Raise InvalidArgument unless `value` is a positive number of seconds that the system can wait for."""
    if not isinstance(value, (int, float)) or not 0 < value <= LONGEST_TIMEOUT_S:
        raise InvalidArgument(
            f"{name}: {what}={shown(value)}; expected a positive, finite number of seconds, "
            f"{LONGEST_TIMEOUT_S:.0e} at most"
        )


def check_ratio(name: str, what: str, value: Any) -> None:
    """Raise InvalidArgument unless `value` is a number above 0 and up to 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise InvalidArgument(f"{name}: {what}={shown(value)}; expected a number above 0 and up to 1")


def check_count(name: str, what: str, value: Any) -> None:
    """Raise InvalidArgument unless `value` is an integer, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgument(f"{name}: {what}={shown(value)}; expected an integer, 0 or more")


def check_text(name: str, what: str, value: Any) -> None:
    """Raise InvalidArgument unless `value` is some text."""
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"{name}: {what}={shown(value)}; expected some text")


def check_seed(name: str, value: Any) -> None:
    """Raise InvalidArgument unless torch's generators take `value` as a seed."""
    if not isinstance(value, int) or not -(2**63) <= value < 2**64:
        raise InvalidArgument(f"{name}: seed={shown(value)}; expected an integer of 64 bits")


def has_state_dict(value: object) -> bool:
    """Return whether an object has `state_dict()` and `load_state_dict()`."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
