"""Parallelize a model for one process with torch's own tools.

The order matters: first the layers of this stage are selected, then each layer is split over the tensor
parallel ranks, then the rest is replicated or sharded over the data-parallel ranks.
"""

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from training.layout import Layout
from training.text_model import GPT


def parallelize(model: GPT, layout: Layout, mesh: DeviceMesh, *, drops_layers: bool = False) -> nn.Module:
    """This rank's part of `model`; backward() averages its gradients over dp and cp. Collective.

    With `drops_layers` a step may pass over some of the layers.
    """
    if layout.pp > 1:
        keep_stage(model, mesh.get_local_rank("pp"), layout.pp)
    if layout.tp > 1:
        split_layers(model, mesh["tp"])
    return share(model, layout, mesh, drops_layers) if layout.num_averaging > 1 else model


def keep_stage(model: GPT, stage: int, num_stages: int) -> None:
    """Pipeline parallel: drop all but the layers of one stage; the first embeds, the last has the head."""
    names = list(model.blocks)
    first, end = (len(names) * bound // num_stages for bound in (stage, stage + 1))
    for name in [*names[:first], *names[end:]]:
        del model.blocks[name]
    if stage > 0:
        model.embedding = None
    if stage < num_stages - 1:
        model.head = None


def split_layers(model: GPT, mesh: DeviceMesh) -> None:
    """Tensor parallel: each rank has some of the heads and hidden columns.

    Two all-reduces per block, where outputs are added up, and two in backward, where gradients are. Embedding
    and head stay whole: of 256 bytes there is little to divide. Norms do the same work on all ranks.

    Source: Shoeybi et al. 2019, "Megatron-LM".
    """
    # One input for three projections: their gradients are added before they are all-reduced.
    same = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    plan = {
        "attention": same,
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(),
    }
    for block in model.blocks.values():
        parallelize_module(block, mesh, plan)


def share(model: GPT, layout: Layout, mesh: DeviceMesh, drops_layers: bool) -> nn.Module:
    """Data parallel: every rank has its own share of the batch, or with cp its own places in a share.

    DDP without other axes: ZeRO-1 needs it, and it takes less time than `fully_shard`. But it does not know
    parameters that tensor parallelism has split, and it fails in a pipeline with as many micro-batches as
    stages (torch 2.13, every backend). `fully_shard` works with all axes; over a "shard" axis of length 1 it
    only averages gradients. Nor does DDP expect layers without gradients: it searches for them in every step,
    and warns where there are none.
    """
    if layout.zero == 1 or (layout.zero == 0 and layout.tp == layout.pp == 1 and not drops_layers):
        return DistributedDataParallel(
            model, process_group=mesh.get_group("replicate"), find_unused_parameters=drops_layers
        )
    for module in (*model.blocks.values(), model):
        fully_shard(module, mesh=mesh["replicate", "shard"])
    return model


def reduces_gradients(model: nn.Module, wanted: bool) -> AbstractContextManager[None]:
    """Inside, backward() averages gradients over dp, or where not wanted lets them pile up."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
    elif isinstance(model, DistributedDataParallel) and not wanted:
        return model.no_sync()
    return nullcontext()
