"""The mistakes that people make with collectives, as data, and what each must end in.

Run under mpirun it makes those that leave a job alive, one after the other, each on groups of its own, and
prints what came of each as a line of JSON: on which rank what was raised, after how many seconds. With the
name of one that ends the job, such as `returns`, it makes that one.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

import mpisgd
from mpisgd import CollectiveMismatch, Deadlock, ReduceOp
from mpisgd.errors import NonFiniteGradients, OutOfSync

LARGE = 3_000_000


class Scene(NamedTuple):
    """Where a mistake is made: fresh groups of all ranks, and who this is."""

    a: mpisgd.Group
    b: mpisgd.Group
    rank: int
    size: int

    @property
    def after(self) -> int:
        return (self.rank + 1) % self.size

    @property
    def before(self) -> int:
        return (self.rank - 1) % self.size


class Mistake(NamedTuple):
    """What the last rank does, what the others do, what all must raise, and words that it must say."""

    one: Callable[[Scene], object]
    others: Callable[[Scene], object]
    words: tuple[str, ...]
    error: type[Exception] = CollectiveMismatch


def x(n: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(n, dtype=dtype)


def xs(s: Scene, n: int = 6) -> list[torch.Tensor]:
    return [x(n) for _ in range(s.size)]


def net(change: Callable[[nn.Sequential], object] = lambda m: None) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    change(model)
    return model


def without_bias(model: nn.Sequential) -> None:
    model[2].register_parameter("bias", None)


def wider(model: nn.Sequential) -> None:
    model[0] = nn.Linear(4, 5)


def in_double(model: nn.Sequential) -> None:
    model[2].double()


def optimizer(s: Scene, model: nn.Module, params: Any = None, **options: Any) -> torch.optim.Optimizer:
    sgd = torch.optim.SGD(list(model.parameters()) if params is None else params, lr=0.1)
    return mpisgd.DistributedOptimizer(sgd, model.named_parameters(), group=s.a, **options)


def construct(**options: Any) -> Callable[[Scene], object]:
    return lambda s: optimizer(s, net(), **options)


def train(s: Scene, *, steps: int = 2, passes: Callable[[int], int] = lambda step: 1, **options: Any) -> None:
    model = net(options.pop("change", lambda m: None))
    opt = optimizer(s, model, **options)
    for step in range(steps):
        opt.zero_grad()
        for _ in range(passes(step)):
            model(torch.ones(2, 4)).sum().backward()
        opt.step()
    mpisgd.barrier(s.a)


def freeze(model: nn.Sequential) -> None:
    model[0].requires_grad_(False)


def poison(model: nn.Sequential) -> None:
    model[2].weight.register_hook(lambda grad: grad * float("nan"))


def drifted(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[2].bias[0] += 1e-6


def both(*works: Any) -> None:
    errors = []
    for work in works:
        try:
            work.wait()
        except mpisgd.MpisgdError as exc:
            errors.append(exc)
    if errors:
        raise errors[0]


def scattered(s: Scene, mine: int) -> None:
    sizes = [mine] * s.size
    mpisgd.all_to_all_single(x(mine * s.size), x(mine * s.size), sizes, sizes, group=s.a)


def with_torch(s: Scene, call: Callable[[Any], object]) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("mpisgd", world_size=s.size, rank=s.rank, store=dist.HashStore())
    call(dist)


def subset(s: Scene, ranks: list[int]) -> None:
    from mpisgd.job.groups import open_group
    from mpisgd.job.lifecycle import current_job

    open_group(current_job(), ranks, name="some")


SUM, AVG = ReduceOp.SUM, ReduceOp.AVG

# "a" is the group that most are made in. A rank's words: its call, as the error must show it.
MISTAKES: dict[str, Mistake] = {
    "another collective": Mistake(
        lambda s: mpisgd.broadcast(x(), 0, s.a),
        lambda s: mpisgd.all_reduce(x(), SUM, s.a),
        ("broadcast(", "all_reduce("),
    ),
    "another order": Mistake(
        lambda s: (mpisgd.all_reduce(x(), SUM, s.a), mpisgd.barrier(s.a)),
        lambda s: (mpisgd.barrier(s.a), mpisgd.all_reduce(x(), SUM, s.a)),
        ("all_reduce(", "barrier("),
    ),
    "another shape": Mistake(
        lambda s: mpisgd.all_reduce(x(1000), SUM, s.a),
        lambda s: mpisgd.all_reduce(x(1024), SUM, s.a),
        ("shape=[1000]", "shape=[1024]"),
    ),
    "another shape of equal size": Mistake(
        lambda s: mpisgd.all_reduce(x(6).view(2, 3), SUM, s.a),
        lambda s: mpisgd.all_reduce(x(6).view(3, 2), SUM, s.a),
        ("shape=[2, 3]", "shape=[3, 2]"),
    ),
    "another dtype": Mistake(
        lambda s: mpisgd.all_reduce(x(6, torch.float64), SUM, s.a),
        lambda s: mpisgd.all_reduce(x(12), SUM, s.a),
        ("dtype=float64", "dtype=float32"),
    ),
    "another op": Mistake(
        lambda s: mpisgd.all_reduce(x(), SUM, s.a),
        lambda s: mpisgd.all_reduce(x(), AVG, s.a),
        ("op=SUM", "op=AVG"),
    ),
    "another root of broadcast": Mistake(
        lambda s: mpisgd.broadcast(x(), 1, s.a), lambda s: mpisgd.broadcast(x(), 0, s.a), ("root=1", "root=0")
    ),
    "another root of reduce": Mistake(
        lambda s: mpisgd.reduce(x(), 1, SUM, s.a),
        lambda s: mpisgd.reduce(x(), 0, SUM, s.a),
        ("root=1", "root=0"),
    ),
    "another algorithm": Mistake(
        lambda s: mpisgd.all_reduce(x(), SUM, s.a, algorithm="ring"),
        lambda s: mpisgd.all_reduce(x(), SUM, s.a, algorithm="halving_doubling"),
        ("algorithm=ring", "algorithm=halving_doubling"),
    ),
    "a barrier instead": Mistake(
        lambda s: mpisgd.barrier(s.a), lambda s: mpisgd.all_reduce(x(), SUM, s.a), ("barrier(", "all_reduce(")
    ),
    "a call too many": Mistake(
        lambda s: (mpisgd.all_reduce(x(), SUM, s.a), mpisgd.all_reduce(x(), SUM, s.a), mpisgd.barrier(s.a)),
        lambda s: (mpisgd.all_reduce(x(), SUM, s.a), mpisgd.barrier(s.a)),
        ("all_reduce(", "barrier("),
    ),
    "a call too few": Mistake(
        lambda s: (mpisgd.all_reduce(x(), SUM, s.a), mpisgd.barrier(s.a)),
        lambda s: (mpisgd.all_reduce(x(), SUM, s.a), mpisgd.all_reduce(x(), SUM, s.a), mpisgd.barrier(s.a)),
        ("all_reduce(", "barrier("),
    ),
    "all_gather of another size": Mistake(
        lambda s: mpisgd.all_gather(xs(s, 5), x(5), s.a),
        lambda s: mpisgd.all_gather(xs(s, 6), x(6), s.a),
        ("[5]", "[6]"),
    ),
    "reduce_scatter of another size": Mistake(
        lambda s: mpisgd.reduce_scatter(x(5), xs(s, 5), SUM, s.a),
        lambda s: mpisgd.reduce_scatter(x(6), xs(s, 6), SUM, s.a),
        ("[5]", "[6]"),
    ),
    "gather of another size": Mistake(
        lambda s: mpisgd.gather(x(5), None, 0, s.a),
        lambda s: mpisgd.gather(x(6), xs(s) if s.rank == 0 else None, 0, s.a),
        ("[5]", "[6]"),
    ),
    "scatter of another size": Mistake(
        lambda s: mpisgd.scatter(x(5), None, 0, s.a),
        lambda s: mpisgd.scatter(x(6), xs(s) if s.rank == 0 else None, 0, s.a),
        ("[5]", "[6]"),
    ),
    "all_to_all of sizes that do not fit": Mistake(
        lambda s: mpisgd.all_to_all(xs(s, 5), xs(s, 6), s.a),
        lambda s: mpisgd.all_to_all(xs(s, 6), xs(s, 6), s.a),
        ("sends 6", "expects 5"),
    ),
    "split sizes that do not fit": Mistake(
        lambda s: scattered(s, 3), lambda s: scattered(s, 2), ("sends 2", "expects 3")
    ),
    "split sizes on one rank only": Mistake(
        lambda s: scattered(s, 2),
        lambda s: mpisgd.all_to_all_single(x(2 * s.size), x(2 * s.size), group=s.a),
        ("with split sizes",),
    ),
    "a list in another order": Mistake(
        lambda s: mpisgd.all_reduce_coalesced([x(3), x(2)], SUM, s.a),
        lambda s: mpisgd.all_reduce_coalesced([x(2), x(3)], SUM, s.a),
        ("float32[2] float32[3]", "float32[3] float32[2]"),
    ),
    "a shorter list": Mistake(
        lambda s: mpisgd.broadcast_coalesced([x(2)], 0, s.a),
        lambda s: mpisgd.broadcast_coalesced([x(2), x(3)], 0, s.a),
        ("float32[2] float32[3]",),
    ),
    "an object instead of a tensor": Mistake(
        lambda s: mpisgd.broadcast_object("x", 0, s.a),
        lambda s: mpisgd.broadcast(x(), 0, s.a),
        ("broadcast_object(", "broadcast("),
    ),
    "another root of an object": Mistake(
        lambda s: mpisgd.broadcast_object(1, 1, s.a),
        lambda s: mpisgd.broadcast_object(1, 0, s.a),
        ("root=1", "root=0"),
    ),
    "asynchronous calls in another order": Mistake(
        lambda s: both(mpisgd.barrier(s.a, True), mpisgd.all_reduce(x(), SUM, s.a, async_op=True)),
        lambda s: both(mpisgd.all_reduce(x(), SUM, s.a, async_op=True), mpisgd.barrier(s.a, True)),
        ("all_reduce(", "barrier("),
    ),
    "an asynchronous call of another dtype": Mistake(
        lambda s: both(mpisgd.all_reduce(x().int(), SUM, s.a, async_op=True)),
        lambda s: both(mpisgd.all_reduce(x(), SUM, s.a, async_op=True)),
        ("dtype=int32", "dtype=float32"),
    ),
    "a group of other ranks": Mistake(
        lambda s: mpisgd.new_group([0]), lambda s: mpisgd.new_group([0, 1]), ("ranks=[0]", "ranks=[0, 1]")
    ),
    "no group": Mistake(lambda s: mpisgd.barrier(), lambda s: mpisgd.new_group(), ("barrier(", "new_group(")),
    "another order of a torch program": Mistake(
        lambda s: with_torch(s, lambda dist: (dist.all_reduce(x()), dist.broadcast(x(), 0))),
        lambda s: with_torch(s, lambda dist: (dist.broadcast(x(), 0), dist.all_reduce(x()))),
        ("all_reduce(", "broadcast("),
    ),
    # -- models and optimizers ------------------------------------------------------------------------
    "a model without a parameter": Mistake(
        lambda s: optimizer(s, net(without_bias)), lambda s: optimizer(s, net()), ("2.bias",)
    ),
    "a model of another shape": Mistake(
        lambda s: optimizer(s, net(wider)), lambda s: optimizer(s, net()), ("0.weight", "[5, 4]", "[3, 4]")
    ),
    "a model of another dtype": Mistake(
        lambda s: optimizer(s, net(in_double)), lambda s: optimizer(s, net()), ("2.weight", "float64")
    ),
    "parameters in another order": Mistake(
        lambda s: optimizer(s, m := net(), list(m.parameters())[::-1]),
        lambda s: optimizer(s, net()),
        ("0.weight",),
    ),
    "another option: bucket_cap_bytes": Mistake(
        construct(bucket_cap_bytes=100), construct(bucket_cap_bytes=200), ("=100", "=200")
    ),
    "another option: backward_passes_per_step": Mistake(
        construct(backward_passes_per_step=2), construct(), ("_per_step=2", "_per_step=1")
    ),
    "another option: op": Mistake(construct(op=SUM), construct(), ("op=SUM", "op=AVG")),
    "broadcast_parameters of another model": Mistake(
        lambda s: mpisgd.broadcast_parameters(net(wider), 0, s.a),
        lambda s: mpisgd.broadcast_parameters(net(), 0, s.a),
        ("0.weight",),
    ),
    "broadcast_optimizer_state of another optimizer": Mistake(
        lambda s: mpisgd.broadcast_optimizer_state(optimizer(s, net()), 0, s.a),
        lambda s: mpisgd.broadcast_optimizer_state(optimizer(s, net(without_bias)), 0, s.a),
        ("2.bias",),
    ),
    "average_gradients of another model": Mistake(
        lambda s: mpisgd.average_gradients(net(in_double), s.a),
        lambda s: mpisgd.average_gradients(net(), s.a),
        ("2.weight",),
    ),
    "a parameter frozen on one rank": Mistake(
        lambda s: train(s, change=freeze), lambda s: train(s), ("frozen",)
    ),
    "a backward too many": Mistake(
        lambda s: train(s, steps=3, passes=lambda step: 2 if step == 1 else 1),
        lambda s: train(s, steps=3),
        ("step 1, reduction 1", "step 2, reduction 0"),
    ),
    "an iteration less": Mistake(
        lambda s: train(s, steps=2), lambda s: train(s, steps=3), ("barrier(", "step 2")
    ),
    "parameters that have drifted apart": Mistake(
        lambda s: mpisgd.check_in_sync(net(drifted), s.a),
        lambda s: mpisgd.check_in_sync(net(), s.a),
        ("2.bias", "norm"),
        OutOfSync,
    ),
    "drift that the optimizer finds": Mistake(
        lambda s: train(s, change=drifted, check_in_sync_every=2, check_start=False),
        lambda s: train(s, check_in_sync_every=2, check_start=False),
        ("2.bias", "norm"),
        OutOfSync,
    ),
    "a gradient that is no number": Mistake(
        lambda s: train(s, change=poison, error_if_nonfinite=True),
        lambda s: train(s, error_if_nonfinite=True),
        ("2.weight", "step 0"),
        NonFiniteGradients,
    ),
    # -- ranks that wait for each other ---------------------------------------------------------------
    "different groups": Mistake(
        lambda s: mpisgd.barrier(s.b), lambda s: mpisgd.barrier(s.a), ("barrier(",), Deadlock
    ),
    "different groups, asynchronous": Mistake(
        lambda s: both(mpisgd.all_reduce(x(), SUM, s.b, async_op=True)),
        lambda s: both(mpisgd.all_reduce(x(), SUM, s.a, async_op=True)),
        ("all_reduce(",),
        Deadlock,
    ),
    "groups in another order": Mistake(
        lambda s: (mpisgd.all_reduce(x(), SUM, s.b), mpisgd.all_reduce(x(), SUM, s.a)),
        lambda s: (mpisgd.all_reduce(x(), SUM, s.a), mpisgd.all_reduce(x(), SUM, s.b)),
        ("all_reduce(",),
        Deadlock,
    ),
    "a message that nobody sends": Mistake(
        lambda s: mpisgd.recv(x(), 0, s.a),
        lambda s: mpisgd.barrier(s.a),
        ("recv from rank 0", "barrier("),
        Deadlock,
    ),
    "a message from anyone, that nobody sends": Mistake(
        lambda s: mpisgd.recv(x(), None, s.a),
        lambda s: mpisgd.barrier(s.a),
        ("recv from any rank", "barrier("),
        Deadlock,
    ),
    "all receive before they send": Mistake(
        lambda s: (mpisgd.recv(x(), s.before, s.a), mpisgd.send(x(), s.after, s.a)),
        lambda s: (mpisgd.recv(x(), s.before, s.a), mpisgd.send(x(), s.after, s.a)),
        ("recv from rank 0", "recv from rank 1"),
        Deadlock,
    ),
    "all send much before they receive": Mistake(
        lambda s: (mpisgd.send(x(LARGE), s.after, s.a), mpisgd.recv(x(LARGE), s.before, s.a)),
        lambda s: (mpisgd.send(x(LARGE), s.after, s.a), mpisgd.recv(x(LARGE), s.before, s.a)),
        ("send to rank 0", "send to rank 1"),
        Deadlock,
    ),
    "another tag": Mistake(
        lambda s: mpisgd.recv(x(), 0, s.a, tag=2),
        lambda s: (
            mpisgd.send(x(), s.size - 1, s.a, tag=1) if s.rank == 0 else None,
            mpisgd.barrier(s.a),
        ),
        ("tag 2",),
        Deadlock,
    ),
    "a group that the others do not make": Mistake(
        lambda s: subset(s, list(range(s.size))), lambda s: mpisgd.barrier(s.a), ("new_group",), Deadlock
    ),
}

# What ends the job: the last rank leaves, the others go on to something that needs it.
LEAVERS: dict[str, Callable[[Scene], object]] = {
    "all_reduce": lambda s: mpisgd.all_reduce(x()),
    "all_reduce of a group": lambda s: mpisgd.all_reduce(x(), SUM, s.a),
    "recv": lambda s: mpisgd.recv(x(), s.size - 1),
    "isend": lambda s: mpisgd.isend(x(LARGE), s.size - 1),
    "async": lambda s: both(mpisgd.all_reduce(x(), async_op=True)),
    "training": lambda s: train(s),
}


def leave(scene: Scene, how: str, what: str) -> None:
    """The last rank leaves in a certain way, the others do something that needs it."""
    if scene.rank < scene.size - 1:
        LEAVERS[what](scene)
    elif how == "exits":
        sys.exit(3)
    elif how == "raises":
        raise RuntimeError("the last rank has had enough")
    elif how == "shuts down":
        mpisgd.shutdown()


def make(mistake: Mistake, scene: Scene) -> tuple[str, str, str]:
    """Make a mistake; what was raised: its name, whether it is right, what is wrong with it."""
    try:
        (mistake.one if scene.rank == scene.size - 1 else mistake.others)(scene)
    except Exception as exc:
        text = str(exc)
        missing = [word for word in (*mistake.words, *places(mistake, scene)) if word not in text]
        right = type(exc) is mistake.error and not missing
        return type(exc).__name__, "" if right else f"{missing} not in {type(exc).__name__}: {text}", text
    return "nothing", "nothing was raised", ""


def places(mistake: Mistake, scene: Scene) -> tuple[str, ...]:
    """What every error says besides: the operation's number and call site, and who, by rank of the job."""
    if mistake.error is NonFiniteGradients:
        return (f"rank {scene.size - 1}:",)
    if mistake.error is OutOfSync:
        return (f"rank {scene.size - 1}: hash", "rank 0" if scene.size == 2 else "ranks 0")
    numbered = ("operation",) if mistake.error is CollectiveMismatch else ()
    return ("mistakes.py:", "rank", *numbered)


def main() -> None:
    mpisgd.init(timeout_s=40)
    from mpi4py import MPI

    referee = MPI.COMM_WORLD.Dup()
    if len(sys.argv) > 2:
        leave(Scene(mpisgd.new_group(), mpisgd.new_group(), mpisgd.rank(), mpisgd.size()), *sys.argv[1:])
        return
    if sys.argv[1:] == ["fast"]:
        hurry()
    torch.optim.SGD([x().requires_grad_()], lr=0.1)  # the first one loads half of torch
    for name, mistake in MISTAKES.items():
        scene = Scene(mpisgd.new_group(), mpisgd.new_group(), mpisgd.rank(), mpisgd.size())
        referee.barrier()
        began_s = time.monotonic()
        raised, wrong, text = make(mistake, scene)
        took_s = time.monotonic() - began_s
        everyone = referee.gather((raised, wrong, took_s))
        if everyone is not None:
            print(json.dumps({"mistake": name, "ranks": everyone, "text": text}), flush=True)
        abandon(scene)
    referee.barrier()


def hurry() -> None:
    """Let ranks that wait for each other be looked for early, so that a test of many takes little time."""
    from mpisgd.monitor import deadlock_detector, state_collector, watchdog

    deadlock_detector.FIRST_S, deadlock_detector.SURE_S = 0.3, 0.2
    watchdog.CHECK_S = state_collector.QUESTIONS_S = 0.1


def abandon(scene: Scene) -> None:
    """Forget groups that may be of no use any more, so that the end of the job can be a clean one."""
    from mpisgd.job.lifecycle import current_job

    for group in (scene.a, scene.b):
        current_job().groups.remove(group)


if __name__ == "__main__":
    main()
