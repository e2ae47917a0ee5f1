"""`context_parallel` around a model: training equals one process, buffers come back, mistakes are named."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from counted_bytes import sent
from peak_meter import peak_bytes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd import CollectiveMismatch, Compression, Group, InvalidArgument, UnsupportedTensor
from mpisgd.context.cost import RingCost
from mpisgd.context.division import own_part
from mpisgd.context.ring import ring_of
from mpisgd.job.lifecycle import world
from mpisgd.methods.cost_kit import CONTEXT, World
from mpisgd.methods.costs import wire_of
from mpisgd.methods.wire_bytes import sent_bytes

WIDTH, HEADS, VOCABULARY = 12, 3, 11
LIMIT = 1e-10
REFUSALS = (InvalidArgument, UnsupportedTensor)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """From tokens and their places, [batch, length] and [length], to logits."""

    def __init__(self, length: int, *, recomputes: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(length, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.recomputes = recomputes

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(places)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.head(x)


def model(length: int, **options: Any) -> Model:
    drawn, draw = Model(length, **options).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in drawn.parameters():
            param.copy_(torch.randn(param.shape, generator=draw, dtype=torch.float64) / 3)
    return drawn


def batch(step: int, length: int, num_sequences: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    text = torch.randint(VOCABULARY, (num_sequences, length + 1), generator=draw)
    return text[:, :-1], text[:, 1:]


def train(
    made: Model, length: int, optimizer: torch.optim.Optimizer, mine: slice, ring: Group | None
) -> list[Tensor]:
    """The parameters after three steps on these sequences of a batch; divided among the ranks of `ring`."""
    for step in range(3):
        tokens, targets = (each[mine] for each in batch(step, length, 4))
        places = torch.arange(length)
        divided: Any = contextlib.nullcontext()
        if ring is not None:
            buffers = [tokens, targets, places]
            divided = mpisgd.context_parallel(ring, buffers=buffers, buffer_seq_dims=[1, -1, 0])
        optimizer.zero_grad()
        with divided:
            cross_entropy(made(tokens, places).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    return [param.detach() for param in made.parameters()]


def sgd(made: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=pytest.mark.on_threads)])
def test_training_with_data_parallelism_equals_one_process(recomputes):
    """Ranks in rings of two where there are four, else in one; every ring has its own sequences."""
    size, rank = mpisgd.size(), mpisgd.rank()
    length = 4 * size
    whole = model(length)
    expected = train(whole, length, sgd(whole), slice(None), None)
    num_rings = 2 if size == 4 else 1
    rings = [
        mpisgd.new_group(range(n * size // num_rings, (n + 1) * size // num_rings)) for n in range(num_rings)
    ]
    place = rank * num_rings // size
    parts = model(length, recomputes=recomputes)
    optimizer = mpisgd.DistributedOptimizer(sgd(parts), parts.named_parameters())
    mine = slice(place * 4 // num_rings, (place + 1) * 4 // num_rings)
    found = train(parts, length, optimizer, mine, rings[place])
    apart = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    everyone(apart <= LIMIT, f"{apart:.1e}")


@pytest.mark.on_threads
@pytest.mark.mpi(min_size=2)
def test_buffers_are_divided_inside_and_as_before_afterwards():
    size, rank = mpisgd.size(), mpisgd.rank()
    base = torch.arange(3 * (4 * size + 1)).view(3, -1)
    tokens, kept, numbers = base[:, :-1], torch.arange(2 * size), torch.randn(2, 4 * size).t()
    before, memory = [tokens.clone(), kept.clone(), numbers.clone()], numbers.data_ptr()
    for fails in (False, True):
        with (
            contextlib.suppress(ArithmeticError),
            mpisgd.context_parallel(
                world(),
                buffers=[tokens, numbers, *([] if fails else [kept])],
                buffer_seq_dims=[1, 0, *([] if fails else [0])],
                no_restore_buffers=set() if fails else {kept},
            ),
        ):
            parts = [own_part(before[0], 1, rank, size), own_part(before[2], 0, rank, size)]
            everyone(torch.equal(tokens, parts[0]) and torch.equal(numbers, parts[1]))
            everyone(torch.equal(base[:, :-1], before[0]), "a view of the memory has changed")
            tokens += 1
            if fails:
                raise ArithmeticError
        everyone(torch.equal(tokens, before[0]) and torch.equal(numbers, before[2]))
        everyone(
            numbers.data_ptr() == memory and kept.tolist() == own_part(before[1], 0, rank, size).tolist()
        )
        everyone(not torch.overrides._get_current_function_mode_stack())


@pytest.mark.on_threads
@pytest.mark.mpi(min_size=2)
def test_backward_after_the_context_is_right_or_refused():
    """What was saved for it must be as it was: divided buffers are not, when they have come back."""
    size, rank = mpisgd.size(), mpisgd.rank()
    draw = torch.Generator().manual_seed(2)
    whole = torch.randn(3, 1, 2, 4 * size, 3, generator=draw, dtype=torch.float64)
    leaves = [own_part(each, 2, rank, size).requires_grad_() for each in whole]
    with mpisgd.context_parallel(world()):
        out = scaled_dot_product_attention(*leaves)
    out.sum().backward()
    plain = [each.clone().requires_grad_() for each in whole]
    scaled_dot_product_attention(*plain).sum().backward()
    apart = max(
        float((leaf.grad - own_part(each.grad, 2, rank, size)).abs().max())
        for leaf, each in zip(leaves, plain, strict=True)
    )
    everyone(apart <= LIMIT, f"{apart:.1e}")
    weight, inputs = torch.ones(4 * size, requires_grad=True), torch.ones(2, 4 * size)
    with mpisgd.context_parallel(world(), buffers=[inputs], buffer_seq_dims=[1]):
        out = (inputs * weight[: inputs.shape[1]]).sum()
    with raises_everywhere(RuntimeError) as caught:
        out.backward()
    everyone("inplace operation" in caught.text, caught.text)


def heads(size: int, **other: Any) -> dict[str, Any]:
    made = {name: torch.ones(2, 2, 4, 3, dtype=torch.float64) for name in ("query", "key", "value")}
    return {**made, **other}


def longer(*names: str) -> dict[str, torch.Tensor]:
    return {name: torch.ones(2, 2, 5, 3, dtype=torch.float64) for name in names}


REFUSED: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "dropout": (lambda n: heads(n, dropout_p=0.1), "dropout_p=0.1 does not go with context_parallel"),
    "a causal mask twice": (
        lambda n: heads(n, attn_mask=torch.ones(4, 4 * n, dtype=torch.bool), is_causal=True),
        "attn_mask and is_causal=True",
    ),
    "columns of a mask": (lambda n: heads(n, attn_mask=torch.ones(4, 4).tril() > 0), "has 4 columns"),
    "rows of a mask": (lambda n: heads(n, attn_mask=torch.ones(3, 4 * n) > 0), "has 3 rows"),
    "dimensions of a mask": (lambda n: heads(n, attn_mask=torch.ones(4 * n) > 0), "has 1 dimensions"),
    "heads of a mask": (lambda n: heads(n, attn_mask=torch.ones(3, 4, 4 * n) > 0), "does not broadcast"),
    "a mask that learns": (
        lambda n: heads(n, attn_mask=torch.ones(4, 4 * n, dtype=torch.float64, requires_grad=True)),
        "attn_mask requires a gradient",
    ),
    "integers in a mask": (
        lambda n: heads(n, attn_mask=torch.ones(4, 4 * n).long()),
        "attn_mask is torch.int64",
    ),
    "other lengths with a causal mask": (
        lambda n: heads(n, query=torch.ones(2, 2, 2, 3, dtype=torch.float64), is_causal=True),
        "as many queries as keys",
    ),
    "a place more, with a causal mask": (
        lambda n: {name: torch.ones(2, 2, 5, 3) for name in ("query", "key", "value")} | {"is_causal": True},
        "is_causal=True with 5 places",
    ),
    "a key more, with a mask": (
        lambda n: heads(n, **longer("key", "value"), attn_mask=torch.ones(4, 5 * n, dtype=torch.bool)),
        "attn_mask with 5 places",
    ),
    "a query more, with a mask": (
        lambda n: heads(n, **longer("query"), attn_mask=torch.ones(5 * n, 4 * n, dtype=torch.bool)),
        "attn_mask with 5 places",
    ),
    "fewer heads of keys": (
        lambda n: heads(n, query=torch.ones(2, 4, 4, 3, dtype=torch.float64)),
        "do not fit together",
    ),
    "a batch that broadcasts": (
        lambda n: heads(n, query=torch.ones(1, 2, 4, 3, dtype=torch.float64)),
        "do not fit together",
    ),
    "five dimensions": (
        lambda n: {name: torch.ones(1, 1, 2, 4, 3) for name in ("query", "key", "value")},
        "[batch, heads, length, width]",
    ),
    "nothing": (
        lambda n: {name: torch.ones(0, 2, 4, 3) for name in ("query", "key", "value")},
        "none without",
    ),
    "two dtypes": (lambda n: heads(n, key=torch.ones(2, 2, 4, 3)), "one floating-point dtype"),
    "another device": (lambda n: heads(n, key=torch.ones(2, 2, 4, 3, device="meta")), "on meta"),
}


@pytest.mark.on_threads
@pytest.mark.mpi(min_size=2)
def test_what_cannot_be_is_refused_by_name_and_the_next_call_is_right():
    size = mpisgd.size()
    for what, (call, said) in REFUSED.items():
        with mpisgd.context_parallel(world()):
            with raises_everywhere(REFUSALS) as caught:
                scaled_dot_product_attention(**call(size))
            everyone(said in caught.text, f"{what}: {caught.text}")
            everyone(bool((scaled_dot_product_attention(**heads(size)) - 1).abs().max() < LIMIT))


@pytest.mark.on_threads
@pytest.mark.mpi(min_size=2)
def test_one_rank_with_another_call_is_told_to_all():
    """No rank is left waiting, whether one has found something wrong or computes something else."""
    size, last = mpisgd.size(), mpisgd.rank() == mpisgd.size() - 1
    for other in ({"dropout_p": 0.1}, {"is_causal": True}, {"scale": 2.0}):
        with mpisgd.context_parallel(world()), raises_everywhere(CollectiveMismatch):
            scaled_dot_product_attention(**heads(size, **(other if last else {})))
    with (
        raises_everywhere(CollectiveMismatch),
        mpisgd.context_parallel(world(), buffers=[torch.arange(4 * size) + last], buffer_seq_dims=[0]),
    ):
        pass
    # In backward, too: two calls of equal shapes, of which a rank goes back through the other one.
    leaves = [torch.ones(2, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    with mpisgd.context_parallel(world()):
        outs = [scaled_dot_product_attention(leaf, leaf, leaf) for leaf in leaves]
        with raises_everywhere(CollectiveMismatch):
            outs[last].sum().backward()


@pytest.mark.on_threads
@pytest.mark.mpi(min_size=2)
def test_buffers_that_cannot_be_divided_are_refused_by_name():
    size = mpisgd.size()
    good = torch.ones(4 * size)
    refused = [
        ([torch.ones(3, 4 * size + 2)], [1], f"buffers[0] has {4 * size + 2} places along dimension 1"),
        ([torch.ones(0)], [0], "has 0 places"),
        ([good], [1], "buffer_seq_dims[0]=1"),
        ([good], [], "1 buffers and 0 buffer_seq_dims"),
        ([good, good], [0, 0], "buffers[1] is the same tensor"),
        ([nn.Parameter(good)], [0], "is a Parameter"),
        ([good.clone().requires_grad_()], [0], "requires a gradient"),
        ([torch.ones(4 * size, device="meta")], [0], "on meta"),
    ]
    for buffers, dims, said in refused:
        with (
            raises_everywhere(REFUSALS) as caught,
            mpisgd.context_parallel(world(), buffers=buffers, buffer_seq_dims=dims),
        ):
            pass
        everyone(said in caught.text, caught.text)
    with raises_everywhere(InvalidArgument), mpisgd.context_parallel(world(), no_restore_buffers={good}):
        pass


@pytest.mark.on_threads
@pytest.mark.mpi(min_size=2)
def test_what_attends_by_itself_is_refused():
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.ones(1, 4, 4)
    with mpisgd.context_parallel(world()), raises_everywhere(InvalidArgument) as caught:
        attention(x, x, x)
    everyone("need_weights=False" in caught.text, caught.text)
    with mpisgd.context_parallel(world()), raises_everywhere(InvalidArgument) as caught:
        checkpoint(lambda q: scaled_dot_product_attention(q, q, q), x.requires_grad_(), use_reentrant=True)
    everyone("use_reentrant=False" in caught.text, caught.text)


@pytest.mark.on_threads
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("strategy", ["LocalSGD(4)", "Gossip('ring')", "ParameterServer('async')"])
def test_strategies_of_differing_parameters_are_refused_within_a_ring(strategy):
    from mpisgd.methods.from_text import strategy_from_text

    made, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = mpisgd.DistributedOptimizer(sgd(made), strategy=strategy_from_text(strategy))
    with mpisgd.context_parallel(world()):
        other(torch.ones(1, 2))
        with raises_everywhere(InvalidArgument) as caught:
            made(torch.ones(1, 2))
    everyone("does not go with it on ranks 0" in caught.text, caught.text)
    everyone(strategy.partition("(")[0] in caught.text, caught.text)
    with mpisgd.context_parallel([mpisgd.new_group([rank]) for rank in range(mpisgd.size())][mpisgd.rank()]):
        made(torch.ones(1, 2))
    optimizer.synchronizer.finish()


class Wide(nn.Module):
    """A layer of a transformer in which attention takes no more memory than elsewhere."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.project, self.up, self.down = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(2, (3, 1, -1)).permute(2, 0, 3, 1, 4)
        x = x + scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.down(torch.relu(self.up(x)))


def peak_of(ring: Group, length: int) -> int:
    """The most bytes at a time of a step of three layers on a part of a sequence."""
    layers = nn.Sequential(Wide(), Wide(), Wide())
    inputs = torch.ones(1, length, 64)

    def step() -> None:
        with mpisgd.context_parallel(
            ring, buffers=[inputs], buffer_seq_dims=[1], no_restore_buffers={inputs}
        ):
            layers(inputs).square().mean().backward()

    return peak_bytes(lambda: None, step)


@pytest.mark.processes
@pytest.mark.mpi(min_size=2)
def test_memory_of_a_rank_falls_with_the_number_of_ranks():
    size, length = mpisgd.size(), 2048 * mpisgd.size()
    alone = [mpisgd.new_group([rank]) for rank in range(size)][mpisgd.rank()]
    peak_of(world(), 16 * size)  # what is made once
    whole = mpisgd.broadcast_object(peak_of(alone, length) if mpisgd.rank() == 0 else 0)
    part = peak_of(world(), length)
    print(f"{size} ranks: whole {whole}, part {part}, x {part * size / whole:.3f}")
    everyone(part <= 1.2 * whole / size, f"whole {whole}, part {part}")


@pytest.mark.processes
@pytest.mark.mpi(min_size=2)
def test_bytes_sent_are_those_of_the_cost(monkeypatch):
    size = mpisgd.size()
    leaves = [torch.ones(1, 2, 64, 8, requires_grad=True) for _ in range(3)]
    nbytes = 2 * leaves[0].nbytes  # of keys and values
    cost, job = RingCost(size, nbytes, nbytes), World(1, size, wire_of(Compression.none))
    forth, back = (sent_bytes(ops, job)[CONTEXT] for ops in (cost.forward(), cost.backward()))
    ring = ring_of(world()).group
    with mpisgd.context_parallel(world()):
        outs: list[Tensor] = []
        forward = sent(monkeypatch, ring, lambda: outs.append(scaled_dot_product_attention(*leaves)))
        backward = sent(monkeypatch, ring, lambda: outs[0].sum().backward())
    # All ranks together, and the check that they do the same.
    everyone(0 <= forward - size * forth <= 256 * size, f"{forward} bytes, expected {size * forth}")
    everyone(0 <= backward - size * back <= 256 * size, f"{backward} bytes, expected {size * back}")
    everyone(forth == (size - 1) * nbytes == back / 2)
