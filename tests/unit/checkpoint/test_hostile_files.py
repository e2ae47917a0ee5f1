"""Files that somebody left in the folder, with right checksums: refused as damaged, and a resume goes on."""

from __future__ import annotations

import copy
import json
import os
import random
import socket
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reading import read_file

from mpisgd.checkpoint import files, rng_state
from mpisgd.checkpoint.format import Document, write
from mpisgd.checkpoint.newest import Seen, newest_intact
from mpisgd.checkpoint.serialization import decode, encode
from mpisgd.checkpoint.storage import name_of
from mpisgd.errors import CheckpointDamaged, CheckpointError

DATA = struct.pack("<6f", *range(6))
CRC_ALONE = '{"__metadata__":{"header_crc32":"00000000"'
SEEN = [Seen("host", 99)]


def header() -> dict[str, Any]:
    """What a file of one tensor has in its header, with the document not yet as text."""
    tree = {"model": ["dict", "w", ["tensor", "model.w"]], "epoch": 3}
    document = {
        "version": 1,
        "step": 7,
        "ranks": 2,
        "state": tree,
        "kinds": {"model": "object", "epoch": "value"},
        "rng": [],
        "crc32": {"model.w": zlib.crc32(DATA)},
    }
    tensor = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    return {"document": document, "model.w": tensor}


def plant(path: Path, content: Any, data: bytes = DATA) -> Path:
    """Write a file with right checksums, whatever is in it."""
    content = dict(content)
    document = content.pop("document")
    text = document if isinstance(document, str) else json.dumps(document)
    metadata = {"header_crc32": "0" * 8, "mpisgd": text}
    return plant_text(path, json.dumps({"__metadata__": metadata, **content}, separators=(",", ":")), data)


def plant_text(path: Path, text: str, data: bytes = DATA) -> Path:
    raw = text.encode()
    raw = raw.replace(b'"header_crc32":"00000000"', b'"header_crc32":"%08x"' % zlib.crc32(raw), 1)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def leave_good(folder: Path, step: int) -> None:
    encoded = encode({"model": {"w": torch.ones(2)}, "epoch": 5})
    rng = encode({"rng": [rng_state.capture()]})
    document = Document(step, 1, encoded.tree, {"model": "object", "epoch": "value"}, rng.tree["rng"][1:])
    tensors = {**encoded.tensors, **rng.tensors}
    files.write_file(folder / name_of(step), lambda file: write(file, document, tensors))


def changed(*keys: Any, to: Any) -> Callable[[], dict[str, Any]]:
    """What makes the header with one of its values replaced."""

    def make() -> dict[str, Any]:
        content = header()
        inner: Any = content
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = to
        return content

    return make


def nested(depth: int) -> Any:
    return "[" * depth + "]" * depth


OF_TENSOR, OF_DOCUMENT = ("model.w",), ("document",)
HOSTILE: dict[str, Callable[[], dict[str, Any]]] = {
    "negative shape": changed(*OF_TENSOR, "shape", to=[-2, -3]),
    "shape of a float": changed(*OF_TENSOR, "shape", to=[2.0, 3]),
    "shape of flags": changed(*OF_TENSOR, "shape", to=[True, 6]),
    "shape that is a number": changed(*OF_TENSOR, "shape", to=6),
    "empty shape too large for memory": changed(*OF_TENSOR, "shape", to=[0, 2**62, 2**62]),
    "huge shape": changed(*OF_TENSOR, "shape", to=[2**62, 2**62]),
    "ten thousand dimensions": changed(*OF_TENSOR, "shape", to=[1] * 10_000),
    "other offsets": changed(*OF_TENSOR, "data_offsets", to=[8, 32]),
    "offsets that are text": changed(*OF_TENSOR, "data_offsets", to="ab"),
    "three offsets": changed(*OF_TENSOR, "data_offsets", to=[0, 24, 24]),
    "an unknown dtype": changed(*OF_TENSOR, "dtype", to="onnx"),
    "a dtype that is a list": changed(*OF_TENSOR, "dtype", to=["F32"]),
    "a tensor that is a number": changed("model.w", to=5),
    "a document that is none": changed("document", to="5"),
    "a document that is no JSON": changed("document", to="{"),
    "deeply nested text": changed("document", to=nested(200_000)),
    "a deeply nested value": changed(*OF_DOCUMENT, "state", "epoch", to=json.loads(nested(300))),
    "a step that is text": changed(*OF_DOCUMENT, "step", to="7"),
    "a negative step": changed(*OF_DOCUMENT, "step", to=-7),
    "no ranks": changed(*OF_DOCUMENT, "ranks", to=0),
    "a state that is a list": changed(*OF_DOCUMENT, "state", to=[]),
    "kinds of other names": changed(*OF_DOCUMENT, "kinds", to={"model": "object"}),
    "an unknown kind": changed(*OF_DOCUMENT, "kinds", "epoch", to="code"),
    "a field too many": changed(*OF_DOCUMENT, "more", to=1),
    "a checksum that is text": changed(*OF_DOCUMENT, "crc32", "model.w", to="abc"),
    "a checksum that is not there": changed(*OF_DOCUMENT, "crc32", to={}),
    "generators of other ranks": changed(*OF_DOCUMENT, "rng", to=[1, 2, 3]),
    "generators that are numbers": changed(*OF_DOCUMENT, "rng", to=[1, 2]),
    "generators without torch's": changed(*OF_DOCUMENT, "rng", to=[["dict"], ["dict"]]),
    "a tensor that is not in the file": changed(*OF_DOCUMENT, "state", "model", to=["tensor", "x"]),
    "an unknown type": changed(*OF_DOCUMENT, "state", "epoch", to=["system", "true"]),
    "a type that is a list": changed(*OF_DOCUMENT, "state", "epoch", to=[[]]),
    "an empty tree": changed(*OF_DOCUMENT, "state", "epoch", to=[]),
    "a dtype that is a module": changed(*OF_DOCUMENT, "state", "epoch", to=["dtype", "onnx"]),
    "no device": changed(*OF_DOCUMENT, "state", "epoch", to=["device", "\x1b[31m"]),
    "a deque without a length": changed(*OF_DOCUMENT, "state", "epoch", to=["deque", 2**70]),
    "a key that cannot be one": changed(*OF_DOCUMENT, "state", "epoch", to=["dict", ["list"], 1]),
    "names of tensors in a constant": changed(*OF_DOCUMENT, "state", "epoch", to=["float", "1", ["tensor"]]),
    "NaN in the header": changed(*OF_DOCUMENT, "state", "epoch", to=float("nan")),
}


def test_the_header_these_files_start_from_is_accepted(tmp_path):
    document, tensors = read_file(plant(tmp_path / "x", header()), {"model"})
    assert document.step == 7
    assert tensors["model.w"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_does_not_stop_a_resume(tmp_path, capfd, name):
    # Other exceptions than CheckpointDamaged came through: one such file stopped every resume.
    leave_good(tmp_path, 10)
    planted = plant(tmp_path / name_of(20), HOSTILE[name]())
    for objects in ({"model"}, set()):  # as `load` and `latest` ask
        found = newest_intact(tmp_path, SEEN, objects)
        assert found is not None
        assert found.document.step == 10
        assert f"checkpoint passed over: {planted}" in capfd.readouterr().err


def test_a_dtype_named_by_a_file_imports_nothing(tmp_path):
    # `getattr(torch, "onnx")` imports torch.onnx.
    with pytest.raises(KeyError):
        decode(["dtype", "onnx"], {})
    assert decode(["dtype", "bfloat16"], {}) is torch.bfloat16


def test_escape_sequences_in_names_do_not_reach_the_terminal(tmp_path, capfd):
    content = header()
    content["\x1b]0;title\x07\u202e\n"] = content.pop("model.w")
    plant(tmp_path / name_of(20), content)
    assert newest_intact(tmp_path, SEEN, set()) is None
    said = capfd.readouterr().err
    assert all(char.isprintable() for char in said.removesuffix("\n")), ascii(said)


def mutated(content: Any, draw: random.Random) -> Any:
    """Return a copy with one value, at a place drawn at random, replaced, removed or moved."""
    content = copy.deepcopy(content)
    junk = [None, True, -1, 0, 2**40, 2**64, 1e300, "", "F64", "tensor", "model.w", [], {}, [[]], ["tensor"]]
    inner = content
    while True:
        key = draw.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        if isinstance(inner[key], (dict, list)) and inner[key] and draw.random() < 0.8:
            inner = inner[key]
            continue
        if draw.random() < 0.2:
            del inner[key]
        else:
            inner[key] = draw.choice(junk)
        return content


def test_whatever_is_in_a_header_it_is_used_or_damaged(tmp_path):
    draw = random.Random(28)
    base = header()
    base["document"]["state"]["more"] = ["list", ["float", "nan"], ["size", 2], ["module", ["dict"], "a", 1]]
    base["document"]["kinds"]["more"] = "value"
    used = 0
    for _ in range(1500):
        content = mutated(base, draw)
        if draw.random() < 0.3:
            content = mutated(content, draw) if content else content
        content.setdefault("document", {})
        path = plant(tmp_path / "x", content)
        try:
            document, tensors = read_file(path, {"model"})
            for tree in document.state.values():
                decode(tree, tensors)
            used += 1
        except CheckpointDamaged:
            pass
    assert 20 < used < 1400


def test_whatever_bytes_a_header_has_it_is_used_or_damaged(tmp_path):
    draw = random.Random(28)
    content = header()
    document = json.dumps(json.dumps(content.pop("document")))
    text = f'{CRC_ALONE},"mpisgd":{document}}},{json.dumps(content)[1:]}'
    said = []
    for _ in range(1500):
        place = draw.randrange(len(CRC_ALONE) + 1, len(text))
        piece = draw.choice(["", "[", "{", '"', "\\", "9", "-", "\x00", "\ud7ff", "1e999", "\\ud800", ","])
        path = plant_text(tmp_path / "x", text[:place] + piece + text[place + draw.randrange(3) :])
        try:
            read_file(path, {"model"})
        except CheckpointDamaged as exc:
            said.append(str(exc))
    assert len(said) > 1000
    assert all(text.isprintable() for text in said)


def test_a_small_header_does_not_take_much_memory(tmp_path):
    # 114 MB of header took 3.3 GB when it was parsed: too many values are refused before.
    many = ",".join(["[]"] * 2_000_001)
    path = plant_text(tmp_path / "x", CRC_ALONE + f',"mpisgd":"0"}},"x":[{many}]}}')
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointDamaged, match="values, at most 4000000"):
            read_file(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * path.stat().st_size


@pytest.mark.parametrize("length", [0, 40, 10**8 + 1, 2**62, 2**64 - 1])
def test_a_length_of_the_header_that_is_none_is_refused(tmp_path, length):
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(2**28)  # without blocks on the disk
    with pytest.raises(CheckpointDamaged, match="header of"):
        read_file(path)


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    long = encode({"history": [0] * 4_000_001})
    document = Document(1, 1, long.tree, {"history": "value"}, [])
    leave = tmp_path / name_of(1)
    with pytest.raises(CheckpointError, match="save long lists as tensors"):
        files.write_file(leave, lambda file: write(file, document, {}))
    assert list(tmp_path.iterdir()) == []
    inner: list[Any] = []
    inner.append(inner)
    assert "nested more than 100 deep" in encode({"x": inner}).problems[0]
    deep: Any = 1
    for _ in range(99):
        deep = [deep]
    encoded = encode({"x": deep})
    files.write_file(leave, lambda file: write(file, Document(1, 1, encoded.tree, {"x": "value"}, []), {}))
    assert decode(read_file(leave)[0].state["x"], {}) == deep


def test_fifos_sockets_and_folders_do_not_block(tmp_path, capfd):
    # Opening a FIFO for reading waits for somebody who writes: rank 0 never came back.
    leave_good(tmp_path, 10)
    os.mkfifo(tmp_path / name_of(40))
    (tmp_path / name_of(30)).mkdir()
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(os.path.relpath(tmp_path / name_of(20)))
        (tmp_path / name_of(15)).symlink_to("/dev/zero")
        found = newest_intact(tmp_path, SEEN, {"model"})
    assert found is not None
    assert found.document.step == 10
    said = capfd.readouterr().err
    assert all(f"no regular file but a {kind}" in said for kind in ("FIFO", "folder", "socket", "device"))
    assert said.count("\n") == 4


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state.pop("torch"),
        lambda state: state.update(torch=torch.zeros(5, dtype=torch.uint8)),
        lambda state: state.update(torch=torch.zeros(5)),
        lambda state: state["numpy"].update(bit_generator="PCG64"),
        lambda state: state["numpy"]["state"].update(pos=10**6),
        lambda state: state["numpy"]["state"].update(pos="x"),
        lambda state: state.update(python=(3, torch.zeros(4, dtype=torch.int64), None)),
        lambda state: state.update(python=(3, state["python"][1], "x")),
        lambda state: state.update(python=7),
    ],
)
def test_generators_that_cannot_be_restored_are_found_before_anything_is_loaded(tmp_path, spoil, capfd):
    leave_good(tmp_path, 10)
    state = rng_state.capture()
    spoil(state)
    encoded = encode({"rng": [state], "epoch": 1})
    document = Document(20, 1, {"epoch": 1}, {"epoch": "value"}, encoded.tree["rng"][1:])
    files.write_file(tmp_path / name_of(20), lambda file: write(file, document, encoded.tensors))
    found = newest_intact(tmp_path, SEEN, set())
    assert found is not None
    assert found.document.step == 10
    assert "generators: " in capfd.readouterr().err
