"""Layers and wrappers of modules that need all ranks.

model = mpisgd.nn.DataParallel(module)          one rank has the batch, all ranks run the module
dropping = mpisgd.nn.ProgressiveLayerDropping(theta=0.5, gamma=1e-3)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpisgd.nn.data_parallel import DataParallel as DataParallel
    from mpisgd.nn.data_parallel_criterion import DataParallelCriterion as DataParallelCriterion
    from mpisgd.nn.layer_dropping import ProgressiveLayerDropping as ProgressiveLayerDropping
    from mpisgd.nn.sync_batch_norm import SyncBatchNorm as SyncBatchNorm

_MODULE_OF = {
    "DataParallel": "data_parallel",
    "DataParallelCriterion": "data_parallel_criterion",
    "ProgressiveLayerDropping": "layer_dropping",
    "SyncBatchNorm": "sync_batch_norm",
}

__all__ = ["DataParallel", "DataParallelCriterion", "ProgressiveLayerDropping", "SyncBatchNorm"]


def __getattr__(name: str) -> Any:
    """Look up a class on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mpisgd.nn' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mpisgd.nn.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
