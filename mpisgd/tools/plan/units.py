"""Sizes, rates and times as people write them: `80 GiB`, `100 Gbit/s`, `5 us`, `312 Tflop/s`; or numbers."""

import math
import re
import sys
from collections.abc import Iterable
from typing import Any

from mpisgd.arguments import shown
from mpisgd.errors import InvalidArgument

__all__ = ["as_flops", "as_nbytes", "as_rate", "as_seconds"]

DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
PREFIXES = DECIMAL | BINARY
# As fractions: 5 us are 5 / 1e6 to the last bit, and 5 * 1e-6 are not.
TIMES = {"": (1, 1), "s": (1, 1), "ms": (1, 10**3), "us": (1, 10**6), "ns": (1, 10**9)}
TIMES |= {"µs": TIMES["us"], "min": (60, 1), "h": (3600, 1)}
NUMBER = re.compile(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?\s*", re.IGNORECASE)


def as_nbytes(name: str, value: Any) -> float:
    """Return bytes of `80 GiB`, `16 GB`, or of a number of them."""
    number, prefix, _ = _read(name, value, r"b?", "a number of bytes, or such as 80 GiB")
    return number * PREFIXES[prefix]


def as_rate(name: str, value: Any) -> float:
    """Return bytes per second of `100 Gbit/s`, `100 Gb/s`, `12.5 GB/s`, or of a number of them.

    A capital B is a byte, and a small one a bit. In small letters alone `gbit/s` and `gbps` are bits, and
    `gb/s` is refused, as people write either by it.
    """
    expected = "bytes per second, or such as 100 Gbit/s (bits) or 12.5 GB/s (bytes)"
    number, prefix, unit = _read(name, value, r"bit/s|bps|b/s", expected)
    if unit == "b/s" and prefix and str(value).strip().islower():
        raise InvalidArgument(f"{name}={shown(value)}; expected Gbit/s for bits, or GB/s for bytes")
    return number * PREFIXES[prefix] / (8 if unit.startswith("b") or unit.lower() == "bit/s" else 1)


def as_flops(name: str, value: Any) -> float:
    """Return operations per second of `312 Tflop/s`, or of a number of them."""
    number, prefix, _ = _read(name, value, r"flops?(?:/s)?", "operations, or such as 20 Tflop/s")
    return number * PREFIXES[prefix]


def as_seconds(name: str, value: Any) -> float:
    """Return seconds of `5 us`, `2 min`, or of a number of them."""
    expected = "seconds, or such as 5 us"
    number, _, unit = _read(name, value, "|".join(TIMES), expected, prefixes=("",))
    factor, divisor = TIMES[unit.lower()]
    return number * factor / divisor


def _read(
    name: str, value: Any, units: str, expected: str, prefixes: Iterable[str] = tuple(PREFIXES)
) -> tuple[float, str, str]:
    """Return number, prefix in small letters, and unit as it is written, of a text; or of a number alone.

    Raises:
        InvalidArgument: it is neither, or not finite.
    """
    number, prefix, unit = _parts(value, units, prefixes)
    if not math.isfinite(number):
        raise InvalidArgument(f"{name}={shown(value)}; expected {expected}")
    return number, prefix, unit


def _parts(value: Any, units: str, prefixes: Iterable[str]) -> tuple[float, str, str]:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return (float(value) if abs(value) <= sys.float_info.max else math.inf), "", ""
    begun = NUMBER.match(value) if isinstance(value, str) else None
    if begun is None:
        return math.nan, "", ""
    rest = value[begun.end() :].strip()
    found = re.fullmatch(rf"({'|'.join(prefixes)})({units})", rest, re.IGNORECASE)
    return (float(begun[0]), found[1].lower(), found[2]) if found else (math.nan, "", "")
