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

import functools
from typing import Any

from mpisgd.elastic.decorator import Frontend, Function, elastic_function
from mpisgd.elastic.joining import Terms
from mpisgd.horovod.elastic.common import ObjectState, State, run_fn
from mpisgd.horovod.elastic.losses import end_together, join_the_others, start_over
from mpisgd.horovod.elastic.sampler import ElasticSampler
from mpisgd.horovod.elastic.state import TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


def run(
    func: Function | None = None,
    *,
    min_ranks: int = 1,
    max_ranks: int | None = None,
    regrow: bool = False,
) -> Any:
    """Let `func(state, ...)` start over when an operation fails or the ranks change.

    Before every start the state is that of rank 0 on all ranks. After a `HorovodInternalError` it is first
    put back to the last commit. Where that was the loss of a rank, those that are left are numbered anew, and
    process sets of one's own are gone: a reset callback may add them again.

    Args:
        func: takes a `State` first.
        min_ranks: with fewer left the job ends. This and what follows is beyond Horovod, whose `horovodrun`
            has such options.
        max_ranks: how many there may be when lost ones are replaced; as many as at first by default.
        regrow: start a process in the place of each lost one; see `mpisgd.elastic.run`.

    Raises:
        HorovodInternalError: from the function made: the same failure came again and again with no commit in
            between, or a rank is lost and this MPI does not outlive that.
        JobError: likewise: too few ranks are left, or this part of a cut network must not go on.
    """
    return elastic_function(FRONTEND, func, min_ranks=min_ranks, max_ranks=max_ranks, regrow=regrow)


def _join(state: State) -> None:
    join_the_others()
    state.on_reset()


def _until_done(func: Function, state: State, terms: Terms, joiner: bool) -> Any:
    def to_the_end(state: State) -> Any:
        result = func(state)
        end_together()
        return result

    return run_fn(to_the_end, functools.partial(start_over, terms))(state)


FRONTEND = Frontend(lambda func, state: None, _join, _until_done)
