"""What a step costs in a layout, as counted without doing it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from two_layers import IO, NAMES, joined_batch, mean_loss, transformer
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd.layouts.cost import local_part

pytestmark = pytest.mark.mpi(min_size=2)

ROWS, WIDTH, HIDDEN = 12, 24, 48


class Pair(nn.Module):
    """Two linear layers, whose costs are known."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


PAIR = {
    "up.weight": ("hidden", "model"),
    "down.weight": ("model", "hidden"),
    "up": ("batch", "hidden"),
    "down": ("batch", "model"),
}
EXAMPLE = [torch.zeros(ROWS, WIDTH)]
WEIGHTS = 2 * WIDTH * HIDDEN * 4  # bytes


def cost(rules: str) -> mpisgd.layouts.cost.LayoutCost:
    layout = mpisgd.layout(rules, mesh={"a": mpisgd.size()})
    return layout.cost(Pair(), PAIR, EXAMPLE, inputs=("batch", "model"))


def ring(nbytes: int) -> int:
    """What a rank sends to all-reduce so much."""
    return round(2 * (mpisgd.size() - 1) / mpisgd.size() * nbytes)


def test_copies_of_everything_send_nothing_and_divide_nothing():
    found = cost("")
    everyone(found.sent_bytes == 0)
    everyone(found.parameter_bytes == WEIGHTS)
    # Forward: two products; backward: two for the weights, one for the state between them.
    everyone(found.operations == 5 * 2 * ROWS * WIDTH * HIDDEN, f"{found}")


def test_data_parallel_sends_the_gradients():
    found = cost("batch:a")
    everyone(found.sent_bytes == ring(WEIGHTS), f"{found}")
    everyone(found.parameter_bytes == WEIGHTS)
    everyone(found.operations * mpisgd.size() == cost("").operations)
    everyone(found.activation_bytes * mpisgd.size() == cost("").activation_bytes)


def test_tensor_parallel_sends_what_is_summed_over_the_divided_dimension():
    found = cost("hidden:a")
    everyone(found.sent_bytes == ring(ROWS * WIDTH * 4), f"{found}")
    everyone(found.parameter_bytes * mpisgd.size() == WEIGHTS)
    everyone(found.operations * mpisgd.size() == cost("").operations)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # those of CommDebugMode
@pytest.mark.parametrize(
    "rules", ["batch:a", pytest.param("heads:a; hidden:a; vocab:a", marks=pytest.mark.long)]
)
def test_counts_are_those_of_a_real_step(rules):
    """The collectives of CommDebugMode in a step that is done."""
    layout = mpisgd.layout(rules, mesh={"a": mpisgd.size()})
    tokens, targets = joined_batch(0)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return mean_loss(logits, layout.shard(targets, ("batch", "length")))

    counted = layout.cost(transformer(), NAMES, [tokens], loss=loss, **IO)
    model = layout.distribute(transformer(), NAMES, **IO)
    with CommDebugMode() as mode:
        loss(model(tokens)).backward()
    everyone(
        sum(mode.get_comm_counts().values()) == counted.num_collectives, f"{counted} {mode.get_comm_counts()}"
    )
    everyone(counted.sent_bytes > 0)
    same_on_all_ranks(counted)


@pytest.mark.parametrize("rules", ["", "batch:a", "hidden:a", "batch:a; model:b", "hidden:a; model:b"])
def test_estimates_are_what_a_rank_keeps(rules):
    """Parameters, gradients and what AdamW keeps, of the parts that this rank has."""
    layout = mpisgd.layout(rules, mesh={"a": mpisgd.size(), "b": 1})
    named = mpisgd.NamedModel(Pair(), PAIR, EXAMPLE, inputs=("batch", "model"))
    (said,) = mpisgd.estimate_memory(named, torch.optim.AdamW, ranks=mpisgd.size(), strategies=[layout])
    model = layout.distribute(Pair(), PAIR, inputs=("batch", "model"))
    optimizer = torch.optim.AdamW(model.parameters())
    model(EXAMPLE[0]).sum().backward()
    optimizer.step()

    def kept(tensors) -> int:
        return sum(local_part(each).nbytes for each in tensors)

    params = list(model.parameters())
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    found = kept(params), kept(param.grad for param in params), kept(state)
    everyone(found == (said.parameters, said.gradients, said.optimizer_state), f"{found}: {said}")


def test_auto_layout_divides_the_batch_where_rows_are_many_and_weights_where_they_do_not_fit():
    mesh = {"a": mpisgd.size()}
    options = {"inputs": ("batch", "model"), "operations_per_byte": 10}
    many = [torch.zeros(100 * ROWS * HIDDEN, WIDTH, device="meta")]
    chosen = mpisgd.auto_layout(Pair(), PAIR, mesh, many, **options)
    everyone(chosen.rules_text == "batch:a", f"{chosen}")
    few = mpisgd.auto_layout(Pair(), PAIR, mesh, EXAMPLE, **options)
    everyone(few.rules_text == "hidden:a", f"{few}")
    fits = mpisgd.auto_layout(
        Pair(), PAIR, mesh, EXAMPLE, memory_bytes=4 * WEIGHTS, **options
    )  # less than Adam takes
    everyone(fits.rules_text == "hidden:a", f"{fits}")
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        mpisgd.auto_layout(Pair(), PAIR, mesh, EXAMPLE, memory_bytes=WEIGHTS // 100, **options)
    everyone("fits into memory_bytes" in caught.text, caught.text)
