"""`SyncBatchNorm` on N ranks equals torch's BatchNorm on the joined batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd import CollectiveMismatch, Group, InvalidArgument, ShapeMismatch, SyncBatchNorm
from mpisgd.job.lifecycle import world

convert = SyncBatchNorm.convert_sync_batchnorm

CHANNELS = 3
KINDS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "2-D": (nn.BatchNorm1d, ()),
    "3-D": (nn.BatchNorm1d, (5,)),
    "4-D": (nn.BatchNorm2d, (3, 2)),
    "5-D": (nn.BatchNorm3d, (2, 1, 3)),
}
COUNTS: dict[str, Callable[[int], int]] = {
    "even": lambda rank: 4,
    "uneven": lambda rank: 2 * rank + 2,
    "one rank has nothing": lambda rank: 0 if rank == 1 else rank + 2,
    "rank 0 has nothing": lambda rank: 3 if rank or world().size == 1 else 0,
}


class Batch:
    """Inputs of all ranks of a group and what backward starts from: other numbers for every element."""

    def __init__(
        self, group: Group, count: Callable[[int], int], shape: tuple[int, ...], step: int, dtype: torch.dtype
    ) -> None:
        self.group = group
        self.counts = [count(rank) for rank in range(group.size)]
        draw = torch.Generator().manual_seed(31 * step + 7)
        whole = (sum(self.counts), CHANNELS, *shape)
        scale = torch.arange(1, CHANNELS + 1).view(-1, *[1] * len(shape))
        self.inputs = (torch.randn(whole, generator=draw, dtype=torch.float64) * scale + scale).to(dtype)
        self.grads = torch.randn(whole, generator=draw, dtype=torch.float64).to(dtype)

    def mine(self, tensor: Tensor) -> Tensor:
        return tensor.detach().split(self.counts)[self.group.rank]


def run(norm: nn.Module, inputs: Tensor, grads: Tensor) -> list[Tensor]:
    """One step; (output, gradient of the input, gradients of the parameters)."""
    inputs = inputs.detach().requires_grad_()
    norm.zero_grad()
    out = norm(inputs)
    out.backward(grads)
    return [out.detach(), inputs.grad, *(param.grad for param in norm.parameters())]


def off(found: Tensor, expected: Tensor) -> float:
    """The largest difference; inf where the kinds of tensors differ or one is not finite."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    worst = (
        (found.detach().double() - expected.detach().double()).abs().max().item() if found.numel() else 0.0
    )
    return worst if worst == worst else float("inf")


def check_equals_joined(
    group: Group,
    kind: str = "4-D",
    count: Callable[[int], int] = COUNTS["uneven"],
    *,
    tol: float = 1e-12,
    dtype: torch.dtype = torch.float64,
    param_dtype: torch.dtype = torch.float64,
    layout: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    **options: Any,
) -> None:
    """Three steps both ways, then evaluation: outputs, gradients, running statistics."""
    make, shape = KINDS[kind]
    plain = make(CHANNELS, dtype=param_dtype, **options)
    for i, param in enumerate(plain.parameters()):
        nn.init.uniform_(param, i + 0.5, i + 1.5, generator=torch.Generator().manual_seed(i))
    ours = convert(copy.deepcopy(plain), group)
    found = []
    for step in range(3):
        batch = Batch(group, count, shape, step, dtype)
        joined = run(plain, layout(batch.inputs), layout(batch.grads))
        mine = run(ours, layout(batch.mine(batch.inputs)), layout(batch.mine(batch.grads)))
        found += [off(mine[i], batch.mine(joined[i])) for i in (0, 1)]
        for local, whole in zip(mine[2:], joined[2:], strict=True):
            mpisgd.all_reduce(local, group=group)
            found.append(off(local, whole))
    pairs = list(zip(ours.buffers(), plain.buffers(), strict=True))
    found += [off(a, b) for a, b in pairs]
    found.append(off(ours.eval()(batch.inputs), plain.eval()(batch.inputs)))
    everyone(max(found) <= tol, f"off by {found}")


# -- equality ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_batch_norm_on_the_joined_batch(kind, count):
    check_equals_joined(world(), kind, COUNTS[count])


def test_in_every_kind_of_group(group):
    check_equals_joined(group)


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"momentum": 0.37, "eps": 0.1},
        {"affine": False},
        {"track_running_stats": False},
        {"affine": False, "track_running_stats": False},
    ],
    ids=str,
)
def test_every_option(options):
    check_equals_joined(world(), **options)


LAYOUTS = {
    "channels last": lambda tensor: tensor.contiguous(memory_format=torch.channels_last),
    "transposed": lambda tensor: tensor.transpose(2, 3).contiguous().transpose(2, 3),
    "strided": lambda tensor: tensor.repeat_interleave(2, 3)[..., ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout):
    check_equals_joined(world(), layout=LAYOUTS[layout])


def test_channels_last_stays_so():
    images = LAYOUTS["channels last"](torch.randn(4, CHANNELS, 5, 5)).requires_grad_()
    out = SyncBatchNorm(CHANNELS)(images)
    out.backward(torch.randn_like(out))
    channels_last = [x.is_contiguous(memory_format=torch.channels_last) for x in (out, images.grad)]
    everyone(all(channels_last))


@pytest.mark.parametrize(
    ("dtype", "param_dtype", "tol"),
    [
        (torch.float32, torch.float32, 1e-5),
        (torch.bfloat16, torch.float32, 0.05),
        (torch.float16, torch.float32, 0.005),
        (torch.bfloat16, torch.bfloat16, 0.3),
    ],
    ids=str,
)
def test_dtypes(dtype, param_dtype, tol):
    check_equals_joined(world(), dtype=dtype, param_dtype=param_dtype, tol=tol)


def test_ranks_far_apart_lose_no_digits():
    """Every rank alone has a small variance; a difference of float32 squares would be all noise."""
    rank, size = mpisgd.rank(), mpisgd.size()
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(size, 64, 1, generator=draw) + 1e4 + 10 * torch.arange(size).view(-1, 1, 1)
    norm = SyncBatchNorm(1, momentum=1.0)
    norm(inputs[rank])
    exact = inputs.double().var()
    # A rank's mean near 1e4 is known to 5e-4 in float32, and the variance is 1 + 100 (size^2 - 1) / 12.
    everyone(abs(norm.running_var.item() / exact.item() - 1) < 1e-3, f"{norm.running_var} {exact}")


def test_derivatives_by_finite_differences():
    """All ranks move the same elements at the same time: a rank's own sum then stands for everyone's."""
    draw = torch.Generator().manual_seed(3)
    inputs, weight, bias = (
        torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)
        for shape in ((4, 2, 3), (2,), (2,))
    )

    def function(*tensors):
        norm = SyncBatchNorm(2, affine=False, track_running_stats=False)
        del norm._parameters["weight"], norm._parameters["bias"]
        norm.weight, norm.bias = tensors[1:]
        return norm(tensors[0])

    everyone(torch.autograd.gradcheck(function, (inputs, weight, bias)))


# -- training ------------------------------------------------------------------------------------------

STEPS, IMAGES = 8, 12  # 1, 2, 3 and 4 ranks divide it


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 4, 2))
        self.head = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))

    def forward(self, images):
        return self.head(self.body(images).mean((2, 3)))


def train(model: nn.Module, opt: torch.optim.Optimizer, rank: int = 0, size: int = 1) -> Iterator[nn.Module]:
    """Train on a share of every batch; yields after each step."""
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        images = torch.randn(IMAGES, 1, 6, 6, generator=draw, dtype=torch.float64)
        targets = torch.randn(IMAGES, 2, generator=draw, dtype=torch.float64)
        opt.zero_grad()
        F.mse_loss(model(images.chunk(size)[rank]), targets.chunk(size)[rank]).backward()
        opt.step()
        yield model


def largest_drift(prepare: Callable[[nn.Module], nn.Module], **options: Any) -> float:
    """The largest difference to one process, over all steps, parameters and buffers."""
    torch.manual_seed(1)
    plain = Convolutions().double()
    ours = prepare(copy.deepcopy(plain))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, ours)]
    opt = mpisgd.DistributedOptimizer(optimizers[1], named_parameters=ours.named_parameters(), **options)
    steps = zip(train(plain, optimizers[0]), train(ours, opt, mpisgd.rank(), mpisgd.size()), strict=True)
    return max(
        off(mine, whole)
        for there, here in steps
        for mine, whole in zip(here.state_dict().values(), there.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("queue", ["of the gradients", "its own"])
@pytest.mark.parametrize("overlap", [False, True])
def test_training_equals_one_process(queue, overlap):
    group = mpisgd.new_group() if queue == "its own" else None
    cap = 64 if overlap else 2**20
    drift = largest_drift(lambda model: convert(model, group), overlap=overlap, bucket_cap_bytes=cap)
    everyone(drift < 1e-11, f"off by {drift}")


@pytest.mark.mpi(min_size=2)
def test_training_without_communication_in_the_layers_does_not():
    everyone(largest_drift(lambda model: model) > 1e-3)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's tracer looks at it
def test_compiled_models():
    torch.manual_seed(4)
    plain = nn.Sequential(nn.Linear(CHANNELS, 4), SyncBatchNorm(4)).double()
    compiled = copy.deepcopy(plain)
    inputs, grads = torch.randn(3, CHANNELS).double() + mpisgd.rank(), torch.randn(3, 4).double()
    made = run(torch.compile(compiled, backend="aot_eager"), inputs, grads)
    pairs = [*zip(made, run(plain, inputs, grads), strict=True)]
    pairs += zip(compiled.buffers(), plain.buffers(), strict=True)
    everyone(max(off(a, b) for a, b in pairs) < 1e-12)


def test_under_autocast():
    torch.manual_seed(2)
    model = convert(nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)))
    images = torch.randn(4, 2, 3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(images)
    out.float().square().sum().backward()
    grads = [param.grad for param in model.parameters()]
    everyone(out.dtype is torch.bfloat16)
    everyone(all(grad.dtype is torch.float32 and grad.isfinite().all() for grad in grads))


# -- what is sent --------------------------------------------------------------------------------------


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kinds of operations on the world, as they come."""
    kinds: list[str] = []
    queue, known_calls = world().queue, world().known_calls
    run, run_again = queue.run, queue.run_again

    def recording(operation, *args, **kwargs):
        kinds.append(operation.kind)
        return run(operation, *args, **kwargs)

    def recording_again(again, tensor):
        if runs := run_again(again, tensor):  # else `run` is called
            kinds.append(again.operation.kind)
        return runs

    monkeypatch.setattr(queue, "run", recording)
    monkeypatch.setattr(queue, "run_again", recording_again)
    known_calls.clear()  # they keep the function that they call
    yield kinds
    known_calls.clear()


@pytest.mark.mpi(min_size=2)
def test_one_collective_each_way(sent):
    norm = SyncBatchNorm(CHANNELS)
    images = torch.randn(2, CHANNELS, 4, 4, requires_grad=True)
    norm(images).sum().backward()
    everyone(sent == ["all_gather_into_tensor", "all_reduce"], str(sent))


@pytest.mark.mpi(min_size=2)
def test_backward_sends_nothing_where_the_input_needs_no_gradient(sent):
    norm = SyncBatchNorm(CHANNELS)
    norm(torch.randn(2, CHANNELS, 4, 4)).sum().backward()
    everyone(sent == ["all_gather_into_tensor"], str(sent))
    everyone(norm.weight.grad is not None)


def test_evaluation_sends_nothing(sent):
    images = torch.randn(mpisgd.rank() + 1, CHANNELS, 4, 4)
    for tracked in (True, False):
        SyncBatchNorm(CHANNELS, track_running_stats=tracked).eval()(images)
    everyone(sent == [], str(sent))


def test_a_group_of_one_rank_is_plain_batch_norm(monkeypatch):
    alone = [mpisgd.new_group([rank]) for rank in range(mpisgd.size())][mpisgd.rank()]
    plain = nn.BatchNorm2d(CHANNELS)
    ours = convert(copy.deepcopy(plain), alone)
    monkeypatch.setattr(alone.queue, "run", None)
    monkeypatch.setattr(alone.queue, "run_again", None)
    images, grads = torch.randn(2, 4, CHANNELS, 4, 4)
    found = zip(run(ours, images, grads), run(plain, images, grads), strict=True)
    everyone(all(torch.equal(a, b) for a, b in found))
    everyone(torch.equal(ours.running_var, plain.running_var))


def test_without_gradients_the_statistics_are_tracked_all_the_same():
    norm = SyncBatchNorm(CHANNELS)
    with torch.no_grad():
        out = norm(torch.randn(4, CHANNELS) + mpisgd.rank() + 1)
    everyone(not out.requires_grad)
    everyone(bool(norm.running_mean.all()))
    same_on_all_ranks(norm.running_mean.tolist())


# -- what goes wrong, and what does not ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "error", "text"),
    [
        ((3,), InvalidArgument, "expected at least 2D input (got 1D input)"),
        ((2, 0), InvalidArgument, "number of input channels should be non-zero"),
        ((2, CHANNELS + 1), ShapeMismatch, "the input has 4 channels, the layer num_features=3"),
    ],
    ids=str,
)
def test_wrong_shapes_are_found_before_anything_is_sent(sent, shape, error, text):
    with raises_everywhere(error) as caught:
        SyncBatchNorm(CHANNELS)(torch.zeros(shape))
    everyone(text in caught.text, caught.text)
    everyone(sent == [])


@pytest.mark.mpi(min_size=2)
def test_one_value_on_all_ranks_together_is_too_few():
    with raises_everywhere(InvalidArgument) as caught:
        SyncBatchNorm(CHANNELS)(torch.zeros(0 if mpisgd.rank() else 1, CHANNELS))
    everyone("Expected more than 1 value per channel when training" in caught.text)
    everyone(caught.error.on_every_rank)


def test_nothing_at_all_changes_nothing():
    """As one process does with an empty batch."""
    plain, norm = nn.BatchNorm1d(CHANNELS), SyncBatchNorm(CHANNELS)
    for layer in (plain, norm):
        run(layer, torch.empty(0, CHANNELS), torch.empty(0, CHANNELS))
    pairs = zip([*norm.parameters()], [*plain.parameters()], strict=True)
    everyone(all(torch.equal(a, b) for a, b in zip(norm.buffers(), plain.buffers(), strict=True)))
    everyone(all(torch.equal(a.grad, b.grad) for a, b in pairs))


@pytest.mark.mpi(min_size=2)
def test_layers_that_differ_between_ranks_are_found():
    channels = CHANNELS + (mpisgd.rank() == 1)
    with raises_everywhere(CollectiveMismatch):
        SyncBatchNorm(channels)(torch.randn(2, channels))


def test_a_copy_communicates_in_the_same_group(group):
    twin = copy.deepcopy(SyncBatchNorm(CHANNELS, process_group=group))
    everyone(twin.process_group is group)
