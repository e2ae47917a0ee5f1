"""`Stage`: one part of a model on one rank: its forward and backward of a micro-batch, its update."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpisgd.errors import UnsupportedTensor
from mpisgd.pipeline.buffers import ChangingBuffers
from mpisgd.pipeline.skips import stashing
from mpisgd.pipeline.weights import StageWeights, device_of

__all__ = ["Connections", "Stage", "gradient_of", "with_gradients"]

Names = tuple[str, ...]


@dataclass(frozen=True)
class Connections:
    """Which tensors a stage exchanges with others, besides its inputs and outputs.

    Attributes:
        popped: by the stage it comes from, the names of the tensors of skip connections.
        stashed: by the stage it goes to.
        before: the stage before it, which gives its inputs; -1: none.
        after: the stage after it, which gets its outputs; -1: none.
    """

    popped: Mapping[int, Names] = field(default_factory=dict)
    stashed: Mapping[int, Names] = field(default_factory=dict)
    before: int = -1
    after: int = -1

    @property
    def targets(self) -> list[int]:
        """The stages that get something."""
        return sorted({*self.stashed, *([self.after] if self.after >= 0 else [])})


@dataclass
class _InFlight:
    """What a stage keeps of a micro-batch between its forward and its backward."""

    received: Mapping[int, Sequence[Tensor]]
    sent: Mapping[int, Sequence[Tensor]]
    loss: Tensor | None = None


class Stage:
    """One stage of a pipeline on this rank.

    Args:
        number: among the stages.
        weights: of its module, with their versions.
        optimizer: of its parameters; None: gradients stay for the caller.
        connections: to other stages.
        recompute: whether only its inputs and outputs are kept, and forward is done again in backward.
    """

    def __init__(
        self,
        number: int,
        weights: StageWeights,
        optimizer: torch.optim.Optimizer | None,
        connections: Connections,
        *,
        recompute: bool,
    ) -> None:
        self.number = number
        self.weights = weights
        self.module: nn.Module = weights.module
        self.optimizer = optimizer
        self.connections = connections
        self.device = device_of(self.module)
        self._buffers = ChangingBuffers(self.module) if recompute else None
        self._in_flight: dict[int, _InFlight] = {}

    def forward(
        self,
        micro_batch: int,
        version: int,
        received: Mapping[int, Sequence[Tensor]],
        inputs: Sequence[Tensor] | None,
        loss: Callable[[Any], Tensor] | None,
        *,
        trains: bool,
    ) -> tuple[Mapping[int, Sequence[Tensor]], Any]:
        """Compute a micro-batch.

        Args:
            micro_batch: its number.
            version: of the weights.
            received: by stage it comes from: outputs of the stage before, then tensors of skip connections.
            inputs: of the model, on the first stage.
            loss: of the last stage's output, times its share of the batch; None without targets.
            trains: whether a backward follows.

        Returns:
            What goes to other stages, by stage, and on the last one the loss, or the output without one.
        """
        leaves = {
            src: [tensor.detach().requires_grad_(trains and tensor.requires_grad) for tensor in tensors]
            for src, tensors in received.items()
        }
        with torch.set_grad_enabled(trains):
            output, stashed = self._compute(version, leaves, inputs, trains)
            result = output if loss is None or self.connections.after >= 0 else loss(output)
        sent = {
            dst: [
                *self._outputs(output, dst),
                *(stashed[name] for name in self.connections.stashed.get(dst, ())),
            ]
            for dst in self.connections.targets
        }
        if trains:
            last = self.connections.after < 0
            self._in_flight[micro_batch] = _InFlight(leaves, sent, result if last else None)
        return sent, result

    def sent(self, micro_batch: int) -> Mapping[int, Sequence[Tensor]] | None:
        """Return the outputs that a micro-batch's forward sent, by rank; None where there was none yet."""
        kept = self._in_flight.get(micro_batch)
        return None if kept is None else kept.sent

    def backward(
        self, micro_batch: int, gradients: Mapping[int, Sequence[Tensor]]
    ) -> Mapping[int, Sequence[Tensor]]:
        """Do the backward of a micro-batch.

        Args:
            micro_batch: its number.
            gradients: by stage: those of the tensors sent there that require one.

        Returns:
            By stage, the gradients of what was received from there and requires one.
        """
        kept = self._in_flight.pop(micro_batch)
        if kept.loss is not None and kept.loss.requires_grad:
            kept.loss.backward()  # type: ignore[no-untyped-call]
        pairs = [
            pair
            for dst, tensors in kept.sent.items()
            for pair in zip(with_gradients(tensors), gradients.get(dst, ()), strict=True)
        ]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        return {
            src: [
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in with_gradients(leaves)
            ]
            for src, leaves in kept.received.items()
        }

    def restart(self) -> None:
        """Forget what was in flight: the pipeline is empty."""
        self._in_flight.clear()
        self.weights.restart()

    def with_gradients_collected(self, excluded: set[Tensor]) -> list[Tensor]:
        """Return the parameters, those excepted, which have their gradients now where there are any."""
        self.weights.collect_gradients()
        return [param for param in self.module.parameters() if param not in excluded]

    def update(self, version: int, keep_from: int) -> None:
        """Do the optimizer's step, from one version of the weights to the next."""
        self.weights.collect_gradients()
        self.weights.update(version, keep_from, self._step)

    def _step(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _compute(
        self,
        version: int,
        leaves: Mapping[int, Sequence[Tensor]],
        inputs: Sequence[Tensor] | None,
        trains: bool,
    ) -> tuple[Any, Mapping[str, Tensor]]:
        """Return the module's output and what it has stashed for other stages."""
        connections = self.connections
        from_before = leaves.get(connections.before, ())
        num_skips = len(connections.popped.get(connections.before, ()))
        own = from_before[: len(from_before) - num_skips] if inputs is None else inputs
        skipped = {
            name: tensor
            for src, names in connections.popped.items()
            for name, tensor in zip(names, leaves[src][len(leaves[src]) - len(names) :], strict=True)
        }
        stashed: list[Mapping[str, Tensor]] = []

        def run(*tensors: Tensor) -> Any:
            # What was popped comes as an argument: recomputation must find it again.
            popped = dict(zip(skipped, tensors[len(own) :], strict=True))
            with stashing(popped) as kept:
                output = self.weights.call(version, *tensors[: len(own)])
            names = [name for names in connections.stashed.values() for name in names]
            stashed[:] = [{name: kept[name] for name in names}]
            return output, tuple(kept[name] for name in names)

        tensors = (*own, *skipped.values())
        if self._buffers is None or not trains:
            output, _ = run(*tensors)
            return output, stashed[0]
        output, kept = checkpoint(_repeatable(run, self._buffers), *tensors, use_reentrant=False)
        names = [name for names in connections.stashed.values() for name in names]
        return output, dict(zip(names, kept, strict=True))

    def _outputs(self, output: Any, dst: int) -> Sequence[Tensor]:
        """Return the outputs for rank `dst`, if the next stage is there."""
        if dst != self.connections.after:
            return ()
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        for each in outputs:
            if not isinstance(each, Tensor):
                raise UnsupportedTensor(
                    f"pipeline: stage {self.number} returned a {type(each).__name__}; expected a tensor or a "
                    "tuple of tensors"
                )
        return outputs


def _repeatable(run: Callable[..., Any], buffers: ChangingBuffers) -> Callable[..., Any]:
    """Return `run`, which does the same in all its calls, and changes the buffers in the first one alone."""
    copies = buffers.copies()
    calls = 0

    def repeatable(*tensors: Tensor) -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            with buffers.replaced({place: copy.clone() for place, copy in copies.items()}):
                return run(*tensors)
        result = run(*tensors)
        buffers.learn(copies)
        return result

    return repeatable


def with_gradients(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return those that require a gradient."""
    return [tensor for tensor in tensors if tensor.requires_grad]


def gradient_of(param: Tensor) -> Tensor:
    """Return the gradient of a parameter, which is zero from now on where it had none."""
    if param.grad is None:
        param.grad = torch.zeros_like(param)
    return param.grad
