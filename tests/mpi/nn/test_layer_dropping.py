"""Progressive layer dropping: the paper's probabilities, choices by seed and step, scaled branches."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from mpisgd import InvalidArgument
from mpisgd.nn import ProgressiveLayerDropping

LAYERS = 6


class Block(nn.Module):
    """Two residual branches, each after its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.one = nn.LayerNorm(4), nn.Linear(4, 4)
        self.norm2, self.two = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.one(self.norm1(x))
        return x + self.two(self.norm2(x))


class OneBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.one(self.norm(x))


def stack(kind: type[nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(LAYERS))).double()


def states() -> Tensor:
    return torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4) ** 3


@pytest.mark.parametrize(("theta", "gamma"), [(0.5, 0.01), (0.1, 1.0), (1.0, 0.1)])
def test_probabilities_are_those_of_the_paper(theta, gamma):
    dropping = ProgressiveLayerDropping(theta, gamma, seed=0)
    for step in range(40):
        at_step = (1 - theta) * math.exp(-gamma * step) + theta
        assert dropping.theta == pytest.approx(at_step, rel=1e-15)
        for layer in range(1, LAYERS + 1):
            expected = 1 - layer * (1 - at_step) / LAYERS
            assert dropping.keep_probability(layer, LAYERS) == pytest.approx(expected, rel=1e-14)
        dropping.step()


def test_layers_are_kept_as_often_as_they_should_be():
    dropping = ProgressiveLayerDropping(0.4, 100.0, seed=3)
    dropping.step()  # theta is in its end
    num = 4000
    counts = torch.zeros(LAYERS)
    for _ in range(num):
        counts += torch.tensor(dropping.kept(LAYERS))
        dropping.step()
    for layer, count in enumerate(counts.tolist(), start=1):
        p = 1 - layer / LAYERS * 0.6
        assert abs(count / num - p) < 4 * math.sqrt(p * (1 - p) / num)


def test_choices_depend_on_seed_step_and_stack_alone():
    def choices(seed: int, stack: int = 0) -> list[list[bool]]:
        dropping = ProgressiveLayerDropping(0.3, 10.0, seed=seed)
        torch.manual_seed(seed + 1)  # nothing that the program draws counts
        dropping.num_steps = 5
        found = []
        for _ in range(20):
            found.append(dropping.kept(LAYERS, stack))
            dropping.step()
        return found

    assert choices(7) == choices(7)
    assert choices(7) != choices(8)
    assert choices(7) != choices(7, stack=1)
    assert len({tuple(kept) for kept in choices(7)}) > 5


def test_a_restart_goes_on_with_the_same_choices():
    first = ProgressiveLayerDropping(0.3, 0.1, seed=7)
    for _ in range(9):
        first.step()
    second = ProgressiveLayerDropping(0.3, 0.1, seed=1)
    second.load_state_dict(first.state_dict())
    assert (second.kept(LAYERS), second.theta) == (first.kept(LAYERS), first.theta)


@pytest.mark.parametrize("branches", [("one", "two"), ()])
def test_a_step_equals_the_serial_simulation_of_the_paper(branches):
    """x <- x + G f(x) / p for each branch; without names of branches, for the block as a whole."""
    model, plain = stack(), stack()
    dropping = ProgressiveLayerDropping(0.3, 10.0, seed=11)
    dropping.wrap(model, branches)
    dropped = 0
    for _ in range(8):
        p = [1 - layer / LAYERS * (1 - dropping.theta) for layer in range(1, LAYERS + 1)]
        x = states()
        for block, keep, gate in zip(plain, p, dropping.kept(LAYERS), strict=True):
            if not gate:
                dropped += 1
            elif branches:
                x = x + block.one(block.norm1(x)) / keep
                x = x + block.two(block.norm2(x)) / keep
            else:
                x = x + (block(x) - x) / keep
        for module in (model, plain):
            module.zero_grad()
        out = model(states())
        out.square().sum().backward()
        x.square().sum().backward()
        torch.testing.assert_close(out, x, rtol=1e-12, atol=1e-12)
        for ours, right in zip(model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (right.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, right.grad, rtol=1e-11, atol=1e-11)
        dropping.step()
    assert 8 < dropped < 40


def test_with_one_branch_both_ways_are_one():
    models = [stack(OneBranch), stack(OneBranch)]
    for model, branches in zip(models, [("one",), ()], strict=True):
        dropping = ProgressiveLayerDropping(0.3, 10.0, seed=11)
        dropping.step()
        dropping.wrap(model, branches)
    torch.testing.assert_close(models[0](states()), models[1](states()), rtol=1e-13, atol=1e-13)


def test_the_branches_count_the_same_on_average():
    """The mean over many steps of what a layer adds is what it adds without dropping."""
    block = OneBranch().double()
    plain = copy.deepcopy(block)
    dropping = ProgressiveLayerDropping(0.5, 100.0, seed=1)
    dropping.step()
    dropping.wrap([block])
    total, num = torch.zeros(2, 4, dtype=torch.float64), 4000
    with torch.no_grad():
        for _ in range(num):
            total += block(states())
            dropping.step()
        change = plain(states()) - states()
    apart = float((total / num - states() - change).abs().max())
    assert apart < 4 * float(change.abs().max()) / math.sqrt(num)


def test_evaluation_uses_all_layers_and_names_stay():
    model, plain = stack(), stack()
    names = list(model.state_dict())
    dropping = ProgressiveLayerDropping(0.1, 100.0, seed=0)
    dropping.step()
    dropping.wrap(model, ("one", "two"))
    assert list(model.state_dict()) == names
    assert torch.equal(model.eval()(states()), plain(states()))
    twin = copy.deepcopy(model).train()
    dropping.step()
    assert torch.equal(twin(states()), model.train()(states()))
    with torch.no_grad():
        next(twin.parameters()).add_(1.0)
    assert not torch.equal(twin.eval()(states()), model.eval()(states()))


def test_a_dictionary_of_blocks_and_further_arguments():
    class Scaled(nn.Module):
        def forward(self, x: Tensor, by: float, *, plus: float = 0.0) -> Tensor:
            return x * by + plus

    blocks = nn.ModuleDict({"a": Scaled(), "b": Scaled()})
    ProgressiveLayerDropping(0.5, 0.1, seed=0).wrap(blocks)
    x = states()
    for block in blocks.values():
        x = block(x, 2.0, plus=1.0)
    assert torch.equal(x, (states() * 2 + 1) * 2 + 1)  # in the first step all layers are kept


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"theta": 0.0}, "theta=0.0"),
        ({"theta": 1.5}, "theta=1.5"),
        ({"gamma": -1.0}, "gamma=-1.0"),
        ({"seed": "x"}, "seed='x'"),
    ],
)
def test_wrong_arguments_are_refused(options, said):
    with pytest.raises(InvalidArgument, match=said):
        ProgressiveLayerDropping(**options)


def test_wrong_blocks_are_refused_and_left_as_they_are():
    dropping = ProgressiveLayerDropping(seed=0)
    model = stack()
    with pytest.raises(InvalidArgument, match="no branch 'three'"):
        dropping.wrap(model, ("one", "three"))
    dropping.wrap(model)
    with pytest.raises(InvalidArgument, match="wrapped already"):
        dropping.wrap(model)
    with pytest.raises(InvalidArgument, match="a block is a int"):
        dropping.wrap([3])
    dropping = ProgressiveLayerDropping(seed=0)
    wrong = nn.Linear(4, 2).double()
    dropping.wrap([wrong])
    with pytest.raises(InvalidArgument, match="its input's shape"):
        wrong(states())
