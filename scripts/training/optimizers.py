"""`--optimizer` of `train_text.py`: what updates the parameters.

    --optimizer adamw    in every layout
    --optimizer muon     matrices by Muon, each by one rank; the rest by AdamW
    --optimizer dion     matrices by Dion, of which the ranks send two narrow factors; the rest by AdamW

docs/how-to/muon.md has both. They are for whole models on all ranks.
"""

from enum import Enum
from typing import Annotated

import typer
from torch import nn
from torch.optim import AdamW, Optimizer

import mpisgd
from training.division import Division
from training.methods import Method

REST = ("embedding", "head")  # of the GPT: what AdamW updates although it has matrices


class OptimizerName(str, Enum):
    """What --optimizer takes."""

    adamw = "adamw"
    muon = "muon"
    dion = "dion"


OptimizerOption = Annotated[
    OptimizerName, typer.Option(help="What updates the parameters; muon, dion: matrices, AdamW the rest.")
]


def method_for(name: OptimizerName, division: Division) -> Method:
    """How ranks train together with an optimizer: with Muon they divide its work, unless a method is given.

    Raises:
        JobError: the model is divided, or Dion, which averages by itself, is to be combined with a method.
    """
    method, layout = division.method, division.layout
    if name is OptimizerName.adamw:
        return method
    is_divided = division.schedule or division.mesh_layout or layout.tp > 1 or layout.pp > 1
    if is_divided or layout.zero not in (0, 2):
        raise mpisgd.JobError(
            f"--optimizer {name.value} goes with the whole model on every rank: leave out --pipeline, "
            "--layout, tp and pp, and take --zero 0 or 2"
        )
    if name is OptimizerName.dion and not (method.is_default and division.num_micro_batches == 1):
        raise mpisgd.JobError(
            "--optimizer dion averages by itself: leave out --strategy, --compression, --zero, --accumulate"
        )
    if name is OptimizerName.muon and method.is_default:
        return Method(mpisgd.Sharded(stage=1), method.compression)
    return method


def make_optimizer(name: OptimizerName, model: nn.Module, lr: float) -> Optimizer:
    """The optimizer of a whole model; Dion's is made by all ranks together."""
    if name is OptimizerName.muon:
        return mpisgd.MuonWithAdamW(model.named_parameters(), lr=lr, adamw=REST)
    if name is OptimizerName.dion:
        return mpisgd.Dion(model.named_parameters(), lr=lr, adamw=REST)
    return AdamW(model.parameters(), lr=lr)
