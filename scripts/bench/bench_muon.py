"""A training step of a GPT whose matrices Muon updates: the work divided, and repeated by every rank.

    mpirun -np 4 --oversubscribe python scripts/bench/bench_muon.py

All variants train the GPT of `train_text.py` on the same tokens, its matrices by torch's Muon and the rest by
AdamW. Those of FSDP2 have torch's Muon on what `fully_shard` makes of the parameters, or one that gathers
whole matrices first, which is faster; over mpisgd's backend, and on gloo. Measured as `mpisgd bench` does:
interleaved, every result checked first; read the ratios.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from timed_record import JsonFile, tell
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.optim._muon import _zeropower_via_newtonschulz as orthogonal

import mpisgd
from mpisgd.sharding.update_work import matrix_work
from mpisgd.tools.bench.measure import Pace, Timed, WrongResult, measure
from mpisgd.tools.bench.torch_parallel import group_on_mpisgd
from mpisgd.tools.cli.program import run_program

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from training.text_model import VOCABULARY, ModelSize, build_model, mean_loss

app = typer.Typer(add_completion=False)

REST = ("embedding", "head")  # what AdamW updates
FSDP2 = "FSDP2, gathered"  # what is compared with: over mpisgd, each rank orthogonalizes all
LR = 2e-3
TOLERANCE = 0.2  # of the length of a change: what bfloat16 rounds is made as large as all else


class Muon(mpisgd.MuonWithAdamW):
    """Notes how much this rank has to orthogonalize."""

    work = 0.0

    def step(self, closure: Any = None) -> Any:
        """Update what the optimizer sees."""
        self.work = sum(
            matrix_work(param.shape, group["ns_steps"])
            for group in self.param_groups
            if group["algorithm"] == "muon"
            for param in group["params"]
        )
        return super().step(closure)


class GatheredMuon(torch.optim.Muon):
    """Muon on what `fully_shard` makes: each rank gathers whole matrices, and orthogonalizes all of them.

    torch's own divides every product of the iteration among the ranks, which takes many collectives.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            mu, lr = group["momentum"], group["lr"]
            for param in group["params"]:
                buffer = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                buffer.lerp_(param.grad, 1 - mu)
                whole = param.grad.lerp(buffer, mu).full_tensor()
                update = orthogonal(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
                param.mul_(1 - lr * group["weight_decay"])
                mine = distribute_tensor(
                    update.to(param.dtype), param.device_mesh, param.placements, src_data_rank=None
                )
                param.add_(mine, alpha=-0.2 * lr * max(whole.shape) ** 0.5)


class Step:
    """One variant: a model on this rank's tokens, with its optimizers."""

    def __init__(self, size: ModelSize, batch: int) -> None:
        self.model: nn.Module = build_model(size, 1)
        draw = torch.Generator().manual_seed(mpisgd.rank())
        self.tokens = torch.randint(VOCABULARY, (batch, size.context + 1), generator=draw)
        self.optimizers: list[Any] = []
        self.expected: list[Tensor] | None = None
        self.first = [param.detach().clone() for param in self.model.parameters()]

    def call(self) -> None:
        """Train a step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        mean_loss(self.model(self.tokens[:, :-1]), self.tokens[:, 1:]).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def parameters(self) -> list[Tensor]:
        """Whole parameters, on every rank. Collective."""
        found = [param.detach() for param in self.model.parameters()]
        return [param.full_tensor() if hasattr(param, "full_tensor") else param.clone() for param in found]

    def verify(self) -> None:
        """Raise where the first step was not that of all ranks without a division of the work."""
        assert self.expected is not None
        for mine, right, before in zip(self.parameters(), self.expected, self.first, strict=True):
            if (mine - right).norm() > TOLERANCE * (right - before).norm() + 1e-6:
                raise WrongResult(f"a parameter is off by {(mine - right).abs().max():.1e}")


class Checked(Timed):
    """A variant whose first step is looked at."""

    def __init__(self, name: str, step: Step, *, ours: bool = False) -> None:
        super().__init__(name, step.call, start=dist.barrier, ours=ours)
        self._first = step

    def check(self) -> None:
        """Take the first step. Collective."""
        self._first.call()
        self._first.verify()


def divided(size: ModelSize, batch: int, **options: Any) -> Step:
    """A step of `DistributedOptimizer`."""
    step = Step(size, batch)
    muon = Muon(step.model.named_parameters(), lr=LR, adamw=REST)
    names = step.model.named_parameters()
    step.optimizers = [mpisgd.DistributedOptimizer(muon, named_parameters=names, **options)]
    return step


def fully_sharded(size: ModelSize, batch: int, mesh: DeviceMesh, muon: Any) -> Step:
    """A step of FSDP2, with torch's optimizers, or `GatheredMuon`."""
    step = Step(size, batch)
    for block in step.model.blocks.values():  # type: ignore[union-attr,operator]
        fully_shard(block, mesh=mesh)
    fully_shard(step.model, mesh=mesh)
    named = dict(step.model.named_parameters())
    matrices = [p for n, p in named.items() if p.dim() == 2 and n.split(".")[0] not in REST]
    rest = [p for p in named.values() if not any(p is matrix for matrix in matrices)]
    step.optimizers = [
        muon(matrices, lr=LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=LR, weight_decay=0.1, betas=(0.9, 0.95)),
    ]
    return step


def expected(size: ModelSize, batch: int) -> list[Tensor]:
    """The parameters after a step in which every rank updates everything. Collective."""
    step = divided(size, batch)
    step.call()
    return step.parameters()


@app.command()
def main(
    layers: Annotated[int, typer.Option(min=1, help="transformer layers")] = 4,
    dim: Annotated[int, typer.Option(min=4, help="hidden dimension")] = 256,
    context: Annotated[int, typer.Option(min=1, help="bytes of a sequence")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="sequences of a rank")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="measured rounds")] = 15,
    json_file: JsonFile = None,
) -> None:
    """Measure training steps by Muon, with the work divided and with the work repeated."""
    mpisgd.init()
    size = ModelSize(layers, 4, dim, context)
    with group_on_mpisgd(True):
        right = expected(size, batch)
        ours, gloo = (
            DeviceMesh.from_group(group, "cpu")
            for group in (dist.group.WORLD, dist.new_group(backend="gloo"))
        )
        makers: dict[str, Callable[[], Step]] = {
            "FSDP2 on gloo, torch's Muon": lambda: fully_sharded(size, batch, gloo, torch.optim.Muon),
            "FSDP2, torch's Muon": lambda: fully_sharded(size, batch, ours, torch.optim.Muon),
            "FSDP2 on gloo, gathered": lambda: fully_sharded(size, batch, gloo, GatheredMuon),
            FSDP2: lambda: fully_sharded(size, batch, ours, GatheredMuon),
            "Synchronous": lambda: divided(size, batch),
            "Sharded(1)": lambda: divided(size, batch, strategy=mpisgd.Sharded(1)),
            "Sharded(2)": lambda: divided(size, batch, strategy=mpisgd.Sharded(2)),
            "share_parameters": lambda: divided(size, batch, share_parameters=True),
        }
        steps = {name: make() for name, make in makers.items()}
        for step in steps.values():
            step.expected = right
        variants = [Checked(name, step, ours="FSDP2" not in name) for name, step in steps.items()]
        measured = measure(variants, Pace(repeats, repeats, 0.0, turn_s=0.5, max_calls=10))
        shares = {name: largest_share(step) for name, step in steps.items() if "FSDP2" not in name}
    what = f"GPT of {layers} x {dim}, batch {batch} x {mpisgd.size()}"
    seconds = measured.seconds
    if FSDP2 not in seconds:
        raise mpisgd.JobError(f"{FSDP2}: {measured.left_out[FSDP2]}", exit_code=1)
    tell("muon", what, seconds, FSDP2, json_file, shares=shares)
    if mpisgd.rank() == 0:
        for name, share in shares.items():
            print(f"{name}: the most that a rank orthogonalizes is {share:.2f} x an even share")


def largest_share(step: Step) -> float:
    """The most that a rank orthogonalizes, times the number of ranks, of all that there is. Collective."""
    everyones: list[float] = [0.0] * mpisgd.size()
    mpisgd.all_gather_object(everyones, step.optimizers[0].work)
    named = step.model.named_parameters()
    whole = [p for n, p in named if p.dim() == 2 and n.split(".")[0] not in REST]
    return max(everyones) * mpisgd.size() / sum(matrix_work(param.shape, 5) for param in whole)


if __name__ == "__main__":
    run_program(app)
