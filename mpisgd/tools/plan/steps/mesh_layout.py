"""`mesh_cost`: a `mpisgd.layout` as a method: the operations that DTensor does in its step, on a cluster.

The batch is that of all ranks, as of `Parallel`. A rank's passes take a share of what they take on one rank
that computes the batch alone, as its products of matrices have; its operations are in the mesh's groups.
"""

from dataclasses import replace
from functools import lru_cache
from math import prod

from mpisgd.errors import InvalidArgument
from mpisgd.layouts.cost import LayoutCost
from mpisgd.layouts.layout import MeshLayout
from mpisgd.layouts.named_model import NamedModel
from mpisgd.methods.cost_kit import Compute, Op, Wait
from mpisgd.methods.costs import MethodCost
from mpisgd.tools.plan.cluster import Cluster
from mpisgd.tools.plan.models.model import OPTIMIZERS, StepProfile

__all__ = ["mesh_cost"]

ALONE = MeshLayout((), (("alone", 1),))


def mesh_cost(cluster: Cluster, profile: StepProfile, layout: MeshLayout) -> MethodCost:
    """Return the cost of a layout.

    Raises:
        InvalidArgument: the model's dimensions have no names, the layout is not legal for it or for so many
            ranks, or would have some hosts in part.
    """
    if profile.named is None:
        raise InvalidArgument(
            f"plan: {layout.text} of {profile.name}, whose dimensions have no names; expected --model "
            "file.py:function that returns a mpisgd.NamedModel"
        )
    layout.check_ranks(cluster.size)
    k, lengths = cluster.ranks_per_host, list(layout.lengths.values())
    widths = [prod(lengths[place:]) for place in range(len(lengths))]
    if not all(k % width == 0 or width % k == 0 for width in widths):
        raise InvalidArgument(f"plan: {layout.text}: an axis would have some hosts of {k} rank(s) in part")
    if not float(profile.batch).is_integer():
        raise InvalidArgument(f"plan: {layout.text} of {profile.batch:g} examples per rank")
    found, alone = _counted(profile.named, layout, round(profile.batch) * cluster.size)
    if not alone.operations:
        raise InvalidArgument(f"plan: {profile.name} has no products of matrices to divide its time by")

    def in_time(op: Op) -> Op:
        if not isinstance(op, Compute):
            return op
        return replace(op, share=cluster.size * op.operations / alone.operations)

    update = Compute("optimizer", found.gradient_bytes / alone.gradient_bytes)
    steps = replace(found, ops=(*map(in_time, found.ops), Wait(), update))
    return steps.method(OPTIMIZERS[profile.optimizer].state * found.gradient_bytes)


@lru_cache(maxsize=64)
def _counted(named: NamedModel, layout: MeshLayout, examples: int) -> tuple[LayoutCost, LayoutCost]:
    """Return the costs of a step of so many examples in a layout, and on one rank."""
    model = named.of_examples(examples)
    return model.cost(layout), model.cost(ALONE)
