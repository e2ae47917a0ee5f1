"""`scaled_dot_product_attention` of a user's model, over all ranks of a ring.

Attention of torch's modules is this function in the end, but some functions of torch hide it: a function that
is written in Python asks the mode, and is then called without it. So `backward`, which may compute forward
again, and `multi_head_attention_forward` run here with the mode.
"""

import math
import sys
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from mpisgd.arguments import shown
from mpisgd.context.masks import check_chunks, rows_of
from mpisgd.context.ring import Ring
from mpisgd.context.ring_attention import AttentionCall, RingAttention
from mpisgd.errors import InvalidArgument, MpisgdError, UnsupportedTensor
from mpisgd.layouts.attention import attends_in_layout

__all__ = ["AttentionOverRanks"]

NAME = "scaled_dot_product_attention"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# They run Python that may call attention.
TRANSPARENT = (torch.autograd.backward, torch.autograd.grad, Tensor.backward, F.multi_head_attention_forward)
# They compute attention by themselves, by what their names begin with.
OPAQUE = ("flex_attention", "_native_multi_head_attention", "_transformer_encoder_layer_fwd")


class AttentionOverRanks(TorchFunctionMode):
    """In here, `scaled_dot_product_attention` of this thread sees the keys of all ranks.

    Args:
        ring: the ranks, of which each has its part of queries, keys and values.
        differing: parameters that are not the same on all of them, with the reason, by id; using one raises.
    """

    def __init__(self, ring: Ring, differing: Mapping[int, tuple[Tensor, str]]) -> None:
        super().__init__()
        self._ring, self._differing = ring, differing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; attention over all ranks."""
        kwargs = kwargs or {}
        if self._differing:
            for arg in (*args, *kwargs.values()):
                if id(arg) in self._differing:
                    raise InvalidArgument(self._differing[id(arg)][1])
        if func is F.scaled_dot_product_attention:
            return _attend(self._ring, *args, **kwargs)
        if func in TRANSPARENT:
            _check_module(func, kwargs)
            with self:
                return _without_question(func)(*args, **kwargs)
        if getattr(func, "__name__", "").startswith(OPAQUE) and self._ring.size > 1:
            raise InvalidArgument(
                f"context_parallel: {func.__name__} computes attention by itself, to the keys of this rank "
                f"alone; call torch.nn.functional.{NAME}"
            )
        return func(*args, **kwargs)


@cache
def _without_question(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that does not ask modes whether they replace it, so that they stay on."""
    assert isinstance(func, FunctionType)
    asks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**func.__globals__, **dict.fromkeys(asks, _no)}
    plain = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    plain.__kwdefaults__ = func.__kwdefaults__
    return plain


def _no(*args: object) -> bool:
    return False


def _check_module(func: Any, kwargs: dict[str, Any]) -> None:
    """Raise where torch's module for attention would multiply matrices instead of calling it."""
    if func is F.multi_head_attention_forward and kwargs.get("need_weights", True):
        raise InvalidArgument(
            "context_parallel: MultiheadAttention with need_weights=True returns a weight for each key, and "
            "each rank has a part of the keys; pass need_weights=False"
        )


def _attend(
    ring: Ring,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Do what torch's function does, with the keys and values of all ranks of `ring`. Collective.

    Raises:
        InvalidArgument, UnsupportedTensor: nothing for a ring; on every rank where it is alike.
        CollectiveMismatch: the ranks' calls differ; on every rank.
    """
    tensors = [query, key, value]
    problem: MpisgdError | None = None
    text = ""
    try:
        _check_kinds(tensors, attn_mask)
        _check_options(attn_mask, dropout_p, is_causal)
        tensors = [_autocast(tensor) for tensor in tensors]
        _check_shapes(tensors, is_causal, enable_gqa)
        if is_causal:
            check_chunks("is_causal=True", query.shape[-2], ring.size)
        three = query.dim() == 3
        query, key, value = (tensor.unsqueeze(0) if three else tensor for tensor in tensors)
        if attn_mask is not None:
            _check_dims(attn_mask, tensors[0])
            attn_mask = rows_of(_autocast(attn_mask), query.shape[2], key.shape[2], ring.rank, ring.size)
            _check_mask(attn_mask, query)
        text = _described(query, key, value, attn_mask, is_causal, scale)
    except MpisgdError as exc:
        problem = exc
    number = ring.next_number()
    ring.agree(NAME, lambda: text, problem=problem)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    call = AttentionCall(ring, is_causal, scale, text, number)
    out: Tensor = RingAttention.apply(query, key, value, attn_mask, call)  # type: ignore[no-untyped-call]
    return out.squeeze(0) if three else out


def _check_kinds(tensors: list[Tensor], mask: Tensor | None) -> None:
    """Raise where a tensor is none that can travel, or the call has been divided already."""
    if attends_in_layout():
        raise InvalidArgument(
            "context_parallel: this model is in a layout, whose inputs all ranks have whole; divide the "
            "dimension 'length' there, or take torch's parallelize_module"
        )
    for name, tensor in zip(("query", "key", "value", "attn_mask"), (*tensors, mask), strict=True):
        if tensor is None and name == "attn_mask":
            continue
        if not isinstance(tensor, Tensor) or isinstance(tensor, DTensor):
            raise UnsupportedTensor(
                f"{NAME}: {name} is a {type(tensor).__name__}; context_parallel takes plain tensors"
            )
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise UnsupportedTensor(
                f"{NAME}: {name} is {tensor.layout} on {tensor.device}; context_parallel of mpisgd is for "
                "dense tensors on the CPU (on GPUs, torch has its own)"
            )
    if len({tensor.dtype for tensor in tensors}) > 1 or tensors[0].dtype not in DTYPES:
        raise UnsupportedTensor(
            f"{NAME}: query, key and value are {', '.join(str(tensor.dtype) for tensor in tensors)}; "
            "expected one floating-point dtype"
        )


def _check_options(mask: Tensor | None, dropout_p: float, is_causal: bool) -> None:
    if dropout_p:
        raise InvalidArgument(
            f"{NAME}: dropout_p={shown(dropout_p)} does not go with context_parallel: no kernel for the CPU "
            "draws it by blocks"
        )
    if mask is not None and is_causal:
        raise InvalidArgument(f"{NAME}: attn_mask and is_causal=True together; torch takes one of them")
    if mask is not None and mask.requires_grad:
        raise InvalidArgument(f"{NAME}: attn_mask requires a gradient, which context_parallel leaves out")
    if not torch.is_grad_enabled() and _is_recomputed():
        raise InvalidArgument(
            "context_parallel: checkpoint(use_reentrant=True) computes forward again in backward, which may "
            "come after the context has ended; pass use_reentrant=False"
        )


def _is_recomputed() -> bool:
    """Return whether this is in a part of the model whose graph is made in backward only."""
    frame = sys._getframe()
    while (outer := frame.f_back) is not None:
        frame = outer
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
    return False


def _autocast(tensor: Tensor) -> Tensor:
    """Return a tensor as autocast, which does not see this function, would pass it on."""
    if (
        not torch.is_autocast_enabled("cpu")
        or not tensor.is_floating_point()
        or tensor.dtype == torch.float64
    ):
        return tensor
    return tensor.to(torch.get_autocast_dtype("cpu"))


def _check_shapes(tensors: list[Tensor], is_causal: bool, enable_gqa: bool) -> None:
    query, key, value = tensors
    shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
    if not query.dim() == key.dim() == value.dim() or query.dim() not in (3, 4):
        raise InvalidArgument(f"{NAME}: {shapes}; context_parallel takes [batch, heads, length, width]")
    heads, shared = query.shape[-3], key.shape[-3]
    same_heads = heads == shared if not enable_gqa else shared > 0 and heads % shared == 0
    if (
        query.shape[:-3] != key.shape[:-3]
        or key.shape[:-1] != value.shape[:-1]
        or query.shape[-1] != key.shape[-1]
        or not same_heads
    ):
        raise InvalidArgument(
            f"{NAME}: {shapes} do not fit together; context_parallel broadcasts nothing, and takes fewer "
            "heads of keys with enable_gqa=True, a divisor of those of queries"
        )
    if 0 in (*query.shape, *value.shape):
        raise InvalidArgument(f"{NAME}: {shapes}; context_parallel takes none without elements")
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise InvalidArgument(
            f"{NAME}: {shapes}; with context_parallel, is_causal=True takes as many queries as keys"
        )


def _check_dims(mask: Tensor, query: Tensor) -> None:
    if not 2 <= mask.dim() <= query.dim():
        raise InvalidArgument(
            f"{NAME}: attn_mask {list(mask.shape)} has {mask.dim()} dimensions, and query {query.dim()}; "
            "expected as many, or only the last ones"
        )


def _check_mask(mask: Tensor, query: Tensor) -> None:
    """Raise where a mask, 4-D, does not broadcast over batch and heads, or has no meaning."""
    if any(have not in (1, want) for have, want in zip(mask.shape[:2], query.shape[:2], strict=True)):
        raise InvalidArgument(
            f"{NAME}: attn_mask {list(mask.shape)} does not broadcast to batch and heads of query "
            f"{list(query.shape)}"
        )
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise UnsupportedTensor(
            f"{NAME}: attn_mask is {mask.dtype}; expected torch.bool, torch.float32 or {query.dtype}"
        )


def _described(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> str:
    """Describe the call in words that are the same on all ranks; they are compared."""
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    parts = [f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}, {query.dtype}"]
    if mask is not None:
        parts.append(f"attn_mask {list(mask.shape)}, {mask.dtype}")
    parts += ["is_causal"] if is_causal else []
    parts += [] if scale is None else [f"scale={scale}"]
    parts += ["for backward"] if learns else []
    return ", ".join(parts)
