"""What Horovod's environment variables say that makes sense here."""

import math
import os
from collections.abc import Mapping
from typing import NamedTuple

from mpisgd.errors import InvalidArgument

__all__ = ["Settings", "read_settings"]


class Settings(NamedTuple):
    """How the negotiation works.

    Attributes:
        fusion_bytes: all-reductions travel together up to this size.
        cycle_s: what is submitted waits this long for more, unless somebody waits for it.
        cache_capacity: how many requests are remembered.
        stall_warning_s: tell after this time which ranks do not come; 0: never.
        stall_end_s: end the job after this time; 0: never.
        stall_stacks: whether the missing ranks then tell what they are doing.
    """

    fusion_bytes: int = 64 * 2**20
    cycle_s: float = 0.002
    cache_capacity: int = 1024
    stall_warning_s: float = 60.0
    stall_end_s: float = 0.0
    stall_stacks: bool = False

    @property
    def shortest_stall_s(self) -> float:
        """After what time the first thing is done about a stall; 0: nothing ever is."""
        return min(filter(None, (self.stall_warning_s, self.stall_end_s)), default=0.0)


def read_settings(env: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings, with HOROVOD_* variables honoured.

    Raises:
        InvalidArgument: a variable holds no number, or a negative one.
    """
    default = Settings()
    stalls = env.get("HOROVOD_STALL_CHECK_DISABLE", "0") in ("", "0")
    return Settings(
        int(_number(env, "HOROVOD_FUSION_THRESHOLD", default.fusion_bytes)),
        _number(env, "HOROVOD_CYCLE_TIME", default.cycle_s * 1000) / 1000,
        int(_number(env, "HOROVOD_CACHE_CAPACITY", default.cache_capacity)),
        _number(env, "HOROVOD_STALL_CHECK_TIME_SECONDS", default.stall_warning_s) if stalls else 0.0,
        _number(env, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", default.stall_end_s) if stalls else 0.0,
        env.get("MPISGD_STALL_STACKS", "0") not in ("", "0"),
    )


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise InvalidArgument(f"{name}={text!r}: expected a number that is not negative")
    return value
