"""A user's program, for `mypy --strict` with the installed package: its types are those that users see."""

import torch
from torch import Tensor, nn
from torch.optim.sgd import SGD  # torch.optim itself has no types for it before 2.5

import mpisgd
from mpisgd import checkpoint, elastic


def losses_of(model: nn.Module, optimizer: mpisgd.DistributedOptimizer, inputs: Tensor) -> list[float]:
    found: list[float] = []
    for _ in range(2):
        optimizer.zero_grad()
        loss: Tensor = model(inputs).square().mean()
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]  # torch's own before 2.6
        optimizer.step()
        found.append(loss.item())
    return found


def collectives(tensor: Tensor) -> Tensor:
    group: mpisgd.Group = mpisgd.new_group([0])
    work: mpisgd.Work | None = mpisgd.all_reduce(tensor, mpisgd.ReduceOp.SUM, async_op=True)
    if work is not None:
        work.wait()
    if group.rank >= 0:
        mpisgd.broadcast(tensor, src=0, group=group)
    mpisgd.barrier()
    return tensor


def strategies(model: nn.Module) -> list[mpisgd.DistributedOptimizer]:
    described: list[mpisgd.Strategy] = [mpisgd.Synchronous(), mpisgd.LocalSGD(sync_every=4), mpisgd.Gossip()]
    return [
        mpisgd.DistributedOptimizer(
            SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            strategy=strategy,
        )
        for strategy in described
    ]


def main() -> None:
    mpisgd.init()
    model = nn.Linear(4, 2)
    mpisgd.broadcast_parameters(model)
    optimizer = mpisgd.DistributedOptimizer(
        SGD(model.parameters(), lr=0.1), compression=mpisgd.compress.TopK(ratio=0.5)
    )
    state = elastic.State(model=model, optimizer=optimizer, step=0)
    state.commit()
    losses_of(model, optimizer, torch.randn(8, 4))
    preemption = checkpoint.on_preemption()
    if preemption.agreed():
        checkpoint.save("runs/a", 2, model=model, optimizer=optimizer)
        preemption.exit()
    rank: int = mpisgd.rank()
    print(rank, mpisgd.size())


if __name__ == "__main__":
    main()
