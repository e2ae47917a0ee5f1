"""A layout changes where numbers are and none of the results: all legal ones equal one process."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from two_layers import IO, NAMES, Transformer, joined_batch, train, transformer
from verdicts import everyone, referee

import mpisgd
from mpisgd.layouts.attention import LocalAttention
from mpisgd.layouts.search import legal_layouts

pytestmark = pytest.mark.mpi(min_size=2)

LIMIT = 1e-10


@functools.cache
def expected() -> list[Tensor]:
    """What one process computes."""
    return train(transformer())


def check(layout: mpisgd.MeshLayout, model: Transformer | None = None) -> float:
    """Train in a layout; how far from one process that is."""
    model = layout.distribute(model or transformer(), NAMES, **IO)
    found = train(model, lambda targets: layout.shard(targets, ("batch", "length")))
    apart = [(ours - right).abs().max().item() for ours, right in zip(found, expected(), strict=True)]
    print(f"{layout}: {max(apart):.1e}", flush=True)
    everyone(max(apart) <= LIMIT, f"{layout}: {max(apart):.1e}")
    return max(apart)


def legal(mesh: str) -> list[mpisgd.MeshLayout]:
    return list(legal_layouts(transformer(), NAMES, mesh, joined_batch(0)[:1], **IO))


def test_one_process_learns():
    losses = expected()[1]
    everyone(3 < float(losses) < 5)


@pytest.mark.parametrize(
    "rules",
    [
        "length:a",
        "heads:a; hidden:a; vocab:a",  # Megatron's
        pytest.param("batch:a", marks=pytest.mark.long),
        pytest.param("model:a", marks=pytest.mark.long),
    ],
)
def test_a_row_of_ranks_equals_one_process(rules):
    check(mpisgd.layout(rules, mesh={"a": mpisgd.size()}))


def test_recomputation_and_keywords_change_nothing():
    # What ran in backward was outside of the layout: mixed tensors. `attention(query=...)` raised IndexError.
    model = transformer()
    model.recomputes = model.layers[1].attention.by_name = True
    check(mpisgd.layout("length:a", mesh={"a": mpisgd.size()}), model)


def test_attention_takes_plain_tensors_beside_divided_ones():
    draw = torch.Generator().manual_seed(3)
    query, key, value = torch.randn(3, 12, 4, 5, 6, dtype=torch.float64, generator=draw)
    mesh = (
        mpisgd.layout("batch:a", mesh={"a": mpisgd.size()}).shard(query, ("batch", *[None] * 3)).device_mesh
    )
    attention = nn.functional.scaled_dot_product_attention
    with LocalAttention():
        for names in (("query",), ("key", "value"), ("query", "key", "value")):
            given = {"query": query, "key": key, "value": value}
            given.update({name: distribute_tensor(given[name], mesh, [Shard(1)]) for name in names})
            found = attention(**given, is_causal=True)
            apart = (found.full_tensor() - attention(query, key, value, is_causal=True)).abs().max()
            everyone(float(apart) < 1e-12, f"{names}: {apart}")


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(
    "rules",
    [
        "batch:a; heads:b; hidden:b; vocab:b",
        "batch:b; model:a",
        pytest.param("length:a; heads:b; vocab:b", marks=pytest.mark.long),
    ],
)
def test_a_grid_of_ranks_equals_one_process(rules):
    if mpisgd.size() != 4:
        pytest.skip("a grid of four")
    check(mpisgd.layout(rules, mesh="a:2, b:2"))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("mesh", ["a:2, b:2", "a:4"])
def test_all_legal_layouts_equal_one_process(mesh):
    if mpisgd.size() != 4:
        pytest.skip("four ranks")
    layouts = legal(mesh)
    apart = [check(layout) for layout in layouts]
    furthest = max(referee().allgather(max(apart)))
    print(f"{len(layouts)} layouts of {mesh}, at most {furthest:.1e} from one process")
    # The names of an axis: model; batch or length, each with or without heads; or some of heads, hidden and
    # vocab: 13 sets. Of two axes: 105 ordered pairs of sets without a common name, 1 of them of equal sets.
    everyone(len(layouts) == {"a:4": 13, "a:2, b:2": (105 + 1) // 2}[mesh], f"{len(layouts)}")


@pytest.mark.mpi(min_size=4)
def test_a_layout_goes_on_with_a_default_group_that_was_made_anew():
    """torch took the groups of an equal mesh of before, by their numbers."""
    layout = mpisgd.layout("batch:a; heads:b; hidden:b; vocab:b", mesh={"a": 2, "b": mpisgd.size() // 2})
    check(layout)
    dist.destroy_process_group()
    dist.init_process_group("mpisgd")
    for _ in range(5):
        dist.new_group([0])  # which have the numbers that those of the mesh had
    check(layout)


def test_parameters_are_divided_and_tied_ones_stay_one():
    layout = mpisgd.layout("vocab:a", mesh={"a": mpisgd.size()})
    model = transformer()
    model.output.weight = model.embedding.weight
    plain = transformer()
    plain.output.weight = plain.embedding.weight
    layout.distribute(model, NAMES, **IO)
    everyone(model.output.weight is model.embedding.weight)
    part = model.output.weight.to_local()
    everyone(part.shape[0] == 36 // mpisgd.size() and isinstance(model.position, DTensor))
    found = train(model, lambda targets: layout.shard(targets, ("batch", "length")))
    apart = max((a - b).abs().max().item() for a, b in zip(found, train(plain), strict=True))
    everyone(apart <= LIMIT, f"{apart:.1e}")


def test_values_of_rank_0_count_and_the_loss_is_a_plain_tensor_on_demand():
    torch.manual_seed(mpisgd.rank())
    model = nn.Linear(12, 12).double()
    weight = mpisgd.broadcast_object(model.weight.detach())
    layout = mpisgd.layout("in:a", mesh={"a": mpisgd.size()})
    layout.distribute(model, {"weight": ("out", "in")}, inputs=("batch", "in"))
    x = torch.arange(24.0, dtype=torch.float64).view(2, 12)
    loss = (model(x) ** 2).mean().full_tensor()
    loss.backward()
    right = torch.nn.Parameter(weight)
    expected = ((x @ right.T + model.bias.full_tensor().detach()) ** 2).mean()
    expected.backward()
    everyone(abs(loss.item() - expected.item()) < 1e-10 * expected.item())
    everyone(torch.allclose(model.weight.grad.full_tensor(), right.grad, rtol=1e-12))
    everyone(type(loss) is Tensor)
