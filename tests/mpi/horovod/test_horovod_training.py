"""`DistributedOptimizer` with each of its arguments: as one process on the joined batch, step by step."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from joined_batch import FEATURES, Run, check, compare, digest, inputs_of, mlp, pair, plain_step, sgd, square
from torch import nn
from verdicts import everyone, same_on_all_ranks

import mpisgd.horovod as hvd
from mpisgd.horovod.gradients import GradientExchange
from mpisgd.horovod.ops import submission


def in_two_passes(run: Run, step: int) -> None:
    run.opt.zero_grad()
    for micro in (0, 1):
        run.backward(step, micro)
    run.opt.step()


def lists(*places: list[int]):
    """Groups of the parameters at these places; those that are in none travel as they come."""
    return lambda net: {"groups": [[list(net.parameters())[i] for i in group] for group in places]}


def sends(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let buckets be sent during backward, as they do between hosts, or at its end."""
    monkeypatch.setattr(GradientExchange, "_sends_early", lambda exchange: early)


ARGUMENTS = {
    "nothing else": {},
    "no names": {"named_parameters": None},
    "groups by number": {"groups": 2},
    "groups by parameters": {"arguments": lists([4, 0], [2])},
    "a group of everything": {"arguments": lists([0, 1, 2, 3, 4])},
    "predivided": {"gradient_predivide_factor": 3.0},
    "predivided groups": {"gradient_predivide_factor": 0.5, "groups": 3},
    "summed": {"op": hvd.Sum},
    "kept None": {"keep_none": True},
    "sparse as dense, of which there are none": {"sparse_as_dense": True},
}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments(case, early, monkeypatch):
    sends(early, monkeypatch)
    how = dict(ARGUMENTS[case])
    check(factor=hvd.size() if how.get("op") == hvd.Sum else 1.0, **how)


def test_the_older_number_of_groups():
    with pytest.warns(DeprecationWarning, match="num_groups"):
        check(num_groups=2)


@pytest.mark.parametrize(
    "how", [{}, {"groups": 2}, {"gradient_predivide_factor": 2.0}, {"keep_none": True}], ids=str
)
def test_two_backward_passes_per_step(how):
    check(in_two_passes, backward_passes_per_step=2, **how)


def test_a_last_window_that_is_not_full():
    def body(run: Run, step: int) -> None:
        (plain_step if step == 3 else in_two_passes)(run, step)

    check(body, backward_passes_per_step=2)


def test_the_number_of_passes_may_change():
    def body(run: Run, step: int) -> None:
        if run.distributed:
            run.opt.set_backward_passes_per_step(1 + step % 2)
        (in_two_passes if step % 2 else plain_step)(run, step)

    check(body)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_gradients(compression):
    """Near the run in float64, but not the same."""
    kind = getattr(hvd.Compression, compression)
    ours = check(compression=kind, tolerance=2e-2)
    plain, _ = pair()
    for step in range(4):
        plain_step(plain, step)
    pairs = zip(plain.model.parameters(), ours.model.parameters(), strict=True)
    everyone(hvd.size() == 1 or any((a - b).abs().max() > 1e-7 for a, b in pairs), "was not compressed")


class Doubling(hvd.Compression.none):
    """A compressor of one's own; values double on the way."""

    @staticmethod
    def compress(tensor):
        return tensor * 2, tensor.shape

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.view(ctx) / 2


def test_a_compressor_of_ones_own():
    check(compression=Doubling)


# --- what optimizers can do ---------------------------------------------------------------------------

OPTIMIZERS = {
    "adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.01),
    "rmsprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=0.001),
    "groups of parameters": lambda net: torch.optim.SGD(
        [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[2:].parameters()}], lr=0.1, momentum=0.5
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    ours = check(optimizer=OPTIMIZERS[name], tolerance=1e-9)
    assert isinstance(ours.opt, type(OPTIMIZERS[name](mlp())))


def test_a_closure_is_called_with_gradients_of_all_ranks():
    def body(run: Run, step: int) -> None:
        def closure():
            run.opt.zero_grad()
            loss = run.loss(step)
            loss.backward()
            # All ranks must see the same loss, or their line searches part.
            return hvd.allreduce(loss.detach(), name="loss") if run.distributed else loss

        run.opt.step(closure) if step % 2 else run.opt.step(closure=closure)

    check(body, optimizer=lambda net: torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3), tolerance=1e-9)


def test_state_and_scheduler_from_before_are_kept():
    """A scheduler knows the object it was made for."""
    schedulers = []

    def warm(net: nn.Module) -> torch.optim.Optimizer:
        opt = sgd(net)
        net(torch.ones(1, FEATURES, dtype=torch.float64)).sum().backward()
        opt.step()
        schedulers.append(torch.optim.lr_scheduler.StepLR(opt, 2, 0.5))
        return opt

    def body(run: Run, step: int) -> None:
        plain_step(run, step)
        run.memory.setdefault("scheduler", schedulers[0 if run.distributed else 1]).step()

    ours = check(body, optimizer=warm)
    assert ours.opt is schedulers[0].optimizer
    assert ours.opt.param_groups[0]["lr"] == pytest.approx(0.1 / 4)


def test_clipping_between_synchronize_and_step():
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        run.backward(step)
        if not run.distributed:
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
            run.opt.step()
            return
        run.opt.synchronize()
        nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
        with run.opt.skip_synchronize():
            run.opt.step()

    check(body)


@pytest.mark.parametrize("synchronizes", [True, False])
def test_a_scaler_that_finds_infinities_on_one_rank_skips_the_step_on_all(synchronizes):
    """Where the program does not synchronize before, as Horovod wants it, the scaler's step does."""

    def body(run: Run, step: int) -> None:
        scaler = run.memory.setdefault(
            "scaler", torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        )
        run.opt.zero_grad()
        loss = run.loss(step)
        if step == 1 and (not run.distributed or hvd.rank() == hvd.size() - 1):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if run.distributed and synchronizes:
            run.opt.synchronize()
            scaler.unscale_(run.opt)
            with run.opt.skip_synchronize():
                scaler.step(run.opt)
        else:
            scaler.step(run.opt)
        scaler.update()
        same_on_all_ranks(scaler.get_scale())

    check(body)


def test_gradients_may_be_zeroed_in_place():
    def body(run: Run, step: int) -> None:
        run.opt.zero_grad(set_to_none=step % 2 == 0)
        run.backward(step)
        run.opt.step()

    check(body)


def test_parameters_may_come_later():
    def body(run: Run, step: int) -> None:
        if step == 2:
            run.opt.add_param_group({"params": run.model[4].parameters(), "lr": 0.3})
        plain_step(run, step)

    ours = check(body, optimizer=lambda net: torch.optim.SGD(net[:4].parameters(), lr=0.1, momentum=0.9))
    assert len(ours.opt.param_groups) == 2


@pytest.mark.parametrize("early", [False, True])
def test_parameters_may_come_between_backward_and_step(early, monkeypatch):
    """The gradients that they have by then count, as in one process."""
    sends(early, monkeypatch)

    def body(run: Run, step: int) -> None:
        run.opt.zero_grad()
        if step < 2:
            run.model.zero_grad()
        run.backward(step)
        if step == 1:
            run.opt.add_param_group({"params": run.model[4].parameters(), "lr": 0.3})
        run.opt.step()

    check(body, optimizer=lambda net: torch.optim.SGD(net[:4].parameters(), lr=0.1, momentum=0.9))


def test_state_dicts_go_in_and_out():
    def body(run: Run, step: int) -> None:
        plain_step(run, step)
        if step == 1:
            run.opt.load_state_dict(run.opt.state_dict())

    check(body)


# --- parameters of every kind -------------------------------------------------------------------------


class Large(nn.Module):
    """Parameters that travel alone beside small ones, one of them turned round."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(FEATURES, 300) / 10)
        self.square = nn.Parameter((torch.randn(300, 300) / 300).t())
        self.small = nn.Linear(300, 2)

    def forward(self, x):
        return self.small(torch.tanh(x @ self.wide) @ self.square)


def test_large_parameters():
    check(model=Large)


def test_convolutions_whose_weights_lie_channels_last():
    def convolution() -> nn.Module:
        layers = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(3, 2))
        return layers.to(memory_format=torch.channels_last)

    check(model=convolution)


class Branches(nn.Module):
    """Which of the branches is used differs by rank and step; one is never used, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(FEATURES, 2) for _ in range(4))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x, branch: int = 0):
        return self.frozen(self.branches[branch](x))


def of_branches(model: nn.Module, inputs: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    """The second branch is used by the first rank alone, the third by all now and then, the fourth never."""
    branch = 1 if rank == 0 and step % 2 else 2 * (step == 2)
    return model(inputs, branch).square().mean()


def without_weight_decay(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.parametrize("groups", [0, 2])
@pytest.mark.parametrize("keep_none", [False, True])
def test_parameters_that_some_ranks_do_not_use(keep_none, groups):
    ours = check(
        model=Branches, loss=of_branches, optimizer=without_weight_decay, keep_none=keep_none, groups=groups
    )
    never = ours.model.branches[3].weight.grad
    everyone((never is None) == (keep_none or hvd.size() == 1), f"{never}")
    assert ours.model.frozen.weight.grad is None


def test_kept_none_leaves_momentum_and_weight_decay_alone_as_one_process_does():
    check(model=Branches, loss=of_branches, optimizer=sgd, keep_none=True)


def test_a_rank_without_a_backward_pass():
    """It may have no rows at a step."""

    def loss(model: nn.Module, inputs: torch.Tensor, rank: int, step: int):
        return None if (rank + step) % 3 == 1 else model(inputs).square().mean()

    check(loss=loss, keep_none=True)


class Words(nn.Module):
    """Embeddings with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 3, sparse=True)
        self.out = nn.Linear(3, 2)

    def forward(self, x):
        return self.out(self.words((x * 3).long().abs() % 10).sum(1))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("how", [{}, {"op": hvd.Sum}, {"sparse_as_dense": True}, {"groups": 1}], ids=str)
def test_sparse_gradients(how, early, monkeypatch):
    sends(early, monkeypatch)
    check(
        model=Words,
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
        factor=hvd.size() if how.get("op") == hvd.Sum else 1.0,
        **how,
    )


def other_words(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


@pytest.mark.parametrize("how", [{}, {"sparse_as_dense": True}, {"keep_none": True}], ids=str)
@pytest.mark.parametrize(("first", "early"), [(0, False), (1, False), (0, True)])
def test_sparse_gradients_that_some_ranks_do_not_have(how, first, early, monkeypatch):
    """At the first step, when ranks cannot know yet, or later; and at one step nobody has any."""
    sends(early, monkeypatch)

    def loss(model: nn.Module, inputs: torch.Tensor, rank: int, step: int):
        if step == 3 or (step >= first and rank == hvd.size() - 1):
            return model.out(inputs[:, :3]).square().mean()
        return model(inputs).square().mean()

    check(model=Words, loss=loss, optimizer=other_words, **how)


def test_gradients_that_are_sparse_on_some_ranks_and_dense_on_others():
    def loss(model: nn.Module, inputs: torch.Tensor, rank: int, step: int):
        model.words.sparse = rank % 2 == 0
        return model(inputs).square().mean()

    check(model=Words, loss=loss, optimizer=other_words)


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_adam(as_dense):
    """It takes sparse gradients only, so they are sparse again when they have travelled as dense ones."""

    class OnlyWords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(6, 2, sparse=True)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.words(inputs.abs().mul(4).long() % 6)

    def loss(model: nn.Module, inputs: torch.Tensor, rank: int, step: int):
        if step == 2 and rank == hvd.size() - 1 > 0:
            return None  # what it had at the steps before was sparse
        return model(inputs).square().mean()

    def sparse_adam(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(list(net.parameters()), lr=0.1)

    ours = check(model=OnlyWords, loss=loss, optimizer=sparse_adam, sparse_as_dense=as_dense)
    everyone(ours.model.words.weight.grad.is_sparse)


def test_sparse_gradients_do_not_travel_as_zeros_too(monkeypatch):
    sent: list[int] = []
    submit = submission.submit

    def counted(entry):
        if entry.request.kind == "allreduce":
            sent.append(sum(tensor.numel() for tensor in entry.inputs))
        return submit(entry)

    monkeypatch.setattr(submission, "submit", counted)
    ours = check(model=Words, optimizer=other_words)
    dense = sum(param.numel() for param in ours.model.out.parameters())
    everyone(hvd.size() == 1 or all(dense <= numel < dense + 30 for numel in sent[1:]), f"{sent}")


@pytest.mark.mpi(min_size=2)
def test_ranks_that_joined_before_anybody_had_sparse_gradients_find_the_others_again():
    torch.manual_seed(5)
    net = Words().double()
    opt = hvd.DistributedOptimizer(other_words(net), net.named_parameters())
    x = inputs_of(0)
    for turn in (0, 1, 2):
        if turn or hvd.rank() < hvd.size() - 1:
            opt.zero_grad()
            net(x).square().mean().backward()
            opt.step()
        if turn == 0:
            hvd.join()
            hvd.broadcast_parameters(net.state_dict(), 0)
    same_on_all_ranks(digest(net.parameters()))


def test_ranks_that_have_received_a_state_find_the_root_again_that_has_had_sparse_gradients():
    torch.manual_seed(5)
    net = Words().double()
    opt = hvd.DistributedOptimizer(other_words(net), net.named_parameters())
    x = inputs_of(0)
    for turn in (0, 1, 2):
        opt.zero_grad()
        net(x).square().mean().backward()
        opt.step()
        if turn == 0:
            hvd.broadcast_optimizer_state(opt, 0)
    same_on_all_ranks(digest(net.parameters()))


@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize("how", ["loaded", "made anew", "broadcast", "restored", "begun anew"])
def test_what_was_sparse_travels_as_it_would_have_without_a_load(compression, how):
    """A dense gradient of it came in a bucket then, rounded; it travels by itself, as it is."""

    def trained(loads: bool) -> str:
        table, vector = (nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in ((5, 2), (3,)))

        def new() -> Any:
            plain = torch.optim.SGD([table, vector], lr=0.3)
            return hvd.DistributedOptimizer(plain, compression=getattr(hvd.Compression, compression))

        opt = new()
        state = hvd.elastic.TorchState(optimizer=opt) if how in ("restored", "begun anew") else None
        for step in range(4):
            dense = torch.arange(10, dtype=torch.float64).view(5, 2).add(hvd.rank() + step).div(3)
            table.grad = dense.to_sparse(1) if step == 0 else dense
            vector.grad = torch.full((3,), 1 / 3, dtype=torch.float64) * (hvd.rank() + step)
            opt.step()
            opt.zero_grad()
            if step == 1 and loads:
                if how == "loaded":
                    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
                elif how == "made anew":
                    saved = copy.deepcopy(opt.state_dict())
                    opt = new()
                    opt.load_state_dict(saved)
                elif how == "broadcast":
                    hvd.broadcast_optimizer_state(opt, hvd.size() - 1)
                else:
                    state.save()
                    state.restore() if how == "restored" else state.reset()
        return digest([table, vector])

    assert trained(True) == trained(False)


def test_what_was_sparse_is_in_a_state_that_one_rank_has_loaded():
    """A rank alone exchanges nothing, and saves what it has loaded."""
    table = nn.Parameter(torch.zeros(5, 2))
    alone = hvd.ProcessSet([0]) if hvd.size() > 1 else hvd.global_process_set
    if hvd.size() > 1:
        hvd.add_process_set(alone)
    opt = hvd.DistributedOptimizer(torch.optim.SGD([table], lr=1.0), process_set=alone)
    opt.load_state_dict({**opt.state_dict(), "horovod": {"sparse": {0: 1}}})
    everyone(opt.state_dict()["horovod"] == {"sparse": {0: 1}})
    plain = torch.optim.SGD([table], lr=1.0)
    plain.load_state_dict(opt.state_dict())
    everyone("horovod" not in plain.state_dict())
    if hvd.size() > 1:
        hvd.remove_process_set(alone)


@pytest.mark.mpi(min_size=2)  # one rank, which has nothing under way, is warned as by Horovod
@pytest.mark.parametrize("resets", [False, True])
def test_after_a_step_that_a_scaler_has_left_out_the_next_one_is_synchronized(resets):
    """Where the program has synchronized by itself: the scaler looked at this rank's gradients alone."""
    model = mlp().double()
    hvd.broadcast_parameters(model.state_dict(), 0)
    opt = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        if resets:
            opt.zero_grad()
        else:
            model.zero_grad()
        loss = square(model, inputs_of(step), hvd.rank(), step)
        overflows = step == 0 or (step == 1 and hvd.rank() == 0)
        scaler.scale(loss * (float("inf") if overflows else 1.0)).backward()
        if step == 0:
            opt.synchronize()
            scaler.unscale_(opt)
            with opt.skip_synchronize():
                scaler.step(opt)
        else:
            scaler.step(opt)
        scaler.update()
        same_on_all_ranks(scaler.get_scale())
        same_on_all_ranks(digest(model.parameters()))


# --- several of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, False])
def test_two_models_of_the_same_shape(named):
    """Both have gradients under way before either steps."""
    runs = [pair(**({} if named else {"named_parameters": None})) for _ in range(2)]
    for step in range(3):
        for side in (0, 1):
            first, second = runs[0][side], runs[1][side]
            for run, at in ((first, step), (second, step + 10)):
                run.opt.zero_grad()
                run.backward(at)
            second.opt.step()
            first.opt.step()
        for plain, ours in runs:
            compare(plain, ours, f"step {step}")


def half_sparse() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(6, 4, mode="sum", sparse=True), nn.Linear(4, 2))


def looked_up(model: nn.Module, inputs: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    return model((inputs.abs() * 100).long() % 6).square().mean()


def without_momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"named_parameters": None},
        {"keep_none": True},
        {"model": half_sparse, "loss": looked_up, "optimizer": without_momentum},
    ],
    ids=["named", "unnamed", "keep_none", "sparse"],
)
def test_two_optimizers_that_ranks_step_in_orders_of_their_own(how):
    # On one host gradients were sent in step() alone: the ranks waited for each other, which raised.
    runs = [pair(**how) for _ in range(2)]
    for step in range(3):
        for plain, ours in runs:
            for run in (plain, ours):
                run.opt.zero_grad()
        for at, (plain, ours) in enumerate(runs):
            for run in (plain, ours):
                run.backward(step + 10 * at)
        for _, ours in runs if hvd.rank() % 2 else runs[::-1]:
            ours.opt.step()
        for plain, _ in runs:
            plain.opt.step()
        for plain, ours in runs:
            compare(plain, ours, f"step {step}")


@pytest.mark.parametrize("waits", ["synchronously", "by polling", "in a barrier"])
def test_another_operation_before_the_step_on_one_rank_and_after_it_on_others(waits):
    plain, ours = pair()

    def other(step: int) -> None:
        if waits == "in a barrier":
            hvd.barrier()
            return
        handle = hvd.allreduce_async(torch.tensor([hvd.rank() + 1.0]), name=f"loss.{step}", op=hvd.Sum)
        while waits == "by polling" and not hvd.poll(handle):
            pass
        total = hvd.size() * (hvd.size() + 1) / 2
        assert hvd.synchronize(handle).item() == total

    for step in range(3):
        plain_step(plain, step)
        ours.opt.zero_grad()
        ours.backward(step)
        if hvd.rank() % 2:
            other(step)
        ours.opt.step()
        if not hvd.rank() % 2:
            other(step)
        compare(plain, ours, f"step {step}")


@pytest.mark.mpi(min_size=2)
def test_gradients_that_are_changed_when_they_have_been_sent_are_told_of():
    _, ours = pair()
    ours.opt.zero_grad()
    ours.backward(0)
    hvd.allreduce(torch.ones(1), name="in between")
    nn.utils.clip_grad_norm_(ours.model.parameters(), 1e-3)
    with pytest.warns(RuntimeWarning, match="changed between backward"):
        ours.opt.step()
    ours.opt.zero_grad()
    ours.backward(1)
    hvd.allreduce(torch.ones(1), name="in between")
    ours.opt.synchronize()
    nn.utils.clip_grad_norm_(ours.model.parameters(), 1e-3)
    with ours.opt.skip_synchronize():
        ours.opt.step()  # without a warning, which would be an error


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_are_changed_when_they_were_sent_during_backward_are_told_of(set_to_none, monkeypatch):
    sends(True, monkeypatch)
    _, ours = pair()
    for step in range(3):  # without a warning, which would be an error
        ours.opt.zero_grad(set_to_none)
        ours.backward(step)
        ours.opt.step()
    ours.opt.zero_grad(set_to_none)
    ours.backward(0)
    nn.utils.clip_grad_norm_(ours.model.parameters(), 1e-3)
    with pytest.warns(RuntimeWarning, match="changed between backward"):
        ours.opt.step()


def test_two_optimizers_of_one_model():
    """One for each half, as in adversarial training: the other's half is frozen meanwhile."""
    torch.manual_seed(5)
    models = [mlp().double() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    runs = []
    for distributed, model in enumerate(models):
        opts = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in (model[:2], model[2:])]
        if distributed:
            opts = [hvd.DistributedOptimizer(opt, model.named_parameters()) for opt in opts]
        runs.append(opts)
    plain, ours = pair()
    for step in range(4):
        for run, model, opts in zip((plain, ours), models, runs, strict=True):
            run.model = model
            for turn, part in enumerate((model[:2], model[2:])):
                model.requires_grad_(False)
                part.requires_grad_(True)
                opts[turn].zero_grad()
                run.backward(step, turn)
                opts[turn].step()
        compare(plain, ours, f"step {step}")


# --- process sets -------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_the_members_of_a_process_set_train_together_and_others_alone():
    some = hvd.add_process_set(range(hvd.size() - 1))
    _, ours = pair(process_set=some, op=hvd.Sum)
    torch.manual_seed(5)
    plain = mlp().double()
    opt = sgd(plain)
    mine = some.ranks if some.included() else [hvd.rank()]
    for step in range(3):
        plain_step(ours, step)
        opt.zero_grad()
        for rank in mine:
            square(plain, inputs_of(step).chunk(hvd.size())[rank], rank, step).backward()
        opt.step()
        pairs = zip(plain.parameters(), ours.model.parameters(), strict=True)
        worst = max((a - b).abs().max().item() for a, b in pairs)
        everyone(worst < 1e-12, f"step {step}: off by {worst}")
    hvd.remove_process_set(some)


def test_gradients_lie_as_parameters_that_were_converted_after_the_first_step():
    """Fused optimizers walk both in the order of memory; found by the fuzzer with mpisgd's own optimizer."""

    def trained(wraps: bool) -> torch.Tensor:
        net = nn.Conv2d(3, 4, 2, dtype=torch.float64)
        with torch.no_grad():
            for param in net.parameters():
                param.copy_(torch.linspace(-1, 1, param.numel()).view_as(param))
        opt = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
        opt = hvd.DistributedOptimizer(opt, net.named_parameters()) if wraps else opt
        for step in range(3):
            opt.zero_grad()
            images = torch.cos(torch.arange(27.0, dtype=torch.float64) * (step + 1)).view(1, 3, 3, 3)
            net(images).square().sum().backward()
            opt.step()
            if step == 0:
                net.to(memory_format=torch.channels_last)
        return net.weight.detach().contiguous()

    everyone(torch.allclose(trained(True), trained(False), rtol=1e-9))
