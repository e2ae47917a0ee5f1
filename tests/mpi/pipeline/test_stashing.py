"""PipeDream and PipeDream-2BW against serial simulations, written from the papers' update rules.

In them a stage is tanh(x W + c) with a list of all its versions; gradients are taken at the versions that the
papers name, and SGD with momentum changes the newest.
"""

from __future__ import annotations

import pytest
import torch
from stage_models import batch, error_of_parameters, has_last, make_stages, replicas_of, sgd
from torch.nn.functional import mse_loss
from verdicts import everyone

import mpisgd
from mpisgd.pipeline import PipeDream, PipeDream2BW, Pipeline

TOLERANCE = 1e-12
NUM_STEPS = 4


class Simulated:
    """The stages of `make_stages`, every version of each, and momentum."""

    def __init__(self, count):
        stages = make_stages(count)
        self.versions = [[[p.detach().clone() for p in stage.parameters()]] for stage in stages]
        self.momentum = [[torch.zeros_like(p) for p in own[0]] for own in self.versions]

    def gradients(self, read, inputs, targets):
        """The gradients of each stage where stage s has version read[s], and the loss."""
        weights = [
            [p.clone().requires_grad_() for p in own[version]]
            for own, version in zip(self.versions, read, strict=True)
        ]
        x = inputs
        for weight, bias in weights:
            x = torch.tanh(x @ weight.T + bias)
        loss = ((x - targets) ** 2).mean()
        flat = torch.autograd.grad(loss, [p for own in weights for p in own])
        return [flat[2 * s : 2 * s + 2] for s in range(len(weights))], loss.item()

    def update(self, stage, gradients):
        """SGD with lr 0.3 and momentum 0.9, from the newest version to the next."""
        newest = self.versions[stage][-1]
        self.momentum[stage] = [0.9 * m + g for m, g in zip(self.momentum[stage], gradients, strict=True)]
        self.versions[stage].append([p - 0.3 * m for p, m in zip(newest, self.momentum[stage], strict=True)])

    def restart(self):
        self.versions = [[own[-1]] for own in self.versions]

    def modules(self):
        stages = make_stages(len(self.versions))
        for stage, own in zip(stages, self.versions, strict=True):
            for param, value in zip(stage.parameters(), own[-1], strict=True):
                param.data = value
        return stages


def in_parts(tensor, parts):
    """Rows in parts, the first of which have one more."""
    return list(torch.tensor_split(tensor, parts))


def simulate_pipedream(simulated, batches, parts, vertical_sync=False):
    """w(t+1) = w(t) - lr grad f(w_0(t-n+1), ..., w_{n-1}(t)); vertical sync: t-n+1 on all. SOSP'19, 3.3."""
    n, t, losses = len(simulated.versions), 0, []
    for inputs, targets in batches:
        total = 0.0
        for x, y in zip(in_parts(inputs, parts), in_parts(targets, parts), strict=True):
            read = [max(0, t - n + 1 + (0 if vertical_sync else s)) for s in range(n)]
            gradients, loss = simulated.gradients(read, x, y)
            for stage in range(n):
                simulated.update(stage, gradients[stage])
            total += loss * len(x) / len(inputs)
            t += 1
        losses.append(total)
    return losses


def simulate_2bw(simulated, batches):
    """w(t+1) = w(t) - lr grad f(w(t-1)), w(-1) = w(0). ICML'21, 3.1."""
    n, losses = len(simulated.versions), []
    for t, (inputs, targets) in enumerate(batches):
        gradients, loss = simulated.gradients([max(0, t - 1)] * n, inputs, targets)
        for stage in range(n):
            simulated.update(stage, gradients[stage])
        losses.append(loss)
    return losses


def check(pipeline, simulated, batches, expected):
    for (inputs, targets), reference in zip(batches, expected, strict=True):
        loss = pipeline.step(inputs, targets)
        everyone((loss is not None) == has_last(pipeline))
        everyone(loss is None or abs(loss - reference) <= TOLERANCE, f"{loss} {reference}")
    pipeline.flush()
    wrong = error_of_parameters(pipeline, simulated.modules())
    everyone(wrong <= TOLERANCE, f"{wrong}")


@pytest.mark.parametrize(("vertical_sync", "checkpoint"), [(False, True), (True, False)])
def test_pipedream_equals_its_simulation(vertical_sync, checkpoint):
    """Parameters after many stale updates, losses on the way; again after a flush."""
    count = max(4, mpisgd.size())
    simulated = Simulated(count)
    pipeline = Pipeline(
        make_stages(count),
        schedule=PipeDream(vertical_sync=vertical_sync),
        num_micro_batches=3,
        loss=mse_loss,
        optimizer=sgd,
        checkpoint=checkpoint,
    )
    for start in (0, NUM_STEPS):
        batches = [batch(start + number, 7, count) for number in range(NUM_STEPS)]
        expected = simulate_pipedream(simulated, batches, 3, vertical_sync)
        check(pipeline, simulated, batches, expected)
        simulated.restart()
    held = {stage: count if vertical_sync else count - stage for stage in pipeline.stages}
    everyone(pipeline.versions_held == held, f"{pipeline.versions_held}")


def test_2bw_equals_its_simulation():
    count = max(4, mpisgd.size())
    simulated = Simulated(count)
    pipeline = Pipeline(
        make_stages(count), schedule="pipedream-2bw", num_micro_batches=count, loss=mse_loss, optimizer=sgd
    )
    for start in (0, NUM_STEPS):
        batches = [batch(start + number, 2 * count + 1, count) for number in range(NUM_STEPS)]
        check(pipeline, simulated, batches, simulate_2bw(simulated, batches))
        simulated.restart()
    everyone(set(pipeline.versions_held.values()) == {2}, f"{pipeline.versions_held}")


def test_stale_gradients_are_not_those_of_synchronous_sgd():
    """The simulations could not tell otherwise."""
    count = max(4, mpisgd.size())
    batches = [batch(number, 2 * count, count) for number in range(NUM_STEPS)]
    stale, fresh = Simulated(count), Simulated(count)
    simulate_2bw(stale, batches)
    for inputs, targets in batches:
        newest = [len(own) - 1 for own in fresh.versions]
        gradients, _ = fresh.gradients(newest, inputs, targets)
        for stage in range(count):
            fresh.update(stage, gradients[stage])
    differences = [
        float((a - b).abs().max())
        for mine, theirs in zip(stale.versions, fresh.versions, strict=True)
        for a, b in zip(mine[-1], theirs[-1], strict=True)
    ]
    everyone(max(differences) > 1e-3)


def test_replicas_average_the_gradients_of_as_many_micro_batches():
    """Stage s with r replicas updates after each r micro-batches, ceil(later ranks / r) of its own behind."""
    replicas = replicas_of(mpisgd.size())
    n, parts = len(replicas), 4
    simulated = Simulated(n)
    depths = [-(-sum(replicas[s + 1 :]) // replicas[s]) for s in range(n)]
    batches = [batch(number, 9, n) for number in range(NUM_STEPS)]
    collected, t, expected = [[] for _ in range(n)], 0, []
    for inputs, targets in batches:
        total = 0.0
        for x, y in zip(in_parts(inputs, parts), in_parts(targets, parts), strict=True):
            read = [max(0, t // replicas[s] - depths[s]) for s in range(n)]
            gradients, loss = simulated.gradients(read, x, y)
            for s in range(n):
                collected[s].append(gradients[s])
                if len(collected[s]) == replicas[s]:
                    means = [sum(each) / replicas[s] for each in zip(*collected[s], strict=True)]
                    simulated.update(s, means)
                    collected[s] = []
            total += loss * len(x) / len(inputs)
            t += 1
        expected.append(total)
    pipeline = Pipeline(
        make_stages(n),
        schedule="pipedream",
        num_micro_batches=parts,
        loss=mse_loss,
        optimizer=sgd,
        replicas=replicas,
    )
    check(pipeline, simulated, batches, expected)
    held = {stage: depths[stage] + 1 for stage in pipeline.stages}
    everyone(pipeline.versions_held == held, f"{pipeline.versions_held}")


def test_replicas_of_2bw_share_the_batch():
    replicas = replicas_of(mpisgd.size())
    simulated = Simulated(len(replicas))
    pipeline = Pipeline(
        make_stages(len(replicas)),
        schedule=PipeDream2BW(),
        num_micro_batches=8,
        loss=mse_loss,
        optimizer=sgd,
        replicas=replicas,
        loss_on_all_ranks=True,
    )
    batches = [batch(number, 17, len(replicas)) for number in range(NUM_STEPS)]
    expected = simulate_2bw(simulated, batches)
    for (inputs, targets), reference in zip(batches, expected, strict=True):
        loss = pipeline.step(inputs, targets)
        everyone(loss is not None and abs(loss - reference) <= TOLERANCE)
    pipeline.flush()
    wrong = error_of_parameters(pipeline, simulated.modules())
    everyone(wrong <= TOLERANCE, f"{wrong}")


@pytest.mark.mpi(min_size=2)
def test_tied_parameters_of_2bw_have_the_sum_of_their_gradients():
    """Stages 0 and last of equal shape; both gradients at w(t-1)."""
    count = mpisgd.size()

    def square():
        torch.manual_seed(5)
        layers = [torch.nn.Linear(4, 4, bias=False).double() for _ in range(count)]
        layers[-1].weight = layers[0].weight
        return layers

    versions = [[layer.weight.detach().clone() for layer in square()]]
    generator = torch.Generator().manual_seed(2)
    pipeline = Pipeline(
        square(),
        schedule="pipedream-2bw",
        num_micro_batches=count,
        loss=mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    for t in range(NUM_STEPS):
        inputs = torch.randn(3 * count, 4, dtype=torch.float64, generator=generator)
        weights = [w.clone().requires_grad_() for w in versions[max(0, t - 1)][:-1]]
        x = inputs
        for w in [*weights, weights[0]]:
            x = x @ w.T
        gradients = torch.autograd.grad((x**2).mean(), weights)
        stepped = [w - 0.1 * g for w, g in zip(versions[-1], gradients, strict=False)]
        versions.append([*stepped, stepped[0]])
        pipeline.step(inputs, torch.zeros_like(inputs))
    pipeline.flush()
    ((stage, module),) = pipeline.stages.items()
    wrong = float((module.weight - versions[-1][stage]).detach().abs().max())
    everyone(wrong <= TOLERANCE, f"{wrong}")
