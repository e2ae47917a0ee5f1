"""torch's TensorPipe agent, made of what MPI knows: `torch.distributed.rpc.init_rpc` without a gloo group.

torch brings an agent up with a gloo group, which listens on the network in a way of its own. Here the ranks
exchange the same things by MPI. With `signatures.py` the only module of mpisgd that uses torch's private
names of RPC.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed.autograd
import torch.distributed.rpc
from torch._C._distributed_c10d import Store

from mpisgd.errors import InvalidArgument, UnsupportedTorch

__all__ = [
    "AgentOptions",
    "Devices",
    "active_calls",
    "available",
    "check_references_work",
    "divide_devices",
    "is_running",
    "own_options",
    "start_agent",
]

TRANSPORTS = ("uv",)
# By falling preference, as far as this torch has them. Not "mpt_uv": it listens on sixteen more sockets, and
# several connections pay above 10 Gbit/s only.
CHANNELS = ("cma", "cuda_ipc", "cuda_xth", "basic", "cuda_basic")


_num_starts = 0  # of this process


class AgentOptions(NamedTuple):
    """What a user chooses of an agent."""

    num_worker_threads: int
    timeout_s: float
    device_maps: dict[str, Any]
    devices: list[Any]


class Devices(NamedTuple):
    """The devices of this rank's agent, and where those of others lie here."""

    reverse_maps: dict[str, Any]
    devices: list[Any]


def available() -> Any:
    """Return `torch.distributed.rpc`.

    Raises:
        UnsupportedTorch: this torch was built without it.
    """
    api: Any = torch.distributed.rpc
    if not api.is_available() or not getattr(api, "_is_tensorpipe_available", False):
        raise UnsupportedTorch(
            f"mpisgd.rpc: torch {torch.__version__} was built without torch.distributed.rpc or its TensorPipe"
            "; install a wheel of torch for Linux, which has both"
        )
    return api


def is_running() -> bool:
    """Return whether this process has an agent."""
    return bool(available()._is_current_rpc_agent_set())


def own_options(given: Any, timeout_s: float) -> AgentOptions:
    """Return the options of `rpc_backend_options`, or the defaults for None.

    Args:
        given: a TensorPipeRpcBackendOptions; its address and its transports are not used.
        timeout_s: of calls, by default.
    """
    api = available()
    if given is None:
        return AgentOptions(api.constants.DEFAULT_NUM_WORKER_THREADS, timeout_s, {}, [])
    if not isinstance(given, api.TensorPipeRpcBackendOptions):
        raise InvalidArgument(
            f"init_rpc: rpc_backend_options is a {type(given).__name__}; expected "
            "mpisgd.rpc.TensorPipeRpcBackendOptions(...) or None"
        )
    return AgentOptions(given.num_worker_threads, given.rpc_timeout, given.device_maps, given.devices)


def divide_devices(
    names: Sequence[str], maps: Sequence[AgentOptions], counts: Sequence[int], rank: int
) -> Devices:
    """Return the devices of one rank's agent, from what all ranks have chosen.

    Raises:
        ValueError: a device map names a worker or a device that there is not; on every rank alike.
    """
    registry: Any = available().backend_registry
    device_maps = {name: options.device_maps for name, options in zip(names, maps, strict=True)}
    devices = {name: options.devices for name, options in zip(names, maps, strict=True)}
    registry._validate_device_maps(list(names), dict(zip(names, counts, strict=True)), device_maps, devices)
    name = names[rank]
    reverse = registry._create_reverse_mapping(name, list(names), device_maps)
    return Devices(reverse, registry._create_device_list(devices[name], device_maps[name], reverse))


class _AgentStore(Store):
    """A store for one agent, which says when the agent that starts is about to publish something.

    It publishes where it listens before it serves any connection, and waits until all others have, too:
    between the two nobody is served yet.

    Args:
        store: that the agents share.
        before_publishing: called whenever this agent sets a key, until `started`.
    """

    def __init__(self, store: Store, before_publishing: Callable[[], None]) -> None:
        super().__init__()
        self._store = store
        self._before_publishing: Callable[[], None] | None = before_publishing
        self.set_timeout(_timeout(store))

    def set(self, key: str, value: Any) -> None:
        if self._before_publishing is not None:
            self._before_publishing()
        self._store.set(key, value)

    def started(self) -> None:
        """Call nobody any more."""
        self._before_publishing = None

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return self._store.compare_set(key, expected, desired)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(list(keys), timeout or _timeout(self))

    # The name by which torch's C++ looks for it.
    def deleteKey(self, key: str) -> bool:
        return self._store.delete_key(key)


def _timeout(store: Any) -> timedelta:
    """Return how long a store waits for a key; torch's annotations forget it."""
    return cast(timedelta, store.timeout)


def start_agent(
    store: Store,
    names: Sequence[str],
    rank: int,
    options: AgentOptions,
    devices: Devices,
    *,
    once_listening: Callable[[], None],
) -> Store:
    """Start this process's agent: from now on it serves. All ranks start theirs at the same time.

    Return what must be kept as long as the agent lives.

    Args:
        store: by which the agents find each other; of this start alone.
        names: of the workers, by rank.
        rank: of this process.
        options: of this rank.
        devices: see `divide_devices`.
        once_listening: called when the agent listens and serves nobody yet; before that, too.
    """
    global _num_starts
    _num_starts += 1
    api = available()
    dist_autograd: Any = torch.distributed.autograd
    dist_autograd._init(rank)  # before anyone can call: a call may carry a context of distributed autograd
    api._set_profiler_node_id(rank)
    if torch.cuda.is_available() and devices.devices:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    chosen = api.TensorPipeRpcBackendOptions(
        num_worker_threads=options.num_worker_threads,
        rpc_timeout=options.timeout_s,
        device_maps=options.device_maps,
        devices=options.devices,
        _transports=list(TRANSPORTS),
        _channels=[channel for channel in CHANNELS if _has_channel(channel)],
    )
    agent_store = _AgentStore(store, once_listening)
    agent = api.TensorPipeAgent(
        agent_store, names[rank], rank, len(names), chosen, devices.reverse_maps, devices.devices
    )
    api.api._init_rpc_states(agent)
    agent_store.started()
    return agent_store


def _has_channel(name: str) -> bool:
    try:
        available().TensorPipeRpcBackendOptions(_channels=[name])
    except RuntimeError:  # "Unknown channel"
        return False
    return True


def check_references_work(name: str) -> None:
    """Raise UnsupportedTorch unless this is the process's first agent: torch sends RRefs by that one."""
    if _num_starts > 1:
        raise UnsupportedTorch(
            f"{name}: RPC was started {_num_starts} times in this process, and torch's RRefs work with the "
            "first start only; start RPC once, and end it with the program"
        )


def active_calls() -> tuple[int, int]:
    """Return how many calls of this process have no answer yet, and how many it has not answered."""
    try:
        metrics = available()._get_current_rpc_agent().get_metrics()
    except RuntimeError:  # ended by another thread
        return 0, 0
    return int(metrics["agent.client_active_calls"]), int(metrics["agent.server_active_calls"])
