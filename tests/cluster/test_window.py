"""One-sided calls between hosts complete although the target calls nothing."""

from __future__ import annotations

from clusters import run_code

PROGRAM = """
import time, torch, mpisgd

mpisgd.init()
window = mpisgd.Window(torch.zeros(3))
if mpisgd.rank() == 0:
    for _ in range(60):  # the monitor, too, calls MPI about once a second
        window.fetch_and_op(torch.ones(3) / 4, 1)
else:
    deadline_s = time.monotonic() + 20
    while window.tensor.min() < 15 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    print("arrived:", window.tensor.tolist(), flush=True)
mpisgd.barrier()
"""


def test_calls_complete_while_the_target_sleeps():
    done = run_code("1,1", PROGRAM)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "arrived: [15.0, 15.0, 15.0]\n"
