"""Trains with `hvd.elastic` while ranks are lost, and compares with what should have come out.

    mpirun --with-ft ulfm -n 4 python horovod_elastic.py [--regrow]

Which rank dies where is written in DEATHS. The parameters at the end must be those of one process that saw
the batches of all ranks joined: of four ranks until the commit before the first death, and so on.
"""

import argparse
import os
import signal

import torch

import mpisgd.horovod as hvd

STEPS = 12
COMMIT_EVERY = 2
# One after the other: at which step, which rank as it is numbered then, and where.
DEATHS = [(3, 1, "before backward"), (7, 0, "after backward"), (10, 1, "in commit"), (0, 0, "never")]


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 300), torch.nn.Tanh(), torch.nn.Linear(300, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def inputs_of(step: int, rank: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 4, dtype=torch.float64, generator=draw)


def die_if_due(state: hvd.elastic.TorchState, where: str) -> None:
    if DEATHS[state.resets] == (state.step, hvd.rank(), where):
        os.kill(os.getpid(), signal.SIGKILL)


def train_step(model: torch.nn.Module, opt: torch.optim.Optimizer, step: int, ranks: range) -> None:
    opt.zero_grad()
    joined = torch.cat([inputs_of(step, rank) for rank in ranks])
    (model(joined) - joined[:, :2].sin()).square().mean().backward()


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    while state.step < STEPS:
        die_if_due(state, "before backward")
        train_step(state.model, state.optimizer, state.step, range(hvd.rank(), hvd.rank() + 1))
        die_if_due(state, "after backward")
        state.optimizer.step()
        state.sizes.append(hvd.size())
        state.step += 1
        if state.step % COMMIT_EVERY == 0:
            die_if_due(state, "in commit")
            state.commit()


def alone(sizes: list[int]) -> torch.nn.Module:
    """Return the model of one process that saw all batches."""
    model, opt = make()
    for step, size in enumerate(sizes):
        train_step(model, opt, step, range(size))
        opt.step()
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--regrow", action="store_true")
    options = parser.parse_args()
    hvd.init()
    model, opt = make()
    if hvd.rank() == 1:
        torch.nn.init.zeros_(model[0].bias)  # what rank 0 has comes to all
    opt = hvd.DistributedOptimizer(opt, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model, opt, step=0, sizes=[], resets=0)

    def reset() -> None:
        state.resets += 1

    state.register_reset_callbacks([reset])
    function = hvd.elastic.run(train.__wrapped__, regrow=True) if options.regrow else train
    function(state)
    worst = max(
        float((a - b).detach().abs().max())
        for a, b in zip(model.parameters(), alone(state.sizes).parameters(), strict=True)
    )
    everyones = hvd.allgather_object((worst, list(state.sizes)))
    if hvd.rank() == 0:
        print(f"sizes {state.sizes} worst {max(each[0] for each in everyones):.1e} resets {state.resets}")


if __name__ == "__main__":
    main()
