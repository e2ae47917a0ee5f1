"""Pipeline parallelism: every schedule of torch's, over `mpisgd`, equals the whole chain in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from chains import (
    BATCH,
    Layer,
    Scale,
    TwoWays,
    chain,
    in_a_loop,
    in_a_v,
    joined_batch,
    mine,
    run_step,
    stages_of,
    through,
)
from closeness import EXACT, check_close, gradients
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    SplitPoint,
    pipeline,
)
from verdicts import everyone

import mpisgd

pytestmark = pytest.mark.mpi(min_size=2)

LIMIT = 1e-14  # at most 9e-16 was measured at 2 to 4 ranks

SINGLE = (ScheduleGPipe, Schedule1F1B)  # one stage per rank, not in a list
IN_A_V = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
SCHEDULES = (
    *SINGLE,
    ScheduleLoopedBFS,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    *IN_A_V,
)


def name_of(kind: type) -> str:
    return kind.__name__.removeprefix("Schedule")


class Run:
    """A chain in one process and its copy in a pipeline of all ranks, which are trained side by side."""

    def __init__(self, kind: type, num_micro_batches: int, layer: Callable[[], nn.Module] = Layer) -> None:
        per_rank = 1 if kind in SINGLE else 2
        where = (in_a_v if kind in IN_A_V else in_a_loop)(mpisgd.size(), per_rank)
        self.model = chain(len(where), layer)
        self.plain = copy.deepcopy(self.model)
        self.stages = stages_of(self.model, where, dist.group.WORLD)
        given = self.stages[0] if kind in SINGLE else self.stages
        self.schedule = kind(given, num_micro_batches, loss_fn=loss_of)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.model, self.plain)]

    def step(self, inputs: Tensor, targets: Tensor) -> None:
        """Compare gradients, parameters, and where the pipeline ends its output and loss."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        out, losses = run_step(self.schedule, self.stages, inputs, targets)
        expected = through(self.plain, inputs)
        loss = loss_of(expected, targets)
        loss.backward()
        ours = [] if out is None else [*listed(out), torch.stack(losses).mean()]
        right = [] if out is None else [*listed(expected), loss]
        check_close(ours + self.of_mine(self.model), right + self.of_mine(self.plain), LIMIT)
        for optimizer in self.optimizers:
            optimizer.step()

    def of_mine(self, model: nn.Sequential) -> list[Tensor]:
        """Gradients and parameters of a model's layers that are this rank's stages."""
        layers = mine(model, self.stages)
        return [t for layer in layers for t in (*gradients(layer), *layer.parameters())]


def listed(out: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [out] if isinstance(out, Tensor) else list(out)


def loss_of(out: Tensor | tuple[Tensor, ...], targets: Tensor) -> Tensor:
    return sum(nn.functional.mse_loss(piece, targets) for piece in listed(out))


@pytest.mark.parametrize("kind", SCHEDULES, ids=name_of)
def test_a_schedule_equals_one_process(kind):
    run = Run(kind, 2 * mpisgd.size())
    for step in range(2):
        run.step(*joined_batch(step))


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble], ids=name_of)
def test_activation_checkpointing_in_every_stage(kind):
    run = Run(kind, 2 * mpisgd.size(), partial(Layer, recompute=True))
    run.step(*joined_batch(0))


@pytest.mark.parametrize("num_micro_batches", [1, 3, BATCH])
def test_any_number_of_micro_batches(num_micro_batches):
    run = Run(ScheduleGPipe, num_micro_batches)
    run.step(*joined_batch(0))


@pytest.mark.parametrize(
    "kind", [Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble], ids=name_of
)
def test_as_few_micro_batches_as_stages(kind):
    run = Run(kind, mpisgd.size())
    run.step(*joined_batch(0))


@pytest.mark.parametrize("kind", [Schedule1F1B, ScheduleInterleaved1F1B], ids=name_of)
def test_stages_that_hand_on_two_tensors(kind):
    run = Run(kind, mpisgd.size(), TwoWays)
    for step in range(2):
        run.step(*joined_batch(step))


def test_stage_outputs_of_several_mebibytes():
    # 4 MiB per micro-batch; activations and gradients cross each other on the way.
    run = Run(Schedule1F1B, mpisgd.size(), partial(Scale, 2**18))
    run.step(*joined_batch(0, rows=2 * mpisgd.size(), width=2**18))


@pytest.mark.mpi(min_size=4)
def test_a_large_message_moves_while_its_sender_waits_in_another_group():
    # Rank 0's message must arrive although its sender is in a collective that, by way of ranks 2, 3 and 1,
    # waits for this very message: MPI moves it only while the sender asks for it.
    rank, group = mpisgd.rank(), {}
    for pair in ((0, 1), (2, 3), (0, 2), (1, 3)):
        made = dist.new_group(pair)
        group |= {pair: made} if rank in pair else {}
    sent, got = torch.arange(2.0**20) + rank, torch.zeros(2**20)
    total = torch.ones(1)
    if rank == 0:
        work = dist.isend(sent, 1, group[0, 1])
        dist.all_reduce(total, group=group[0, 2])
        work.wait()
    elif rank == 1:
        dist.recv(got, 0, group[0, 1])
        dist.all_reduce(total, group=group[1, 3])
    elif rank == 2:
        dist.recv(got, 3, group[2, 3])
        dist.all_reduce(total, group=group[0, 2])
    elif rank == 3:
        dist.all_reduce(total, group=group[1, 3])
        dist.send(sent, 2, group[2, 3])
    source = {1: 0, 2: 3}.get(rank)
    check_close([] if source is None else [got], [] if source is None else [sent - rank + source], EXACT)
    everyone(rank > 3 or total.item() == 2)


def test_forward_only():
    model = chain(mpisgd.size())
    (stage,) = stages_of(model, in_a_loop(mpisgd.size(), 1), dist.group.WORLD)
    schedule = ScheduleGPipe(stage, mpisgd.size())
    inputs, _ = joined_batch(0)
    with torch.no_grad():
        out = schedule.eval(*([inputs] if stage.is_first else []))
        check_close([out] if stage.is_last else [], [model(inputs)] if stage.is_last else [], LIMIT)


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")  # torch's own
def test_a_model_that_torch_cuts_itself():
    size = mpisgd.size()
    model = chain(size)
    plain = copy.deepcopy(model)
    inputs, targets = joined_batch(0)
    cuts = {str(layer): SplitPoint.BEGINNING for layer in range(1, size)}
    pieces = pipeline(model, mb_args=(inputs[: BATCH // 2],), split_spec=cuts)
    stage = pieces.build_stage(mpisgd.rank(), torch.device("cpu"))
    out, _ = run_step(ScheduleGPipe(stage, 2, loss_fn=loss_of), [stage], inputs, targets)
    expected = plain(inputs)
    loss_of(expected, targets).backward()
    check_close(
        [*gradients(stage.submod), *listed(() if out is None else out)],
        [*gradients(plain[mpisgd.rank()]), *listed(() if out is None else expected)],
        LIMIT,
    )
