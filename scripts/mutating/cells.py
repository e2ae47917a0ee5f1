"""The modes of `verify`, or of its quick form, in a job that is there: exit code 1 where one is not right.

mpirun -n 3 python -m mutating.cells --quick
mpirun -n 3 python -m mutating.cells --all
"""

from __future__ import annotations

import os
import sys
import time

import mpisgd
from mpisgd.job.lazy_dynamo import defer_import
from mpisgd.tools.verification.cell import Cell
from mpisgd.tools.verification.matrix import Selection, run_here

CHECKS = {"--quick": "cells", "--all": "modes"}


def main() -> int:
    """Return the exit code."""
    trace = None
    name = f"{CHECKS[sys.argv[1]]} {sys.argv[1]}"
    if folder := os.environ.get("MUTATING_LINES"):
        from mutating.lines import Trace

        trace = Trace()
        trace.begin(name)
    began_s, defer_only = time.monotonic(), defer_import()
    assert defer_only is None
    mpisgd.init()

    def report(cell: Cell) -> None:
        if not cell.is_as_wanted:
            os.write(2, f"{cell}\n".encode())
            os._exit(1)  # mpirun ends the others: one is enough

    run_here(Selection(quick=sys.argv[1] == "--quick"), report)
    if trace is not None and folder:
        trace.took(name, time.monotonic() - began_s)
        trace.save(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
