"""Checkpoints at a URL: what a folder promises holds in what fsspec reaches, whatever call fails."""

from __future__ import annotations

import pytest
import torch
from failing_store import Broken, FailingFile, failing_stores
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

import mpisgd
from mpisgd import checkpoint
from mpisgd.checkpoint import object_store
from mpisgd.checkpoint.files import Folder
from mpisgd.checkpoint.format import Document
from mpisgd.checkpoint.newest import Seen, newest_intact
from mpisgd.checkpoint.object_store import ObjectStore
from mpisgd.checkpoint.saving import Content, to_disk
from mpisgd.checkpoint.serialization import encode
from mpisgd.checkpoint.storage import as_location, checkpoints_in, find, name_of, remove_older
from mpisgd.errors import CheckpointError, InvalidArgument
from mpisgd.job.threads_as_ranks import run_ranks

WHOLE = b"content"


@pytest.fixture(autouse=True)
def calls():
    with failing_stores() as found:
        yield found


@pytest.fixture(params=["folder", "memory", "local"])
def storage(request, tmp_path):
    kinds = {
        "folder": lambda: Folder(tmp_path / "a"),
        "memory": lambda: ObjectStore("memory://runs/a"),
        "local": lambda: ObjectStore(f"file://{tmp_path}/a"),
    }
    return kinds[request.param]()


def put(storage, name: str, content: bytes = WHOLE) -> None:
    storage.put(name, lambda file: file.write(content), None)


def content_of(storage, name: str) -> bytes:
    file, size = storage.open(name)
    with file:
        found = bytearray(size)
        assert file.readinto(found) == size
        return bytes(found)


def test_a_file_is_there_whole_or_not_at_all_and_can_be_replaced(storage):
    assert list(storage.names()) == []
    storage.prepare()
    put(storage, "x")
    assert content_of(storage, "x") == WHOLE

    def fail(file):
        file.write(b"half")
        raise Broken("in the middle")

    with pytest.raises((OSError, Broken), match="in the middle"):
        storage.put("x", fail, None)
    with pytest.raises((OSError, Broken)):
        storage.put("y", fail, None)
    assert list(storage.names()) == ["x"]
    assert content_of(storage, "x") == WHOLE
    put(storage, "x", b"new")
    assert content_of(storage, "x") == b"new"
    storage.delete("x")
    assert list(storage.names()) == []


def test_names_are_sorted_by_step_and_older_ones_go(storage):
    storage.prepare()
    for step in (10, 20, 30, 40, 90):
        put(storage, name_of(step))
    put(storage, "other.txt")
    remove_older(storage, name_of(40), 2)
    assert checkpoints_in(storage) == [name_of(step) for step in (90, 40, 30)]
    assert storage.is_file("other.txt")
    assert not storage.is_file(name_of(10))


def test_it_is_made_and_tried_out(storage):
    storage.check_writable()
    assert list(storage.names()) == []


def test_what_is_missing_is_an_error_of_the_system(storage):
    storage.prepare()
    with pytest.raises(OSError):
        storage.open("nothing")


def content(step: int) -> Content:
    encoded = encode({"w": torch.arange(50.0) + step, "step": step})
    kinds = dict.fromkeys(encoded.tree, "value")
    return Content(Document(step, 1, encoded.tree, kinds, []), encoded.tensors)


def newest_step(url: str) -> int:
    found = newest_intact(url, [Seen("host", -1)], ())
    return -1 if found is None else found.document.step


def test_reading_fails_with_an_error_of_the_system_and_damage_is_passed_over(capsys, calls):
    url = "failing://runs/a"
    for step in (10, 20):
        to_disk(url, content(step), None, None)
    calls.begin(1)
    with pytest.raises(OSError, match="Broken: ls"):
        newest_intact(url, [Seen("host", -1)], ())
    for number in (2, 3, 4):  # info, open, readinto: the newest one cannot be opened, or not be read
        calls.begin(number)
        assert newest_intact(url, [Seen("host", -1)], ()).document.step == 10
        assert "cannot be read" in capsys.readouterr().err
    calls.begin()
    (file,) = (file for path, file in MemoryFileSystem.store.items() if path.endswith(name_of(20)))
    file.truncate(60)
    assert newest_step(url) == 10


def test_a_store_that_cannot_replace_a_file_at_once_is_refused_by_name(monkeypatch):
    monkeypatch.delattr(FailingFile, "commit")
    with pytest.raises(OSError, match="FailingMemory cannot replace a file at once"):
        to_disk("failing://runs/a", content(10), None, None)


def test_ranks_save_and_load_at_a_url(tmp_path):
    def train() -> list:
        model = nn.Linear(2, 2)
        mpisgd.broadcast_parameters(model)
        url = "memory://runs/b/"
        saved = [checkpoint.save(url, step, model=model, epoch=step, keep_last=2) for step in (1, 2, 3)]
        with checkpoint.Writer(url) as writer:
            assert writer.save(4, model=model, epoch=4)
        other = nn.Linear(2, 2)
        loaded = checkpoint.load(url, model=other)
        assert torch.equal(other.weight, model.weight)
        by_name = checkpoint.load(saved[-1], model=other)
        return [saved[-1], checkpoint.latest(url), loaded["epoch"], by_name["epoch"], by_name.path]

    names = [f"memory://runs/b/{name_of(step)}" for step in (3, 4)]
    for found in run_ranks(3, train):
        assert found == [names[0], names[1], 4, 3, names[0]]


def test_mistakes_are_told_on_every_rank():
    def mistaken() -> list[str]:
        attempts = [
            lambda: checkpoint.save("nosuch://a/b", 1, x=1),
            lambda: checkpoint.save("memory://a/b", 1, x=1, mode=0o600),
            lambda: checkpoint.load("memory://nothing/there"),
        ]
        said = []
        for attempt in attempts:
            with pytest.raises((InvalidArgument, CheckpointError)) as error:
                attempt()
            said.append(str(error.value))
        return said

    for said in run_ranks(2, mistaken):
        assert "checkpoint.save: nosuch://a/b: ValueError: Protocol not known: nosuch" in said[0]
        assert "has no permissions" in said[1]
        assert "checkpoint.load: memory://nothing/there holds no whole checkpoint" in said[2]


def test_a_rank_that_lacks_the_package_of_a_protocol_takes_part(monkeypatch):
    """It raised alone, and the first rank, which has the package, waited."""
    url_to_fs = object_store.url_to_fs

    def lacking(url, **options):
        if mpisgd.rank():
            raise ImportError("Install s3fs to access S3")
        return url_to_fs(url, **options)

    def save_and_load() -> tuple:
        saved = checkpoint.save("memory://runs/c", 1, x=1)
        return saved, checkpoint.latest("memory://runs/c"), checkpoint.load("memory://runs/c")["x"]

    monkeypatch.setattr(object_store, "url_to_fs", lacking)
    url = f"memory://runs/c/{name_of(1)}"
    assert run_ranks(2, save_and_load, ranks_per_host=(1, 1)) == [(url, url, 1)] * 2


def test_a_file_at_the_root_of_a_store_is_found():
    to_disk("memory://", content(7), None, None)
    storage, name = find(f"memory://{name_of(7)}")
    assert content_of(storage, name)
    assert as_location("load", "path", "memory:///") == "memory://"


def test_a_url_of_local_files_is_a_path(tmp_path):
    assert as_location("load", "path", f"file://{tmp_path}/a/") == tmp_path / "a"


def test_a_path_is_no_url(tmp_path):
    assert isinstance(find(tmp_path)[0], Folder)
    storage, name = find("memory://a/b")
    assert isinstance(storage, object_store.ObjectStore)
    assert name is None
