"""DeviceMesh on our groups: meshes of two and three dimensions, with collectives along each of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from verdicts import everyone

pytestmark = [
    pytest.mark.mpi(min_size=2),
    # In favour of names that earlier versions of torch do not have.
    pytest.mark.filterwarnings("ignore:.torch.distributed.all_gather_into_tensor. is deprecated"),
    pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_scatter_tensor. is deprecated"),
]

AXES = ("pipeline", "data", "model")
SHAPES = {
    2: [(1, 2), (2, 1), (1, 2, 1)],
    3: [(1, 3), (3, 1), (1, 3, 1)],
    4: [(2, 2), (4, 1), (1, 2, 2), (2, 1, 2)],
}
PLACES = range(max(map(len, SHAPES.values())))


@pytest.fixture(scope="module", params=PLACES)
def mesh(request: pytest.FixtureRequest) -> DeviceMesh:
    shapes = SHAPES[dist.get_world_size()]
    if request.param >= len(shapes):
        pytest.skip("fewer shapes for so many ranks")
    shape = shapes[request.param]
    return init_device_mesh("cpu", shape, mesh_dim_names=AXES[: len(shape)])


def peers_along(mesh: DeviceMesh, dim: int) -> list[int]:
    """Return this rank and those at the same place in all other dimensions, by counting alone."""
    here = list(coordinate(mesh.shape, dist.get_rank()))
    places = [[*here[:dim], place, *here[dim + 1 :]] for place in range(mesh.shape[dim])]
    return [number(mesh.shape, place) for place in places]


def coordinate(shape: Sequence[int], rank: int) -> tuple[int, ...]:
    return list(itertools.product(*map(range, shape)))[rank]


def number(shape: Sequence[int], place: Sequence[int]) -> int:
    return list(itertools.product(*map(range, shape))).index(tuple(place))


def values(rank: int, num: int = 5) -> Tensor:
    """Differs by rank and by element."""
    return torch.arange(num, dtype=torch.float64) + 10.0 * (rank + 1)


def test_every_rank_is_at_its_place(mesh: DeviceMesh) -> None:
    rank = dist.get_rank()
    everyone(tuple(mesh.get_coordinate() or ()) == coordinate(mesh.shape, rank))
    for dim, name in enumerate(mesh.mesh_dim_names or ()):
        group = mesh.get_group(name)
        everyone(dist.get_process_group_ranks(group) == peers_along(mesh, dim))
        everyone(mesh.get_local_rank(name) == peers_along(mesh, dim).index(rank) == dist.get_rank(group))


def test_collectives_along_each_dimension(mesh: DeviceMesh) -> None:
    for dim in range(mesh.ndim):
        peers, group = peers_along(mesh, dim), mesh.get_group(dim)
        check_reductions(peers, group)
        check_movements(peers, group)


def check_reductions(peers: list[int], group: dist.ProcessGroup) -> None:
    place, size = dist.get_rank(group), len(peers)
    total = values(dist.get_rank())
    dist.all_reduce(total, group=group)
    everyone(torch.equal(total, sum(map(values, peers))), f"all_reduce gave {total}")
    part = torch.empty(3, dtype=torch.float64)
    dist.reduce_scatter_tensor(part, values(dist.get_rank(), 3 * size), group=group)
    expected = sum(values(peer, 3 * size) for peer in peers)
    everyone(torch.equal(part, expected.chunk(size)[place]), f"reduce_scatter gave {part}")


def check_movements(peers: list[int], group: dist.ProcessGroup) -> None:
    place, size = dist.get_rank(group), len(peers)
    mine = values(dist.get_rank(), 2 * size)
    gathered = torch.empty(2 * size * size, dtype=torch.float64)
    dist.all_gather_into_tensor(gathered, mine, group=group)
    everyone(torch.equal(gathered, torch.cat([values(peer, 2 * size) for peer in peers])))
    exchanged = torch.empty_like(mine)
    dist.all_to_all_single(exchanged, mine, group=group)
    everyone(torch.equal(exchanged, torch.cat([values(p, 2 * size).chunk(size)[place] for p in peers])))
    dist.broadcast(mine, src=peers[-1], group=group)
    everyone(torch.equal(mine, values(peers[-1], 2 * size)))


def test_dimensions_in_opposite_order_do_not_wait_for_each_other(mesh: DeviceMesh) -> None:
    """Half of the ranks start along the last dimension: one order for all groups would deadlock."""
    dims = list(range(mesh.ndim))
    if sum(mesh.get_coordinate() or ()) % 2:
        dims.reverse()
    tensors = {dim: values(dist.get_rank()) for dim in dims}
    works = [dist.all_reduce(tensors[dim], group=mesh.get_group(dim), async_op=True) for dim in dims]
    for work in works:
        work.wait()
    everyone(all(torch.equal(tensors[dim], sum(map(values, peers_along(mesh, dim)))) for dim in dims))


def test_functional_collectives_take_a_mesh_and_a_dimension(mesh: DeviceMesh) -> None:
    for dim in range(mesh.ndim):
        total = functional.all_reduce(values(dist.get_rank()), "sum", (mesh, dim))
        everyone(torch.equal(functional.wait_tensor(total), sum(map(values, peers_along(mesh, dim)))))


def test_slices_share_the_groups_of_their_mesh(mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names or ()
    for dim, name in enumerate(names):
        everyone(mesh[name].get_group() is mesh.get_group(name))
        everyone(mesh[name].mesh.tolist() == peers_along(mesh, dim))
    pair = mesh[names[0], names[-1]]
    everyone(pair.shape == (mesh.shape[0], mesh.shape[-1]))
    everyone(pair[names[-1]].get_group() is mesh.get_group(names[-1]))


def test_flattened_dimensions_are_one_group(mesh: DeviceMesh) -> None:
    names = (mesh.mesh_dim_names or ())[-2:]
    flat = mesh[names]._flatten("flat")
    here = coordinate(mesh.shape, dist.get_rank())
    peers = [rank for rank in range(dist.get_world_size()) if coordinate(mesh.shape, rank)[:-2] == here[:-2]]
    everyone(dist.get_process_group_ranks(flat.get_group()) == peers)
    check_reductions(peers, flat.get_group())
    check_movements(peers, flat.get_group())


@pytest.mark.mpi(min_size=3)
def test_a_mesh_may_leave_ranks_out() -> None:
    ranks = list(range(dist.get_world_size()))[-2:]
    mesh = DeviceMesh("cpu", ranks)
    mine = values(dist.get_rank())
    if dist.get_rank() in ranks:
        dist.all_reduce(mine, group=mesh.get_group())
    expected = sum(map(values, ranks)) if dist.get_rank() in ranks else values(dist.get_rank())
    everyone((mesh.get_coordinate() is not None) == (dist.get_rank() in ranks))
    everyone(torch.equal(mine, expected))
    if dist.get_rank() in ranks:
        # torch names groups made with `use_local_synchronization` by the number of those a rank is in.
        dist.destroy_process_group(mesh.get_group())


def test_a_mesh_is_made_from_groups() -> None:
    groups = init_device_mesh("cpu", (1, dist.get_world_size())).get_all_groups()
    ranks = torch.arange(dist.get_world_size()).unsqueeze(0)
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=("one", "all"))
    check_reductions(list(range(dist.get_world_size())), mesh["all"].get_group())
