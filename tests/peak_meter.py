"""The most memory that torch has allocated at a time, on this thread."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile, record_function

ALLOCATION, COUNTS = "[memory]", "counts from here on"


def peak_bytes(prepare: Callable[[], object], run: Callable[[], object]) -> int:
    """The most bytes that there were during `run()` of what torch has allocated since `prepare()` began."""
    gc.collect()  # of what was allocated under another meter, the end would count here
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = prepare()
        with record_function(COUNTS):
            run()
    events = profiler.profiler.kineto_results.events()
    (begun_ns,) = (each.start_ns() for each in events if each.name() == COUNTS)
    changes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == ALLOCATION)
    del kept
    now = peak = 0
    for at_ns, nbytes in changes:
        now += nbytes
        peak = max(peak, now) if at_ns >= begun_ns else now
    return peak
