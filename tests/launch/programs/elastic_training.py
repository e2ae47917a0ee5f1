"""Training that loses ranks on the way: KILLS is step:rank,... of the world at that moment, each once.

The step is `begin` in the first commit.
Rank 0 writes what happened, a line of JSON for each step, to the file that is the first argument.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import BatchSampler, TensorDataset

import mpisgd

BATCH, STEPS_BETWEEN_COMMITS = 4, 5


def make_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def make_data() -> TensorDataset:
    torch.manual_seed(2)
    return TensorDataset(torch.randn(96, 6).double(), torch.randn(96, 1).double())


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model: torch.nn.Module, data: TensorDataset, indices: list[int]) -> torch.Tensor:
    inputs, targets = data[indices]
    return torch.nn.functional.mse_loss(model(inputs), targets)


def perish(kills: list[str], step: int | str, folder: Path) -> None:
    """Die here if that is planned, and has not been done."""
    plan = f"{step}:{mpisgd.rank()}"
    mark = folder / f"killed-{plan}"
    if plan in kills and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    path, options = Path(sys.argv[1]), os.environ
    kills, num_epochs = options.get("KILLS", "").split(","), 2
    mpisgd.init()
    model, data = make_model(), make_data()
    optimizer = mpisgd.DistributedOptimizer(
        make_optimizer(model),
        share_parameters="SHARE" in options,
        strategy=mpisgd.Sharded(int(options["STAGE"])) if "STAGE" in options else None,
    )
    sampler = mpisgd.elastic.ElasticSampler(data)
    own = {"tickets": torch.tensor([float(mpisgd.rank()), 0.0])}
    shared_out: dict[int, list[float]] = {}

    def get():
        if state.commits == 0:
            perish(kills, "begin", path.parent)
        return own["tickets"]

    def put(pieces):
        shared_out.clear()
        shared_out.update({rank: piece.tolist() for rank, piece in pieces.items()})
        mine = [piece for rank, piece in pieces.items() if rank % mpisgd.size() == mpisgd.rank()]
        own["tickets"] = torch.stack(mine).sum(0) if mine else torch.zeros(2)

    state = mpisgd.elastic.State(
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        tickets=mpisgd.elastic.PerRank(get, put),
        epoch=0,
        step=0,
        resets=[],
    )
    state.register_reset_callbacks([lambda: state.resets.append(mpisgd.size())])

    @mpisgd.elastic.run(regrow=options.get("REGROW") == "1", min_ranks=int(options.get("MIN_RANKS", 1)))
    def train(state):
        while state.epoch < num_epochs:
            for batch, indices in enumerate(BatchSampler(sampler, BATCH, drop_last=False)):
                perish(kills, state.step, path.parent)
                optimizer.zero_grad()
                loss = loss_of(model, data, indices)
                loss.backward()
                optimizer.step()
                own["tickets"][1] += 1
                sampler.record_batch(batch, BATCH)
                state.step += 1
                mean = loss.detach().clone()
                mpisgd.all_reduce(mean, op=mpisgd.ReduceOp.AVG)
                write({"step": state.step, "size": mpisgd.size(), "loss": mean.item()})
                if state.step % STEPS_BETWEEN_COMMITS == 0:
                    state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    def write(line):
        if mpisgd.rank() == 0:
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    train(state)
    total = own["tickets"].clone()
    mpisgd.all_reduce(total)
    metrics = {}
    if "MPISGD_METRICS_PORT" in options:
        time.sleep(1.5)  # until the others have added up
        metrics = mpisgd.metrics.read()
    end = {"end": state.step, "resets": state.resets, "shared_out": shared_out, "tickets": total.tolist()}
    write({**end, "metrics": metrics})


if __name__ == "__main__":
    main()
