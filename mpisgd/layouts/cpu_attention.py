"""How DTensor divides torch's fused attention on CPUs, of which it knows only the kernels of GPUs.

Attention over [batch, heads, length, width of a head] works on each sequence and each head by itself. So
these two dimensions may be divided; where the length or the width is divided, DTensor gathers it first.
"""

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

__all__ = ["register_attention"]

BATCH, HEADS = 0, 1
Shardings = list[tuple[list[Placement], list[Placement]]]  # of outputs and inputs


@functools.cache  # once
def register_attention() -> None:
    """Tell DTensor how to divide attention on CPUs, unless this torch knows it."""
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    if forward not in DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs:
        register_sharding(forward)(_forward)
        register_sharding(backward)(_backward)


def _forward(query: Any, key: Any, value: Any, *scalars: Any, **options: Any) -> Shardings:
    """Outputs: what attention returns, and logarithms of sums of exponentials, [batch, heads, length]."""
    return _shardings(num_outputs=2, num_inputs=3, masked=options.get("attn_mask") is not None)


def _backward(grad: Any, query: Any, key: Any, value: Any, *others: Any, **options: Any) -> Shardings:
    """Outputs: three gradients. Inputs: that of the output, query, key, value, and what forward returned."""
    return _shardings(num_outputs=3, num_inputs=6, masked=options.get("attn_mask") is not None)


def _shardings(*, num_outputs: int, num_inputs: int, masked: bool) -> Shardings:
    """Return the placements on one axis: all tensors alike; copied with a mask, which may have any shape."""
    if masked:
        return [([Replicate()] * num_outputs, [Replicate()] * (num_inputs + 1))]
    choices: list[Placement] = [Replicate(), Shard(BATCH), Shard(HEADS)]
    return [([where] * num_outputs, [where] * num_inputs) for where in choices]
