"""The data sets of scripts/: each form is read, and each kind of damage is refused by name."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from training.image_data import DataError, load, read_idx

NAMES = {
    "x_train": "train-images-idx3-ubyte",
    "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte",
    "y_test": "t10k-labels-idx1-ubyte",
}


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    """Images that differ by image and by pixel, with all of 0 to 255 and labels 0 to 9."""
    x = (np.arange(20 * 3 * 4) * 7 % 256).astype(np.uint8).reshape(20, 3, 4)
    y = (np.arange(20) * 3 % 10).astype(np.uint8)
    return {"x_train": x[:15], "y_train": y[:15], "x_test": x[15:], "y_test": y[15:]}


@pytest.fixture
def folder(tmp_path: Path, arrays) -> Path:
    """The arrays as MNIST's files, two of them gzipped and one under the older name."""
    for key, name in NAMES.items():
        if key.startswith("x"):
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(idx(arrays[key])))
        else:
            (tmp_path / (name if key == "y_train" else name.replace("-idx", ".idx"))).write_bytes(
                idx(arrays[key])
            )
    return tmp_path


def archive(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path / "data.npz", **arrays)
    return path / "data.npz"


def test_digits_are_split_the_same_way_every_time():
    first, second = load(), load()
    assert (len(first.train), len(first.test), first.image_shape) == (1437, 360, (1, 8, 8))
    assert torch.equal(first.test.labels, second.test.labels)
    assert torch.equal(first.train.pixels, second.train.pixels)
    pixels, _ = first.train.dataset(torch.float64).tensors
    assert (pixels.dtype, pixels.min(), pixels.max()) == (torch.float64, 0, 1)


def test_mnist_files_are_read(folder, arrays):
    data = load(folder)
    assert torch.equal(data.train.pixels, torch.from_numpy(arrays["x_train"])[:, None])
    assert data.test.labels.tolist() == arrays["y_test"].tolist()
    assert data.test.labels.dtype == torch.int64
    pixels, _ = data.train.dataset(torch.float32).tensors
    torch.testing.assert_close(pixels, data.train.pixels / 255)


def test_archive_with_four_arrays_is_read(tmp_path, arrays):
    data = load(archive(tmp_path, **arrays))
    assert torch.equal(data.test.pixels, torch.from_numpy(arrays["x_test"])[:, None])
    assert data.train.labels.tolist() == arrays["y_train"].tolist()


def test_archive_with_channels_and_floats_is_split(tmp_path):
    images = np.linspace(0, 1, 10 * 2 * 3 * 3).reshape(10, 2, 3, 3).astype(">f4")
    data = load(archive(tmp_path, images=images, labels=np.arange(10)))
    assert (len(data.train), len(data.test), data.image_shape) == (8, 2, (3, 2, 3))
    assert sorted([*data.train.labels.tolist(), *data.test.labels.tolist()]) == list(range(10))
    for part in (data.train, data.test):
        for pixels, label in zip(part.pixels, part.labels, strict=True):
            np.testing.assert_array_equal(pixels.permute(1, 2, 0).numpy(), images[label])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "begins with"),
        (b"GIF89a", "begins with 47 49 46 38"),
        (idx(np.zeros((2, 2), np.uint8)), "begins with 00 00 08 02, a file of this kind with 00 00 08 01"),
        (struct.pack(">4B", 0, 0, 8, 1) + b"\0\0", "ends after 6 bytes, within its header"),
        (idx(np.zeros(9, np.uint8))[:-1], "has 8 bytes of data, its header announces 9"),
        (idx(np.zeros(9, np.uint8)) + b"\0", "has 10 bytes of data, its header announces 9"),
    ],
)
def test_damaged_idx_file_is_refused(tmp_path, content, said):
    path = tmp_path / "labels"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path}: .*{said}"):
        read_idx(path, num_dims=1)


@pytest.mark.parametrize("keep", [3, 12, 30, -9, -1])
def test_truncated_gzip_is_refused(folder, keep):
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=str(path)):
        load(folder)


def test_gzip_with_a_changed_byte_is_refused(folder):
    path = folder / "t10k-images-idx3-ubyte.gz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(DataError, match=str(path)):
        load(folder)


def test_folder_without_the_files_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"has no train-images-idx3-ubyte, plain or with \.gz"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"y_train": np.arange(14)}, "training set: 15 images, but labels of shape (14,)"),
        ({"y_test": np.full(5, 10)}, "test image 0 has the label 10, not one of 0 to 9"),
        ({"y_train": np.arange(15) - 3}, "training image 0 has the label -3"),
        ({"y_test": np.zeros(5)}, "labels of type float64, expected integers"),
        ({"x_test": np.zeros((5, 3, 5), np.uint8)}, "training images have the shape (1, 3, 4), test images"),
        ({"x_test": np.zeros((5, 12), np.uint8)}, "images of shape (5, 12), expected"),
        ({"x_test": np.full((5, 3, 4), 1.5)}, "pixels from 1.5 to 1.5, floats must lie in 0 to 1"),
        ({"x_test": np.full((5, 3, 4), np.nan)}, "pixels from nan"),
        ({"x_test": np.zeros((5, 3, 4), np.int32)}, "pixels of type int32"),
        ({"x_test": np.zeros((0, 3, 4)), "y_test": np.zeros(0, int)}, "0 test images"),
    ],
)
def test_archive_that_does_not_fit_is_refused(tmp_path, arrays, change, said):
    path = archive(tmp_path, **{**arrays, **change})
    with pytest.raises(DataError) as refusal:
        load(path)
    assert said in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_archive_with_other_names_is_refused(tmp_path, arrays):
    with pytest.raises(DataError, match="has a, b; expected x_train"):
        load(archive(tmp_path, a=arrays["x_train"], b=arrays["y_train"]))


def test_archive_with_python_objects_is_not_unpickled(tmp_path, arrays):
    path = archive(tmp_path, **{**arrays, "y_test": np.array([{}] * 5, dtype=object)})
    with pytest.raises(DataError, match="allow_pickle"):
        load(path)


@pytest.mark.parametrize("keep", [0, 10, 200, -30])
def test_truncated_archive_is_refused(tmp_path, arrays, keep):
    path = archive(tmp_path, **arrays)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=str(path)):
        load(path)


def test_single_array_is_refused(tmp_path):
    path = tmp_path / "data.npz"
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(DataError, match="a single array"):
        load(path)


def test_missing_file_is_refused():
    with pytest.raises(DataError, match=r"cannot read /nowhere\.npz: No such file"):
        load("/nowhere.npz")
