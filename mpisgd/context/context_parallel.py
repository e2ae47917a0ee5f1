"""`context_parallel`: a context in which sequences are divided among ranks."""

import contextlib
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mpisgd.arguments import ranks_text, shown
from mpisgd.context.attention import AttentionOverRanks
from mpisgd.context.division import own_part
from mpisgd.context.ring import Ring, ring_of
from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument, MpisgdError, UnsupportedTensor
from mpisgd.gradients.tree_sum import TreeSum
from mpisgd.methods.strategy.goes_with import no
from mpisgd.optim.living import living_optimizers
from mpisgd.parameters.fingerprint import fingerprints
from mpisgd.torch_backend.process_group import ProcessGroupMpisgd

__all__ = ["context_parallel"]

NAME = "context_parallel"

_inside: ContextVar[bool] = ContextVar("mpisgd_context_parallel", default=False)


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh | Group,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: AbstractSet[Tensor] | None = None,
) -> Iterator[None]:
    """Divide sequences among ranks: each has a part of `buffers`, and attention goes over all parts.

    Collective: all ranks of `mesh` enter with equal buffers, compute the same layers, and call `backward()`
    before they leave. Inside, `torch.nn.functional.scaled_dot_product_attention` of this thread takes this
    rank's queries, keys and values and returns its rows of the attention to the keys of all ranks; keys and
    values travel around a ring, and so do their gradients in backward. All other layers must treat each
    position of the sequence independently, and take position indices from a buffer. A sequence is cut into
    2 n chunks for n ranks; rank r has chunks r and 2 n - 1 - r, so that with a causal mask all ranks have
    equal work.

        with mpisgd.context_parallel(mesh, buffers=[tokens, targets, places], buffer_seq_dims=[1, 1, 0]):
            loss = cross_entropy(model(tokens, places).flatten(0, 1), targets.flatten())
            loss.backward()

    The loss is the mean over this rank's part. Gradients must be averaged over all ranks, those of `mesh` and
    those with other examples: `DistributedOptimizer` over all ranks, or DDP, does so.

    Args:
        mesh: the ranks: an axis of a DeviceMesh of the backend "mpisgd", `mesh["cp"]`, or a `Group`.
        buffers: tensors on the CPU, the same on all ranks, such as inputs, targets and positions; no
            parameters. Inside the context each tensor has this rank's part of its values, in new memory;
            afterwards it has its former memory again. Views of that memory are not changed.
        buffer_seq_dims: for each buffer the dimension along which it is divided; its length must be a
            multiple of 2 n.
        no_restore_buffers: those of `buffers` that stay divided afterwards, which frees their former memory.

    Raises:
        InvalidArgument, UnsupportedTensor: a buffer cannot be divided. Inside: attention with dropout, with a
            mask whose columns are divided, or with shapes that do not fit; or the model's parameters may
            differ between ranks, as with `LocalSGD`. On every rank if all have passed the same.
        CollectiveMismatch: the ranks have different buffers, or call attention differently; on every rank.

    Cost: for a layer with keys and values of K bytes over all ranks, each rank sends (n - 1) / n K bytes in
        forward, and 2 (n - 1) / n K bytes in backward (more with 16-bit dtypes, since gradients are sent in
        float32). Each rank has 1 / n of the activations.

    Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context".
    """
    group = _group_of(mesh)
    ring = ring_of(group)
    whole: list[Tensor] = []
    dims: list[int] = []
    kept: list[Tensor] = []
    problem: MpisgdError | None = None
    try:
        whole, dims = _listed("buffers", buffers), _listed("buffer_seq_dims", buffer_seq_dims)
        kept = _listed("no_restore_buffers", no_restore_buffers)
        if _inside.get():
            raise InvalidArgument(f"{NAME}: inside another one, which divides the sequences already")
        dims = _check_buffers(whole, dims, kept, ring.size)
    except MpisgdError as exc:
        problem = exc
    ring.agree(
        NAME,
        lambda: ", ".join(f"{list(b.shape)} along {dim}" for b, dim in zip(whole, dims, strict=True)),
        when="" if problem else _contents(whole),
        problem=problem,
    )
    token = _inside.set(True)
    try:
        with _divided(whole, dims, kept, ring), AttentionOverRanks(ring, _differing(group)):
            yield
    finally:
        _inside.reset(token)


@contextlib.contextmanager
def _divided(buffers: list[Tensor], dims: list[int], kept: list[Tensor], ring: Ring) -> Iterator[None]:
    """Let buffers be this rank's parts meanwhile. Their memory is exchanged: views of it stay whole."""
    if ring.size == 1:
        yield
        return
    back = [(buffer, buffer.detach()) for buffer in buffers if not any(buffer is each for each in kept)]
    with torch.no_grad():
        for buffer, dim in zip(buffers, dims, strict=True):
            buffer.set_(own_part(buffer, dim, ring.rank, ring.size))  # type: ignore[call-overload]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, whole in back:
                buffer.set_(whole)  # type: ignore[call-overload]


def _group_of(mesh: Any) -> Group:
    """Return the ranks that share sequences.

    Raises:
        InvalidArgument: it is no axis of ranks, or they are not those of a job.
        NotInGroup: this rank is none of them.
    """
    if isinstance(mesh, Group):
        _ = mesh.resources  # raises where this rank is no member
        return mesh
    if not isinstance(mesh, DeviceMesh):
        raise InvalidArgument(f"{NAME}: mesh={shown(mesh)}; expected an axis of a DeviceMesh, or a Group")
    if mesh.ndim != 1:
        raise InvalidArgument(
            f"{NAME}: mesh has {mesh.ndim} axes {mesh.mesh_dim_names or ''}; take one of them, as in "
            'mesh["cp"]'
        )
    group: Any = mesh.get_group()
    if not isinstance(group, ProcessGroupMpisgd):
        group = group._get_backend(torch.device("cpu"))
    if not isinstance(group, ProcessGroupMpisgd):
        raise InvalidArgument(
            f"{NAME}: mesh is of the backend '{group.name()}'; call init_process_group(\"mpisgd\") before "
            "you make it"
        )
    found: Group = group.mpisgd_group
    return found


def _listed(what: str, value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, (list, tuple, AbstractSet)):
        return list(value)
    raise InvalidArgument(f"{NAME}: {what} is a {type(value).__name__}; expected a list")


def _differing(group: Group) -> dict[int, tuple[Tensor, str]]:
    """Return (parameter, why) by id, of parameters that ranks which share sequences may not train so."""
    found: dict[int, tuple[Tensor, str]] = {}
    for optimizer in living_optimizers(group.job):
        training, what = optimizer.synchronizer.training, optimizer.strategy
        shared = set(training.group.ranks) & set(group.ranks)
        answer = what.goes_with.context_parallel
        if isinstance(tree := training.options.compression, TreeSum):
            what, answer = tree, no("it needs whole micro-batches on each rank")
        if len(shared) > 1 and not answer.goes:
            why = f"{NAME}: {what} does not go with it on {ranks_text(shared)}: {answer.words}"
            found.update({id(param): (param, why) for param in training.params})
    return found


def _check_buffers(buffers: list[Tensor], dims: list[Any], kept: list[Tensor], size: int) -> list[int]:
    """Return the dimensions, counted from the front.

    Raises:
        InvalidArgument, UnsupportedTensor: something cannot be divided among `size` ranks.
    """
    if len(buffers) != len(dims):
        raise InvalidArgument(
            f"{NAME}: {len(buffers)} buffers and {len(dims)} buffer_seq_dims; expected one for each"
        )
    if any(not any(each is buffer for buffer in buffers) for each in kept):
        raise InvalidArgument(f"{NAME}: no_restore_buffers has a tensor that is none of buffers")
    return [_check_buffer(place, buffers, dims[place], size) for place in range(len(buffers))]


def _check_buffer(place: int, buffers: list[Tensor], dim: Any, size: int) -> int:
    buffer, what = buffers[place], f"{NAME}: buffers[{place}]"
    if not isinstance(buffer, Tensor) or isinstance(buffer, (nn.Parameter, DTensor)):
        raise UnsupportedTensor(f"{what} is a {type(buffer).__name__}; expected a plain tensor")
    if buffer.device.type != "cpu" or buffer.layout != torch.strided:
        raise UnsupportedTensor(f"{what} is {buffer.layout} on {buffer.device}; expected it dense on the CPU")
    if buffer.requires_grad:
        raise UnsupportedTensor(f"{what} requires a gradient, which would be lost; divide what it is made of")
    if any(buffer is other for other in buffers[:place]):
        raise InvalidArgument(f"{what} is the same tensor as one before it")
    if isinstance(dim, bool) or not isinstance(dim, int) or not -buffer.dim() <= dim < buffer.dim():
        raise InvalidArgument(
            f"{NAME}: buffer_seq_dims[{place}]={shown(dim)}; the shape is {list(buffer.shape)}"
        )
    length = buffer.shape[dim]
    if size > 1 and (not length or length % (2 * size)):
        raise InvalidArgument(
            f"{what} has {length} places along dimension {dim}, which {size} ranks cannot divide: expected a "
            f"multiple of {2 * size}; pad sequences to one, and leave the places added out of the loss"
        )
    return dim % buffer.dim()


def _contents(buffers: list[Tensor]) -> str:
    """Return a hash of the integer buffers, which differs where ranks have different examples."""
    exact = [buffer for buffer in buffers if not (buffer.is_floating_point() or buffer.is_complex())]
    return f"contents with hash {hash(tuple(fingerprints(exact))) & 0xFFFFFFFF:08x}"
