"""`choose_compression`: which compressor reduces gradients of these shapes fastest on this link.

Predicted from a trial: a sample of the model's parameters gets random gradients, which are reduced by the
code that reduces those of the model.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.collectives.all_reduce import all_reduce
from mpisgd.compress.compressor import Choosing, Compressor
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import UnsupportedOp, UnsupportedTensor
from mpisgd.gradients.options import ReductionOptions
from mpisgd.gradients.reducer import GradientReducer
from mpisgd.standard_error import print_to_user
from mpisgd.threads.scheduling import now_s

__all__ = ["Choice", "Trial", "choose_compression", "sample_shapes", "with_chosen_compression"]

SAMPLE_BYTES = 2 * 2**20
ROUNDS = 3  # after one that makes plans and first touches memory
ENOUGH_S = 0.5  # of a candidate's rounds


class Choice(NamedTuple):
    """What was measured, and chosen.

    Attributes:
        compressor: the chosen one.
        nbytes: of all gradients.
        seconds: what one reduction of all gradients is predicted to take with each candidate.
    """

    compressor: Compressor
    nbytes: int
    seconds: dict[Compressor, float]

    def __str__(self) -> str:
        found = ", ".join(f"{each.short_name} {1e3 * s:.3g} ms" for each, s in self.seconds.items())
        first = next(iter(self.seconds))
        pays = "no other one clearly pays" if self.compressor == first else "it is clearly faster"
        return (
            f"compression='auto' takes {self.compressor.short_name}: {pays}. Predicted for a reduction of "
            f"{self.nbytes / 2**20:.3g} MiB of gradients: {found}"
        )


class Trial:
    """Gradients of a sample of parameters, which are reduced to see what that takes.

    Args:
        params: of the model; those that are not trained, or not floating, do not count.
        group: the ranks.
        options: how gradients are to be reduced.

    Attributes:
        nbytes: of the gradients of all parameters.
    """

    def __init__(self, params: Sequence[Tensor], group: Group, options: ReductionOptions) -> None:
        trained = [p for p in params if p.requires_grad and p.is_floating_point()]
        self.nbytes = sum(param.nbytes for param in trained)
        self._group, self._options = group, options
        self._sample = [
            torch.empty(shape, dtype=trained[place].dtype, device=trained[place].device)
            for place, shape in sample_shapes(trained)
        ]
        self._scale = self.nbytes / max(1, sum(tensor.nbytes for tensor in self._sample))

    def seconds(self, compressor: Compressor) -> float:
        """Return the seconds of a reduction of all gradients on the slowest rank, alike on all. Collective.

        Raises:
            UnsupportedOp, UnsupportedTensor: the compressor cannot be used for these gradients here.
        """
        named = [(f"sample {i}", torch.nn.Parameter(each)) for i, each in enumerate(self._sample)]
        options = self._options._replace(compression=_warmed_up(compressor), overlap=False)
        reducer = GradientReducer(named, self._group, options)
        found: list[float] = []
        while len(found) <= ROUNDS and sum(found) < ENOUGH_S:
            for _, param in named:
                param.grad = _noise(param)
            found.append(self._slowest(lambda: reducer.reduce("a trial of compressors")))
        return min(found[1:] or found) * self._scale

    def _slowest(self, action: Callable[[], None]) -> float:
        started_s = now_s()
        action()
        elapsed = torch.tensor(now_s() - started_s, dtype=torch.float64)
        all_reduce(elapsed, ReduceOp.MAX, self._group)
        return float(elapsed)


def choose_compression(
    auto: Choosing, params: Sequence[Tensor], group: Group, options: ReductionOptions
) -> Choice:
    """Return the first candidate, unless a later one clearly pays. Collective, and alike on all ranks.

    Args:
        auto: the candidates, of which those that cannot be used for these gradients are left out.
        params: of the model.
        group: the ranks.
        options: how gradients are to be reduced.
    """
    trial = Trial(params, group, options)
    if group.size == 1 or not trial.nbytes:
        return Choice(auto.candidates[0], trial.nbytes, {})
    seconds: dict[Compressor, float] = {}
    for candidate in auto.candidates:
        try:
            seconds[candidate] = trial.seconds(candidate)
        except (UnsupportedOp, UnsupportedTensor):  # raised on all ranks alike
            continue
    if not seconds:
        return Choice(auto.candidates[0], trial.nbytes, {})
    chosen = next(iter(seconds))
    for candidate, needed in seconds.items():
        if needed <= auto.max_time_ratio * seconds[chosen]:
            chosen = candidate
    return Choice(chosen, trial.nbytes, seconds)


def with_chosen_compression(
    params: Sequence[Tensor], group: Group, options: ReductionOptions
) -> ReductionOptions:
    """Return the options with a candidate in place of what chooses, and let one rank print why. Collective.

    Others are returned as they are.
    """
    if not isinstance(options.compression, Choosing):
        return options
    choice = choose_compression(options.compression, params, group, options)
    if group.rank == 0 and choice.seconds:
        print_to_user(str(choice))
    return options._replace(compression=choice.compressor)


def sample_shapes(params: Sequence[Tensor], most_bytes: int = SAMPLE_BYTES) -> list[tuple[int, torch.Size]]:
    """Return parameters that stand for all, evenly spread over their bytes: their places and shapes.

    All of them if they have at most `most_bytes`. If even one is larger, its first rows.
    """
    total = sum(param.nbytes for param in params)
    part = min(1.0, most_bytes / max(1, total))
    taken, due = [], 0.0
    for place, param in enumerate(params):
        due += param.nbytes * part
        if part == 1.0 or due > param.nbytes / 2:
            taken.append((place, param.shape))
            due -= param.nbytes
    if taken or not params:
        return taken
    largest = max(range(len(params)), key=lambda place: params[place].nbytes)
    rows, *rest = params[largest].shape
    kept = max(1, int(rows * most_bytes / params[largest].nbytes))
    return [(largest, torch.Size([kept, *rest]))]


def _warmed_up(compressor: Compressor) -> Compressor:
    """Return the compressor as it is after its first steps, in which some send more."""
    if any(field.name == "warmup_steps" for field in dataclasses.fields(compressor)):
        return dataclasses.replace(compressor, warmup_steps=0)  # type: ignore[call-arg]
    return compressor


def _noise(param: Tensor) -> Tensor:
    """Return a gradient; the program's own random numbers stay what they are."""
    generator = torch.Generator(param.device).manual_seed(0)
    noise: Tensor = torch.empty_like(param, requires_grad=False).normal_(generator=generator)
    return noise
