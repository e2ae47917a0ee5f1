"""Labelled images for the example programs: handwritten digits, MNIST-format files, or an .npz archive.

    load(None)         1,797 real digits of 8 x 8 pixels, which ship inside scikit-learn
    load("DIR")        MNIST's four files, plain or gzipped (Fashion-MNIST and EMNIST come in them too):
                       train-images-idx3-ubyte train-labels-idx1-ubyte t10k-images-... t10k-labels-...
    load("FILE.npz")   arrays x_train y_train x_test y_test, as Keras has them,
                       or images and labels, of which every fifth (after a fixed shuffle) becomes a test image

Images in an archive are [n, height, width] or [n, height, width, channels], of uint8 or of floats from 0
to 1; labels are integers from 0. A file that is damaged or does not fit is refused with a `DataError` that
names the file and says what is wrong with it.
"""

import gzip
import importlib.util
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

IDX_UINT8 = 0x08
TEST_FRACTION = 0.2


class DataError(ValueError):
    """A data set is missing, damaged or not of the kind that was asked for."""


@dataclass(frozen=True)
class Images:
    """Images [n, channels, height, width], uint8 or float from 0 to 1, and their labels [n], int64."""

    pixels: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def dataset(self, dtype: torch.dtype) -> TensorDataset:
        """The pairs (image, label) with pixels from 0 to 1 in `dtype`."""
        scale = 255 if self.pixels.dtype == torch.uint8 else 1
        return TensorDataset(self.pixels.to(dtype) / scale, self.labels)


@dataclass(frozen=True)
class ImageData:
    """A training set and a test set of the same image shape and the same classes."""

    train: Images
    test: Images
    num_classes: int

    @property
    def image_shape(self) -> tuple[int, ...]:
        """Channels, height, width."""
        return tuple(self.train.pixels.shape[1:])


def load(source: Path | str | None = None, *, num_classes: int = 10) -> ImageData:
    """Read a data set; labels must be 0 to `num_classes` - 1.

    Raises:
        DataError: a file is missing, damaged, or does not fit the others.
    """
    if source is None:
        train, test = split(*read_digits())
    elif Path(source).is_dir():
        train, test = read_mnist(Path(source))
    else:
        train, test = read_npz(Path(source))
    name = source or "digits"
    if 0 in (train.pixels.numel(), test.pixels.numel()):
        raise DataError(
            f"{name}: {len(train)} training and {len(test)} test images; both sets must have some"
        )
    if train.pixels.shape[1:] != test.pixels.shape[1:]:
        shapes = [tuple(images.pixels.shape[1:]) for images in (train, test)]
        raise DataError(f"{name}: training images have the shape {shapes[0]}, test images {shapes[1]}")
    check_labels(train.labels, num_classes, f"{name}: training image")
    check_labels(test.labels, num_classes, f"{name}: test image")
    return ImageData(train, test, num_classes)


# --- the three sources --------------------------------------------------------------------------------


def read_digits() -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """The digits of the UCI repository (Alpaydin and Kaynak 1998), 8 x 8 pixels with values 0 to 16."""
    package = importlib.util.find_spec("sklearn")  # to import it takes longer than to train
    if package is None or package.origin is None:
        raise DataError("the digits ship inside scikit-learn: pip install scikit-learn, or give --data")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with described(path):
        rows = np.loadtxt(path, dtype=np.float32, delimiter=",")
    return (rows[:, :-1] / 16).reshape(-1, 8, 8), rows[:, -1].astype(np.int64)


def read_mnist(folder: Path) -> tuple[Images, Images]:
    """The two sets of a folder with MNIST's four files."""
    train, test = (
        as_images(
            read_idx(find(folder, f"{part}-images-idx3-ubyte"), num_dims=3),
            read_idx(find(folder, f"{part}-labels-idx1-ubyte"), num_dims=1),
            f"{folder}: {part}",
        )
        for part in ("train", "t10k")
    )
    return train, test


def read_npz(path: Path) -> tuple[Images, Images]:
    """The two sets of an archive; see the top of this file for the names and shapes."""
    with described(path), path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise DataError("a single array, where an .npz archive was expected")
        if {"x_train", "y_train", "x_test", "y_test"} <= set(archive):
            train = as_images(archive["x_train"], archive["y_train"], "training set")
            return train, as_images(archive["x_test"], archive["y_test"], "test set")
        if {"images", "labels"} <= set(archive):
            return split(archive["images"], archive["labels"])
        raise DataError(
            f"has {', '.join(sorted(archive)) or 'nothing'}; "
            "expected x_train, y_train, x_test and y_test, or images and labels"
        )


def split(pixels: NDArray[np.generic], labels: NDArray[np.generic]) -> tuple[Images, Images]:
    """Set a fifth of the images apart as the test set: the same ones in every run, whatever its seed."""
    images = as_images(pixels, labels, "images")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    num_test = math.ceil(TEST_FRACTION * len(order))
    train, test = order[num_test:], order[:num_test]
    return Images(images.pixels[train], images.labels[train]), Images(
        images.pixels[test], images.labels[test]
    )


# --- files --------------------------------------------------------------------------------------------


@contextmanager
def described(path: Path) -> Iterator[None]:
    """Turn what goes wrong while reading `path` into a `DataError` of one line that names it."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except OSError as error:  # a damaged gzip too, which has no strerror
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except (EOFError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged or of another kind: {str(error).splitlines()[0]}") from error


def find(folder: Path, name: str) -> Path:
    """The file `name` in `folder`, plain or gzipped, also under the older name with a dot."""
    for candidate in (name, name.replace("-idx", ".idx")):
        for path in (folder / candidate, folder / f"{candidate}.gz"):
            if path.exists():
                return path
    raise DataError(f"{folder} has no {name}, plain or with .gz")


def read_idx(path: Path, *, num_dims: int) -> NDArray[np.uint8]:
    """The array of an idx file: two zero bytes, type, number of dimensions, their sizes, then the bytes.

    Source: the description of the format beside the MNIST data, LeCun, Cortes and Burges.
    """
    with described(path):
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        magic = bytes([0, 0, IDX_UINT8, num_dims])
        if content[:4] != magic:
            raise DataError(f"begins with {content[:4].hex(' ')}, a file of this kind with {magic.hex(' ')}")
        header = 4 + 4 * num_dims
        if len(content) < header:
            raise DataError(f"ends after {len(content)} bytes, within its header")
        shape = struct.unpack(f">{num_dims}I", content[4:header])
        if len(content) - header != math.prod(shape):
            raise DataError(
                f"has {len(content) - header} bytes of data, its header announces {math.prod(shape)}"
            )
        return np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()


# --- checks -------------------------------------------------------------------------------------------


def as_images(pixels: NDArray[np.generic], labels: NDArray[np.generic], what: str) -> Images:
    """Check a pair of arrays, name their axes as torch does, and make tensors of them."""
    if pixels.ndim not in (3, 4):
        raise DataError(
            f"{what}: images of shape {pixels.shape}, expected [n, height, width] or one axis more"
        )
    if labels.shape != pixels.shape[:1]:
        raise DataError(f"{what}: {pixels.shape[0]} images, but labels of shape {labels.shape}")
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"{what}: labels of type {labels.dtype}, expected integers")
    check_pixels(pixels, what)
    # The machine's own byte order, and of the floats the two that torch computes with everywhere.
    wide = pixels.dtype.itemsize > 4
    kind = np.uint8 if pixels.dtype == np.uint8 else np.float64 if wide else np.float32
    stored = torch.from_numpy(pixels.astype(kind))
    channels_first = stored.unsqueeze(1) if stored.ndim == 3 else stored.permute(0, 3, 1, 2).contiguous()
    return Images(channels_first, torch.from_numpy(labels.astype(np.int64)))


def check_pixels(pixels: NDArray[np.generic], what: str) -> None:
    """Pixels are uint8, or floats from 0 to 1."""
    if pixels.dtype == np.uint8 or pixels.size == 0:
        return
    if not np.issubdtype(pixels.dtype, np.floating):
        raise DataError(f"{what}: pixels of type {pixels.dtype}, expected uint8, or floats from 0 to 1")
    low, high = pixels.min(), pixels.max()
    if not (low >= 0 and high <= 1):  # written so that NaN is refused too
        raise DataError(f"{what}: pixels from {low} to {high}, floats must lie in 0 to 1")


def check_labels(labels: torch.Tensor, num_classes: int, what: str) -> None:
    """Every label is a class."""
    wrong = ((labels < 0) | (labels >= num_classes)).nonzero()
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"{what} {first} has the label {int(labels[first])}, not one of 0 to {num_classes - 1}"
        )
