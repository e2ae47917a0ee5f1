"""Shards of a data set that one rank has: nothing lost, nothing twice, and nobody left waiting."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import mpisgd
from mpisgd.config import launcher_size
from mpisgd.data import ItemDataset, partition, scatter, scatter_dataset
from mpisgd.data.partition import split_evenly

pytestmark = pytest.mark.mpi

totals = pytest.mark.parametrize("total", [0, 1, 2, 3, 5, 16, 17])


@pytest.fixture(params=range(launcher_size() or 1))
def src(request):
    """Every rank in turn."""
    return request.param


@pytest.fixture(params=["one round", "several rounds"])
def rounds(request, monkeypatch):
    if request.param == "several rounds":
        monkeypatch.setattr(scatter, "ROUND_BYTES", 60)
        monkeypatch.setattr(scatter, "ROUND_ITEMS", 2)


def everyones(obj):
    """What each rank has: an assertion about it has the same verdict on every rank."""
    gathered = [None] * mpisgd.size()
    mpisgd.all_gather_object(gathered, obj)
    return gathered


def joined(lists):
    return list(itertools.chain.from_iterable(lists))


def only_on(src, dataset):
    return dataset if mpisgd.rank() == src else None


def tensors(total):
    """Rows that differ by element, in several dtypes."""
    images = torch.arange(total * 6, dtype=torch.float64).view(total, 2, 3)
    labels = torch.arange(total) * 7
    flags = torch.arange(total) % 3 == 0
    return TensorDataset(images, labels, flags, images[:, 0].bfloat16(), torch.empty(total, 0))


def outcome_of(*args, **kwargs):
    """The error of every rank, as text."""
    try:
        scatter_dataset(*args, **kwargs)
    except mpisgd.MpisgdError as exc:
        return everyones(f"{type(exc).__name__}: {exc}")
    return everyones("no error")


class Sentences(Dataset):
    """Items that are no tensors; one may be damaged."""

    def __init__(self, total, damaged=None, item=None):
        self.total, self.damaged, self.item = total, damaged, item

    def __len__(self):
        return self.total

    def __getitem__(self, index):
        if index == self.damaged:
            if self.item is not None:
                return self.item
            raise FileNotFoundError(f"sentence-{index}.txt")
        return {"text": "a" * index, "length": torch.tensor(index)}


class Tripled(TensorDataset):
    """Does more with an item than look it up."""

    def __getitem__(self, index):
        return tuple(3 * tensor for tensor in super().__getitem__(index))


@totals
def test_tensor_shards_in_rank_order_are_the_whole(src, total, rounds):
    shard = scatter_dataset(only_on(src, tensors(total)), src)
    shards = everyones(shard.tensors)
    assert [len(columns[0]) for columns in shards] == split_evenly(total, mpisgd.size())
    for received, column in zip(
        map(torch.cat, zip(*shards, strict=True)), tensors(total).tensors, strict=True
    ):
        assert received.dtype == column.dtype
        assert torch.equal(received, column)


@totals
def test_item_shards_in_rank_order_are_the_whole(src, total, rounds):
    shard = scatter_dataset(only_on(src, Sentences(total)), src)
    assert all(everyones(isinstance(shard, ItemDataset)))
    shards = everyones([shard[i] for i in range(len(shard))])
    assert [len(items) for items in shards] == split_evenly(total, mpisgd.size())
    assert joined(shards) == [Sentences(total)[i] for i in range(total)]


def test_the_shuffle_depends_on_the_seed_and_not_on_the_source(src):
    def shuffled(seed):
        shard = scatter_dataset(only_on(src, tensors(40)), src, shuffle=True, seed=seed)
        return torch.cat(everyones(shard.tensors[1])).tolist()

    expected = torch.randperm(40, generator=torch.Generator().manual_seed(5)) * 7
    assert shuffled(5) == expected.tolist()
    assert shuffled(6) != shuffled(5)
    assert sorted(shuffled(6)) == sorted(shuffled(5))


def test_items_and_tensors_are_shuffled_alike(src):
    as_tensors = scatter_dataset(only_on(src, TensorDataset(torch.arange(30))), src, shuffle=True, seed=2)
    as_items = scatter_dataset(only_on(src, Sentences(30)), src, shuffle=True, seed=2)
    lengths = [int(item["length"]) for item in as_items.items]
    assert all(everyones(as_tensors.tensors[0].tolist() == lengths))


def test_a_subset_of_tensors_travels_as_tensors(src):
    part = Subset(partition(tensors(50), [0.5, 0.5], seed=1)[1], [3, -1, 20, 4, 4])
    shard = scatter_dataset(only_on(src, part), src)
    assert all(everyones(type(shard) is TensorDataset))
    assert torch.equal(torch.cat(everyones(shard.tensors[1])), torch.stack([row[1] for row in part]))


def test_an_empty_subset_gives_everyone_an_empty_shard(src):
    shard = scatter_dataset(only_on(src, Subset(tensors(5), [])), src)
    assert everyones(len(shard)) == [0] * mpisgd.size()
    assert all(everyones(list(DataLoader(shard, batch_size=2)) == []))


def test_a_dataset_that_transforms_its_tensors_goes_item_by_item(src):
    shard = scatter_dataset(only_on(src, Tripled(torch.arange(9))), src)
    assert joined(everyones([int(item) for (item,) in shard.items])) == list(range(0, 27, 3))


def test_strided_tensors_arrive_in_order(src):
    columns = torch.arange(44.0).view(4, 11).t()
    shard = scatter_dataset(only_on(src, TensorDataset(columns, columns.to(torch.complex64).conj())), src)
    assert torch.equal(torch.cat(everyones(shard.tensors[0])), columns)


def test_a_shard_shares_no_memory_with_the_whole(src):
    whole = tensors(8)
    shard = scatter_dataset(only_on(src, whole), src)
    for column in shard.tensors:
        column.zero_()
    intact = all(
        torch.equal(mine, kept) for mine, kept in zip(whole.tensors, tensors(8).tensors, strict=True)
    )
    assert all(everyones(intact))


def test_what_the_other_ranks_pass_is_not_looked_at(src):
    mine = tensors(6) if mpisgd.rank() == src else Sentences(99)
    assert sum(everyones(len(scatter_dataset(mine, src)))) == 6


def test_a_slice_is_not_sent_with_the_memory_it_is_cut_from(src, monkeypatch):
    class Rows(Dataset):
        def __init__(self):
            self.rows = torch.arange(80_000.0).view(8, 10_000)

        def __len__(self):
            return 8

        def __getitem__(self, index):
            return self.rows[index, :10]

    sent = []
    send = scatter.scatter_object

    def spy(payloads, **kwargs):
        sent.extend(map(len, payloads or ()))
        return send(payloads, **kwargs)

    monkeypatch.setattr(scatter, "scatter_object", spy)
    shard = scatter_dataset(only_on(src, Rows()), src)
    assert torch.equal(torch.stack(joined(everyones(list(shard.items)))), Rows().rows[:, :10])
    assert sum(map(sum, everyones(sent))) < 20_000


class Endless(Dataset):
    def __getitem__(self, index):
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (None, "the data set is None"),
        (Endless(), "Endless has no length"),
        (Stream(), "Stream has no length"),
        (Sentences(9, damaged=8), "item 8 cannot be read: FileNotFoundError: sentence-8.txt"),
        (Sentences(9, damaged=2, item=lambda: None), "pickle"),
        (Subset(tensors(3), [0, 3]), "IndexError"),
        (TensorDataset(torch.eye(3).to_sparse()), "tensor 0 has layout"),
    ],
)
def test_what_is_wrong_on_the_source_is_raised_on_every_rank(src, dataset, said):
    outcomes = outcome_of(only_on(src, dataset), src)
    assert len(set(outcomes)) == 1
    assert outcomes[0].startswith(f"InvalidArgument: scatter_dataset: rank {src}: ")
    assert said in outcomes[0]
    # The group is as good as before.
    assert sum(everyones(len(scatter_dataset(only_on(src, tensors(5)), src)))) == 5


@pytest.mark.parametrize("src", [-1, 4, "0"])
def test_a_source_that_is_no_rank_is_refused_on_every_rank(src):
    outcomes = outcome_of(tensors(3), src)
    assert all(f"InvalidRank: scatter_dataset: src={src!r}" in outcome for outcome in outcomes)


@pytest.mark.mpi(min_size=2)
def test_a_group_shares_among_its_members_in_its_order():
    members = list(range(1, mpisgd.size()))[::-1]
    group = mpisgd.new_group(members)
    if mpisgd.rank() == 0:
        with pytest.raises(mpisgd.NotInGroup):
            scatter_dataset(tensors(7), 1, group=group)
        mine = None
    else:
        mine = scatter_dataset(only_on(1, tensors(7)), 1, group=group).tensors[1]
    shards = everyones(mine)
    assert torch.equal(torch.cat([shards[member] for member in members]), tensors(7).tensors[1])
    outcomes = outcome_of(tensors(3), 0, group=group)
    assert all("InvalidRank: scatter_dataset: src=0" in outcome for outcome in outcomes)
