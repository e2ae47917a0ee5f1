"""Where a state is restored or divided anew, each part of it travels once, to the rank that owns it."""

from __future__ import annotations

import copy

import pytest
from counted_bytes import sent, state_bytes
from harness import FEATURES, Run, adam, digest, pair, plain_step
from pretended_hosts import group_of_hosts
from torch import nn
from verdicts import everyone, referee, same_on_all_ranks

import mpisgd
from mpisgd.core.group import Group
from mpisgd.elastic.buddy_replicas import BuddyReplicas
from mpisgd.elastic.state_handlers import handler_for
from mpisgd.job.lifecycle import world

pytestmark = pytest.mark.mpi(min_size=2)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 300), nn.Tanh(), nn.Linear(300, 257), nn.Linear(257, 2))


@pytest.mark.parametrize("stage", [1, 2])
def test_owners_get_their_parts_when_a_commit_is_restored(stage, monkeypatch):
    _, ours = pair(model=model, optimizer=adam, strategy=mpisgd.Sharded(stage))
    for step in range(3):
        plain_step(ours, step)
    handler, replicas = handler_for(ours.opt), BuddyReplicas()
    saved = handler.save(None)
    replicas.save(1, {"optimizer": handler.per_rank})
    committed = copy.deepcopy(ours.opt.state_dict())
    values = [param.detach().clone() for param in ours.model.parameters()]
    plain_step(ours, 3)
    after = digest(ours.model.parameters())
    plain_step(ours, 4)

    handler.restore(saved)
    handler.reset()
    for param, value in zip(ours.model.parameters(), values, strict=True):
        param.detach().copy_(value)
    whole = state_bytes(committed["state"])
    restored = sent(monkeypatch, world(), lambda: replicas.restore(1, {"optimizer": handler.per_rank}))
    ours.backward(3)  # with stage 1 the parameters are divided by bucket now
    everyone(restored < 1.25 * whole, f"{restored} bytes were sent to restore a state of {whole}")
    ours.opt.step()
    same_on_all_ranks(digest(ours.model.parameters()))
    everyone(digest(ours.model.parameters()) == after, "the restored run differs")


def test_what_has_another_owner_travels_once_when_parameters_are_divided_anew(monkeypatch):
    def run(group: Group) -> Run:
        strategy = mpisgd.Sharded(1)
        return pair(model=model, optimizer=adam, strategy=strategy, bucket_cap_bytes=10_000, group=group)[1]

    with group_of_hosts(range(mpisgd.size())) as hosts:
        old = run(hosts)
        for step in range(3):
            plain_step(old, step)
        new = run(hosts)
        new.opt.load_shard_state_dicts(referee().allgather(old.opt.shard_state_dict()))
        for ours, theirs in zip(new.model.parameters(), old.model.parameters(), strict=True):
            ours.detach().copy_(theirs)
        whole = state_bytes(old.opt.state_dict()["state"])
        for each in (old, new):
            each.opt.zero_grad()
        # New is divided by bucket only now, and has sent its gradients then, too.
        plain = sent(monkeypatch, hosts, lambda: old.backward(3))
        redivided = sent(monkeypatch, hosts, lambda: new.backward(3)) - plain
        everyone(redivided < 1.25 * whole, f"{redivided} bytes were sent to divide a state of {whole} anew")
        for each in (old, new):
            each.opt.step()
        digests = [digest(each.model.parameters()) for each in (old, new)]
    same_on_all_ranks(digests)
    everyone(digests[0] == digests[1], "the parameters differ")
