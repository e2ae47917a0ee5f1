"""What a program does to an optimizer whose parameters are divided among ranks, and to these."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import mpisgd
from mpisgd.job.threads_as_ranks import RankFailed, run_ranks

DIVIDED = [
    {"strategy": mpisgd.Sharded(1)},
    {"strategy": mpisgd.Sharded(2)},
    {"share_parameters": True},
    {"strategy": mpisgd.ParameterServer("sync")},
    {"strategy": mpisgd.ParameterServer("async")},
]


def after_two_steps(options):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for place, param in enumerate(model.parameters()):
        nn.init.constant_(param, place + 1.0)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[1].parameters())}]
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.1, momentum=0.9), **options)
    step(model, optimizer)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def refused(program, text):
    with pytest.raises(RankFailed) as caught:
        run_ranks(2, program)
    assert isinstance(caught.value.__cause__, mpisgd.InvalidArgument)
    assert text in str(caught.value.__cause__)


USES = {
    "cleared": lambda state, param: state.clear(),
    "read": lambda state, param: state[param]["momentum_buffer"].zero_(),
    "looked for": lambda state, param: param in state,
    "read if there": lambda state, param: state.get(param),
    "taken out": lambda state, param: state.pop(param, None),
    "replaced": lambda state, param: state.update() or state.__setitem__(param, {}),
}


@pytest.mark.parametrize("options", DIVIDED, ids=str)
@pytest.mark.parametrize("use", USES)
def test_the_state_of_a_parameter_is_not_where_a_program_looks_for_it(options, use):
    def program():
        model, optimizer = after_two_steps(options)
        USES[use](optimizer.state, model[0].weight)

    refused(program, "optimizer.state_dict()")


@pytest.mark.parametrize("options", DIVIDED[:4], ids=str)
def test_libraries_may_move_what_they_find_and_states_are_saved_and_loaded(options):
    def program():
        model, optimizer = after_two_steps(options)
        assert not list(optimizer.state.items())
        state = optimizer.state_dict()
        assert len(state["state"]) == 4
        optimizer.load_state_dict(copy.deepcopy(state))
        step(model, optimizer)
        assert len(optimizer.state_dict()["state"]) == 4

    run_ranks(2, program)


CHANGES = {
    "moved": lambda groups: groups[1]["params"].append(groups[0]["params"].pop()),
    "taken out": lambda groups: groups[0]["params"].pop(),
    "reordered": lambda groups: groups[0]["params"].reverse(),
    "a group is taken out": lambda groups: groups.pop(),
}


@pytest.mark.parametrize("options", DIVIDED, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_stay_in_their_groups(options, change):
    def program():
        model, optimizer = after_two_steps(options)
        CHANGES[change](optimizer.param_groups)
        step(model, optimizer)

    refused(program, "each stays in its group")


@pytest.mark.parametrize("options", DIVIDED[:4], ids=str)
def test_groups_may_be_added_and_replaced_by_loading(options):
    def program():
        model, optimizer = after_two_steps(options)
        more = nn.Parameter(torch.ones(3))
        optimizer.add_param_group({"params": [more]})
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        (model(torch.ones(2, 3)).sum() + more.sum()).backward()
        optimizer.step()

    run_ranks(2, program)


def warnings_of(write) -> list[str]:
    """What the second of three ranks with shared parameters is warned of, after `write` on each."""
    seen: list[str] = []

    def program():
        model, optimizer = after_two_steps({"share_parameters": True})
        for _ in range(2):
            mpisgd.barrier()
            with torch.no_grad():
                write(model)
            mpisgd.barrier()
            step(model, optimizer)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(3, program)
    seen.extend(str(each.message) for each in caught)
    return seen


def test_writing_to_shared_parameters_on_every_rank_is_worth_one_warning():
    (text,) = warnings_of(lambda model: model[0].weight.mul_(0.5))
    assert "multiplies once for each rank" in text


def test_a_state_that_every_rank_loads_is_worth_none():
    loaded = []

    def once(model):
        if mpisgd.rank() not in loaded:
            loaded.append(mpisgd.rank())
            model.load_state_dict(copy.deepcopy(model.state_dict()))

    assert warnings_of(once) == []


def test_writing_on_the_first_rank_alone_or_not_at_all_is_worth_none():
    assert warnings_of(lambda model: None) == []
    assert warnings_of(lambda model: mpisgd.local_rank() or model[0].weight.mul_(0.5)) == []


# --- hooks of the step ----------------------------------------------------------------------------------


def trained_with_hooks(options, ranks=3):
    """Where a hook of the program, registered before or after mpisgd's, clips and changes a setting."""

    def program():
        model = nn.Linear(3, 4)
        nn.init.constant_(model.weight, 0.5)
        nn.init.constant_(model.bias, 0.25)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        inner.register_step_pre_hook(lambda opt, *_: scaled(opt, "weight_decay", 2.0))
        optimizer = inner if options is None else mpisgd.DistributedOptimizer(inner, **options)
        optimizer.register_step_pre_hook(lambda opt, *_: scaled(opt, "lr", 0.5))
        optimizer.register_step_pre_hook(lambda opt, *_: clipped(opt, model))
        seen = []
        optimizer.register_step_post_hook(lambda opt, *_: seen.append(len(opt.param_groups[0]["params"])))
        for number in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 3), 1.0 + number)).square().sum().backward()
            optimizer.step()
        assert seen == [2, 2, 2]
        return torch.cat([model.weight.detach().flatten(), model.bias.detach()])

    return run_ranks(ranks, program)


def scaled(optimizer, name, factor):
    for group in optimizer.param_groups:
        group[name] *= factor


def clipped(optimizer, model):
    if isinstance(optimizer, mpisgd.DistributedOptimizer):
        optimizer.clip_grad_norm_(0.5)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)


@pytest.mark.parametrize("options", [{}, *DIVIDED[:4]], ids=str)
def test_what_hooks_before_the_step_change_counts(options):
    (right,) = trained_with_hooks(None, ranks=1)
    for found in trained_with_hooks(options):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-6)


# --- offload --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use", [lambda o: o.step(), lambda o: o.clip_grad_norm_(1.0)], ids=["step", "clip"])
def test_gradients_that_a_step_has_freed_are_not_used_again(use, tmp_path):
    def program():
        options = {"strategy": mpisgd.Sharded(2, offload=mpisgd.Offload(str(tmp_path)))}
        model, optimizer = after_two_steps(options)
        step(model, optimizer)  # gradients are reset, and new
        use(optimizer)

    refused(program, "frees the gradients")


def test_a_closure_computes_gradients_anew_where_a_step_has_freed_them(tmp_path):
    def program():
        options = {"strategy": mpisgd.Sharded(2, offload=mpisgd.Offload(str(tmp_path)))}
        model, optimizer = after_two_steps(options)

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).sum()
            loss.backward()
            return loss

        before = model[0].bias.detach().clone()
        optimizer.step(closure)
        assert not torch.equal(model[0].bias, before)

    run_ranks(2, program)
