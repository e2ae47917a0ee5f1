"""A store in a file is to an optimizer what a dictionary is: same updates, same state, to the last bit."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from torch import nn

from mpisgd.sharding.offload.description import Offload
from mpisgd.sharding.offload.disk_speed import blocks_of
from mpisgd.sharding.offload.file_store import FileStore

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "radam": torch.optim.RAdam,
    "asgd": torch.optim.ASGD,
    "rprop": torch.optim.Rprop,
}


def store_in(folder, **options):
    offload = Offload(folder, **{"block_bytes": 4096, "io": "buffered", "prefetch": 1, **options})
    return FileStore(offload, blocks_of(offload, "state"), str, 0)


def pairs(sizes):
    torch.manual_seed(len(sizes))
    ours = [nn.Parameter(torch.randn(size)) for size in sizes]
    return ours, [nn.Parameter(param.detach().clone()) for param in ours]


def train(ours, theirs, stored, plain, store, *, steps=3, present=lambda step, k: True):
    """Update the one set one by one, with their state in the store, and the other all at once."""
    for step in range(steps):
        for k, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            mine.grad = torch.full_like(mine, 0.1 * k + step - 0.5) if present(step, k) else None
            other.grad = None if mine.grad is None else mine.grad.clone()
        plain.step()
        for mine in ours:
            stored.param_groups[0]["params"] = [mine]
            stored.step()
            store.release([mine])
        store.end_step()


def assert_equal_state(store, plain, ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        expected = plain.state[other]
        found = store.read(mine) if mine in store else {}
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_does_the_same(tmp_path, kind):
    ours, theirs = pairs([1, 700, 33, 2000, 5, 900, 900, 400])
    stored, plain = OPTIMIZERS[kind](ours), OPTIMIZERS[kind](theirs)
    stored.state = store = store_in(tmp_path, checksum="crc32")
    train(ours, theirs, stored, plain, store)
    assert_equal_state(store, plain, ours, theirs)


def test_what_has_no_gradient_for_some_steps_keeps_its_state(tmp_path):
    ours, theirs = pairs([600] * 12)
    stored, plain = torch.optim.Adam(ours), torch.optim.Adam(theirs)
    stored.state = store = store_in(tmp_path)
    train(ours, theirs, stored, plain, store, steps=6, present=lambda step, k: (step + k) % 3 > 0)
    assert_equal_state(store, plain, ours, theirs)


def test_other_layouts_of_memory_are_kept(tmp_path):
    weight = torch.randn(4, 8, 5, 5).contiguous(memory_format=torch.channels_last)
    ours, theirs = [nn.Parameter(weight.clone())], [nn.Parameter(weight.clone())]
    stored, plain = torch.optim.Adam(ours), torch.optim.Adam(theirs)
    stored.state = store = store_in(tmp_path)
    train(ours, theirs, stored, plain, store)
    assert_equal_state(store, plain, ours, theirs)
    assert store.read(ours[0])["exp_avg"].stride() == weight.stride()


def test_memory_is_that_of_the_buffers(tmp_path):
    ours, theirs = pairs([1000] * 50)
    stored, plain = torch.optim.Adam(ours), torch.optim.Adam(theirs)
    stored.state = store = store_in(tmp_path)
    train(ours, theirs, stored, plain, store)
    assert len(store._cache) == 50
    assert store._cache.nbytes_in_memory <= 4 * 8192


def test_safetensors_opens_the_file(tmp_path):
    ours, theirs = pairs([300, 2000])
    stored, plain = torch.optim.Adam(ours), torch.optim.Adam(theirs)
    offload = Offload(tmp_path, block_bytes=4096, io="buffered")
    names = {ours[0]: "first", ours[1]: "second"}
    stored.state = store = FileStore(offload, blocks_of(offload, "state"), names.__getitem__, 2)
    train(ours, theirs, stored, plain, store)
    found = safetensors.torch.load_file(f"/proc/self/fd/{store.flush()}")
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(found[f"first.{name}"], plain.state[theirs[0]][name])
        assert torch.equal(found[f"second.{name}"], plain.state[theirs[1]][name])


def test_it_is_a_dictionary(tmp_path):
    store, (key, other) = store_in(tmp_path), pairs([100])[0] + pairs([200])[0]
    assert len(store) == 0
    assert key not in store
    store[key] = {"a": torch.arange(100.0), "n": 3}
    store["all"]["k"] = 1
    assert store[other] == {}
    assert list(store) == [key, other, "all"]
    found = store.pop(key)
    assert torch.equal(found["a"], torch.arange(100.0))
    assert found["n"] == 3
    assert key not in store
    with pytest.raises(KeyError):
        del store[key]
    store.clear()
    assert len(store) == 0
    store[key] = {"a": torch.ones(100)}
    assert (store.read(key)["a"] == 1).all()


def test_an_entry_that_is_replaced_is_written_anew(tmp_path):
    store, (key, *more) = store_in(tmp_path), pairs([100, 2000, 2000, 2000, 2000, 2000])[0]
    for k in [key, *more]:
        store[k] = {"a": torch.ones(100)}
    store[key]["a"] = torch.full((100,), 2.0)
    store[key]["b"] = torch.full((50,), 3.0)
    store.release([key])
    store.end_step()
    for k in more:
        assert (store.read(k)["a"] == 1).all()
    found = store.read(key)
    assert (found["a"] == 2).all()
    assert (found["b"] == 3).all()
