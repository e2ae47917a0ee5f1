"""One thread of torch's for all tests of one process.

What is computed here is small, and ranks that are threads of this process would each have a team of OpenMP's.
Its threads spin while they wait: products of matrices with six rows took five times the processor's time.
"""

from __future__ import annotations

import os

# OpenMP reads it as torch is loaded. Programs that a test starts find what was there before.
before = os.environ.get("OMP_NUM_THREADS")
os.environ["OMP_NUM_THREADS"] = "1"
import torch  # noqa: E402

torch.set_num_threads(1)  # where another file has loaded it already
del os.environ["OMP_NUM_THREADS"]
if before is not None:
    os.environ["OMP_NUM_THREADS"] = before
