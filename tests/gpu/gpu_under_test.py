"""The GPU that tests/gpu runs on: CUDA's where torch sees one, elsewhere that of tests/simulated_gpu.

`DEVICE` is what torch calls it, `gpu` its module: `torch.cuda`, or one with the same functions.
"""

from __future__ import annotations

from typing import Any

import torch
from simulated_gpu.device import KIND, install

__all__ = ["DEVICE", "IS_SIMULATED", "gpu"]

IS_SIMULATED = not torch.cuda.is_available()
DEVICE = KIND if IS_SIMULATED else "cuda"
if IS_SIMULATED:
    install()
gpu: Any = torch.get_device_module(DEVICE)
