"""Sizes, rates and times as people write them: `80 GiB`, `100 Gbit/s`, `5 us`, `312 Tflop/s`; or numbers."""

import math
import re
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
NUMBER = r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*"


def as_nbytes(name: str, value: Any) -> float:
    """Return bytes of `80 GiB`, `16 GB`, or of a number of them."""
    return _with_prefix(name, value, r"b?", "80 GiB")


def as_rate(name: str, value: Any) -> float:
    """Return bytes per second of `100 Gbit/s`, `100 Gb/s`, `12.5 GB/s`, or of a number of them."""
    rate = _with_prefix(name, value, r"(?:bit/s|bps|b/s)", "100 Gbit/s or 12.5 GB/s")
    if not isinstance(value, str):
        return rate
    unit = value.strip().lstrip("0123456789.e+- ")
    if re.fullmatch("[kmgt]i?b/s", unit):
        raise InvalidArgument(f"{name}={shown(value)}; expected Gbit/s for bits, or GB/s for bytes")
    return rate if unit.endswith("B/s") else rate / 8


def as_flops(name: str, value: Any) -> float:
    """Return operations per second of `312 Tflop/s`, or of a number of them."""
    return _with_prefix(name, value, r"flops?(?:/s)?", "20 Tflop/s")


def as_seconds(name: str, value: Any) -> float:
    """Return seconds of `5 us`, `2 min`, or of a number of them."""
    if _is_number(value):
        return float(value)
    found = re.fullmatch(NUMBER + r"([a-zµ]*)\s*", value.lower()) if isinstance(value, str) else None
    if found is None or found[2] not in TIMES:
        raise InvalidArgument(f"{name}={shown(value)}; expected seconds, or such as 5 us")
    factor, divisor = TIMES[found[2]]
    return float(found[1]) * factor / divisor


def _with_prefix(name: str, value: Any, unit: str, example: str) -> float:
    if _is_number(value):
        return float(value)
    pattern = NUMBER + rf"({'|'.join(PREFIXES)}){unit}\s*"
    found = re.fullmatch(pattern, value.lower()) if isinstance(value, str) else None
    if found is None:
        raise InvalidArgument(f"{name}={shown(value)}; expected a number, or such as {example}")
    return float(found[1]) * PREFIXES[found[2]]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
