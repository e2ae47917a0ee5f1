"""`SyncBatchNorm`: BatchNorm over the batches of all ranks, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from mpisgd.arguments import check_flag, shown
from mpisgd.collectives.all_reduce import all_reduce
from mpisgd.core.group import Group
from mpisgd.core.uneven_data import UnevenData, acting, performs, refuse
from mpisgd.errors import InvalidArgument, ShapeMismatch
from mpisgd.job.job_of_thread import job_place
from mpisgd.job.lazy_dynamo import outside_compiler
from mpisgd.job.lifecycle import group_or_world
from mpisgd.nn.batch_norm_function import normalize
from mpisgd.nn.batch_statistics import BatchStatistics, gather_statistics

__all__ = ["STATISTICS", "SyncBatchNorm", "converted"]

STATISTICS = "statistics"  # its name for ranks without data


class SyncBatchNorm(_BatchNorm):
    """Batch normalization with the mean and variance of the joined batch of all ranks.

    In training, N ranks compute what one process with BatchNorm computes on the joined batch, running
    statistics included. Ranks may have batches of different sizes, or an empty one (no images, but the shape
    of one). In evaluation, and in a group of one rank, it is torch's BatchNorm and sends nothing.

    Collective in training: all ranks of the group call forward, and backward where the input needs a
    gradient, in the same order. The gradients of weight and bias are this rank's own, to be averaged like all
    others.

    Args:
        num_features: channels of the input, [batch, channels, ...].
        eps, momentum, affine, track_running_stats, device, dtype, bias: as in torch.nn.SyncBatchNorm.
        process_group: a Group, or a torch.distributed group of the backend "mpisgd"; by default all processes
            of the job. With a separate group from `mpisgd.new_group()`, the statistics do not queue behind
            gradients that are sent during backward.

    Raises:
        InvalidArgument: `process_group` is neither. In forward, as torch's: no channels, fewer than two
            dimensions (before anything is sent), or one value per channel on all ranks together (on all).
        ShapeMismatch: the input has not `num_features` channels; before anything is sent.

    Cost: forward sends one all-gather of 2 * num_features + 1 float64, backward one all-reduce of
        2 * num_features. By NCCL the host waits for neither, unless this rank has fewer than two values per
        channel.
    """

    process_group: Group | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        _check_numbers(num_features, eps, momentum)
        for what, flag in (("affine", affine), ("track_running_stats", track_running_stats), ("bias", bias)):
            check_flag("SyncBatchNorm", what, flag)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:  # older torch does not take it
            self.register_parameter("bias", None)
        self.process_group = _as_group(process_group)
        self._number = _number(self)

    def forward(self, input: Tensor) -> Tensor:
        """Return `input` normalized; in training, collective over the group."""
        return self._synchronized(input) if self.training else super().forward(input)

    @outside_compiler  # communication is nothing to trace
    def _synchronized(self, input: Tensor) -> Tensor:
        if self._num_ranks() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        statistics = self._statistics(input)
        # Where this rank has two values, all have: nobody need ask the GPU.
        total = 2 if input.numel() >= 2 * input.size(1) else int(statistics.count)
        if total == 1:
            error = InvalidArgument(
                "Expected more than 1 value per channel when training, got one on all ranks together; "
                f"input size {tuple(input.shape)} on this one"
            )
            error.on_every_rank = True
            raise error
        if self.track_running_stats:
            self._track(statistics, is_empty=total == 0)
        return normalize(input, self.weight, self.bias, statistics, self.eps, self._add_up())

    # Communication with the other ranks, which a subclass may replace.

    def _num_ranks(self) -> int:
        return group_or_world(self.process_group).size

    def _statistics(self, input: Tensor) -> BatchStatistics:
        """Return the statistics of all ranks' `input`."""
        group = group_or_world(self.process_group)
        with acting(
            group, STATISTICS, _name_of(self, group.queue.uneven), tuple(input.shape[1:]), input.dtype
        ):
            return gather_statistics(input, group)

    @torch.no_grad()
    def take_part(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Take part in a forward of the other ranks with an empty batch. Collective.

        Args:
            shape: shape of an example of the other ranks.
            dtype: dtype of an example of the other ranks.
        """
        tensors = [tensor for tensor in (self.running_mean, self.weight) if tensor is not None]
        device = tensors[0].device if tensors else None
        self._synchronized(torch.empty(0, *shape, dtype=dtype, device=device))

    def __setstate__(self, state: Any) -> None:
        """A copy is a layer of its own."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._number = _number(self)

    def _add_up(self) -> Callable[[Tensor], object]:
        """Return the in-place sum over the ranks that backward calls."""
        group = group_or_world(self.process_group)
        if (data := group.queue.uneven) is not None:
            return partial(_add_up_weighted, group=group, examples=data.examples)
        return partial(all_reduce, group=group)

    def _check_input_dim(self, input: Tensor) -> None:
        """Check the shape before anything is sent; `super().forward` calls it too."""
        if input.dim() < 2:
            raise InvalidArgument(f"expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) == 0:
            raise InvalidArgument("SyncBatchNorm number of input channels should be non-zero")
        if input.size(1) != self.num_features:
            raise ShapeMismatch(
                f"SyncBatchNorm: the input has {input.size(1)} channels, the layer num_features="
                f"{self.num_features}"
            )

    @torch.no_grad()
    def _track(self, statistics: BatchStatistics, *, is_empty: bool) -> None:
        """Update the running statistics; an empty batch is counted and changes nothing else."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        if is_empty:
            return
        average = self.num_batches_tracked.double().reciprocal()
        momentum = average if self.momentum is None else self.momentum
        unbiased = statistics.var * (statistics.count / (statistics.count - 1))
        _fold(self.running_mean, statistics.mean, momentum)
        _fold(self.running_var, unbiased, momentum)

    # Not `convert`: a torch program changes the class's name and nothing else.
    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Replace every BatchNorm in `module`, torch.nn.SyncBatchNorm too, by one of this class.

        Parameters and buffers stay the same objects, so optimizers that were made before remain valid. Hooks
        are not copied. A layer that is used in several places stays a single layer.

        Args:
            module: changed in place, unless it is a BatchNorm itself.
            process_group: group of all new layers, also of those that had another one; by default all
                processes of the job.

        Returns:
            `module`, or the layer that has replaced it.

        Raises:
            InvalidArgument: `process_group` is not a group of mpisgd; a lazy BatchNorm does not know its
                channels.
        """
        return converted(module, cls, _as_group(process_group), {})


def _add_up_weighted(sums: Tensor, group: Group, examples: int) -> None:
    """Add up what comes of the losses of ranks that count as much as they have examples.

    The gradients of this rank will be multiplied by its examples, and those of the others by theirs.
    """
    sums.mul_(examples)
    all_reduce(sums, group=group)
    sums.div_(examples)


class _Layers:
    """Those of this rank, by the order in which they were made: it is the same on all ranks."""

    def __init__(self) -> None:
        self.count = 0
        self.by_number: weakref.WeakValueDictionary[int, SyncBatchNorm] = weakref.WeakValueDictionary()


def _number(layer: SyncBatchNorm) -> int:
    layers = job_place().own(_Layers)
    layers.count += 1
    layers.by_number[layers.count] = layer
    return layers.count


def _name_of(layer: SyncBatchNorm, data: UnevenData | None) -> int | tuple[int, int]:
    """Return how ranks name a layer to each other: by its weight, or as one of those that were made."""
    by_weight = None if data is None or layer.weight is None else data.names.get(id(layer.weight))
    return layer._number if by_weight is None else by_weight


@performs(STATISTICS)
def _beside_others(
    data: UnevenData, name: int | tuple[int, int], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Do what the others do in a forward, on a rank without data."""
    layers = list(job_place().own(_Layers).by_number.values())
    layer = next((each for each in layers if _name_of(each, data) == name), None)
    if layer is None:
        refuse(f"SyncBatchNorm {name}", "this rank has no such layer: make one model on all ranks")
    else:
        layer.take_part(shape, dtype)


def _check_numbers(num_features: Any, eps: Any, momentum: Any) -> None:
    """Raise InvalidArgument where torch would fail later."""
    if not isinstance(num_features, int) or not 0 <= num_features < 2**31:
        raise InvalidArgument(
            f"SyncBatchNorm: num_features={shown(num_features)}; expected a count of channels"
        )
    if not isinstance(eps, (int, float)) or not eps >= 0:
        raise InvalidArgument(f"SyncBatchNorm: eps={shown(eps)}; expected a number from 0 on")
    if momentum is not None and not isinstance(momentum, (int, float)):
        raise InvalidArgument(f"SyncBatchNorm: momentum={shown(momentum)}; expected a number or None")


def _as_group(process_group: object) -> Group | None:
    """Return the group to communicate in, None for all processes of the job.

    A torch.distributed group of our backend carries one of ours as an attribute, which spares an import.
    """
    group = getattr(process_group, "mpisgd_group", process_group)
    if group is None or isinstance(group, Group):
        return group
    raise InvalidArgument(
        f"SyncBatchNorm: process_group is a {type(process_group).__name__}; expected what mpisgd.new_group() "
        "returns, a torch.distributed group of the backend 'mpisgd', or None for all processes of the job"
    )


def _fold(running: Tensor | None, new: Tensor, momentum: float | Tensor) -> None:
    """Update `running` with `new`, with one rounding."""
    assert running is not None
    running.copy_((1 - momentum) * running.double() + momentum * new)


def converted(
    module: nn.Module, cls: Callable[..., SyncBatchNorm], ranks: Any, done: dict[nn.Module, nn.Module]
) -> nn.Module:
    """Return `module` with its BatchNorms replaced; `done` maps modules seen before to their replacements.

    Args:
        cls: of the new layers.
        ranks: which share the statistics, as `cls` takes it.
    """
    if module in done:
        return done[module]
    out = done[module] = _twin(module, cls, ranks) if isinstance(module, _BatchNorm) else module
    # Not named_children(), which leaves out a module's second name.
    for name, child in list(module._modules.items()):
        if child is not None:
            out.add_module(name, converted(child, cls, ranks, done))
    return out


def _twin(norm: _BatchNorm, cls: Callable[..., SyncBatchNorm], ranks: Any) -> SyncBatchNorm:
    """Return a layer of ours that holds the parameters and buffers of `norm`."""
    if isinstance(norm, LazyModuleMixin):
        raise InvalidArgument(
            f"convert_sync_batchnorm: {type(norm).__name__} does not know its number of channels yet; send a "
            "batch through the model first"
        )
    options = (norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats, ranks)
    twin = cls(*options, device="meta")  # its own tensors are replaced at once
    for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"):
        setattr(twin, name, getattr(norm, name))
    return twin.train(norm.training)
