"""`CompressedMomentumOptimizer`: what optimizers share that average in `step()`, and by one bit later on.

    warm-up       local gradients -> averaged (float) -> momentum and variance -> parameters
    afterwards    local gradients -> local momentum -> averaged (1 bit) -> parameters; the variance is frozen

Source of the second line: Tang et al. 2021, "1-bit Adam". Adam is not linear in its gradients, so compressing
these with error feedback fails; with its variance fixed it is momentum SGD with a preconditioner, and linear.
"""

import abc
import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.owner import OPTIMIZER, new_owner, owned_by
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import InvalidArgument, UnsupportedTensor
from mpisgd.gradients.gradient_flags import FlagsExchange
from mpisgd.gradients.options import DEFAULT_BUCKET_CAP_BYTES, ReductionOptions
from mpisgd.gradients.reducer import GradientReducer
from mpisgd.job.lifecycle import group_or_world
from mpisgd.method_state import (
    ENTRY,
    check_version,
    entry_of,
    forget_own,
    mean_of,
    own_of,
    part,
    pieces_of,
    restart,
    take,
)
from mpisgd.methods.cast.cast import Compression
from mpisgd.methods.compressed_momentum.compressed_average import CompressedAverage
from mpisgd.methods.compressed_momentum.means import make_means
from mpisgd.methods.compressed_momentum.moments import Trained, TrainedParameters
from mpisgd.methods.strategy.goes_with import Compressions, GoesWith, needs_default, no, yes
from mpisgd.parameters.parameter_names import agree_on, name_parameters
from mpisgd.parameters.starting_alike import SETTINGS_EVERY, check_alike
from mpisgd.sharding.layerwise.in_files import check_in_memory

__all__ = ["CompressedMomentumOptimizer", "Kept"]


# By a load, to the defaults of an optimizer that does not have it; so ranks that have not loaded do not.
ADDED_BY_TORCH = "differentiable"


@dataclass
class Kept:
    """What an optimizer keeps beside the state of its parameters.

    Attributes:
        errors: of the 1-bit average.
    """

    errors: CompressedAverage = part(CompressedAverage)


GOES_WITH = GoesWith(
    of="OneBitAdam, OneBitLamb, ZeroOneAdam",
    compression=Compressions("no", (needs_default,)),
    op=no(),
    gradient_predivide_factor=no(),
    uneven_data=no("what a rank without data would send is a momentum of its own"),
    error_if_nonfinite=no(),
    check_in_sync_every=no(),
    named_buffers=no(),
    whole_gradients=no(),
    backward_passes_per_step=yes("several `backward()`s before a `step()`"),
    clip_grad_norm_=yes("of each rank's"),
    grad_scaler=no(
        "a GradScaler decides on each rank by itself whether to step; train in bfloat16, which needs "
        "none, or with DistributedOptimizer"
    ),
    sparse_gradients=no("a gradient is sparse; expected dense ones"),
    checkpoint=yes("has what each rank's errors are"),
)


class CompressedMomentumOptimizer(TrainedParameters, abc.ABC):
    """An optimizer whose `step()` averages over the ranks: do not wrap it in `DistributedOptimizer`.

    Collective: all ranks of `group` make the same optimizer over the same parameters, which must be equal at
    the beginning (`mpisgd.broadcast_parameters`), and call `step()` together. The first step compares
    parameters, and settings such as the learning rate; settings are compared again every 100 steps if the
    ranks exchange in every step. Gradients belong to this rank until `step()`: several calls of `backward()`
    accumulate, and clipping is that of each rank. GradScaler raises an error, since it would skip steps on
    some ranks only. A deep copy has its own parameters, state and errors, and trains with the copies of the
    other ranks; pickling raises an error.

    Args:
        params: as for any torch optimizer.
        defaults: default values of the parameter groups.
        group: the ranks that train together, all of the job by default.
        agreed: further arguments that must be the same on all ranks.

    Attributes:
        group: the ranks.
        spans_job: whether all ranks of the job train together: no group was chosen.
        num_steps: number of steps so far.
        saved_as_mean: entries of a parameter's state of which each rank has its own, linear in the gradients:
            the mean over the ranks is saved, and stands for each of them.

    Raises:
        InvalidArgument, UnsupportedTensor: found locally, before anything is sent.
        CollectiveMismatch: arguments or parameters differ; raised on every rank, names what differs.
    """

    _keeps_models_equal: ClassVar[bool] = True  # after every step
    goes_with: ClassVar[GoesWith] = GOES_WITH
    saved_as_mean: ClassVar[tuple[str, ...]] = ()
    _step_supports_amp_scaling = True  # GradScaler leaves the decision to `step()` then, on every rank
    # What a deep copy takes over beside what all torch optimizers have.
    _copied: ClassVar[tuple[str, ...]] = (
        "_agreed",
        "_has_started",
        "_have_means",
        "_kept",
        "_owner",
        "group",
        "num_steps",
        "spans_job",
    )

    @classmethod
    @abc.abstractmethod
    def examples(cls) -> Sequence[Mapping[str, Any]]:
        """Return settings beside `lr` with which `verify` and the tests try it; the plainest first."""

    def __init__(self, params: Any, defaults: dict[str, Any], group: Group | None, agreed: str) -> None:
        self._agreed = agreed
        self._kept = self._new_state_of_method()
        self._have_means = False  # whether what is saved as a mean is that on all ranks
        self._reducer: GradientReducer | None = None  # None: not all parameter groups are known
        super().__init__(params, defaults)
        self._join(group, type(self).__name__, self._settings())

    def _join(self, group: Group | None, kind: str, settings: str = "") -> None:
        """Agree with the ranks of a group, and begin without errors. Collective."""
        self.spans_job = group is None
        self.group = group_or_world(group)
        names = [name for name, _ in name_parameters(self, None)]
        self._owner = new_owner(self.group.num_owners, OPTIMIZER, type(self).__name__, names)
        self._has_started = False
        self._reducer = self._new_reducer(self._agree(kind, settings))
        forget_own(self._kept)

    def _new_reducer(self, named: Sequence[tuple[str, Tensor]]) -> GradientReducer:
        options = ReductionOptions(
            ReduceOp.AVG, Compression.none, 1.0, DEFAULT_BUCKET_CAP_BYTES, overlap=False
        )
        with owned_by(self._owner):
            return GradientReducer(named, self.group, options)

    def __deepcopy__(self, memo: dict[int, Any]) -> "CompressedMomentumOptimizer":
        """Return a copy for copies of the parameters, to be trained by the same ranks. Not collective."""
        copied = type(self).__new__(type(self))
        memo[id(self)], memo[id(self.group)] = copied, self.group
        own = {name: getattr(self, name) for name in self._copied}
        copied.__setstate__(copy.deepcopy({**self.__getstate__(), **own}, memo))
        copied._no_variance = {}
        copied._reducer = copied._new_reducer(name_parameters(copied, None))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: another process is no rank of this job.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{type(self).__name__}: it averages over the ranks of this job, so it cannot be pickled; save "
            "its state_dict(), or copy it by copy.deepcopy on all ranks"
        )

    def _new_state_of_method(self) -> Any:
        """Return the state beside that of parameters, as before the first step; see `method_state`.

        None: nothing.
        """
        return Kept()

    def _settings(self) -> str:
        names = [name for name in self.defaults if name != ADDED_BY_TORCH]
        return str([{name: group[name] for name in names} for group in self.param_groups])

    def _agree(self, kind: str, settings: str) -> list[tuple[str, Tensor]]:
        named = name_parameters(self, None)
        for name, param in named:
            if not param.is_floating_point():
                raise UnsupportedTensor(f"{kind}: {name} is {param.dtype}; expected a floating dtype")
        check_in_memory(kind, named)
        with owned_by(self._owner):
            agree_on(kind, named, self.group, extra=f"{self._agreed}, {settings}")
        return named

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters later. Collective: all ranks add the same ones. Errors begin anew."""
        super().add_param_group(param_group)
        if self._reducer is not None:
            self._reducer.cover(self._agree("add_param_group", self._settings()))

    def rebuild(self, group: Group | None = None) -> None:
        """Train with other ranks from now on, without the errors. Collective over `group`.

        What `mpisgd.elastic` calls when the ranks have changed. Newcomers may have no state yet, and other
        learning rates: `mpisgd.broadcast_optimizer_state` gives them both.

        Args:
            group: the ranks that train together, all of the job by default.
        """
        self._join(group, "rebuild")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average what the ranks have, and update the parameters. Collective.

        Args:
            closure: computes the loss and its gradients on this rank's data.

        Returns:
            What the closure has returned on this rank.

        Raises:
            InvalidArgument, UnsupportedTensor: a GradScaler is used, or gradients are sparse.
        """
        if hasattr(self, "found_inf"):
            raise InvalidArgument(f"{type(self).__name__}: {self.goes_with.grad_scaler.words}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if any(param.grad is not None and param.grad.is_sparse for param in group["params"]):
                raise UnsupportedTensor(f"{type(self).__name__}: {self.goes_with.sparse_gradients.words}")
        with owned_by(self._owner):
            self._check_start(self.num_steps + 1)
            self.num_steps += 1
            self._have_means = False
            self._update()
        return loss

    def _check_start(self, step: int) -> None:
        """Compare what ranks must start with, and settings from time to time."""
        # Where ranks have models of their own, a state that was loaded goes on from these.
        is_first = not self._has_started and (self._keeps_models_equal or step == 1)
        again = self._keeps_models_equal and step % SETTINGS_EVERY == 0  # ranks meet in every step
        if self.group.size > 1 and (is_first or again):
            named = name_parameters(self, None) if is_first else ()
            check_alike(type(self).__name__, named, self.param_groups, self.group, f"step {step}")
        self._has_started = True

    @abc.abstractmethod
    def _update(self) -> None:
        """Do step `num_steps`, the first one is 1. Collective."""

    # -- what is sent -------------------------------------------------------------------------------

    def _average_gradients(self) -> None:
        """Replace gradients by their mean; where no rank has one it stays None. Collective."""
        assert self._reducer is not None
        self._reducer.reduce(f"step {self.num_steps}")

    def _with_some_gradient(self, last: str) -> tuple[list[Trained], list[Trained]]:
        """Return all parameters, and those of which some rank has a gradient. Collective.

        Args:
            last: until when a first gradient may come.

        Raises:
            InvalidArgument: there is a parameter with its first one; see `_refuse_new`.
        """
        everything = list(self._trained())
        exist = self._exist_somewhere([trained.param.grad is not None for trained in everything])
        new = [here and "step" not in t.state for t, here in zip(everything, exist, strict=True)]
        self._refuse_new(new, last)
        return everything, [trained for trained, here in zip(everything, exist, strict=True) if here]

    def _exist_somewhere(self, here: Sequence[bool]) -> list[bool]:
        """Return for each entry whether it holds on any rank. Collective."""
        if self.group.size == 1:
            return list(here)
        flags = FlagsExchange(bytes(here), self.group)
        operation = Operation(type(self).__name__, extra=f"step {self.num_steps}")
        self.group.queue.run(operation, flags.finish, before=flags.before)
        assert flags.joined is not None
        return [bool(flag) for flag in flags.joined]

    def _exchange(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by the 1-bit average of everyone's. Collective."""
        self._kept.errors.average(tensors, self.group)

    # -- the state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as other torch optimizers do.

        The entry "mpisgd", which others ignore, has what is this rank's own, such as its errors. They are of
        use to the same rank among as many ones only. Collective where something is `saved_as_mean`: the ranks
        go on from the mean, too, which changes nothing but the rounding.
        """
        if self.saved_as_mean and self.group.size > 1:
            with owned_by(self._owner):
                self._have_means = make_means(
                    self.saved_as_mean, list(self._trained()), self.group, made=self._have_means
                )
        return {**super().state_dict(), **self.method_entry()}

    def method_entry(self) -> dict[str, Any]:
        """Return the entry "mpisgd" of `state_dict()`; {} where nothing is kept beside that of parameters."""
        if self._kept is None:
            return {}
        rank, size = self.group.rank, self.group.size
        return entry_of(pieces_of(self._kept), of=self.method, rank=rank, size=size, steps=self.num_steps)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, also one of torch.optim.Adam. All ranks load the same, or each its own.

        Errors begin anew at zero where those given are of another rank, or of another number of ranks:
        what had been left out is lost, which is less than one step's momentum. So they do, with a warning,
        where another method has saved the state.

        Raises:
            InvalidArgument: another version of mpisgd has written it in a form that this one does not know.
        """
        entry = state_dict.get(ENTRY)
        if entry is not None:
            check_version(entry)
        super().load_state_dict(state_dict)
        self._no_variance.clear()
        self._have_means = True
        self._complete_state()
        self.num_steps = self._most_steps
        if entry is not None and entry["of"] != self.method:
            if self.group.rank == 0:
                text = f"the state is of {entry['of']}, and this is {self.method}"
                warnings.warn(f"load_state_dict: {text}; what the former has kept is left out", stacklevel=2)
            entry = None
        if entry is None:
            restart(self._kept)
            return
        self.num_steps = entry["steps"]
        take(self._kept, entry["alike"], own_of(entry, self.group.rank, self.group.size), {})

    @property
    def _most_steps(self) -> int:
        """How many steps there were, as far as the state of the parameters tells."""
        return max((int(t.state["step"]) for t in self._trained() if "step" in t.state), default=0)

    @property
    def method(self) -> str:
        """What the optimizer is called in a saved state."""
        return type(self).__name__

    def replica(self, *, anyway: bool = False) -> dict[str, Tensor]:
        """Return the parameters that differ by rank now, by key: none, but between meetings of `ZeroOneAdam`.

        Args:
            anyway: also return them where they do not differ.
        """
        params = [param for group in self.param_groups for param in group["params"]]
        return {str(place): param.detach() for place, param in enumerate(params)} if anyway else {}

    def consensus_of(
        self, replicas: Sequence[Mapping[str, Tensor]], entries: Sequence[Any]
    ) -> dict[str, Tensor]:
        """Return the consensus of the replicas of all ranks: their mean."""
        return mean_of(replicas)

    def forget_own_state(self) -> None:
        """Begin anew with what is this rank's own: all ranks do so, as after a broadcast of the state."""
        forget_own(self._kept)
        if self._kept is None:  # the others have loaded a state that does not say how many steps there were
            self.num_steps = self._most_steps
