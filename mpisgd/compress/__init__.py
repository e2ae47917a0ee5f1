"""What gradients look like on the wire: one method of compression per file.

optimizer = mpisgd.DistributedOptimizer(optimizer, compression=mpisgd.compress.TopK(ratio=0.01))
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpisgd.compress.auto import Auto as Auto
    from mpisgd.compress.per_host import PerHost as PerHost
    from mpisgd.compress.power_sgd import PowerSGD as PowerSGD
    from mpisgd.compress.quantized.natural import Natural as Natural
    from mpisgd.compress.quantized.qsgd import QSGD as QSGD
    from mpisgd.compress.quantized.tern_grad import TernGrad as TernGrad
    from mpisgd.compress.signs.one_bit import OneBit as OneBit
    from mpisgd.compress.signs.sign_sgd import SignSGD as SignSGD
    from mpisgd.compress.sparse.deep_gradient import DeepGradient as DeepGradient
    from mpisgd.compress.sparse.random_k import RandomK as RandomK
    from mpisgd.compress.sparse.threshold import Threshold as Threshold
    from mpisgd.compress.sparse.top_k import TopK as TopK

_MODULE_OF = {
    "Auto": "auto",
    "DeepGradient": "sparse.deep_gradient",
    "Natural": "quantized.natural",
    "OneBit": "signs.one_bit",
    "PerHost": "per_host",
    "PowerSGD": "power_sgd",
    "QSGD": "quantized.qsgd",
    "RandomK": "sparse.random_k",
    "SignSGD": "signs.sign_sgd",
    "TernGrad": "quantized.tern_grad",
    "Threshold": "sparse.threshold",
    "TopK": "sparse.top_k",
}

__all__ = [
    "QSGD",
    "Auto",
    "DeepGradient",
    "Natural",
    "OneBit",
    "PerHost",
    "PowerSGD",
    "RandomK",
    "SignSGD",
    "TernGrad",
    "Threshold",
    "TopK",
]


def __getattr__(name: str) -> Any:
    """Look up a compressor on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mpisgd.compress' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mpisgd.compress.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
