"""`mpisgd.elastic`: training that survives the loss of ranks.

    state = mpisgd.elastic.State(model=model, optimizer=optimizer, sampler=sampler, epoch=0)

    @mpisgd.elastic.run
    def train(state):
        while state.epoch < 10:
            ...
            state.epoch += 1
            state.commit()

    train(state)

Needs `mpirun --with-ft ulfm` of Open MPI 5.
"""

from mpisgd.elastic.buddy_replicas import PerRank
from mpisgd.elastic.run import run
from mpisgd.elastic.sampler import ElasticSampler
from mpisgd.elastic.state import State

__all__ = ["ElasticSampler", "PerRank", "State", "run"]
