"""Text is read the same everywhere, and a step's pieces depend on the seed and the step alone."""

from __future__ import annotations

import pytest
import torch
from training.image_data import DataError
from training.text_data import load, random_sequences


def test_standard_library_is_there_without_being_asked_for():
    text = load()
    assert text.dtype == torch.uint8
    assert len(text) > 3_000_000
    assert b"class Path" in bytes(text.numpy())


def test_folder_is_read_by_name_without_what_is_hidden_or_no_text(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "second.txt").write_text("zwei")
    (tmp_path / "a.txt").write_text("ein")
    (tmp_path / "c.bin").write_bytes(b"\0\1\2")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("drei")
    assert bytes(load(tmp_path).numpy()) == b"ein\nzwei"


def test_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(1, 256)))
    assert load(path).tolist() == list(range(1, 256))


@pytest.mark.parametrize("content", [b"", b"\0binary"])
def test_file_without_text_is_refused_by_name(tmp_path, content):
    path = tmp_path / "empty"
    path.write_bytes(content)
    with pytest.raises(DataError, match="empty: no text"):
        load(path)


def test_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match="nowhere"):
        load(tmp_path / "nowhere")


def test_pieces_are_pieces_of_the_text_from_all_over_it():
    text = torch.arange(200, dtype=torch.uint8)
    pieces = random_sequences(text, 500, 11, seed=0, step=0)
    assert (pieces.shape, pieces.dtype) == ((500, 11), torch.int64)
    assert torch.equal(pieces - pieces[:, :1], torch.arange(11).expand(500, 11))
    assert (pieces.min(), pieces.max()) == (0, 199)


def test_seed_and_step_decide_the_pieces():
    text = torch.arange(200, dtype=torch.uint8)
    drawn = [random_sequences(text, 20, 5, seed=seed, step=step) for seed, step in ((0, 0), (0, 1), (1, 0))]
    assert torch.equal(drawn[0], random_sequences(text, 20, 5, seed=0, step=0))
    assert len({tuple(pieces[:, 0].tolist()) for pieces in drawn}) == 3
