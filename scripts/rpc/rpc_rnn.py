"""A recurrent network on two ranks: distributed autograd and its optimizer.

    mpirun -n 2 python scripts/rpc/rpc_rnn.py

                rank 1                 rank 0               rank 1
    text  -->  embedding  --vectors-->  LSTM  --states-->  decoder  -->  the next character

Rank 0 has the loop. The network learns to continue this file, character by character. `backward` goes the way
back over both ranks, and on each rank an optimizer takes a step with the parameters that are there.
"""

from pathlib import Path

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd import rpc

CHARACTERS, WIDTH, LENGTH, BATCH, STEPS = 128, 64, 32, 16, 60


class SplitRNN(nn.Module):
    """The network: its recurrent layer here, the others on another rank."""

    def __init__(self, there: str) -> None:
        super().__init__()
        self.embedding = rpc.remote(there, nn.Embedding, (CHARACTERS, WIDTH))
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.decoder = rpc.remote(there, nn.Linear, (WIDTH, CHARACTERS))

    def forward(self, text: Tensor) -> Tensor:
        """Return scores [batch, length, CHARACTERS] for what comes after each character of `text`."""
        states, _ = self.lstm(self.embedding.rpc_sync().forward(text))
        scores: Tensor = self.decoder.rpc_sync().forward(states)
        return scores

    def parameter_references(self) -> list[rpc.RRef]:
        """Return references to all parameters, here and there."""
        found = [rpc.RRef(parameter) for parameter in self.lstm.parameters()]
        for part in (self.embedding, self.decoder):
            found += rpc.rpc_sync(part.owner(), references, (part,))
        return found


def references(module: rpc.RRef) -> list[rpc.RRef]:
    """Return references to the parameters of a module of this rank. Called by the other rank."""
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


def batches() -> Tensor:
    """Return STEPS batches of pieces of this file, [STEPS, BATCH, LENGTH + 1]."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    starts = torch.randint(len(text) - LENGTH - 1, (STEPS, BATCH, 1))
    return text[starts + torch.arange(LENGTH + 1)]


def train(there: str) -> None:
    """Train; print a loss now and then."""
    model = SplitRNN(there)
    optimizer = rpc.DistributedOptimizer(torch.optim.Adam, model.parameter_references(), lr=0.02)
    for step, text in enumerate(batches()):
        with rpc.dist_autograd.context() as context:
            scores = model(text[:, :-1])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
            rpc.dist_autograd.backward(context, [loss])
            optimizer.step(context)
        if step % 20 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    """Start RPC on both ranks; rank 0 trains."""
    if mpisgd.size() != 2:
        raise mpisgd.JobError("this network has two parts: start this with mpirun -n 2")
    torch.manual_seed(mpisgd.rank())
    rpc.init_rpc(("recurrent", "embedding_and_decoder")[mpisgd.rank()])
    if mpisgd.rank() == 0:
        train("embedding_and_decoder")
    rpc.shutdown()


if __name__ == "__main__":
    main()
