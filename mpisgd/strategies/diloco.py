"""`DiLoCo`: ranks train by themselves for many steps, and an outer optimizer steps along the mean change.

With x_i the parameters of rank i of p, and z the outer parameters, which all ranks have alike (Douillard et
al. 2023):

    x_i <- x_i - u_i                                every step, u_i the update of the wrapped optimizer
    d   <- z - (x_1 + ... + x_p) / p                every `sync_every` steps: the outer gradient
    z   <- OuterOptimizer(z, d)
    x_i <- z

Streaming DiLoCo (Douillard et al. 2025) cuts the parameters into fragments, which are synchronised at
different steps; and the mean may be taken during the next `overlap_steps` steps, after which

    x_i <- overlap_alpha x_i + (1 - overlap_alpha) z
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpisgd.arguments import check_count, check_positive, shown
from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument
from mpisgd.strategies.compatibility import LOCAL_STEPS, refuse_momentum
from mpisgd.strategies.kept_tensors import detached, follow
from mpisgd.strategies.local_training import LocalSynchronizer
from mpisgd.strategies.strategy import Strategy
from mpisgd.strategies.tensor_mean import TensorMean
from mpisgd.strategies.training import Training

__all__ = ["DiLoCo"]

NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


@dataclass(frozen=True)
class DiLoCo(Strategy):
    """Ranks train by themselves; every `sync_every` steps an outer optimizer takes the mean of their changes.

    The wrapped optimizer is the inner one; each rank keeps its own state of it. Every rank takes the same
    outer step, on a copy of the parameters, with a state of its own.

    Args:
        sync_every: steps from one outer step of a parameter to the next.
        outer_optimizer: class of the outer optimizer, any of torch's that needs no closure.
        outer_options: what it is made with; for SGD by default lr=0.7, momentum=0.9, nesterov=True.
        fragments: parts into which the parameters are divided, of about as many bytes, in the order of the
            optimizer, each of at least one; part f is synchronised f * sync_every / fragments steps after
            the first.
        overlap_steps: steps that ranks take while the mean is under way; fewer than `sync_every`.
        overlap_alpha: which share of what they have by then ranks keep; 0 drops these steps.

    Module buffers (`named_buffers`) take their mean whenever the first fragment is synchronised.
    """

    sync_every: int = 100
    outer_optimizer: type[torch.optim.Optimizer] = torch.optim.SGD
    outer_options: Mapping[str, Any] | None = None
    fragments: int = 1
    overlap_steps: int = 0
    overlap_alpha: float = 0.5

    excludes: ClassVar[frozenset[str]] = LOCAL_STEPS

    def __post_init__(self) -> None:
        for name in ("sync_every", "fragments"):
            check_positive("DiLoCo", name, getattr(self, name), whole=True)
        check_count("DiLoCo", "overlap_steps", self.overlap_steps)
        if self.overlap_steps >= self.sync_every:
            raise InvalidArgument(
                f"DiLoCo: overlap_steps={self.overlap_steps}; expected fewer than {self.sync_every}"
            )
        if self.fragments > self.sync_every:
            raise InvalidArgument(
                f"DiLoCo: fragments={self.fragments}; expected at most sync_every={self.sync_every}"
            )
        if not isinstance(self.overlap_alpha, (int, float)) or not 0 <= self.overlap_alpha <= 1:
            raise InvalidArgument(
                f"DiLoCo: overlap_alpha={shown(self.overlap_alpha)}; expected a number from 0 to 1"
            )
        self._check_outer()

    def _check_outer(self) -> None:
        cls = self.outer_optimizer
        if not inspect.isclass(cls) or not issubclass(cls, torch.optim.Optimizer):
            raise InvalidArgument(
                f"DiLoCo: outer_optimizer={shown(cls)}; expected a class such as torch.optim.SGD, whose "
                "arguments are outer_options={...}"
            )
        self.make_outer([torch.zeros(1)])

    @classmethod
    def slow_momentum(cls, sync_every: int, *, momentum: float = 0.5, lr: float = 1.0) -> "DiLoCo":
        """Return SlowMo (Wang et al. 2020) as a case of this: outer SGD with momentum, not Nesterov's.

        Its buffer is that of the paper times the inner learning rate, which makes no difference while that
        stays as it is.

        Args:
            sync_every: tau of the paper.
            momentum: beta.
            lr: alpha.
        """
        return cls(sync_every, outer_options={"lr": lr, "momentum": momentum})

    def make_outer(self, params: list[Tensor]) -> torch.optim.Optimizer:
        """Return the outer optimizer of `params`.

        Raises:
            InvalidArgument: it does not take `outer_options`.
        """
        options = self.outer_options
        if options is not None and not isinstance(options, Mapping):
            raise InvalidArgument(
                f"DiLoCo: outer_options={shown(options)}; expected a dict such as {NESTEROV}"
            )
        if options is None:
            options = NESTEROV if self.outer_optimizer is torch.optim.SGD else {}
        make: Callable[..., torch.optim.Optimizer] = self.outer_optimizer
        try:
            return make(params, **options)
        except (TypeError, ValueError) as exc:
            raise InvalidArgument(f"DiLoCo: outer_options={shown(options)}: {exc}") from exc

    def check(self, training: Training) -> None:
        """See `Strategy.check`.

        Raises:
            InvalidArgument: also where there are fewer parameters than fragments.
        """
        super().check(training)
        refuse_momentum(self, training)
        number = len(training.named)
        if self.fragments > max(1, number):
            raise InvalidArgument(
                f"DiLoCo: fragments={self.fragments}, and the optimizer has {number} parameters, which are "
                f"not cut; expected at most {max(1, number)}"
            )

    def synchronizer(self, training: Training) -> "DiLoCoSynchronizer":
        """Return what takes the outer steps."""
        return DiLoCoSynchronizer(training, self)


class _Fragment:
    """Some parameters, what they were after the last outer step, and the outer optimizer of these.

    Args:
        params: of this rank, themselves: their memory may become another one.
        first: the first step after which they are synchronised.
        training: its group and options.
        strategy: see `DiLoCo`.
    """

    def __init__(self, params: Sequence[Tensor], first: int, training: Training, strategy: DiLoCo) -> None:
        self._params, self._first, self._strategy = params, first, strategy
        self._mean = TensorMean(params, training.group, training.options)
        self.outer = [param.clone() for param in detached(params)]
        self._optimizer = strategy.make_outer(self.outer)
        self._changes: list[Tensor] = []  # on their way
        self._wait: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Take the parameters as they are."""
        self._follow()
        torch._foreach_copy_(self.outer, detached(self._params))

    def _follow(self) -> None:
        """Go over to the dtypes that the parameters have now."""
        if follow(self.outer, self._params, "DiLoCo"):
            self._optimizer.load_state_dict(self._optimizer.state_dict())  # which casts its state, too

    def after(self, step: int) -> None:
        """Do what is due after a step."""
        since = step - self._first
        overlap = self._strategy.overlap_steps
        if self._changes and since % self._strategy.sync_every == overlap:
            self._finish()
        if since >= 0 and since % self._strategy.sync_every == 0:
            self._follow()
            self._changes = list(torch._foreach_sub(self.outer, detached(self._params)))
            self._wait = self._mean.start(self._changes, async_op=overlap > 0)
            if not overlap:
                self._finish()

    def _finish(self) -> None:
        """Take the outer step, and go on from there."""
        self._wait()
        self._follow()
        follow(self._changes, self._params, "DiLoCo")
        for param, change in zip(self.outer, self._changes, strict=True):
            param.grad = change
        self._changes = []
        self._optimizer.step()
        self._optimizer.zero_grad()
        alpha = self._strategy.overlap_alpha if self._strategy.overlap_steps else 0.0
        params = detached(self._params)
        if alpha:
            torch._foreach_lerp_(params, self.outer, 1 - alpha)
        else:
            torch._foreach_copy_(params, self.outer)

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the parameters; what is on its way has arrived then."""
        self._wait()
        self._wait = lambda: None
        return {
            "outer": self.outer,
            "optimizer": self._optimizer.state_dict(),
            "changes": self._changes,
            "compression": self._mean.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` has returned."""
        torch._foreach_copy_(self.outer, state["outer"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._changes = [change.clone() for change in state["changes"]]
        self._wait = lambda: None
        self._mean.load_state_dict(state["compression"])


class DiLoCoSynchronizer(LocalSynchronizer):
    """Synchronises fragments after the steps that `DiLoCo` names."""

    def __init__(self, training: Training, strategy: DiLoCo) -> None:
        super().__init__(training)
        self._strategy = strategy
        self._fragments: list[_Fragment] = []
        self._num_params = 0
        self.reopen()

    def reopen(self) -> None:
        """See `LocalSynchronizer`: added parameters are a fragment of their own, other ranks begin anew."""
        params, strategy = self.continuous, self._strategy
        if self._begins:
            self._fragments, self._num_params = [], 0
        parts = [params[self._num_params :]] if self._num_params else _cut(params, strategy.fragments)
        for number, part in enumerate(parts):
            first = number * strategy.sync_every // strategy.fragments
            self._fragments.append(_Fragment(part, first, self.training, strategy))
        self._num_params = len(params)

    def begin(self) -> None:
        """See `LocalSynchronizer`."""
        for fragment in self._fragments:
            fragment.begin()

    def synchronize(self) -> None:
        """Begin and finish what is due. Collective where anything is."""
        for fragment in self._fragments:
            fragment.after(self.steps)
        if self.steps % self._strategy.sync_every == 0:
            all_reduce_coalesced(self.buffers, ReduceOp.AVG, self.training.group)

    def consensus(self) -> list[Tensor]:
        """Return the outer parameters, and the mean of the buffers. Collective."""
        buffers = [tensor.clone() for tensor in self.buffers]
        all_reduce_coalesced(buffers, ReduceOp.AVG, self.training.group)
        return [*(outer.clone() for fragment in self._fragments for outer in fragment.outer), *buffers]

    def own_state(self) -> dict[str, Any]:
        """Return the state of all fragments."""
        return {"fragments": [fragment.state_dict() for fragment in self._fragments]}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `own_state` has returned."""
        for fragment, saved in zip(self._fragments, state["fragments"], strict=True):
            fragment.load_state_dict(saved)


def _cut(params: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Cut into `count` parts of about as many bytes, in their order; none is empty if there are enough."""
    parts: list[list[Tensor]] = [[] for _ in range(count)]
    total, before, place = sum(param.nbytes for param in params), 0, -1
    for number, param in enumerate(params):
        even = before * count // total if total else 0
        last_chance = count - (len(params) - number)  # from here on each part gets one parameter
        place = max(place, min(even, place + 1), last_chance)
        parts[place].append(param)
        before += param.nbytes
    return [part for part in parts if part]
