"""`hvd.elastic`: a training function that starts over from its last commit when an operation has failed.

    state = hvd.elastic.TorchState(model, optimizer, epoch=0)

    @hvd.elastic.run
    def train(state):
        while state.epoch < 10:
            ...
            state.epoch += 1
            state.commit()

    train(state)

Under `mpirun --with-ft ulfm` a lost rank is such a failure too, and those that are left go on without it;
elsewhere it ends the job. It is `mpisgd.elastic` under Horovod's names.
"""

from mpisgd.horovod.elastic.common import ObjectState, State
from mpisgd.horovod.elastic.run import run
from mpisgd.horovod.elastic.sampler import ElasticSampler
from mpisgd.horovod.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
