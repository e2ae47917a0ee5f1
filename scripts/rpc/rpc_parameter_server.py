"""A parameter server over RPC: rank 0 has the parameters, the other ranks compute gradients.

    mpirun -n 3 python scripts/rpc/rpc_parameter_server.py

    worker 1    gradient of its digits  --push-->                                         --> new parameters
                                                   rank 0: sum, one step of the optimizer
    worker 2    gradient of its digits  --push-->                                         --> new parameters

A push is answered when all workers have pushed and the step is done, so this is synchronous SGD: any number
of workers gives the same losses. While it waits a push occupies no thread of the server (`async_execution`).
"""

import threading

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.futures import Future

import mpisgd
from mpisgd import rpc

EPOCHS, BATCH, LEARNING_RATE = 3, 64, 0.5


def make_model() -> nn.Module:
    """Return the model: the same parameters on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()


class ParameterServer:
    """The parameters, and the gradients that have come for the next step. Lives on rank 0."""

    def __init__(self, num_workers: int) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        self.num_workers = num_workers
        self.num_pushed = 0
        self.lock = threading.Lock()
        self.step_done: Future[list[Tensor]] = Future()

    @staticmethod
    @rpc.functions.async_execution
    def push(server: rpc.RRef, gradients: list[Tensor]) -> Future[list[Tensor]]:
        """Add a worker's gradients; the future has the parameters after the step, once all have pushed."""
        self: ParameterServer = server.local_value()
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            self.num_pushed += 1
            step_done = self.step_done
            if self.num_pushed == self.num_workers:
                self._step()
        return step_done

    def _step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        done, self.step_done, self.num_pushed = self.step_done, Future(), 0
        done.set_result([parameter.detach().clone() for parameter in self.model.parameters()])


def train(server: rpc.RRef, worker: int, num_workers: int) -> list[float]:
    """Train on every `num_workers`-th image of each batch. Called on each worker, by rank 0.

    Returns:
        This worker's part of the loss of each epoch.
    """
    model, (images, labels) = make_model(), digits()
    losses = []
    for _ in range(EPOCHS):
        losses.append(0.0)
        for start in range(0, len(images), BATCH):
            batch = slice(start, start + BATCH)
            mine = images[batch][worker::num_workers], labels[batch][worker::num_workers]
            loss = nn.functional.cross_entropy(model(mine[0]), mine[1], reduction="sum") / len(images[batch])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            parameters = rpc.rpc_sync(server.owner(), ParameterServer.push, (server, gradients))
            nn.utils.vector_to_parameters(
                torch.cat([new.flatten() for new in parameters]), model.parameters()
            )
            losses[-1] += loss.item() * len(images[batch]) / len(images)
    return losses


def digits() -> tuple[Tensor, Tensor]:
    """Return images [n, 64] and labels [n]."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images) / 16, torch.from_numpy(labels)


def main() -> None:
    """Call `train` on all workers, and print the losses."""
    num_workers = mpisgd.size() - 1
    if num_workers < 1:
        raise mpisgd.JobError("a server needs workers: start this with mpirun -n 2 or more")
    rpc.init_rpc()
    if mpisgd.rank() == 0:
        server = rpc.RRef(ParameterServer(num_workers))
        calls = [rpc.rpc_async(i + 1, train, (server, i, num_workers)) for i in range(num_workers)]
        for epoch, parts in enumerate(zip(*(call.wait() for call in calls), strict=True)):
            print(f"epoch {epoch}: loss {sum(parts):.6f}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main()
