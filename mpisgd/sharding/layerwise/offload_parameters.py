"""`offload_parameters`: moves the parameters of a model to files, from which each layer gets its own."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpisgd.arguments import check_callable, shown
from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument, UnsupportedTensor
from mpisgd.job.lifecycle import group_or_world
from mpisgd.job.malloc_settings import return_large_memory
from mpisgd.sharding.layerwise.layer_hooks import BackwardPass, LayerHooks
from mpisgd.sharding.layerwise.layers import Initialize, layers_of, materialize
from mpisgd.sharding.layerwise.parameter_unit import Unit
from mpisgd.sharding.layerwise.streamed_parameters import StreamedParameters
from mpisgd.sharding.offload.description import Offload

__all__ = [
    "StateDictHooks",
    "offload_parameters",
]

STATE_DICT = "state_dict"


def offload_parameters(
    model: nn.Module,
    offload: Offload,
    *,
    layers: Sequence[nn.Module] | None = None,
    init: Initialize | None = None,
    group: Group | None = None,
) -> None:
    """Keep the parameters and gradients of a model in files; each rank has an equal part of them.

    Collective: all ranks of `group` call it for the same model. Each layer is in memory while it computes
    forward or backward; meanwhile the next one is read. Pass the same `offload` to `Sharded(offload=...)`.

        offload = mpisgd.Offload("/scratch/run", what="optimizer,parameters")
        with torch.device("meta"):
            model = Net()                                   # no memory yet
        mpisgd.offload_parameters(model, offload)           # layer by layer: memory, first values, file

    A parameter that several layers use is in memory with each of them. The values are those of the first
    rank. `model.state_dict()` and `load_state_dict()` become collective; the tensors of `state_dict()` are
    mapped from a file, so that only the parts that are used are read.

    Args:
        model: on the CPU, or on the device "meta", where its parameters have no memory.
        offload: where the files are.
        layers: the modules that are loaded as a whole; by default the children of the model, and the children
            of containers such as `Sequential` and `ModuleList`. Other modules must not use their parameters.
        init: a function that sets the first values of a layer that was on "meta"; by default the
            `reset_parameters()` of its modules.
        group: defaults to all processes of the job.

    Raises:
        InvalidArgument, UnsupportedTensor: found locally, before anything is sent.
        OffloadError: a file cannot be made or written; on every rank.

    Source: Rajbhandari et al. 2021, ZeRO-Infinity.
    """
    _check(model, offload, layers, init)
    return_large_memory()
    chosen = layers_of(model) if layers is None else list(layers)
    owned = _owned(model, chosen)
    params = list(model.parameters())
    nbytes = sum(param.nbytes for param in params)
    streamed = StreamedParameters(offload, group_or_world(group), nbytes, len(params))
    units_of = _move(model, chosen, owned, streamed, init)
    backward = BackwardPass(streamed)
    for param in model.parameters():
        param._mpisgd_streamed = streamed  # type: ignore[attr-defined]
    for k, layer in enumerate(chosen):
        LayerHooks(layer, units_of[k], streamed, backward)
        StateDictHooks(layer, units_of[k], streamed)


def _check(model: Any, offload: Any, layers: Any, init: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"offload_parameters: model={shown(model)}; expected a module")
    if not isinstance(offload, Offload) or "parameters" not in offload.parts:
        raise InvalidArgument(
            f"offload_parameters: offload={shown(offload)}; expected "
            "mpisgd.Offload(folder, what='optimizer,parameters')"
        )
    if init is not None:
        check_callable("offload_parameters", "init", init)
    known = set(model.modules())
    if layers is not None and not (layers and all(layer in known for layer in layers)):
        raise InvalidArgument("offload_parameters: layers; expected modules of the model")
    for name, param in model.named_parameters():
        if param.device.type not in ("cpu", "meta") or param.layout is not torch.strided:
            where = f"on {param.device}, {param.layout}"
            raise UnsupportedTensor(f"offload_parameters: {name} is {where}; expected a dense one on the CPU")
        if getattr(param, "_mpisgd_streamed", None) is not None:
            raise InvalidArgument(f"offload_parameters: {name} is in a file already")


Users = tuple[int, ...]


def _owned(model: nn.Module, layers: Sequence[nn.Module]) -> dict[str, Users]:
    """Return which layers use each parameter.

    Raises:
        InvalidArgument: none does.
    """
    users: dict[int, list[int]] = defaultdict(list)
    for k, layer in enumerate(layers):
        for param in layer.parameters(recurse=layer is not model):
            users[id(param)].append(k)
    for name, param in model.named_parameters():
        if id(param) not in users:
            raise InvalidArgument(f"offload_parameters: {name} is in none of the layers")
    return {name: tuple(users[id(param)]) for name, param in model.named_parameters()}


def _move(
    model: nn.Module,
    layers: Sequence[nn.Module],
    owned: Mapping[str, Users],
    streamed: StreamedParameters,
    init: Initialize | None,
) -> list[list[Unit]]:
    """Bring the parameters to their files, layer by layer; return the units of each. Collective."""
    of_layers: list[list[Unit]] = [[] for _ in layers]
    users_of: dict[Unit, Users] = {}
    made: dict[int, Tensor] = {}
    for k, layer in enumerate(layers):
        materialize(layer, init, made, recurse=layer is not model)
        for users, named in _complete(model, owned, k):
            unit = streamed.add(named)
            streamed.first_values(unit)
            users_of[unit] = users
            for user in users:
                of_layers[user].append(unit)
    streamed.units.sort(key=lambda unit: min(users_of[unit]))  # backward is done with those of the first last
    return of_layers


Named = list[tuple[str, Tensor]]


def _complete(model: nn.Module, owned: Mapping[str, Users], k: int) -> list[tuple[Users, Named]]:
    """Return the parameters of each new unit, with the layers that use them, when the k-th layer is there."""
    found: dict[tuple[Any, ...], Named] = defaultdict(list)
    for name, param in model.named_parameters():
        if owned[name][-1] == k:
            found[owned[name], param.dtype, param.requires_grad].append((name, param))
    return [(key[0], named) for key, named in found.items()]


class StateDictHooks:
    """Lets `state_dict` find the values of a layer, and `load_state_dict` change them.

    Args:
        layer: the module.
        units: what it uses.
        streamed: brings them into memory.
    """

    def __init__(self, layer: nn.Module, units: Sequence[Unit], streamed: StreamedParameters) -> None:
        self._units, self._streamed = units, streamed
        self._user = (STATE_DICT, id(layer))
        acquire, copy, write = map(partial, (self._acquire, self._copy, self._write))  # torch sets attributes
        layer.register_state_dict_pre_hook(acquire)  # type: ignore[no-untyped-call]
        layer.register_state_dict_post_hook(copy)  # type: ignore[no-untyped-call]
        layer.register_load_state_dict_pre_hook(acquire)  # type: ignore[no-untyped-call]
        layer.register_load_state_dict_post_hook(write)  # type: ignore[no-untyped-call]

    def _acquire(self, *_: Any) -> None:
        self._streamed.acquire(self._units, self._user)

    def _copy(self, _: nn.Module, state_dict: dict[str, Any], *__: Any) -> None:
        """Put copies of the values into a state_dict: the parameters lose their memory."""
        addresses = {unit.flat.untyped_storage().data_ptr() for unit in self._units}
        with self._streamed.shared_errors():
            for name, value in state_dict.items():
                if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in addresses:
                    state_dict[name] = self._streamed.copy_of(value.detach())
        self._streamed.release(self._units, self._user)

    def _write(self, *_: Any) -> None:
        for unit in self._units:
            self._streamed.write(unit)
        self._streamed.release(self._units, self._user)
