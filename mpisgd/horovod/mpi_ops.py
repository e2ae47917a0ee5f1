"""Where Horovod keeps its operations, `horovod.torch.mpi_ops`: all that the modules here export."""

# ruff: noqa: F403

from mpisgd.horovod.allgather import *
from mpisgd.horovod.allreduce import *
from mpisgd.horovod.alltoall import *
from mpisgd.horovod.basics import *
from mpisgd.horovod.broadcast import *
from mpisgd.horovod.compression import Compression as Compression
from mpisgd.horovod.exceptions import HorovodInternalError as HorovodInternalError
from mpisgd.horovod.handles import poll as poll
from mpisgd.horovod.handles import synchronize as synchronize
from mpisgd.horovod.process_sets import *
from mpisgd.horovod.reduce_ops import *
from mpisgd.horovod.reducescatter import *
from mpisgd.horovod.sparse import sparse_allreduce_async as sparse_allreduce_async
