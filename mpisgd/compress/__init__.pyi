"""The compressors, for type checkers and for the look-up in `__init__.py`: a line for each."""

from mpisgd.methods.auto.auto import Auto as Auto
from mpisgd.methods.block_quantized.block_quantized import BlockQuantized as BlockQuantized
from mpisgd.methods.chunk_top_k.chunk_top_k import ChunkTopK as ChunkTopK
from mpisgd.methods.deep_gradient.deep_gradient import DeepGradient as DeepGradient
from mpisgd.methods.natural.natural import Natural as Natural
from mpisgd.methods.one_bit.one_bit import OneBit as OneBit
from mpisgd.methods.per_host.per_host import PerHost as PerHost
from mpisgd.methods.power_sgd.power_sgd import PowerSGD as PowerSGD
from mpisgd.methods.qsgd.qsgd import QSGD as QSGD
from mpisgd.methods.random_k.random_k import RandomK as RandomK
from mpisgd.methods.sign_sgd.sign_sgd import SignSGD as SignSGD
from mpisgd.methods.tern_grad.tern_grad import TernGrad as TernGrad
from mpisgd.methods.threshold.threshold import Threshold as Threshold
from mpisgd.methods.top_k.top_k import TopK as TopK

__all__: list[str]
