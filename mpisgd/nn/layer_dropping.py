"""`ProgressiveLayerDropping`: fewer and fewer layers of a deep residual network are computed in a step.

Zhang and He 2020, "Accelerating Training of Transformer-Based Language Models with Progressive Layer
Dropping". Layer i of L keeps its place in step t with the probability

    p_i(t) = 1 - i / L (1 - theta(t))                  the first layers nearly always, the last with theta(t)
    theta(t) = (1 - theta_bar) exp(-gamma t) + theta_bar       1 at first, theta_bar in the end

and is passed over otherwise. One gate G_i, drawn for each step, decides about all residual branches f of
the layer:

    x <- x + G_i f(x) / p_i(t)

so that a branch counts the same on average, and nothing is scaled in evaluation.
"""

import functools
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpisgd.arguments import check_count, check_positive, check_ratio, check_seed
from mpisgd.collectives.objects import broadcast_object
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument
from mpisgd.job.lifecycle import group_or_world

__all__ = ["ProgressiveLayerDropping"]

NAME = "ProgressiveLayerDropping"


class ProgressiveLayerDropping:
    """Skip some of a model's residual layers in each training step, the same ones on every rank.

        dropping = mpisgd.nn.ProgressiveLayerDropping(theta=0.5, gamma=100 / num_steps)
        dropping.wrap(model.blocks)
        ...
        optimizer.step()
        dropping.step()

    For layers of the form `x + f(x)` whose branches begin with the norm (PreLN); other models do not train
    well with skipped layers. The choice depends only on the seed and the number of steps: it is the same on
    any number of ranks, in each micro-batch of a step, and after a restart with `load_state_dict`.

    Parameters of a dropped layer have no gradient in that step, on all ranks, and `DistributedOptimizer` does
    not change them. torch's DistributedDataParallel needs `find_unused_parameters=True`.

    The constructor is collective: all ranks of `group` call it with the same theta and gamma.

    Args:
        theta: the final probability of keeping the last layer, theta_bar of the paper.
        gamma: how fast the probabilities fall, per step; the paper takes 100 / number of steps.
        seed: seed of the choice; None: `torch.initial_seed()`. The value of rank 0 is used on all ranks.
        group: all ranks of the job by default.

    Attributes:
        num_steps: number of calls of `step`, t of the paper.

    Raises:
        InvalidArgument: found locally, before anything is sent.
        CollectiveMismatch: the ranks' theta or gamma differ; raised on every rank.
    """

    def __init__(
        self, theta: float = 0.5, gamma: float = 1e-3, *, seed: int | None = None, group: Group | None = None
    ) -> None:
        check_ratio(NAME, "theta", theta)
        check_positive(NAME, "gamma", gamma)
        if seed is not None:
            check_seed(NAME, seed)
        self.theta_bar, self.gamma, self.num_steps = float(theta), float(gamma), 0
        self.seed = self._agree(torch.initial_seed() if seed is None else seed, group_or_world(group))
        self._num_stacks = 0

    def __repr__(self) -> str:
        state = f"seed={self.seed}, num_steps={self.num_steps}"
        return f"{NAME}(theta={self.theta_bar}, gamma={self.gamma}, {state})"

    def __deepcopy__(self, memo: object) -> "ProgressiveLayerDropping":
        """A copy of a model drops the same layers."""
        return self

    def _agree(self, seed: int, group: Group) -> int:
        """Return the seed of rank 0, once all ranks agree on the rest. Collective."""
        group.queue.run(Operation(NAME, extra=f"theta={self.theta_bar}, gamma={self.gamma}"), lambda: None)
        return int(broadcast_object(seed, group.ranks[0], group))

    @property
    def theta(self) -> float:
        """The probability of keeping the last layer in this step."""
        return (1 - self.theta_bar) * math.exp(-self.gamma * self.num_steps) + self.theta_bar

    def keep_probability(self, layer: int, num_layers: int) -> float:
        """Return the probability of keeping a layer, 1 to `num_layers`, in this step."""
        return 1 - layer / num_layers * (1 - self.theta)

    def kept(self, num_layers: int, stack: int = 0) -> list[bool]:
        """Return which layers are kept in this step, from the first to the last.

        Args:
            num_layers: number of layers.
            stack: number of the wrapped list; each list has its own random choice.
        """
        draws = _draws(num_layers, self.seed, self.num_steps, stack)
        return [draw < self.keep_probability(place, num_layers) for place, draw in enumerate(draws, start=1)]

    def wrap(self, blocks: Iterable[nn.Module], branches: Sequence[str] = ()) -> None:
        """Let each of `blocks`, the residual layers from the first to the last, be dropped in training.

        Their forward is replaced, which changes no name of a parameter and no hook. A block takes and returns
        one tensor; further arguments are passed on.

        Args:
            blocks: such as a ModuleList; of a ModuleDict, its values.
            branches: names of the blocks' submodules whose outputs are added to the residual stream, such as
                `("attention", "feed_forward")`: each is scaled by 1 / p, as in the paper. Without them the
                change that a block makes as a whole is scaled, which is the same for one branch.

        Raises:
            InvalidArgument: a block has no such submodule, or is wrapped already; nothing is changed then.
        """
        layers = list(blocks.values()) if isinstance(blocks, nn.ModuleDict) else list(blocks)
        for block in layers:
            _check_block(block, branches)
        for place, block in enumerate(layers, start=1):
            gate = _Gate(self, place, len(layers), self._num_stacks)
            for name in branches:
                block.get_submodule(name).register_forward_hook(_ScaledBranch(gate, block))
            block.forward = _DroppableForward(gate, block, scales=not branches)
        self._num_stacks += 1

    def step(self) -> None:
        """Go on to the next step; call it after `optimizer.step()`."""
        self.num_steps += 1

    def state_dict(self) -> dict[str, int]:
        """Return the seed and the number of steps, on which the next choices depend."""
        return {"seed": self.seed, "num_steps": self.num_steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a state."""
        check_seed(NAME, state["seed"])
        check_count(NAME, "num_steps", state["num_steps"])
        self.seed, self.num_steps = state["seed"], state["num_steps"]


def _check_block(block: Any, branches: Sequence[str]) -> None:
    if not isinstance(block, nn.Module):
        raise InvalidArgument(f"{NAME}: a block is a {type(block).__name__}; expected a torch.nn.Module")
    if isinstance(block.forward, _DroppableForward):
        raise InvalidArgument(f"{NAME}: a {type(block).__name__} is wrapped already")
    for name in branches:
        try:
            block.get_submodule(name)
        except AttributeError as exc:
            raise InvalidArgument(f"{NAME}: a {type(block).__name__} has no branch {name!r}") from exc


@functools.lru_cache(maxsize=16)  # every layer asks
def _draws(num_layers: int, seed: int, step: int, stack: int) -> list[float]:
    """Return a number from 0 to 1 for each layer, which depends on nothing else."""
    key = f"{seed}, {step}, {stack}".encode()
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    )
    return torch.rand(num_layers, generator=generator, dtype=torch.float64).tolist()


class _Gate:
    """The place of a layer, and whether it is open in this step."""

    def __init__(self, dropping: ProgressiveLayerDropping, layer: int, num_layers: int, stack: int) -> None:
        self._dropping, self._layer, self._num_layers, self._stack = dropping, layer, num_layers, stack

    @property
    def is_open(self) -> bool:
        return self._dropping.kept(self._num_layers, self._stack)[self._layer - 1]

    @property
    def scale(self) -> float:
        """1 / p."""
        return 1 / self._dropping.keep_probability(self._layer, self._num_layers)


class _DroppableForward:
    """What a block's forward is replaced by."""

    def __init__(self, gate: _Gate, block: nn.Module, *, scales: bool) -> None:
        self._gate, self._block, self._forward, self._scales = gate, block, block.forward, scales

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not self._block.training:
            out: Tensor = self._forward(x, *args, **kwargs)
            return out
        if not self._gate.is_open:
            return x.clone()  # FSDP2 warns where a block returns its input, or a view of it
        out = self._forward(x, *args, **kwargs)
        if not isinstance(out, Tensor) or out.shape != x.shape:
            kind = type(self._block).__name__
            raise InvalidArgument(
                f"{NAME}: a {kind} returns something else than a tensor of its input's shape"
            )
        return torch.lerp(x, out, self._gate.scale) if self._scales else out


class _ScaledBranch:
    """A forward hook of a residual branch."""

    def __init__(self, gate: _Gate, block: nn.Module) -> None:
        self._gate, self._block = gate, block

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * self._gate.scale if self._block.training else output
