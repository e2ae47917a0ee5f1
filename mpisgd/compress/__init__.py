"""The form in which gradients are sent: the interface of a compressor, and what several of them share.

    optimizer = mpisgd.DistributedOptimizer(optimizer, compression=mpisgd.compress.TopK(ratio=0.01))

The compressors themselves lie in `mpisgd.methods`, a folder each, and are looked up on first use.
"""

from mpisgd.lazy_names import look_up_in, modules_of_names

_MODULE_OF = modules_of_names(__file__)

__all__ = sorted(_MODULE_OF)
__getattr__ = look_up_in(__name__, _MODULE_OF)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
