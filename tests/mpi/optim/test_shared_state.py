"""The optimizer's state where each rank has that of its own parameters: whole for whoever asks for it."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import ADAM_DRIFT, Run, adam, batch, compare, digest, judge, mse, plain_step, share, shared_pair
from verdicts import everyone, raises_everywhere, referee, same_on_all_ranks

import mpisgd
from mpisgd import checkpoint

pytestmark = pytest.mark.usefixtures("pieces")


def trained_pair() -> tuple[Run, Run]:
    """The plain run and the one with shared parameters, after three steps."""
    plain, ours = shared_pair(optimizer=adam)
    for step in range(3):
        plain_step(plain, step)
        plain_step(ours, step)
    return plain, ours


def check_going_on(plain: Run, ours: Run) -> None:
    """From there on, both do the same."""
    seen = []
    for step in range(3, 7):
        plain_step(plain, step)
        plain_step(ours, step)
        seen.append(compare(plain, ours))
    judge(seen, ADAM_DRIFT)


def test_state_dict_is_that_of_one_process():
    plain, ours = trained_pair()
    wanted, got = plain.opt.state_dict(), ours.opt.state_dict()
    everyone(got["param_groups"] == wanted["param_groups"], "other groups")
    everyone(sorted(got["state"]) == sorted(wanted["state"]), f"{sorted(got['state'])}")
    for index, entries in wanted["state"].items():
        for key, value in entries.items():
            everyone(torch.allclose(got["state"][index][key], value, rtol=0, atol=1e-12), f"{index} {key}")
    same_on_all_ranks(digest(value for e in got["state"].values() for value in e.values()))


@pytest.mark.parametrize("how", ["load_state_dict", "broadcast_optimizer_state", "elastic"])
def test_training_goes_on_from_a_state(how, here):
    plain, ours = trained_pair()
    state = copy.deepcopy(ours.opt.state_dict())
    weights = copy.deepcopy(ours.model.state_dict())
    kept = mpisgd.elastic.State(model=ours.model, optimizer=ours.opt)
    kept.commit()
    plain_step(ours, 17)  # astray
    mpisgd.barrier()
    ours.model.load_state_dict(weights)
    mpisgd.barrier()
    if how == "load_state_dict":
        ours.opt.load_state_dict(state)
    elif how == "elastic":
        kept.resume(joiners=False)
    else:  # the last rank has read a checkpoint, the others are still astray
        if mpisgd.rank() == mpisgd.size() - 1:
            ours.opt.load_state_dict(state)
        mpisgd.broadcast_optimizer_state(ours.opt, mpisgd.size() - 1)
    check_going_on(plain, ours)


def test_training_goes_on_without_mpisgd():
    """A plain optimizer loads the state, and one with shared parameters that of a plain one."""
    plain, ours = trained_pair()
    alone = copy.deepcopy(plain.model)
    optimizer = adam(alone)
    optimizer.load_state_dict(copy.deepcopy(ours.opt.state_dict()))
    ours.opt.load_state_dict(copy.deepcopy(plain.opt.state_dict()))
    check_going_on(plain, ours)
    for step in range(3, 7):
        optimizer.zero_grad()
        mse(alone, *batch(step)).backward()
        optimizer.step()
    pairs = zip(alone.parameters(), plain.model.parameters(), strict=True)
    everyone(all(torch.allclose(a, b, rtol=0, atol=ADAM_DRIFT) for a, b in pairs), "they differ")


def test_a_checkpoint_has_all_of_it(tmp_path):
    folder = referee().bcast(str(tmp_path))
    plain, ours = trained_pair()
    checkpoint.save(folder, step=3, model=ours.model, optimizer=ours.opt)
    plain_step(ours, 17)  # astray
    checkpoint.load(folder, model=ours.model, optimizer=ours.opt)
    check_going_on(plain, ours)


def test_check_in_sync_sees_one_optimizer():
    _, ours = shared_pair(optimizer=adam)
    plain_step(ours, 0)
    mpisgd.check_in_sync(ours.opt)
    mpisgd.check_in_sync(ours.model)


def test_other_ranks_take_over():
    """The first half goes on alone with what all had, and equals one process on its own data."""
    if mpisgd.size() < 2:
        pytest.skip("one rank has nobody to leave")
    _, ours = shared_pair(optimizer=adam)
    for step in range(3):
        plain_step(ours, step)
    ours.opt.load_state_dict(ours.opt.state_dict())
    halves = [range(mpisgd.size() // 2), range(mpisgd.size() // 2, mpisgd.size())]
    groups = [mpisgd.new_group(list(half)) for half in halves]
    which = 0 if mpisgd.rank() in halves[0] else 1
    twin = copy.deepcopy(ours.model)
    alone = adam(twin)
    alone.load_state_dict(copy.deepcopy(ours.opt.state_dict()))
    ours.opt.rebuild(groups[which])
    for step in range(3, 6):
        for model, opt, rows in (
            (ours.model, ours.opt, [share(t, groups[which].rank, groups[which].size) for t in batch(step)]),
            (twin, alone, batch(step)),
        ):
            opt.zero_grad()
            mse(model, *rows).backward()
            opt.step()
    pairs = zip(ours.model.parameters(), twin.parameters(), strict=True)
    everyone(all(torch.allclose(a, b, rtol=0, atol=ADAM_DRIFT) for a, b in pairs), "they differ")


def test_ranks_with_the_whole_state_do_not_wait_for_one_with_a_part(here):
    _, ours = shared_pair(optimizer=adam)
    plain_step(ours, 0)
    whole = ours.opt.state_dict()
    if mpisgd.rank() != 0:
        ours.opt.load_state_dict(whole)
    with raises_everywhere(mpisgd.CollectiveMismatch) as caught:
        ours.opt.rebuild()
    everyone("a part of the state" in caught.text, caught.text)
    plain_step(ours, 1)


def test_ranks_may_not_leave_with_parts_of_the_state(here):
    _, ours = shared_pair(optimizer=adam)
    plain_step(ours, 0)
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        ours.opt.rebuild()
    everyone("load_state_dict" in caught.text, caught.text)
