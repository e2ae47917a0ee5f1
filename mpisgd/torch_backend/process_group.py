"""`ProcessGroupMpisgd`: a `torch.distributed.ProcessGroup` on one of our groups: its members and its end.

What the members do together is in `operations`.
"""

import warnings
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpisgd.config import BACKEND
from mpisgd.core.group import Group
from mpisgd.errors import CollectiveTimeout, NotInitialized, UnsupportedOp
from mpisgd.job.groups import close_group, leave_group
from mpisgd.job.recovery import free_old_worlds
from mpisgd.torch_backend import compat
from mpisgd.torch_backend.membership import Membership, are_handles_known, handle_of_process
from mpisgd.torch_backend.operations import Operations
from mpisgd.torch_backend.window import BackendWindow
from mpisgd.torch_backend.work import BackendWork

__all__ = ["ProcessGroupMpisgd"]


class _NoMembers:
    """In the place of `mpisgd_group`, until there is one: its value on the object hides this one."""

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None:
            return self
        raise NotInitialized(
            "this process group has no members yet, since it was made with enable_reconfigure=True; call "
            "reconfigure first"
        )


@compat.never_compiled
class ProcessGroupMpisgd(Operations):
    """A process group of the backend "mpisgd"; made by `init_process_group` and `new_group` only.

    It has the operations of `torch.distributed.ProcessGroup`, which `torch.distributed` calls.
    Operations run in the order in which they are issued. With `async_op=False` they run at once. Asynchronous
    ones run at once if all ranks have issued them and share a host, and otherwise in a thread of the group.

    Attributes:
        mpisgd_group: the value for `group=` of mpisgd's own functions; another one after each `reconfigure`.
    """

    mpisgd_group: Any = _NoMembers()

    def __init__(self, group: Group | None, store: Any, membership: Membership) -> None:
        super().__init__(*(-1, -1) if group is None else (group.rank, group.size))
        if group is not None:
            self.mpisgd_group = group
        self._membership = membership
        self._store = store
        self._name = ""
        self._desc = ""

    def __repr__(self) -> str:
        group = self._found_group()
        return f"ProcessGroupMpisgd(name={self._name!r}, ranks={list(group.ranks) if group else []})"

    def _found_group(self) -> Group | None:
        """Return `mpisgd_group`, None where there is none yet."""
        found: Group | None = vars(self).get("mpisgd_group")
        return found

    # -- what it is ------------------------------------------------------------------------------------

    def name(self) -> str:
        """Return the backend's name."""
        return BACKEND

    getBackendName = _get_backend_name = name

    def get_group_store(self) -> Any:
        """Return the store of the rendezvous."""
        return self._store

    def getGroupName(self) -> str:
        """Return the name of this group in torch."""
        return self._name

    def getGroupDesc(self) -> str:
        """Return the description of this group in torch."""
        return self._desc

    def setGroupName(self, name: str) -> None:
        """Set the name that torch gives the group."""
        self._name = name

    def setGroupDesc(self, desc: str) -> None:
        """Set the description that torch gives the group."""
        self._desc = desc

    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(device) for device in devices]

    # torch asks the group for a backend per device; ours is the group itself, and these are its answers.

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False
    supports_window = compat.HAS_WINDOWS

    def _get_backend(self, device: torch.device) -> "ProcessGroupMpisgd":
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: tensors need no special memory."""
        return False

    # -- other members (from torch 2.14 on) ------------------------------------------------------------

    def getRank(self) -> int:
        """Return this rank's number in the group; -1 before the first `reconfigure`."""
        return -1 if (group := self._found_group()) is None else group.rank

    def getSize(self) -> int:
        """Return the number of members; -1 before the first `reconfigure`."""
        return -1 if (group := self._found_group()) is None else group.size

    @property
    def supports_reconfigure(self) -> bool:
        """Whether this torch has `reconfigure`, and the default group is one of this backend."""
        return compat.HAS_RECONFIGURE and are_handles_known()

    def get_reconfigure_handle(self) -> str:
        """Return the text that identifies this process in `reconfigure`; it never changes."""
        if not are_handles_known():
            raise UnsupportedOp(
                "get_reconfigure_handle: needs a default group of 'mpisgd', and a job that mpisgd.elastic "
                "has not begun anew"
            )
        return handle_of_process()

    def reconfigure(self, opts: Any) -> dist.Work:
        """Replace the members of the group by those that `opts.handles` names. Collective over these.

        The members are ranks of the job. If a rank of the job was lost, all remaining ranks must call it; it
        then also restarts the job with them, and other groups can be reconfigured afterwards.

        Args:
            opts: torch's ReconfigureOptions. `uuid`: the same on all members, and new to this group.
                `handles`: a list in the order of the new ranks, or a set, for the order of the job.
                `timeout`: of the reconfiguration. `hints` are not used.

        Returns:
            A finished `Work`. If an error is raised, the group is unchanged.

        Raises:
            InvalidArgument: the uuid was used before, the timeout is not positive, or a handle is unknown,
                given twice, or that of this rank is missing; before anything is sent.
            CollectiveMismatch: members gave different orders.
            CollectiveTimeout: a member did not come, or gave another uuid or other handles.
            JobError: after a loss, this is the smaller part of a partitioned network.
        """
        before = self._found_group()
        self.mpisgd_group = self._membership.renew(before, opts)
        self._aborted, self._coalesced = None, None
        if before is not None and before.job is not self.mpisgd_group.job:
            free_old_worlds()
        return BackendWork([], None)

    # -- one-sided communication (from torch 2.14 on) --------------------------------------------------

    def new_window(self, tensor: Tensor | None = None) -> BackendWindow:
        """Return a window of the group, with `tensor` registered if it is given. Collective then."""
        window = BackendWindow(self.mpisgd_group)
        if tensor is not None:
            window.tensor_register(tensor)
        return window

    # -- its limits and its end ------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Let operations wait this long for other ranks from now on."""
        self._membership.timeout_s = timeout.total_seconds()
        if (group := self._found_group()) is not None and group.is_usable:
            group.queue.consistency.timeout_s = timeout.total_seconds()
            group.point_to_point.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Close the group; torch's `destroy_process_group` calls this. Collective over its members.

        After a failed operation this rank does not wait; the others are told that it has left the group.
        """
        # Where mpisgd.shutdown() was quicker there is nothing to give back.
        if (group := self._found_group()) is not None and group in group.job.groups:
            close_group(group)

    def abort(self) -> None:
        """End this rank's waits in the group with an error; every later operation raises.

        May be called from any thread. This rank then no longer belongs to the group: other ranks do not wait
        for it when they destroy the group or end the program; their operations raise at the group's timeout.
        """
        if (group := self._found_group()) is None or not group.is_usable:
            return  # nothing waits
        error = NotInitialized(f"{self!r} was aborted")
        self._aborted = self._aborted or error
        if group.device is not None:  # first: what waits for the GPU is not woken otherwise
            group.device.abandon(error)
        group.point_to_point.abandon_devices(error)
        if group.queue.abort(error):
            leave_group(group)
        else:
            warnings.warn(
                f"abort: {self!r} is in a call of MPI, which cannot be interrupted; the operation goes on",
                RuntimeWarning,
                2,
            )
        group.point_to_point.abandon(error)

    def get_error(self) -> Any:
        """Return torch's ErrorType: SUCCESS as long as no operation has failed on this rank."""
        group = self._found_group()
        broken = None if group is None else group.broken
        if broken is None and self._aborted is None:
            return compat.error_type("SUCCESS")
        return compat.error_type("TIMEOUT" if isinstance(broken, CollectiveTimeout) else "COMM_ERROR")
