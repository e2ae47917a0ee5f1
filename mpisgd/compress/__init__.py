"""What gradients look like on the wire: one method of compression per file."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpisgd.compress.one_bit import OneBit as OneBit
    from mpisgd.compress.sign_sgd import SignSGD as SignSGD

_MODULE_OF = {"OneBit": "one_bit", "SignSGD": "sign_sgd"}

__all__ = ["OneBit", "SignSGD"]


def __getattr__(name: str) -> Any:
    """Look up a compressor on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mpisgd.compress' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mpisgd.compress.{_MODULE_OF[name]}"), name)
