"""DTensor: what is spread over the ranks equals the plain tensor, wherever its pieces lie."""

from __future__ import annotations

import itertools

import pytest
import torch
from closeness import EXACT, check_close, whole
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from verdicts import everyone, raises_everywhere

import mpisgd

pytestmark = pytest.mark.mpi(min_size=2)

LAYOUTS = {"replicated": Replicate(), "rows": Shard(0), "columns": Shard(1), "to be added": Partial()}
# Cut evenly by 2, 3 and 4 ranks; unevenly; and so that some ranks get nothing.
SHAPES = [(12, 24), (7, 5), (1, 3)]


@pytest.fixture(scope="module")
def mesh(default_group) -> DeviceMesh:
    """All ranks in a row."""
    return init_device_mesh("cpu", (mpisgd.size(),))


@pytest.fixture(scope="module")
def grid(default_group) -> DeviceMesh:
    """All ranks in two columns."""
    size = mpisgd.size()
    if size % 2:
        pytest.skip("an odd number of ranks makes no grid")
    return init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("outer", "inner"))


def counting(shape: tuple[int, ...], start: int = 1) -> torch.Tensor:
    """Whole numbers, so that every sum of them is exact."""
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def laid_out(tensor: torch.Tensor, mesh: DeviceMesh, placement: object) -> DTensor:
    """A distributed tensor that stands for `tensor`."""
    if isinstance(placement, Partial):
        others = sum(range(1, mesh.size())) * counting(tensor.shape)
        mine = tensor - others if mesh.get_rank() == 0 else counting(tensor.shape) * mesh.get_rank()
        return DTensor.from_local(mine, mesh, [placement])
    return distribute_tensor(tensor, mesh, [placement])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_distribute_tensor_hands_out_what_rank_0_has(mesh, shape):
    mine = counting(shape, start=100 * mpisgd.rank())
    for placement in (Replicate(), Shard(0), Shard(1)):
        spread = distribute_tensor(mine, mesh, [placement])
        check_close([spread], [counting(shape, start=0)], EXACT)


def test_pieces_are_those_that_torch_chunk_makes(mesh):
    tensor = counting((7, 5))
    for dim in (0, 1):
        piece = distribute_tensor(tensor, mesh, [Shard(dim)]).to_local()
        pieces = tensor.chunk(mesh.size(), dim)
        expected = pieces[mpisgd.rank()] if mpisgd.rank() < len(pieces) else tensor.narrow(dim, 0, 0)
        everyone(torch.equal(piece, expected), f"dim {dim}: {piece}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("source", LAYOUTS)
def test_redistribute_keeps_the_tensor(mesh, shape, source):
    tensor = counting(shape)
    spread = laid_out(tensor, mesh, LAYOUTS[source])
    moved = [spread.redistribute(mesh, [target]) for target in (Replicate(), Shard(0), Shard(1))]
    check_close(moved, [tensor] * len(moved), EXACT)


@pytest.mark.parametrize(
    ("op", "combine"),
    [
        ("sum", lambda pieces: pieces.sum(0)),
        ("avg", lambda pieces: pieces.sum(0) / len(pieces)),
        ("max", lambda pieces: pieces.amax(0)),
        ("min", lambda pieces: pieces.amin(0)),
        ("product", lambda pieces: pieces.prod(0)),
    ],
)
def test_partial_tensors_are_combined_by_their_operation(mesh, op, combine):
    pieces = torch.stack([(counting((5, 3)) * (rank + 2)) % 7 for rank in range(mesh.size())])
    spread = DTensor.from_local(pieces[mpisgd.rank()], mesh, [Partial(op)])
    moved = [spread.redistribute(mesh, [target]) for target in (Replicate(), Shard(0), Shard(1))]
    check_close(moved, [combine(pieces)] * len(moved), 1e-15)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.bool], ids=str
)
def test_every_dtype_moves(mesh, dtype):
    tensor = (counting((6, 5)) % 3).to(dtype)
    for source, target in itertools.permutations((Replicate(), Shard(0), Shard(1)), 2):
        moved = laid_out(tensor, mesh, source).redistribute(mesh, [target])
        everyone(torch.equal(whole(moved), tensor), f"{source} to {target}")


@pytest.mark.parametrize(("source", "target"), [*itertools.permutations([*LAYOUTS][:3], 2)])
def test_gradients_go_back_through_redistribute(mesh, source, target):
    leaf = laid_out(counting((7, 5)), mesh, LAYOUTS[source]).requires_grad_()
    weight = laid_out(counting((7, 5), start=3), mesh, LAYOUTS[target])
    (leaf.redistribute(mesh, [LAYOUTS[target]]) * weight).sum().backward()
    check_close([leaf.grad], [counting((7, 5), start=3)], EXACT)


@pytest.mark.parametrize(("left", "right"), [*itertools.product(["rows", "columns"], [*LAYOUTS][:3])])
def test_matmul_and_its_gradients_equal_the_plain_ones(mesh, left, right):
    a, b, seed = counting((7, 6)), counting((6, 5), start=2), counting((7, 5), start=3)
    plain = [a.clone().requires_grad_(), b.clone().requires_grad_()]
    product = plain[0] @ plain[1]
    product.backward(seed)
    spread = [laid_out(t, mesh, LAYOUTS[p]).requires_grad_() for t, p in ((a, left), (b, right))]
    ours = spread[0] @ spread[1]
    (ours * distribute_tensor(seed, mesh, [Replicate()])).sum().backward()
    check_close([ours, *(t.grad for t in spread)], [product, *(t.grad for t in plain)], EXACT)


def test_reductions_and_softmax_over_a_sharded_dimension(mesh):
    tensor = counting((7, 7)) / 10  # no rank is left without a piece, of which there is no maximum
    for placement in (Shard(0), Shard(1)):
        spread = distribute_tensor(tensor, mesh, [placement])
        ours = [spread.mean(0), spread.amax(1), spread.norm(), spread.softmax(1)]
        check_close(ours, [tensor.mean(0), tensor.amax(1), tensor.norm(), tensor.softmax(1)], 1e-14)


def test_on_a_grid_every_pair_of_layouts_becomes_every_other(grid):
    tensor = counting((7, 5))
    pairs = list(itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2))
    for source in pairs:
        spread = distribute_tensor(tensor, grid, source)
        check_close([spread.redistribute(grid, target) for target in pairs], [tensor] * len(pairs), EXACT)


def test_a_piece_of_a_grid_is_a_mesh(grid):
    inner = grid["inner"]
    mine = counting((4, 3)) * (1 + grid.get_local_rank("outer"))
    spread = distribute_tensor(mine, inner, [Shard(0)])
    check_close([spread.redistribute(inner, [Shard(1)])], [mine], EXACT)
    total = DTensor.from_local(mine, grid["outer"], [Partial()]).full_tensor()
    rows = grid.size(0)
    check_close([total], [counting((4, 3)) * (rows * (rows + 1) / 2)], EXACT)


def test_ranks_that_redistribute_differently_are_told(mesh):
    spread = laid_out(counting((12, 24)), mesh, Partial())
    target = Replicate() if mpisgd.rank() == 0 else Shard(1)
    with raises_everywhere(mpisgd.CollectiveMismatch):
        spread.redistribute(mesh, [target]).to_local() + 0
    check_close([spread], [counting((12, 24))], EXACT)
