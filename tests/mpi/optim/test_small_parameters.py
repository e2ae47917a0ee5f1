"""`Sharded` with many small tensors: they lie side by side, travel and are updated together."""

from __future__ import annotations

import itertools

import pytest
import torch
from harness import ADAM_DRIFT, FEATURES, Run, check_equal_runs, pair, plain_step
from test_sharded import STAGES, check_same_bits
from torch import nn
from verdicts import everyone, referee

import mpisgd

DEPTH = 12
CAP_BYTES = 2048  # several buckets, which with stage 2 take turns in the same memory


@pytest.fixture(autouse=True)
def way() -> str:
    """How gradients travel: together, as small ones do."""
    return "fused"


class Narrow(nn.Module):
    """Layers whose tensors end in the middle of a cache line."""

    def __init__(self):
        super().__init__()
        widths = [FEATURES, *(5 + layer % 3 for layer in range(DEPTH)), 2]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Biases without decay, as usual; so neighbours of one kind are not neighbours in the model."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    biases = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


def pieces_of(run: Run) -> list:
    return run.opt.synchronizer._parameters.pieces


@pytest.mark.parametrize("overlap", [None, True])
@pytest.mark.parametrize("stage", STAGES)
def test_the_bits_are_those_of_synchronous(stage, overlap):
    how = {"model": Narrow, "optimizer": two_groups, "bucket_cap_bytes": CAP_BYTES, "overlap": overlap}
    _, ours = check_same_bits(plain_step, stage, steps=6, **how)
    if mpisgd.size() > 1:
        pieces = referee().allgather(len(pieces_of(ours)))
        everyone(sum(pieces) < 2 * DEPTH, f"{pieces} pieces of {2 * DEPTH + 2} parameters")


@pytest.mark.parametrize("stage", STAGES)
def test_what_lies_between_them_counts_nothing(stage):
    """The norm of all gradients is that of one process, whatever was in the memory of a bucket before."""

    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        run.backward(step)
        clip = run.opt.clip_grad_norm_ if run.distributed else lambda most: norm_of(run, most)
        run.memory.setdefault("norms", []).append(float(clip(0.01)))
        run.opt.step()

    def norm_of(run: Run, most: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(run.model.parameters(), most)

    how = {"model": Narrow, "optimizer": two_groups, "bucket_cap_bytes": CAP_BYTES}
    plain, ours = check_equal_runs(body, tol=ADAM_DRIFT, strategy=mpisgd.Sharded(stage), **how)
    pairs = zip(plain.memory["norms"], ours.memory["norms"], strict=True)
    everyone(all(abs(a - b) <= 1e-12 for a, b in pairs), "the norms differ")


def test_a_parameter_that_shares_its_memory_stays_there():
    """Also if that is so on one rank only: the ranks divide alike."""
    seen: list[torch.Tensor] = []

    def prepare(model: nn.Module) -> nn.Module:
        if mpisgd.rank() == mpisgd.size() - 1:
            seen.append(model.layers[1].weight.data)
        return model

    _, run = pair(model=Narrow, optimizer=two_groups, prepare=prepare, strategy=mpisgd.Sharded())
    plain_step(run, 0)
    weight = run.model.layers[1].weight
    everyone(not seen or seen[-1].data_ptr() == weight.data_ptr())
    parts = [len(piece.members) for piece in pieces_of(run) if any(m.param == 1 for m in piece.members)]
    everyone(set(parts) <= {1}, f"{parts}")


def test_they_are_together_again_with_other_ranks():
    _, run = pair(model=Narrow, optimizer=two_groups, strategy=mpisgd.Sharded())
    plain_step(run, 0)
    before = [param.detach().clone() for param in run.model.parameters()]
    pieces = [len(piece.members) for piece in pieces_of(run)]
    run.opt.load_state_dict(run.opt.state_dict())
    run.opt.rebuild()
    everyone(all(map(torch.equal, before, run.model.parameters())))
    plain_step(run, 1)
    everyone(sum(pieces) == sum(len(piece.members) for piece in pieces_of(run)), f"{pieces}")


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_taken_away_leaves_the_others_alone(stage):
    """Also in the first step after a state was loaded, which cuts what had none off from what had one."""
    taken = (2, 5, 6)

    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        run.backward(step)
        for index, param in enumerate(run.model.parameters()):
            if index in taken and step % 2 == 0:
                param.grad = None
        if step == 2:
            run.opt.load_state_dict(run.opt.state_dict())
        run.opt.step()

    check_same_bits(body, stage, steps=1, model=Narrow, optimizer=two_groups)
    check_equal_runs(
        body, steps=5, tol=ADAM_DRIFT, model=Narrow, optimizer=two_groups, strategy=mpisgd.Sharded(stage)
    )
