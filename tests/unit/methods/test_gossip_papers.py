"""`Gossip` is what its papers say, with the matrices of the graphs written down here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paper_programs import CLOSE, Program, assert_same, by_mpisgd, by_paper, definition_of

from mpisgd import Gossip, compress
from mpisgd.methods.gossip.d_psgd.paper import DPSGD
from mpisgd.methods.gossip.push_sum.paper import PushSum
from mpisgd.methods.paper_kit import Paper
from mpisgd.tools.verification.paper_run import Definition

# -- the matrices, for up to 4 ranks ----------------------------------------------------------------


def by_edges(size: int, edges: set[tuple[int, int]], share: float) -> torch.Tensor:
    """W[i, j] = `share` for every edge from j to i; the rest of each row on the diagonal."""
    w = torch.zeros(size, size, dtype=torch.float64)
    for j, i in edges:
        if i != j:
            w[i, j] = share
    return w + torch.diag(1 - w.sum(1))


def ring(size: int, _: int) -> torch.Tensor:
    edges = {(r, (r + d) % size) for r in range(size) for d in (1, -1)}
    return by_edges(size, edges, 1 / min(size, 3))


def torus(size: int, _: int) -> torch.Tensor:
    """Of 4 ranks 2 x 2, else a ring."""
    if size != 4:
        return ring(size, 0)
    return by_edges(4, {(rank, rank ^ bit) for rank in range(4) for bit in (1, 2)}, 1 / 3)


def star(size: int, _: int) -> torch.Tensor:
    return by_edges(size, {e for r in range(1, size) for e in ((0, r), (r, 0))}, 1 / size)


def exponential(size: int, _: int) -> torch.Tensor:
    distances = [1, 2][: (size - 1).bit_length()]
    return by_edges(
        size, {(r, (r + d) % size) for r in range(size) for d in distances}, 1 / (len(distances) + 1)
    )


def one_peer(size: int, step: int) -> torch.Tensor:
    distance = 2 if size > 2 and step % 2 else 1
    return by_edges(size, {(r, (r + distance) % size) for r in range(size)}, 0.5)


def complete(size: int, _: int) -> torch.Tensor:
    return torch.full((size, size), 1 / size, dtype=torch.float64)


def directed(size: int, _: int) -> torch.Tensor:
    """Rank 0 keeps a third and passes on two; the others pass on a half. Columns sum to 1, rows do not."""
    w = torch.zeros(size, size, dtype=torch.float64)
    for j in range(size):
        kept = 1 / 3 if j == 0 else 1 / 2
        w[j, j] += kept
        w[(j + 1) % size, j] += (1 - kept) / 2
        w[(j + 2) % size, j] += (1 - kept) / 2
    return w


MATRICES = {
    "ring": ring,
    "torus": torus,
    "star": star,
    "exponential": exponential,
    "one_peer_exponential": one_peer,
    "complete": complete,
    "directed": directed,
}


DOUBLY = [name for name in MATRICES if name != "directed"]
STYLES = [
    *[("adapt_then_combine", name, 1) for name in DOUBLY],
    *[("combine_then_adapt", name, 1) for name in ("torus", "one_peer_exponential")],
    *[("push_sum", name, 1) for name in ("directed", "one_peer_exponential")],
    ("adapt_then_combine", "one_peer_exponential", 3),
    ("combine_then_adapt", "ring", 3),
    ("push_sum", "directed", 3),
]


def paper_of_style(style: str, name: str, every: int) -> Paper:
    def matrix(size: int, k: int) -> list[list[float]]:
        return MATRICES[name](size, k).tolist()

    if style == "push_sum":
        return PushSum(matrix, every)
    return DPSGD(matrix, style == "adapt_then_combine", every)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("style", "name", "every"), STYLES)
def test_every_style_and_graph(style, name, every, size):
    program = Program(size=size, dyadic=False, apart=True)
    topology = directed(size, 0).tolist() if name == "directed" else name
    found = by_mpisgd(program, strategy=Gossip(topology, style=style, every=every), check_start=False)
    assert_same(found, by_paper(program, Definition(paper_of_style(style, name, every))), CLOSE)


def test_styles_and_graphs_differ():
    """What the test above compares is not the same for all of them."""
    program = Program(size=4, dyadic=False, apart=True, steps=3)
    chosen = [STYLES[0], STYLES[1], ("combine_then_adapt", "ring", 1), *STYLES[-4:]]
    results = [by_paper(program, Definition(paper_of_style(*each)))[0][-1]["matrix"] for each in chosen]
    for i, one in enumerate(results):
        assert all((one - other).abs().max() > 1e-4 for other in results[:i])


@pytest.mark.parametrize("compression", [compress.TopK(0.2), compress.OneBit()], ids=repr)
def test_compressed_changes_of_ranks_that_begin_apart(compression):
    program = Program(size=3, dyadic=False, apart=True)
    options = {"strategy": Gossip("ring", consensus_step=0.3), "compression": compression}
    found = by_mpisgd(program, check_start=False, **options)
    assert_same(found, by_paper(program, definition_of(program, **options)), CLOSE)


def test_ranks_begin_apart():
    program = Program(size=2, apart=True)
    first, second = (program.start(rank)["matrix"] for rank in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(replace(program, apart=False).start(1)["matrix"], first)
