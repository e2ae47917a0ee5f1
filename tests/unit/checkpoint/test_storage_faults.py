"""Each call of each storage fails in turn, in all that checkpoints ask of one: nothing whole is lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from failing_store import Broken, Calls, failing_stores, system_calls

import mpisgd
from mpisgd import checkpoint
from mpisgd.checkpoint.files import Folder
from mpisgd.checkpoint.object_store import ObjectStore
from mpisgd.checkpoint.storage import Storage, checkpoints_in, name_of, remove_older
from mpisgd.errors import CheckpointError
from mpisgd.job.threads_as_ranks import run_ranks

OLD, NEW = b"old content", b"new content"
MOST_CALLS = 100


@pytest.fixture
def store_calls() -> Iterator[Calls]:
    with failing_stores() as calls:
        yield calls


class Place:
    """A storage, and how one of its calls is made to fail.

    Args:
        storage: with whole calls.
        calls: of a store of fsspec's; None: the system's are counted.
    """

    def __init__(self, storage: Storage, calls: Calls | None = None) -> None:
        self.storage = storage
        self._calls = calls

    @contextlib.contextmanager
    def failing(self, number: int) -> Iterator[list[str]]:
        """Have a call fail, from 1 on; yield the names of those that are made."""
        if self._calls is None:
            with system_calls(number) as said:
                yield said
            return
        self._calls.begin(number)
        try:
            yield self._calls.said
        finally:
            self._calls.fails_at = 0


@pytest.fixture(params=["folder", "store in memory", "store over files"])
def place(request: Any, tmp_path: Path, store_calls: Calls) -> Place:
    if request.param == "folder":
        return Place(Folder(tmp_path / "runs" / "a"))
    url = "failing://runs/a" if request.param == "store in memory" else f"failing-files://{tmp_path}/runs/a"
    return Place(ObjectStore(url), store_calls)


def put(storage: Storage, name: str, content: bytes) -> None:
    storage.put(name, lambda file: (file.write(content[:5]), file.write(content[5:])), None)


def content_of(storage: Storage, name: str) -> bytes:
    file, size = storage.open(name)
    with file:
        found = bytearray(size)
        assert file.readinto(found) == size
        return bytes(found)


def each_call(place: Place, act: Callable[[], object]) -> Iterator[tuple[str, Exception | None]]:
    """Do something again and again, each time with the next call failing, until none is left that could.

    Yields:
        The name of the call, and the error that came of it; None where it was done all the same.
    """
    for number in range(1, MOST_CALLS):
        error = None
        with place.failing(number) as said:
            try:
                act()
            except Exception as exc:  # which must be an OSError
                error = exc
        if len(said) < number:
            assert error is None
            assert number > 1, "nothing was called"
            return
        yield said[number - 1], error
    raise AssertionError(f"more than {MOST_CALLS} calls")


def test_a_file_that_is_replaced_is_old_or_new(place: Place) -> None:
    place.storage.prepare()
    put(place.storage, "x", OLD)
    failed = set()
    for call, error in each_call(place, lambda: put(place.storage, "x", NEW)):
        assert isinstance(error, OSError | None), (call, error)
        assert set(place.storage.names()) - {"x"} <= unfinished(place), call
        found = content_of(place.storage, "x")
        assert found == NEW if error is None else found in (OLD, NEW), (call, error)
        failed |= {call} if error is not None else set()
        put(place.storage, "x", OLD)
        assert content_of(place.storage, "x") == OLD, call
    assert failed >= ({"write", "fsync", "open"} if is_folder(place) else {"open wb", "write", "commit"})


def is_folder(place: Place) -> bool:
    return isinstance(place.storage, Folder)


def unfinished(place: Place) -> set[str]:
    """What a folder may have of a write whose removal failed, too: it is removed by the next `prepare`."""
    return {name for name in place.storage.names() if name.startswith(".") and is_folder(place)}


def test_a_place_is_made_or_told_of(place: Place) -> None:
    for call, error in each_call(place, place.storage.prepare):
        assert isinstance(error, OSError | None), (call, error)
        place.storage.prepare()
        put(place.storage, "x", NEW)
        assert content_of(place.storage, "x") == NEW


def test_a_place_that_fails_is_not_called_writable(place: Place) -> None:
    for call, error in each_call(place, place.storage.check_writable):
        assert isinstance(error, OSError | None), (call, error)
        if not is_folder(place):  # there Python has another way to make a file that is deleted again
            assert error is not None, call
        place.storage.check_writable()


def test_what_is_asked_of_a_place_is_answered_or_is_an_error_of_the_system(place: Place) -> None:
    place.storage.prepare()
    put(place.storage, "x", NEW)
    asked: dict[str, Callable[[], Any]] = {
        "names": lambda: sorted(place.storage.names()),
        "is_file": lambda: place.storage.is_file("x"),
        "content": lambda: content_of(place.storage, "x"),
    }
    for what, ask in asked.items():
        right, answers = ask(), list[Any]()
        for call, error in each_call(place, lambda ask=ask, answers=answers: answers.append(ask())):
            assert isinstance(error, OSError | None), (what, call, error)
            assert error is not None or answers[-1] == right, (what, call)
        assert ask() == right


def test_older_ones_are_removed_and_never_the_newest(place: Place) -> None:
    place.storage.prepare()
    names = [name_of(step) for step in (30, 20, 10)]

    def fill() -> None:
        for name in names:
            put(place.storage, name, NEW)

    fill()
    for call, error in each_call(place, lambda: remove_older(place.storage, names[0], 1)):
        assert isinstance(error, OSError | None), (call, error)
        left = checkpoints_in(place.storage)
        assert left[0] == names[0], (call, left)
        fill()
    remove_older(place.storage, names[0], 1)
    assert checkpoints_in(place.storage) == names[:1]


# -- with ranks, of which the first alone sees the store ---------------------------------------------------


URL = "failing://runs/a"


def outcome(act: Callable[[], Any]) -> Any:
    """What a rank gets: a value, or the text of the error that it must be."""
    try:
        return act()
    except CheckpointError as exc:
        return str(exc)


def save(step: int) -> str:
    return str(checkpoint.save(URL, step, keep_last=2, value=torch.full((5,), float(step))))


def load() -> int:
    loaded = checkpoint.load(URL)
    assert torch.equal(loaded["value"], torch.full((5,), float(loaded.step)))
    return loaded.step


def write_in_background(step: int) -> bool:
    with checkpoint.Writer(URL, keep_last=2) as writer:
        begun: bool = writer.save(step, value=torch.full((5,), float(step)))
        writer.wait()
    return begun


ACTS: dict[str, Callable[[int], Any]] = {
    "save": save,
    "writer": write_in_background,
    "load": lambda step: load(),
    "latest": lambda step: checkpoint.latest(URL),
}


@pytest.mark.parametrize("what", ACTS)
def test_ranks_learn_alike_of_the_call_that_fails(store_calls: Calls, what: str) -> None:
    """All get the same error or the same value, and the newest whole checkpoint is there afterwards."""
    run_ranks(2, lambda: [save(10), save(20)])
    failed, step = [], 20
    for number in range(1, MOST_CALLS):
        step += 10
        store_calls.begin(number)
        found = run_ranks(2, lambda step=step: outcome(lambda: ACTS[what](step)))
        said, store_calls.fails_at = list(store_calls.said), 0
        assert found[1:] == found[:-1], (said, found)
        if len(said) < number:
            assert "Broken" not in str(found[0])
            break
        if "Broken" in str(found[0]):
            failed.append(said[number - 1])
        newest = run_ranks(2, load)
        assert newest[0] == newest[1]
        assert step - newest[0] in (0, 10), (said, found, newest)
        run_ranks(2, lambda step=step: save(step))
    assert number > 1
    assert failed


def test_a_rank_raises_nothing_of_the_store_itself(store_calls: Calls) -> None:
    store_calls.begin(1)
    for said in run_ranks(2, lambda: outcome(lambda: save(10))):
        assert "checkpoint.save" in said
        assert "Broken: makedirs" in said
    assert not issubclass(Broken, (OSError, mpisgd.MpisgdError))
