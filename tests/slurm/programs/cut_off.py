"""Elastic training whose last node is cut off on the way, compared with one process that knows when."""

import socket
import subprocess

import torch

import mpisgd
from mpisgd import elastic

STEPS, STEPS_BETWEEN_COMMITS, CUT = 20, 5, 7
INPUTS = torch.randn(60, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def make_model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(8, 1).double()


def loss_of(model: torch.nn.Linear, rank: int, size: int) -> torch.Tensor:
    return model(INPUTS[rank::size]).square().mean()


def trained_alone(sizes: list[int]) -> torch.nn.Linear:
    """The model after one step for each number of ranks, whose gradients are averaged."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for size in sizes:
        optimizer.zero_grad()
        (sum(loss_of(model, rank, size) for rank in range(size)) / size).backward()
        optimizer.step()
    return model


def main() -> None:
    mpisgd.init()
    model, started = make_model(), mpisgd.size()
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    state = elastic.State(model=model, optimizer=optimizer, step=0)

    @elastic.run
    def train(state: elastic.State) -> None:
        while state.step < STEPS:
            if state.step == CUT and socket.gethostname() == "node3":
                subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
            optimizer.zero_grad()
            loss_of(model, mpisgd.rank(), mpisgd.size()).backward()
            optimizer.step()
            state.step += 1
            if state.step % STEPS_BETWEEN_COMMITS == 0:
                state.commit()

    train(state)
    lost_from = CUT - CUT % STEPS_BETWEEN_COMMITS
    alone = trained_alone([started] * lost_from + [mpisgd.size()] * (STEPS - lost_from))
    worst = max(
        (a - b).abs().max().item() for a, b in zip(model.parameters(), alone.parameters(), strict=True)
    )
    print(f"rank {mpisgd.rank()} of {started}, then {mpisgd.size()}: off by {worst:.1e}", flush=True)


if __name__ == "__main__":
    main()
