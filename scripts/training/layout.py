"""The parallel layout of a job, `--parallel dp=2,tp=2,pp=2`, and its checks.

    dp    data parallel: each has its share of the batch
    cp    context parallel: each has a part of every sequence
    tp    tensor parallel: each has a part of every layer's heads and columns
    pp    pipeline parallel: each has some of the layers

Ranks that talk the most are neighbours, so that they share a host: tp counts fastest, then cp, dp, pp. Eight
ranks, dp=2,tp=2,pp=2:

              pp 0                pp 1
            tp 0  tp 1          tp 0  tp 1
    dp 0     0     1             4     5
    dp 1     2     3             6     7
"""

from dataclasses import dataclass
from math import prod

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mpisgd import JobError
from training.text_model import ModelSize

AXES = ("dp", "cp", "tp", "pp")


@dataclass(frozen=True)
class Layout:
    """The number of ranks along each axis, and how much of a model's state is divided among those of dp.

    `zero` is 0: nothing, 1: the optimizer's state, 2: gradients too, 3: parameters too.
    """

    dp: int
    tp: int
    pp: int
    zero: int
    cp: int = 1

    def __str__(self) -> str:
        """As --parallel takes it."""
        return ",".join(f"{axis}={length}" for axis, length in self.lengths.items())

    @property
    def lengths(self) -> dict[str, int]:
        """The number of ranks along each axis; cp where there are several."""
        return {axis: getattr(self, axis) for axis in AXES if axis != "cp" or self.cp > 1}

    @property
    def num_averaging(self) -> int:
        """How many ranks average the gradients of a parameter: each sees other places of the batch."""
        return self.dp * self.cp

    def mesh(self) -> DeviceMesh:
        """The ranks as a grid. Collective.

        dp and cp are two axes in it: "shard" where parameters are divided, else "replicate"; the other has
        length 1.
        """
        replicate, shard = (1, self.num_averaging) if self.zero == 3 else (self.num_averaging, 1)
        names = ("pp", "replicate", "shard", "tp")
        return init_device_mesh("cpu", (self.pp, replicate, shard, self.tp), mesh_dim_names=names)

    def context_mesh(self) -> DeviceMesh:
        """The ranks that share this rank's sequences. Collective."""
        names = ("pp", "dp", "cp", "tp")
        return init_device_mesh("cpu", (self.pp, self.dp, self.cp, self.tp), mesh_dim_names=names)["cp"]


def parse_layout(text: str | None, zero: int, num_ranks: int) -> Layout:
    """The layout that --parallel and --zero ask for; all ranks along dp by default.

    Raises:
        JobError: no such layout, or not for this number of ranks.
    """
    lengths = {"dp": num_ranks} if text is None else read_lengths(text)
    layout = Layout(**{axis: lengths.get(axis, 1) for axis in AXES}, zero=zero)
    if (product := prod(layout.lengths.values())) != num_ranks:
        factors = " x ".join(map(str, layout.lengths.values()))
        raise JobError(f"--parallel {text}: {factors} = {product} ranks, but this job has {num_ranks}")
    if zero == 1 and max(layout.tp, layout.pp) > 1:
        raise JobError(f"--parallel {text}: --zero 1 goes with dp alone, as DDP does; --zero 3 goes with all")
    if layout.cp > 1 and layout.pp > 1:
        raise JobError(f"--parallel {text}: cp goes with dp and tp, and has not been tried with pp")
    return layout


def read_lengths(text: str) -> dict[str, int]:
    """The lengths of the axes that --parallel names."""
    lengths: dict[str, int] = {}
    for item in text.split(","):
        axis, _, length = item.strip().partition("=")
        if axis not in AXES or not length.isdecimal() or int(length) < 1:
            raise JobError(f"--parallel {text}: {item.strip()!r} is none of dp=N, cp=N, tp=N, pp=N")
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
    if layout.cp > 1 and size.context % (2 * layout.cp):
        raise JobError(f"--context {size.context} must divide by 2 x cp={layout.cp}")
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
