"""The program into which faults are injected: a small training that shows a lost or repeated step.

Every rank takes its share of one batch of twelve rows, so one, two, three, four or six ranks have the same
loss curve up to rounding: with any faults, the loss of step s must equal that of a run without faults.

    mpirun --with-ft ulfm -n 4 python fault_program.py FOLDER --elastic

It writes its event log into FOLDER, which `fault_verdict` reads.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from fault_injector import FaultPoints, Journal
from fault_resources import resources

if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    FAULT_POINTS = FaultPoints(FOLDER)
    JOURNAL = Journal(FOLDER, f"rank-{os.getpid()}")

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd import checkpoint

ROWS = 12  # of a batch; shared by any number of ranks that divides it
FEATURES = 6
WIDTH = 16


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The batch of a step, the same in every process."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(ROWS, FEATURES, generator=generator, dtype=torch.float64)
    return inputs, inputs.sin().sum(1, keepdim=True)


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, and an optimizer with momentum."""
    torch.manual_seed(7)
    layers = [nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)]
    model = nn.Sequential(*layers).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def loss_of(model: nn.Module, step: int, rank: int, size: int) -> Tensor:
    """The loss of a rank's share of a step's batch."""
    inputs, labels = batch_of(step)
    return nn.functional.mse_loss(model(inputs[rank::size]), labels[rank::size])


def losses_without_faults(steps: int) -> list[float]:
    """The loss of every step, in one process."""
    model, optimizer = make_model()
    losses = []
    for step in range(steps):
        loss = loss_of(model, step, 0, 1)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


class Training:
    """The training of a rank, with its fault injection points."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model, optimizer = make_model()
        mpisgd.broadcast_parameters(self.model)
        self.optimizer = mpisgd.DistributedOptimizer(optimizer)

    def one_step(self, step: int) -> None:
        """Do a step."""
        rank, size = mpisgd.rank(), mpisgd.size()
        with FAULT_POINTS.at("between", step, rank):
            pass
        with FAULT_POINTS.at("forward", step, rank):
            loss = loss_of(self.model, step, rank, size)
            self.optimizer.zero_grad()
        with FAULT_POINTS.at("backward", step, rank):
            loss.backward()  # type: ignore[no-untyped-call]
        with FAULT_POINTS.at("collective", step, rank):
            mean = loss.detach().clone()
            mpisgd.all_reduce(mean, mpisgd.ReduceOp.AVG)
        with FAULT_POINTS.at("update", step, rank):
            self.optimizer.step()
        time.sleep(self.options.pause)
        JOURNAL.write("step", step=step, loss=mean.item(), rank=rank, size=size)

    def is_due(self, step: int) -> bool:
        """Whether to commit and to save behind a step."""
        return (step + 1) % self.options.every == 0

    def save(self, step: int) -> None:
        """Write a checkpoint behind a step, if there are to be any."""
        if not self.options.checkpoints:
            return
        state = {"model": self.model, "optimizer": self.optimizer}
        try:
            with FAULT_POINTS.at("checkpoint", step, mpisgd.rank()):
                checkpoint.save(FOLDER / "checkpoints", step + 1, keep_last=3, **state)
        except mpisgd.MpisgdError as exc:
            if not self.options.go_on:
                raise
            JOURNAL.write("not saved", step=step + 1, why=str(exc))
        else:
            JOURNAL.write("saved", step=step + 1)

    def start(self) -> int:
        """Load the newest checkpoint, if there is one; the step to begin with."""
        if not self.options.checkpoints:
            return 0
        folder = FOLDER / "checkpoints"
        if checkpoint.latest(folder) is None:
            return 0
        return checkpoint.load(folder, model=self.model, optimizer=self.optimizer).step


def train_plainly(training: Training) -> None:
    """Train; a lost rank ends the job, which resumes from a checkpoint."""
    first = training.start()
    JOURNAL.write("begin", step=first, rank=mpisgd.rank(), size=mpisgd.size())
    for step in range(first, training.options.steps):
        training.one_step(step)
        if training.is_due(step):
            training.save(step)


def train_elastically(training: Training) -> None:
    """Train; the remaining ranks continue from the last commit."""
    options = training.options
    state = mpisgd.elastic.State(model=training.model, optimizer=training.optimizer, step=0)

    @mpisgd.elastic.run(regrow=options.regrow)
    def train(state: mpisgd.elastic.State) -> None:
        JOURNAL.write("begin", step=state.step, rank=mpisgd.rank(), size=mpisgd.size(), holds=resources())
        while state.step < options.steps:
            step = state.step
            training.one_step(step)
            state.step += 1
            if training.is_due(step):
                with FAULT_POINTS.at("commit", step, mpisgd.rank()):
                    state.commit()
                JOURNAL.write("committed", step=state.step)
                training.save(step)

    train(state)


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="The program to which faults are done.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5, help="steps between commits, and checkpoints")
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--regrow", action="store_true")
    parser.add_argument("--checkpoints", action="store_true")
    parser.add_argument("--go-on", action="store_true", help="continue if a checkpoint cannot be written")
    parser.add_argument(
        "--pause", type=float, default=0.0, metavar="S", help="seconds to sleep in every step"
    )
    return parser.parse_args()


def main() -> None:
    """Train on all ranks."""
    options = parse()
    mpisgd.init()
    training = Training(options)
    (train_elastically if options.elastic else train_plainly)(training)
    JOURNAL.write("end", rank=mpisgd.rank(), size=mpisgd.size())


if __name__ == "__main__":
    main()
