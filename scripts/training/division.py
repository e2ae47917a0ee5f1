"""How the work is divided among the ranks, as the options say, and which of them do not go together.

--parallel, --zero 0 1 3          axes of ranks, by torch (cp: training_pass.py)        parallelize.py
--strategy, --compression         the whole model on every rank                         methods.py
--zero 2, --offload               the same, with divided gradients and optimizer state  methods.py
--pipeline                        stages by a schedule of mpisgd.pipeline               training_pass.py
--layout, --mesh                  tensors by the names of their dimensions              training_pass.py
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import mpisgd
from training.layout import Layout, parse_layout
from training.methods import Method, read_method
from training.training_pass import ScheduleName


class Zero(str, Enum):
    """What --zero takes."""

    nothing = "0"
    optimizer = "1"
    gradients = "2"
    parameters = "3"


@dataclass(frozen=True)
class Division:
    """How the work is divided among the ranks.

    Attributes:
        layout: of --parallel and --zero.
        method: of --strategy, --compression and --zero 2.
        schedule: of --pipeline.
        mesh_layout: of --layout and --mesh.
        num_micro_batches: of each rank and step.
        recompute: whether activations are computed again in backward.
        drops_layers: whether steps pass over layers.
    """

    layout: Layout
    method: Method
    schedule: ScheduleName | None
    mesh_layout: mpisgd.MeshLayout | None
    num_micro_batches: int
    recompute: bool
    drops_layers: bool

    def __str__(self) -> str:
        """As the line above the steps says it."""
        if self.mesh_layout is not None:
            return f"layout {self.mesh_layout}"
        return f"{self.layout}, {self.schedule.value if self.schedule else f'zero {self.layout.zero}'}"


def choose_layout(
    parallel: str | None, zero: Zero, pipeline: ScheduleName | None, layout_rules: str | None
) -> Layout:
    """The axes of the job's ranks: all along dp by default, or along pp with --pipeline."""
    if layout_rules is not None:
        return Layout(dp=1, tp=1, pp=1, zero=int(zero.value))  # the mesh has axes of its own
    if pipeline is not None and parallel is None:
        parallel = f"pp={mpisgd.size()}"
    return parse_layout(parallel, int(zero.value), mpisgd.size())


def choose_method(strategy: str, compression: str, zero: Zero, offload: Path | None) -> Method:
    """How the ranks train together; --zero 2 is mpisgd's own sharding, the others are torch's."""
    if zero is not Zero.gradients:
        if offload is not None:
            raise mpisgd.JobError("--offload goes with --zero 2")
        return read_method(strategy, compression)
    if read_method(strategy, compression) != read_method("Synchronous", "none"):
        raise mpisgd.JobError("--zero 2 is a strategy of its own; leave out --strategy and --compression")
    on_disk = None if offload is None else mpisgd.Offload(offload)
    return Method(mpisgd.Sharded(stage=2, offload=on_disk), mpisgd.Compression.none)


def check_division(division: Division, parallel: str | None) -> None:
    """Raise JobError where the options do not go together; `parallel`: what --parallel says."""
    check_own_division(division, parallel)
    check_method(division.method, division.layout)


def check_method(method: Method, layout: Layout) -> None:
    """A strategy and a compression want the whole model on every rank, and the same one with cp."""
    goes_with_context = method.strategy.goes_with.context_parallel
    if layout.cp > 1 and not goes_with_context.goes:
        raise mpisgd.JobError(
            f"--strategy {method.strategy} does not go with --parallel {layout}: {goes_with_context.words}"
        )
    if method.is_default or (layout.zero in (0, 2) and layout.tp == layout.pp == 1):
        return
    divided = f"--zero {layout.zero}" if layout.zero in (1, 3) else f"--parallel {layout}"
    raise mpisgd.JobError(
        f"--strategy, --compression and --zero 2 go with the whole model on every rank, not with {divided}"
    )


def check_own_division(division: Division, parallel: str | None) -> None:
    """--pipeline and --layout divide in ways of their own.

    Raises:
        JobError: something else was asked for that does not go with them.
    """
    option = "--pipeline" if division.schedule else "--layout" if division.mesh_layout else ""
    if not option:
        return
    if division.schedule and division.mesh_layout:
        raise mpisgd.JobError("--pipeline and --layout do not go together: one of them divides the model")
    if division.layout.zero or not division.method.is_default:
        raise mpisgd.JobError(f"{option} goes without --zero, --strategy and --compression")
    if option == "--layout" and parallel is not None:
        raise mpisgd.JobError("--layout goes with --mesh instead of --parallel")
    if option == "--layout" and division.recompute:
        raise mpisgd.JobError("--checkpoint-activations does not go with --layout, but with --parallel tp=N")
    if option == "--pipeline":
        check_stages(division)


def check_stages(division: Division) -> None:
    """Raise JobError where the ranks cannot be the stages of --pipeline."""
    layout, schedule = division.layout, division.schedule
    if max(layout.tp, layout.cp) > 1 or layout.pp == 1:
        raise mpisgd.JobError(
            f"--pipeline {schedule.value}: {layout}; expected two stages or more, and tp=1, cp=1"
        )
    if division.drops_layers:
        raise mpisgd.JobError(
            "--layer-dropping goes with --parallel pp=N: it passes over other layers in each step, and those "
            "of --pipeline overlap"
        )
