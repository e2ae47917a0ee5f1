"""`MuonWithAdamW`: torch's Muon and torch's AdamW in one optimizer, and what becomes of it among ranks."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.sharding.update_work import matrix_work

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has no Muon")

STEPS = 5
PLACEMENTS: dict[str, dict[str, Any]] = {
    "replicated": {},
    "shared": {"share_parameters": True},
    "stage 1": {"strategy": mpisgd.Sharded(1)},
    "stage 2": {"strategy": mpisgd.Sharded(2)},
    "shared, stage 2": {"strategy": mpisgd.Sharded(2), "share_parameters": True},
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6, bias=False)
        self.head = nn.Sequential(nn.Linear(6, 11))
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        return self.head(x + self.down(torch.tanh(self.up(x))))


MATRICES = ("up.weight", "down.weight")


def make(model: nn.Module, **options: Any) -> Any:
    return mpisgd.MuonWithAdamW(model.named_parameters(), lr=0.02, adamw=["embedding", "head"], **options)


def tokens(step: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 11, (4, 3), generator=draw)


def loss(model: nn.Module, step: int, ranks: Any) -> Tensor:
    losses = [
        nn.functional.cross_entropy(model(tokens(step, r)).flatten(0, 1), tokens(step + 100, r).flatten())
        for r in ranks
    ]
    return torch.stack(losses).mean()


def one_process(model: nn.Module, opt: Any, size: int, first: int = 0, steps: int = STEPS) -> None:
    for step in range(first, first + steps):
        opt.zero_grad()
        loss(model, step, range(size)).backward()
        opt.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def test_it_is_torchs_muon_and_torchs_adamw():
    model, other = Model(), Model()
    opt = make(model, weight_decay=0.01, momentum=0.9, ns_steps=4, adamw_lr=0.005, adamw_betas=(0.8, 0.9))
    params = dict(other.named_parameters())
    muon = torch.optim.Muon(
        [params.pop(name) for name in MATRICES],
        lr=0.02,
        weight_decay=0.01,
        momentum=0.9,
        ns_steps=4,
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(params.values(), lr=0.005, weight_decay=0.01, betas=(0.8, 0.9))
    for step in range(STEPS):
        opt.zero_grad()
        loss(model, step, range(2)).backward()
        opt.step()
        muon.zero_grad()
        adamw.zero_grad()
        loss(other, step, range(2)).backward()
        muon.step()
        adamw.step()
    assert all(map(torch.equal, values(model).values(), values(other).values()))


def test_groups_have_names_and_algorithms():
    opt = make(Model())
    assert [group["algorithm"] for group in opt.param_groups] == ["muon", "adamw"]
    assert opt.param_groups[0]["param_names"] == list(MATRICES)
    given = [{"params": [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))], "lr": 0.5}]
    groups = mpisgd.MuonWithAdamW(given, lr=0.1).param_groups
    assert [(group["algorithm"], group["lr"]) for group in groups] == [("muon", 0.5), ("adamw", 0.5)]
    chosen = {"params": [nn.Parameter(torch.ones(2, 3))], "algorithm": "adamw"}
    assert [group["algorithm"] for group in mpisgd.MuonWithAdamW([chosen]).param_groups] == ["adamw"]


def test_only_vectors_and_only_matrices():
    for shape in ((3,), (3, 4), (2, 3, 4)):
        param = nn.Parameter(torch.ones(shape))
        opt = mpisgd.MuonWithAdamW([param])
        param.grad = torch.rand(shape)
        opt.step()
        assert not torch.equal(param.detach(), torch.ones(shape))


def test_a_state_goes_round_and_copies_train_on():
    """By torch.save, a deep copy, and a pickle."""
    model = Model()
    opt = make(model)
    one_process(model, opt, 2)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    others = []
    for how in ("state", "copy", "pickle"):
        other = copy.deepcopy(model)
        if how == "state":
            its = make(other)
            its.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        else:
            pair = model, opt  # a copy of the optimizer has copies of its parameters
            other, its = copy.deepcopy(pair) if how == "copy" else pickle.loads(pickle.dumps(pair))
        one_process(other, its, 2, first=STEPS)
        others.append(values(other))
    one_process(model, opt, 2, first=STEPS)
    for found in others:
        assert all(map(torch.equal, found.values(), values(model).values()))


def test_parameters_are_added_to_either():
    opt = mpisgd.MuonWithAdamW([nn.Parameter(torch.ones(2, 3))], lr=0.1, adamw_lr=0.3)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3))]})
    opt = copy.deepcopy(opt)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(ValueError, match="more than one"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2, 2)), opt.param_groups[2]["params"][0]]})
    assert [(group["algorithm"], group["lr"]) for group in opt.param_groups] == [
        ("muon", 0.1),
        ("muon", 0.1),
        ("adamw", 0.3),
        ("adamw", 0.3),
    ]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": "fast"}, "lr='fast'"),
        ({"adamw_lr": -1.0}, "adamw_lr=-1.0"),
        ({"adamw_betas": (0.9, 1.0)}, "adamw_betas"),
        ({"adamw_eps": 0.0}, "adamw_eps"),
        ({"adamw_weight_decay": float("nan")}, "adamw_weight_decay"),
        ({"adamw": ["embeding"]}, "adamw has 'embeding'"),
    ],
)
def test_what_makes_no_sense_is_refused(options, text):
    with pytest.raises(mpisgd.InvalidArgument, match=text):
        mpisgd.MuonWithAdamW(Model().named_parameters(), **options)


def test_groups_that_make_no_sense_are_refused():
    vector, matrix = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, 3))
    with pytest.raises(mpisgd.InvalidArgument, match=r"shape \(3,\) has algorithm='muon'"):
        mpisgd.MuonWithAdamW([{"params": [vector], "algorithm": "muon"}])
    with pytest.raises(mpisgd.InvalidArgument, match="algorithm='sgd'"):
        mpisgd.MuonWithAdamW([{"params": [vector], "algorithm": "sgd"}])
    with pytest.raises(mpisgd.InvalidArgument, match="the parameters have none"):
        mpisgd.MuonWithAdamW([matrix], adamw=["head"])
    with pytest.raises(TypeError, match="set"):
        mpisgd.MuonWithAdamW([{"params": {matrix, vector}}])
    swapped = [{"params": [matrix], "algorithm": "adamw"}, {"params": [nn.Parameter(torch.ones(3))]}]
    with pytest.raises(mpisgd.InvalidArgument, match="groups by"):
        make(Model()).load_state_dict(mpisgd.MuonWithAdamW(swapped).state_dict())


def test_the_work_is_that_of_matrices():
    opt = make(Model())
    muon, adamw = opt.param_groups
    assert opt.whole_update_work(muon["params"][0], muon) == matrix_work(torch.Size((9, 6)), 5)
    assert opt.whole_update_work(adamw["params"][0], adamw) is None


# -- among ranks ----------------------------------------------------------------------------------------


def same(one: dict[str, Tensor], other: dict[str, Tensor], off: float = 1e-9) -> bool:
    return all(float((one[name] - other[name]).abs().max()) <= off for name in other)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ranks_equal_one_process(placement, size):
    """In float64 Muon's bfloat16 sees the same numbers, whatever order gradients were added in."""
    alone = Model()
    one_process(alone, make(alone), size)

    def program() -> dict[str, Tensor]:
        model = Model()
        opt = mpisgd.DistributedOptimizer(make(model), model.named_parameters(), **PLACEMENTS[placement])
        for step in range(STEPS):
            opt.zero_grad()
            loss(model, step, [mpisgd.rank()]).backward()
            opt.step()
        return values(model)

    found = run_ranks(size, program)
    assert all(same(each, values(alone)) for each in found)
    assert all(torch.equal(each[name], found[0][name]) for each in found for name in each)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 4), (2, 1)])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_other_ranks_go_on(placement, before, after):
    """With the state of all, and a group that is added afterwards; the data are those of 4 ranks."""
    alone, extra = Model(), nn.Linear(6, 5).double()
    alone_opt = make(alone)
    one_process(alone, alone_opt, 4)

    def program(given: Any, first: int) -> Any:
        model = Model()
        opt = make(model)
        opt = mpisgd.DistributedOptimizer(opt, model.named_parameters(), **PLACEMENTS[placement])
        if given is not None:
            if mpisgd.local_rank() == 0 or "shared" not in placement:
                model.load_state_dict(given[0])
            mpisgd.barrier()
            opt.load_state_dict(copy.deepcopy(given[1]))
            opt.add_param_group({"params": list(copy.deepcopy(extra).named_parameters("extra"))})
        one_process(model, opt, 4, first=first)
        return values(model), copy.deepcopy(opt.state_dict())

    first = run_ranks(before, lambda: program(None, 0))
    found = run_ranks(after, lambda: program(first[0], STEPS))
    one_process(alone, alone_opt, 4, first=STEPS)
    assert all(same(each, values(alone)) for each, _ in found)
    assert all(len(state["param_groups"]) == 4 for _, state in found)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_rest_is_cut_and_matrices_are_not(stage):
    def program() -> list[list[tuple[int, ...]]]:
        shapes = ((40, 30), (30, 40), (9000,))
        params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        opt = Watched(params, lr=0.1)
        opt = mpisgd.DistributedOptimizer(opt, strategy=mpisgd.Sharded(stage))
        sum(param.square().sum() for param in params).backward()
        opt.step()
        return opt.seen

    for seen in run_ranks(2, program):
        assert seen[0] in ([(40, 30)], [(30, 40)])
        assert sum(numel for (numel,) in seen[1]) < 5000


class Watched(mpisgd.MuonWithAdamW):
    """Notes what it is given."""

    def step(self, closure=None):
        self.seen = [[tuple(p.shape) for p in group["params"]] for group in self.param_groups]
        return super().step(closure)
