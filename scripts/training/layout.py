"""The parallel layout of a job, `--parallel dp=2,tp=2,pp=2`, and its checks.

    dp    data parallel: each has its share of the batch
    tp    tensor parallel: each has a part of every layer's heads and columns
    pp    pipeline parallel: each has some of the layers

Ranks that talk the most are neighbours, so that they share a host: tp counts fastest, then dp, then pp. Eight
ranks, dp=2,tp=2,pp=2:

              pp 0                pp 1
            tp 0  tp 1          tp 0  tp 1
    dp 0     0     1             4     5
    dp 1     2     3             6     7
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mpisgd import JobError
from training.text_model import ModelSize

__all__ = ["AXES", "Layout", "check_fit", "parse_layout"]

AXES = ("dp", "tp", "pp")


@dataclass(frozen=True)
class Layout:
    """The number of ranks along each axis, and how much of a model's state is divided among those of dp.

    `zero` is 0: nothing, 1: the optimizer's state, 2: gradients too, 3: parameters too.
    """

    dp: int
    tp: int
    pp: int
    zero: int

    def __str__(self) -> str:
        """As --parallel takes it."""
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES)

    def mesh(self) -> DeviceMesh:
        """The ranks as a grid. Collective.

        dp is two axes in it: "shard" where parameters are divided, else "replicate"; the other has length 1.
        """
        replicate, shard = (1, self.dp) if self.zero == 3 else (self.dp, 1)
        names = ("pp", "replicate", "shard", "tp")
        return init_device_mesh("cpu", (self.pp, replicate, shard, self.tp), mesh_dim_names=names)


def parse_layout(text: str | None, zero: int, num_ranks: int) -> Layout:
    """The layout that --parallel and --zero ask for; all ranks along dp by default.

    Raises:
        JobError: no such layout, or not for this number of ranks.
    """
    lengths = {"dp": num_ranks} if text is None else read_lengths(text)
    lengths = {axis: lengths.get(axis, 1) for axis in AXES}
    if prod(lengths.values()) != num_ranks:
        product = " x ".join(map(str, lengths.values()))
        raise JobError(
            f"--parallel {text}: {product} = {prod(lengths.values())} ranks, but this job has {num_ranks}"
        )
    if zero == 1 and max(lengths["tp"], lengths["pp"]) > 1:
        raise JobError(f"--parallel {text}: --zero 1 goes with dp alone, as DDP does; --zero 3 goes with all")
    return Layout(**lengths, zero=zero)


def read_lengths(text: str) -> dict[str, int]:
    """The lengths of the axes that --parallel names."""
    lengths: dict[str, int] = {}
    for item in text.split(","):
        axis, _, length = item.strip().partition("=")
        if axis not in AXES or not length.isdecimal() or int(length) < 1:
            raise JobError(f"--parallel {text}: {item.strip()!r} is none of dp=N, tp=N, pp=N")
        if axis in lengths:
            raise JobError(f"--parallel {text} names {axis} twice")
        lengths[axis] = int(length)
    return lengths


def check_fit(layout: Layout, size: ModelSize, batch_size: int, num_micro_batches: int) -> None:
    """Raise JobError where a model or a batch cannot be divided so."""
    if size.dim % size.num_heads:
        raise JobError(f"--dim {size.dim} does not divide by --heads {size.num_heads}")
    if size.num_heads % layout.tp:
        raise JobError(f"--heads {size.num_heads} cannot be divided among tp={layout.tp} ranks")
    if size.num_layers < layout.pp:
        raise JobError(f"--layers {size.num_layers} is less than one for each of pp={layout.pp} stages")
    if batch_size % (layout.dp * num_micro_batches):
        raise JobError(
            f"--batch-size {batch_size} is for the whole job and must divide by "
            f"dp={layout.dp} x {num_micro_batches} micro-batch{'es' * (num_micro_batches > 1)}"
        )
    if num_micro_batches < layout.pp:
        raise JobError(
            f"--accumulate {num_micro_batches}: a pipeline of {layout.pp} stages needs {layout.pp} "
            "micro-batches or more"
        )
