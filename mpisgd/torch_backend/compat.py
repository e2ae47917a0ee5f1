"""What differs between the versions of torch, and what torch has no public name for.

Nothing else in this package knows a version of torch.
"""

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from mpisgd.errors import UnsupportedTorch

if TYPE_CHECKING:
    from mpisgd.dtypes import ReduceOp

__all__ = [
    "HAS_RECONFIGURE",
    "HAS_WINDOWS",
    "arrived",
    "blocks",
    "check_version",
    "error_type",
    "factor_of",
    "has_views",
    "keep_works_of_reducers",
    "never_compiled",
    "opt_out_of_flight_recorder",
    "reduction_of",
    "take_over_monitored_barrier",
    "take_over_rendezvous",
    "wants_reconfigure",
    "window_attr",
    "with_old_names",
]

# What torch 2.13 calls so, earlier versions call otherwise; both are looked up by attribute.
OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
    "recv_anysource": "recvAnysource",
}

OLDEST = (2, 7)

# Whether torch asks groups for other members, and for one-sided windows (from 2.14 on).
HAS_RECONFIGURE = hasattr(dist.ProcessGroup, "reconfigure")
HAS_WINDOWS = hasattr(dist.ProcessGroup, "new_window")

RendezvousHandler = Callable[..., Iterator[tuple[Any, int, int]]]
C = TypeVar("C", bound=type)


def with_old_names(cls: C) -> C:
    """Let a process group's methods be found under their earlier names too."""
    for name, old in OLD_NAMES.items():
        setattr(cls, old, getattr(cls, name))
    return cls


def arrived(tensor: Tensor) -> Tensor:
    """Return the plain tensor of what a functional collective returns: a stage's output, say."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def blocks(opts: Any) -> bool:
    """Return whether the caller is going to wait at once; earlier versions do not tell."""
    return not getattr(opts, "asyncOp", True)


def reduction_of(op: Any) -> "ReduceOp":
    """Return torch's reduction as ours; what is multiplied first is a sum then, see `factor_of`."""
    from mpisgd.dtypes import ReduceOp  # which may be what imports torch, and so this module

    kind = getattr(op, "op", op)
    if kind == dist.ReduceOp.PREMUL_SUM:
        return ReduceOp.SUM
    return ReduceOp[str(kind).rpartition(".")[2]]


def factor_of(op: Any) -> float | Tensor | None:
    """Return the factor of every rank's tensor before it is added, None for most reductions."""
    if getattr(op, "op", op) != dist.ReduceOp.PREMUL_SUM:
        return None
    factor: float | Tensor = op.factor if hasattr(op, "factor") else op.__getstate__()[1]
    return factor


def wants_reconfigure(options: Any) -> bool:
    """Return whether the program makes a group whose members `reconfigure` is to name."""
    return bool(getattr(options, "enable_reconfigure", False))


def error_type(name: str) -> Any:
    """Return a member of torch's ErrorType, which earlier versions do not have: its name there."""
    kinds = getattr(sys.modules["torch._C._distributed_c10d"], "ErrorType", None)
    return name if kinds is None else getattr(kinds, name)


def window_attr(*, unified: bool) -> Any:
    """Return what torch's windows say of the memory of a rank."""
    c10d: Any = sys.modules["torch._C._distributed_c10d"]
    attr = c10d.WindowAttr()
    attr.access_type = c10d.WindowAccessType.UNIFIED if unified else c10d.WindowAccessType.SEPARATE
    return attr


def has_views(tensor: Tensor) -> bool:
    """Return whether other tensors use the memory of this one."""
    uses: Callable[[int], int] = torch._C._storage_Use_Count
    alone = torch.empty(1)
    return uses(tensor.untyped_storage()._cdata) > uses(alone.untyped_storage()._cdata)


def check_version() -> None:
    """Raise where torch is too old: it would lose our works between Python and C++, and wait for ever."""
    found = torch.__version__.split("+")[0]
    if tuple(map(int, found.split(".")[:2])) < OLDEST:
        raise UnsupportedTorch(f"the backend 'mpisgd' needs torch 2.7 or newer; this is torch {found}")


def opt_out_of_flight_recorder(backend: str) -> None:
    """Keep torch (from 2.15 on) from attaching its recorder, which a group written in Python cannot have."""
    by_themselves: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    by_themselves.add(backend)


def never_compiled(cls: C) -> C:
    """Let torch.compile leave the methods of a class, and what they call, as they are.

    C++ calls them while a compiled model runs (DDP's reducer where it makes its buckets anew), and the
    compiler would take them for a part of the program.
    """
    from torch._C._dynamo import eval_frame

    if hasattr(eval_frame, "_FrameExecStrategy"):
        skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
        for member in vars(cls).values():
            if isinstance(member, types.FunctionType):
                eval_frame.set_code_exec_strategy(member.__code__, skip)
    return cls


def keep_works_of_reducers() -> Callable[[], None]:
    """Let DDP's reducer keep the Python object of a work that it is handed. Returns what undoes it.

    It keeps the C++ object alone. Without its Python object a work of ours has lost its `wait()`, and the
    reducer waits for ever: in DDP's `join(divide_by_initial_world_size=False)`.
    """
    reducers: Any = dist.Reducer  # type: ignore[attr-defined]  # torch exports it in silence
    original = reducers._set_forward_pass_work_handle
    works: weakref.WeakKeyDictionary[Any, dist.Work] = weakref.WeakKeyDictionary()

    def set_and_keep(reducer: Any, work: dist.Work, use_static_world_size: bool) -> None:
        works[reducer] = work
        original(reducer, work, use_static_world_size)

    def give_back() -> None:
        if reducers._set_forward_pass_work_handle is set_and_keep:
            reducers._set_forward_pass_work_handle = original

    reducers._set_forward_pass_work_handle = set_and_keep
    return give_back


def take_over_rendezvous(scheme: str, backend: str, handler: RendezvousHandler) -> Callable[[], None]:
    """Let `handler` serve the calls for `backend` that name no rendezvous (torch takes env:// then).

    Returns what undoes it.
    """
    # By this name, since torch.distributed has a function called like its module.
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    original = handlers[scheme]

    def ours_or_original(url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        return (handler if backend in _backend_asked_for() else original)(url, **kwargs)

    def give_back() -> None:
        if handlers[scheme] is ours_or_original:
            handlers[scheme] = original

    handlers[scheme] = ours_or_original
    return give_back


def take_over_monitored_barrier(
    is_ours: Callable[[Any], bool], barrier: Callable[..., None]
) -> Callable[[], None]:
    """Let `barrier` serve the groups that are ours: torch's own refuses every backend but gloo by name.

    Returns what undoes it.
    """
    original = distributed_c10d.monitored_barrier

    @functools.wraps(original)
    def ours_or_original(group: Any = None, *args: Any, **kwargs: Any) -> None:
        asked = distributed_c10d.GroupMember.WORLD if group is None else group
        (barrier if is_ours(asked) else original)(group, *args, **kwargs)

    def give_back() -> None:
        if dist.monitored_barrier is distributed_c10d.monitored_barrier is ours_or_original:
            dist.monitored_barrier = distributed_c10d.monitored_barrier = original

    dist.monitored_barrier = distributed_c10d.monitored_barrier = ours_or_original
    return give_back


def _backend_asked_for() -> str:
    """Return the argument of the call of init_process_group we are in; torch hands it to no rendezvous."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "init_process_group":
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else str(frame.f_locals.get("backend") or "").lower()
