"""What the ranks divide is loaded in parts: each rank gets what it owns, and goes on as if it had got all."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from counted_bytes import sent, state_bytes
from peak_meter import peak_bytes
from pretended_hosts import EVEN, group_of_hosts
from torch import nn
from verdicts import everyone, raises_everywhere, referee

import mpisgd
from mpisgd import Group, checkpoint
from mpisgd.checkpoint import format, loading
from mpisgd.job.lifecycle import world
from mpisgd.methods.parameter_server.shard_memory import ShardMemory
from mpisgd.optim.distributed import DistributedOptimizer
from mpisgd.sharding import module_parts
from mpisgd.sharding.layerwise.in_files import streamed_parameters_of

pytestmark = pytest.mark.mpi(min_size=2)

FEATURES, WIDTH = 24, 257
SAVED_AT, LAST = 3, 6


class Net(nn.Module):
    """Parameters of several shapes: one lies channels last, one is tied, one is frozen, one is small."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.conv = nn.Conv2d(3, 40, 3).to(memory_format=torch.channels_last)
        self.inner = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("shift", torch.rand(1))
        self.out = nn.Linear(width, FEATURES, bias=False)
        self.out.weight = nn.Parameter(self.embed.weight.detach().t().clone())
        self.scale = nn.Linear(1, FEATURES).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = x[:, :12].view(-1, 3, 2, 2)
        more = self.conv(nn.functional.pad(image, (1, 1, 1, 1))).sum(dim=(1, 2, 3))
        x = self.norm(torch.tanh(self.inner(torch.tanh(self.embed(x)))))
        return self.out(x) * self.scale(torch.ones_like(x[:, :1])) + more[:, None] + self.shift


def batch(step: int, group: Group) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step)
    rows = torch.randn(12, FEATURES, generator=draw, dtype=torch.float64)
    return rows.chunk(group.size)[group.rank]


class Run:
    """A model and its optimizer."""

    def __init__(self, group: Group, kind: str, folder: Path, *, seed: int, width: int = WIDTH) -> None:
        torch.manual_seed(seed)
        self.group, options = group, dict(OPTIONS[kind])
        self.model: nn.Module = Net(width).to(options.pop("dtype", torch.float64))
        if "offload" in options:
            what = options.pop("offload")
            offload = mpisgd.Offload(str(folder / "offload"), what=what, block_bytes=32768, io="buffered")
            if "parameters" in what:
                mpisgd.offload_parameters(self.model, offload, group=group)
            options["strategy"] = mpisgd.Sharded(1, offload=offload)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trained if p.dim() > 1]},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]
        inner = torch.optim.AdamW(groups, lr=0.01, amsgrad=True)
        self.optimizer = mpisgd.DistributedOptimizer(inner, group=group, check_start=False, **options)

    def train(self, first: int, last: int) -> None:
        dtype = next(self.model.parameters()).dtype
        for step in range(first, last):
            self.optimizer.zero_grad()
            self.model(batch(step, self.group).to(dtype)).square().mean().backward()
            self.optimizer.step()

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def come_to(self) -> dict[str, Any]:
        """Everything that the run has come to."""
        return {"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()["state"]}


OPTIONS: dict[str, dict[str, Any]] = {
    "stage 1": {"strategy": mpisgd.Sharded(1)},
    "stage 2": {"strategy": mpisgd.Sharded(2)},
    "masters": {"strategy": mpisgd.Sharded(1, master_dtype=torch.float32), "dtype": torch.bfloat16},
    "shared": {"share_parameters": True},
    "shared, sharded": {"strategy": mpisgd.Sharded(1), "share_parameters": True},
    "offload": {"offload": "optimizer"},
    "parameters in files": {"offload": "optimizer,parameters"},
}


def have_same_bits(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(have_same_bits(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other) and one.stride() == other.stride()
    return bool(one == other)


def memory_of_loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the bytes of each tensor that this rank makes for what is loaded."""
    room, memory = [], loading._memory

    def counted(*args: Any) -> Any:
        empty = memory(*args)

        def made(shape: Any, dtype: torch.dtype) -> torch.Tensor:
            tensor = empty(shape, dtype)
            room.append(tensor.nbytes)
            return tensor

        return made

    monkeypatch.setattr(loading, "_memory", counted)
    return room


def load_everything_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the program looks at what is loaded."""
    monkeypatch.setattr(DistributedOptimizer, "_needed_parts", lambda self, group: None)
    monkeypatch.setattr("mpisgd.checkpoint.loading.needed_parts_of", lambda model, group: None)


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_a_run_goes_on_bit_by_bit_from_parts(kind: str, folder: Path) -> None:
    run = Run(world(), kind, folder, seed=1)
    run.train(0, SAVED_AT)
    checkpoint.save(folder, SAVED_AT, **run.objects)
    saved = copy.deepcopy(run.come_to())
    run.train(SAVED_AT, LAST)
    expected = run.come_to()
    resumed = Run(world(), kind, folder, seed=2)
    resumed.train(0, 1)  # it has a state of its own that is replaced
    checkpoint.load(folder, **resumed.objects)
    everyone(not resumed.optimizer.synchronizer.has_whole_state, "the state is whole")
    everyone(have_same_bits(resumed.come_to(), saved), "it has not loaded what was saved")
    resumed.train(SAVED_AT, LAST)
    everyone(have_same_bits(resumed.come_to(), expected), "it goes on differently")


@pytest.mark.parametrize("kind", list(OPTIONS))
def test_what_comes_in_parts_is_what_comes_as_a_whole(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, alone: Group
) -> None:
    """From another number of ranks; then that of all of these."""
    if kind == "masters":
        pytest.skip("sums of half precision differ by the number of ranks")
    single = Run(alone, kind, folder / str(mpisgd.rank()), seed=1)
    single.train(0, SAVED_AT)
    if mpisgd.rank() == 0:
        checkpoint.save(folder, SAVED_AT, **single.objects, group=alone)
    mpisgd.barrier()
    runs = []
    for whole in (False, True):
        with monkeypatch.context() as patched:
            if whole:
                load_everything_everywhere(patched)
            runs.append(Run(world(), kind, folder, seed=2))
            checkpoint.load(folder, **runs[-1].objects)
        everyone(runs[-1].optimizer.synchronizer.has_whole_state == whole)
        runs[-1].train(SAVED_AT, LAST)
    everyone(have_same_bits(runs[0].come_to(), runs[1].come_to()), "they go on differently")


@pytest.mark.parametrize("kind", ["stage 1", "stage 2", "masters", "shared, sharded", "offload"])
def test_a_part_travels_once_to_its_owner(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = mpisgd.size()
    with group_of_hosts(range(size)) as group:
        run = Run(group, kind, folder, seed=1)
        run.train(0, 2)
        checkpoint.save(folder, 2, optimizer=run.optimizer, group=group)
        whole = state_bytes(run.optimizer.state_dict()["state"])
        resumed = Run(group, kind, folder, seed=2)
        moved = sent(
            monkeypatch, group, lambda: checkpoint.load(folder, optimizer=resumed.optimizer, group=group)
        )
        least = (size - 1) / size * whole
        everyone(0.9 * least < moved < 1.15 * least + 100_000, f"{moved} bytes for a state of {whole}")


def test_a_host_gets_what_it_shares_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one copy of the parameters on each host, the ranks of each divide everything."""
    if mpisgd.size() < 4:
        pytest.skip("two hosts of two ranks")
    with group_of_hosts(EVEN[4]) as group:
        run = Run(group, "shared", folder, seed=1)
        run.train(0, 2)
        checkpoint.save(folder, 2, optimizer=run.optimizer, group=group)
        whole = state_bytes(run.optimizer.state_dict()["state"])
        resumed = Run(group, "shared", folder, seed=2)
        moved = sent(
            monkeypatch, group, lambda: checkpoint.load(folder, optimizer=resumed.optimizer, group=group)
        )
        everyone(1.3 * whole < moved < 1.7 * whole + 100_000, f"{moved} bytes for a state of {whole}")


def test_one_copy_of_the_parameters_is_loaded_once_on_each_host(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where hosts have one rank each, the model travels to each; where they have two, once to both."""
    if mpisgd.size() < 4:
        pytest.skip("two hosts of two ranks")
    with group_of_hosts(EVEN[4]) as group:
        run = Run(group, "shared", folder, seed=1)
        run.train(0, 2)
        checkpoint.save(folder, 2, model=run.model, group=group)
        saved = copy.deepcopy(dict(run.model.state_dict()))
        whole = sum(value.nbytes for value in saved.values())
        resumed = Run(group, "shared", folder, seed=2)
        room = memory_of_loads(monkeypatch)
        moved = sent(monkeypatch, group, lambda: checkpoint.load(folder, model=resumed.model, group=group))
        everyone(have_same_bits(dict(resumed.model.state_dict()), saved), "it has not loaded what was saved")
        everyone(moved < 1.1 * whole + 100_000, f"{moved} bytes for a model of {whole}")
        first = group.host_memory is None or group.host_memory.rank == 0
        everyone(sum(room) < (1.1 if first else 0.1) * whole, f"{sum(room)} bytes of memory for {whole}")
        resumed.model.inner.weight.data = resumed.model.inner.weight.detach().clone()
        checkpoint.load(folder, model=resumed.model, group=group)
        everyone(have_same_bits(dict(resumed.model.state_dict()), saved), "own memory was not loaded")


class Follower:
    """Takes what a model has when its own state is loaded."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.seen = model, {}

    def state_dict(self) -> dict[str, Any]:
        return {"step": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = copy.deepcopy(dict(self.model.state_dict()))


def test_what_is_loaded_with_a_shared_model_finds_it_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with group_of_hosts([0] * mpisgd.size()) as group:
        run = Run(group, "shared", folder, seed=1)
        checkpoint.save(folder, 1, model=run.model, follower=Follower(run.model), group=group)
        saved = copy.deepcopy(dict(run.model.state_dict()))
        resumed = Run(group, "shared", folder, seed=2)
        load_into = module_parts._load_into

        def late(*args: Any) -> None:
            if group.rank == 0:
                time.sleep(0.1)
            load_into(*args)

        monkeypatch.setattr("mpisgd.sharding.module_parts._load_into", late)
        follower = Follower(resumed.model)
        checkpoint.load(folder, model=resumed.model, follower=follower, group=group)
        everyone(have_same_bits(follower.seen, saved), "it has seen what was there before")


def test_parameters_in_files_travel_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the rank that writes, which alone has copies of them then, and to those that load their parts."""
    size = mpisgd.size()
    with group_of_hosts(range(size)) as group:
        run = Run(group, "parameters in files", folder, seed=1)
        run.train(0, 2)
        state, values = run.optimizer.state_dict()["state"], dict(run.model.state_dict())
        whole = state_bytes(state) + sum(value.nbytes for value in values.values())
        least = (size - 1) / size * whole
        files = streamed_parameters_of(list(run.model.parameters()))
        assert files is not None
        copies, copy_of = [], files.values.copy_of
        monkeypatch.setattr(files.values, "copy_of", lambda tensor: [copy_of(tensor), copies.append(1)][0])
        moved = sent(monkeypatch, group, lambda: checkpoint.save(folder, 1, **run.objects, group=group))
        everyone(0.9 * least < moved < 1.15 * least + 150_000, f"{moved} bytes for {whole}")
        everyone(bool(copies) == (group.rank == 0), f"{len(copies)} copies")
        with monkeypatch.context() as patched:
            if group.rank == 0:
                patched.setattr(files.values, "copy_of", _no_room)
            with raises_everywhere(mpisgd.CheckpointError) as caught:
                checkpoint.save(folder, 2, **run.objects, group=group)
        everyone("No space left" in caught.text, caught.text)
        everyone(have_same_bits(dict(run.model.state_dict()), values), "it has not the values of before")
        seen: list[dict[str, Any]] = []
        if group.rank == 1:  # where a program looks at what is saved, it finds everything
            run.model.register_state_dict_post_hook(lambda _, state, *__: seen.append(dict(state)))
        checkpoint.save(folder, 2, **run.objects, group=group)
        everyone(len(seen) == (group.rank == 1) and all(have_same_bits(each, values) for each in seen))
        resumed = Run(group, "parameters in files", folder, seed=2)
        moved = sent(monkeypatch, group, lambda: checkpoint.load(folder, **resumed.objects, group=group))
        everyone(0.9 * least < moved < 1.15 * least + 150_000, f"{moved} bytes for {whole}")


@pytest.mark.mpi(min_size=3)
def test_no_rank_has_more_than_its_part_and_one_tensor(folder: Path) -> None:
    width = 700
    run = Run(world(), "stage 1", folder, seed=1, width=width)
    run.train(0, 2)
    checkpoint.save(folder, 2, optimizer=run.optimizer)
    whole = state_bytes(run.optimizer.state_dict()["state"])
    largest = 8 * width * width
    resumed = Run(world(), "stage 1", folder, seed=2, width=width)
    peak = peak_bytes(lambda: None, lambda: checkpoint.load(folder, optimizer=resumed.optimizer))
    # First what has come and a tensor that is read, then what has come and what the pieces have of it.
    part = whole / mpisgd.size()
    most = 1.15 * max(part + largest, 2 * part)
    assert most < 0.85 * whole
    everyone(peak < most, f"{peak} bytes for a state of {whole}")


def test_ranks_that_load_otherwise_get_the_whole_state(folder: Path, alone: Group) -> None:
    """As where a program looks at what is loaded, or others load than those that train."""
    run = Run(world(), "stage 1", folder, seed=1)
    run.train(0, 2)
    checkpoint.save(folder, 2, optimizer=run.optimizer)
    seen: list[int] = []
    resumed = Run(world(), "stage 1", folder, seed=2)
    if mpisgd.rank() == 1:  # it is enough that one does
        resumed.optimizer.register_load_state_dict_post_hook(
            lambda optimizer: seen.append(len(optimizer.state))
        )
    checkpoint.load(folder, optimizer=resumed.optimizer)
    everyone(bool(seen) == (mpisgd.rank() == 1) and resumed.optimizer.synchronizer.has_whole_state)
    everyone(len(resumed.optimizer.state) == len(run.optimizer.state_dict()["state"]))
    checkpoint.load(folder, optimizer=resumed.optimizer, group=alone)
    everyone(resumed.optimizer.synchronizer.has_whole_state)


@pytest.mark.parametrize("kind", ["stage 1", "stage 2", "masters", "shared, sharded", "offload"])
def test_a_saved_part_travels_once_to_the_rank_that_writes(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = mpisgd.size()
    with group_of_hosts(range(size)) as group:
        run = Run(group, kind, folder, seed=1)
        run.train(0, 2)
        whole = state_bytes(run.optimizer.state_dict()["state"])
        moved = sent(
            monkeypatch, group, lambda: checkpoint.save(folder, 2, optimizer=run.optimizer, group=group)
        )
        least = (size - 1) / size * whole
        everyone(0.9 * least < moved < 1.15 * least + 100_000, f"{moved} bytes for a state of {whole}")
        seen = []
        if mpisgd.rank() == 1:  # where a program looks at what is saved, it finds everything
            run.optimizer.register_state_dict_post_hook(
                lambda _, state: seen.append(state_bytes(state["state"]))
            )
        checkpoint.save(folder, 3, optimizer=run.optimizer, group=group)
        everyone(seen == ([whole] if mpisgd.rank() == 1 else []), f"{seen} bytes of {whole}")


class Constant(nn.Module):
    """The gradients do not depend on the parameters: it matters not in which order ranks push them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(FEATURES * (i + 1), WIDTH) for i in range(4))
        self.conv = nn.Conv2d(3, 40, 3).to(memory_format=torch.channels_last)

    def loss(self) -> torch.Tensor:
        dense = sum(layer(torch.ones(1, layer.in_features)).sum() for layer in self.layers)
        return dense + self.conv(torch.ones(1, 3, 3, 3)).sum()


@pytest.mark.parametrize("hosts", ["one", "each"])
def test_of_the_state_of_servers_one_rank_reads_all_and_each_gets_its_shard(
    hosts: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = mpisgd.size()
    with group_of_hosts(range(size) if hosts == "each" else [0] * size) as group:
        windows: list[mpisgd.Window] = []  # which end before their group does

        def trained(folder: Path | None) -> tuple[nn.Module, mpisgd.DistributedOptimizer]:
            model = Constant()
            adam, strategy = torch.optim.Adam(model.parameters(), lr=0.1), mpisgd.ParameterServer("async")
            optimizer = mpisgd.DistributedOptimizer(adam, strategy=strategy, group=group)
            windows.extend((optimizer.synchronizer._clocks.window, optimizer.synchronizer._memory.window))
            if folder is not None:
                with torch.no_grad():  # the others take the parameters of the first rank
                    model.conv.bias.add_(1 + group.rank)
                checkpoint.load(folder, model=model, optimizer=optimizer, group=group)
            return model, optimizer

        def go_on(model: nn.Module, optimizer: mpisgd.DistributedOptimizer) -> dict[str, Any]:
            model.loss().backward()
            optimizer.step()
            optimizer.synchronizer.finish()
            return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()["state"]}

        model, optimizer = trained(None)
        saved = copy.deepcopy(go_on(model, optimizer))
        whole = state_bytes(saved["optimizer"])
        reads, read = [], ShardMemory.read
        with monkeypatch.context() as patched:
            patched.setattr(
                ShardMemory, "read", lambda self, shard: (reads.append(shard), read(self, shard))[1]
            )
            checkpoint.save(folder, 1, rng=False, model=model, optimizer=optimizer, group=group)
        everyone(bool(reads) == (group.rank == 0), f"{len(reads)} reads of shards")

        _, other = trained(None)
        with monkeypatch.context() as patched:
            room = memory_of_loads(patched)
            moved = sent(monkeypatch, group, lambda: checkpoint.load(folder, optimizer=other, group=group))
        rooms = sum(referee().allgather(sum(room)))
        small = size * 4 * 4096  # that of biases, which all ranks get
        everyone(whole <= rooms < whole + small, f"{rooms} bytes of memory for a state of {whole}")
        if hosts == "each":
            least = (size - 1) / size * whole
            everyone(0.5 * least < moved < 1.3 * least + 100_000, f"{moved} bytes for a state of {whole}")
        everyone(have_same_bits(other.state_dict()["state"], saved["optimizer"]), "the state differs")

        resumed = go_on(*trained(folder))
        again = Constant()
        adam = torch.optim.Adam(again.parameters(), lr=0.1)
        for _ in range(2 * size):
            adam.zero_grad()
            (again.loss() / size).backward()
            adam.step()
        values = dict(again.state_dict())
        everyone(all(torch.equal(values[name], value) for name, value in resumed["model"].items()), "values")
        one, other = adam.state_dict()["state"], resumed["optimizer"]
        alike = all(torch.equal(one[place][key], other[place][key]) for place in one for key in one[place])
        everyone(alike and one.keys() == other.keys(), "it goes on with another state")
        for window in windows:
            window.free()


def damage(path: Path, at: float) -> None:
    if mpisgd.rank() == 0:
        with open(path, "r+b") as file:
            file.seek(int(path.stat().st_size * at))
            byte = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([byte[0] ^ 1]))
    mpisgd.barrier()


@pytest.mark.parametrize("at", [0.3, 0.6, 0.999])
def test_a_damaged_part_is_an_error_on_every_rank_and_nothing_was_loaded(folder: Path, at: float) -> None:
    run = Run(world(), "stage 1", folder, seed=1)
    run.train(0, 2)
    path = checkpoint.save(folder, 2, **run.objects)
    resumed = Run(world(), "stage 1", folder, seed=2)
    resumed.train(0, 1)
    before = copy.deepcopy(resumed.come_to())
    damage(Path(path), at)
    with raises_everywhere(mpisgd.CheckpointDamaged) as caught:
        checkpoint.load(path, **resumed.objects)
    everyone("has checksum" in caught.text, caught.text)
    everyone(have_same_bits(resumed.come_to(), before), "something was loaded")
    with raises_everywhere(mpisgd.CheckpointError) as caught:
        checkpoint.load(folder, **resumed.objects)
    everyone("no whole checkpoint" in caught.text, caught.text)


def test_an_older_checkpoint_is_loaded_where_a_part_of_the_newest_is_damaged(folder: Path) -> None:
    run = Run(world(), "stage 2", folder, seed=1)
    run.train(0, 2)
    checkpoint.save(folder, 2, **run.objects)
    saved = copy.deepcopy(run.come_to())
    run.train(2, 3)
    damage(Path(checkpoint.save(folder, 3, **run.objects)), 0.7)
    resumed = Run(world(), "stage 2", folder, seed=2)
    everyone(checkpoint.load(folder, **resumed.objects).step == 2)
    everyone(have_same_bits(resumed.come_to(), saved), "it has not loaded what was saved")


@pytest.mark.parametrize("number", [1, 6, 12])
def test_a_file_that_cannot_be_read_on_is_an_error_on_every_rank(
    folder: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for parts that come no more."""
    run = Run(world(), "stage 1", folder, seed=1)
    run.train(0, 2)
    path = checkpoint.save(folder, 2, **run.objects)
    before = copy.deepcopy(run.come_to())
    run.train(2, 3)
    after = copy.deepcopy(run.come_to())
    read, left = format._read_tensor, [number]

    def failing(*args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(5, "Input/output error")
        read(*args)

    monkeypatch.setattr(format, "_read_tensor", failing)
    with raises_everywhere(mpisgd.CheckpointError) as caught:
        checkpoint.load(path, **run.objects)
    everyone("Input/output error" in caught.text, caught.text)
    everyone(have_same_bits(run.come_to(), after), "something was loaded")
    checkpoint.load(path, **run.objects)
    everyone(have_same_bits(run.come_to(), before), "it has not loaded what was saved")


def test_memory_that_one_rank_lacks_is_an_error_on_every_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(world(), "stage 1", folder, seed=1)
    run.train(0, 2)
    checkpoint.save(folder, 2, **run.objects)
    if mpisgd.rank() == 1:
        monkeypatch.setattr(loading, "_memory", lambda group, folder: _no_memory)
    with raises_everywhere(Exception) as caught:
        checkpoint.load(folder, **run.objects)
    everyone("out of memory" in caught.text, caught.text)


def _no_memory(*_: Any) -> None:
    raise RuntimeError("out of memory")


def test_a_state_of_other_parameters_is_refused(folder: Path) -> None:
    run = Run(world(), "stage 1", folder, seed=1)
    run.train(0, 1)
    checkpoint.save(folder, 1, optimizer=run.optimizer)
    model = nn.Linear(FEATURES, WIDTH)
    other = mpisgd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.1), strategy=mpisgd.Sharded(1)
    )
    with raises_everywhere(mpisgd.CheckpointMismatch) as caught:
        checkpoint.load(folder, optimizer=other)
    everyone("parameters in its groups" in caught.text, caught.text)
    with raises_everywhere(mpisgd.CheckpointMismatch) as caught:
        checkpoint.load(folder, missing=other)
    everyone("has no missing; it has optimizer" in caught.text, caught.text)


def test_a_part_that_cannot_be_stored_is_an_error_on_every_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and again in the next step; another load sets it right."""
    run = Run(world(), "offload", folder, seed=1)
    run.train(0, 2)
    checkpoint.save(folder, 2, **run.objects)
    resumed = Run(world(), "offload", folder, seed=2)
    expected = copy.deepcopy(run.come_to())
    with monkeypatch.context() as patched:
        if mpisgd.rank() == mpisgd.size() - 1:
            patched.setattr("os.posix_fallocate", _no_room)
        with raises_everywhere(mpisgd.CheckpointError) as caught:
            checkpoint.load(folder, **resumed.objects)
    everyone("No space left" in caught.text, caught.text)
    with raises_everywhere(mpisgd.OffloadError):
        resumed.train(2, 3)
    checkpoint.load(folder, **resumed.objects)
    everyone(have_same_bits(resumed.come_to(), expected), "it has not loaded what was saved")


def _no_room(*_: Any) -> None:
    raise OSError(28, "No space left on device")
