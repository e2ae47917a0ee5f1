"""Where Horovod keeps its operations, `horovod.torch.mpi_ops`: all that the modules here export."""

# ruff: noqa: F403

from mpisgd.horovod.basics import *
from mpisgd.horovod.compression import Compression as Compression
from mpisgd.horovod.exceptions import HorovodInternalError as HorovodInternalError
from mpisgd.horovod.ops.allgather import *
from mpisgd.horovod.ops.allreduce import *
from mpisgd.horovod.ops.alltoall import *
from mpisgd.horovod.ops.broadcast import *
from mpisgd.horovod.ops.handles import poll as poll
from mpisgd.horovod.ops.handles import synchronize as synchronize
from mpisgd.horovod.ops.reduce_ops import *
from mpisgd.horovod.ops.reducescatter import *
from mpisgd.horovod.ops.sparse import sparse_allreduce_async as sparse_allreduce_async
from mpisgd.horovod.process_sets import *
