"""`send`, `recv`, `isend`, `irecv`: from one rank to another, outside the order of the collectives."""

from torch import Tensor

from mpisgd.accelerator.buffers import StagedOutput, readable
from mpisgd.accelerator.capture import check_not_capturing
from mpisgd.accelerator.runtime import on_device
from mpisgd.arguments import shown
from mpisgd.collectives.tensor_arguments import check_output, check_tensor
from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument, InvalidRank, ShapeMismatch
from mpisgd.job.lifecycle import group_or_world
from mpisgd.transport.device.stream_guard import StreamGuard
from mpisgd.transport.messages.message_work import MessageWork
from mpisgd.transport.messages.point_to_point import PointToPoint

__all__ = ["irecv", "isend", "recv", "send"]


def isend(tensor: Tensor, dst: int, group: Group | None = None, tag: int = 0) -> MessageWork:
    """Start sending `tensor` to rank `dst`.

    Args:
        tensor: any dense tensor; do not change it until the work's `wait()` has returned. A tensor on a GPU
            is sent to another GPU by NCCL, unless the group's collectives go through host memory.
        dst: global rank of the receiver.
        group: defaults to all processes of the job; sender and receiver name the same group.
        tag: messages of equal tag between two ranks arrive in order.

    Raises:
        UnsupportedTensor, InvalidRank, InvalidArgument: before anything is sent.
    """
    group = group_or_world(group)
    _check_everyone_has_data("isend", group)
    check_tensor("isend", tensor)
    if on_device(tensor):
        check_not_capturing("isend")
    _check_tag("isend", tag, group)
    messages: PointToPoint = group.point_to_point
    peer = group.group_rank("isend", "dst", dst)
    if on_device(tensor) and messages.elsewhere is not None:
        messages.elsewhere.check()
        if messages.elsewhere.announces(tensor, peer):
            work: MessageWork = messages.elsewhere.send(tensor, peer, tag)
            return work
    return messages.send("send", readable(tensor), peer, tag, [tensor])


def irecv(tensor: Tensor, src: int | None = None, group: Group | None = None, tag: int = 0) -> MessageWork:
    """Start receiving into `tensor` from rank `src`.

    Args:
        tensor: of the size that is sent; do not use it until the work's `wait()` has returned.
        src: global rank of the sender; None takes a message from any rank, see the work's `source`.
        group: defaults to all processes of the job; sender and receiver name the same group.
        tag: only a message of this tag is taken.

    Raises:
        UnsupportedTensor, InvalidRank, InvalidArgument: at once.
        ShapeMismatch: from `wait()`, if the message has another size; the content of the tensor is then
            undefined. By NCCL nothing is sent in this case, and the sender's `wait()` raises the error, too.
    """
    group = group_or_world(group)
    _check_everyone_has_data("irecv", group)
    check_output("irecv", tensor)
    if on_device(tensor):
        check_not_capturing("irecv")
    _check_tag("irecv", tag, group)
    root = None if src is None else group.group_rank("irecv", "src", src)
    messages: PointToPoint = group.point_to_point
    if on_device(tensor) and messages.elsewhere is not None:
        messages.elsewhere.check()
    output = StagedOutput(tensor, keep=False)
    guard = _guard(tensor, group)
    copy_back = output.copy_back if guard is None else guard.to_its_end(output.copy_back)

    def arrived(nbytes: int) -> None:
        expected = tensor.numel() * tensor.element_size()
        if nbytes != expected:
            sender = "the message" if src is None else f"the message from rank {src}"
            raise ShapeMismatch(
                f"recv: {sender} has {nbytes} bytes, the tensor has {expected} ({list(tensor.shape)})"
            )
        copy_back()

    ready = None if guard is None else guard.ready
    work = messages.receive("recv", output.flat, root, tag, [tensor], arrived, ready=ready)
    work.stream = None if guard is None else guard.stream
    return work


def _check_everyone_has_data(name: str, group: Group) -> None:
    """Raise inside `join()`: a rank without data sends nothing, and receives nothing."""
    if (uneven := group.queue.uneven) is not None:
        uneven.intercept(name)


def _guard(tensor: Tensor, group: Group) -> StreamGuard | None:
    """Return a guard by which any thread copies to a device after the work of the caller's stream."""
    if not on_device(tensor):
        return None
    return StreamGuard(tensor.device, group.streams.get("messages", tensor.device), waits=True)


def send(tensor: Tensor, dst: int, group: Group | None = None, tag: int = 0) -> None:
    """Send `tensor` to rank `dst`; it may be changed when this returns. See `isend`."""
    _refuse_self("send", "dst", dst, group)
    isend(tensor, dst, group, tag).wait()


def recv(tensor: Tensor, src: int | None = None, group: Group | None = None, tag: int = 0) -> int:
    """Receive `tensor` from rank `src`, and return the global rank that sent it; see `irecv`."""
    _refuse_self("recv", "src", src, group)
    work = irecv(tensor, src, group, tag)
    work.wait()
    assert work.source is not None
    return group_or_world(group).ranks[work.source]


def _refuse_self(name: str, what: str, peer: int | None, group: Group | None) -> None:
    members = group_or_world(group)
    if peer is not None and members.rank >= 0 and members.group_rank(name, what, peer) == members.rank:
        raise InvalidRank(
            f"{name}: {what}={peer} is this rank itself, which would wait for ever; use i{name}"
        )


def _check_tag(name: str, tag: int, group: Group) -> None:
    limit = group.point_to_point.tag_limit
    if not isinstance(tag, int) or not 0 <= tag <= limit:
        raise InvalidArgument(f"{name}: tag={shown(tag)}; expected an integer from 0 to {limit}")
