"""What the ranks of a pipeline tell each other of a batch before a step, so that all know its rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpisgd.errors import InvalidArgument
from mpisgd.pipeline.micro_batches import RowSpec, as_tensors, num_rows_of, row_counts, spec_of

__all__ = ["BatchSpec", "agreed_batch", "check_as_before", "own_batch"]

MOST_TEXT = 400  # characters of a problem


class BatchSpec(NamedTuple):
    """What a rank says of its batch.

    Attributes:
        problem: what is wrong with it, or "".
        num_rows: of the inputs, on the first stage; None elsewhere.
        inputs: what is the same in all batches, on the first stage.
        num_targets: rows of the targets, on the last stage.
        form: of the rank's parameters: what its messages may depend on beside the inputs.
    """

    problem: str = ""
    num_rows: int | None = None
    inputs: RowSpec | None = None
    num_targets: int | None = None
    form: int = 0

    def has_other_inputs(self, other: "BatchSpec") -> bool:
        """Return whether messages may have other shapes."""
        return (self.num_rows, self.inputs) != (other.num_rows, other.inputs)


def own_batch(
    inputs: Any, targets: Any, *, has_inputs: bool, has_targets: bool, num_micro_batches: int
) -> BatchSpec:
    """Return the specification of this rank's batch; raises nothing.

    Args:
        inputs: of the model.
        targets: of the loss.
        has_inputs: whether the inputs are used here.
        has_targets: whether the targets are.
        num_micro_batches: which each need a row.
    """
    num_rows = spec = num_targets = None
    try:
        if has_inputs:
            tensors = as_tensors("inputs", inputs)
            num_rows, spec = num_rows_of(tensors), spec_of(tensors)
            row_counts(num_rows, num_micro_batches)
        if has_targets:
            num_targets = num_rows_of(as_tensors("targets", targets))
    except InvalidArgument as exc:
        return BatchSpec(str(exc)[:MOST_TEXT])
    return BatchSpec("", num_rows, spec, num_targets)


def agreed_batch(told: Sequence[BatchSpec], ranks: Sequence[int]) -> BatchSpec:
    """Return the batch of all ranks, from what each of `ranks` has told.

    Raises:
        InvalidArgument: it does not fit together; the same on all ranks.
    """
    problems = [
        f"rank {rank}: {spec.problem}" for rank, spec in zip(ranks, told, strict=True) if spec.problem
    ]
    if problems:
        raise InvalidArgument("; ".join(problems))
    first = next(spec for spec in told if spec.num_rows is not None)
    for rank, spec in zip(ranks, told, strict=True):
        if spec.num_rows is not None and spec.has_other_inputs(first):
            raise InvalidArgument(
                f"pipeline: rank {rank} has {spec.num_rows} rows of {spec.inputs}, the first one "
                f"{first.num_rows} of {first.inputs}; all ranks of the first stage give the whole batch"
            )
        if spec.num_targets not in (None, first.num_rows):
            raise InvalidArgument(
                f"pipeline: {first.num_rows} rows of inputs, {spec.num_targets} of targets on rank {rank}"
            )
    return first


def check_as_before(mine: BatchSpec, before: BatchSpec) -> None:
    """Raise unless this rank's batch is as the last ones, where the pipeline is not empty.

    Raises:
        InvalidArgument: it has another number of rows, or rows of another shape.
    """
    inputs_differ = mine.inputs is not None and mine.has_other_inputs(before)
    if mine.problem or inputs_differ or mine.num_targets not in (None, before.num_rows):
        raise InvalidArgument(
            mine.problem
            or f"pipeline: this batch has {mine.num_rows or mine.num_targets} rows, of inputs {mine.inputs}; "
            f"those before had {before.num_rows}, {before.inputs}; call flush() before another size comes"
        )
