"""Text for the example programs: a file or a folder as one row of bytes, and random sequences of it.

    load(None)      the sources of Python's standard library, some ten million bytes on every machine
    load("FILE")    the file, whatever it is
    load("DIR")     all files below it that are text, by name; no hidden ones

A step's sequences depend only on the seed and the step's number, not on the number of ranks or on a resume.
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from training.image_data import DataError

# Of the standard library: other people's packages, and tests that are data rather than programs.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def load(source: Path | None = None) -> Tensor:
    """Read all text of `source` as a row of uint8.

    Raises:
        DataError: nothing there, or no text.
    """
    try:
        texts = [path.read_bytes() for path in files(source)]
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}") from error
    joined = b"\n".join(text for text in texts if is_text(text))
    if not joined:
        raise DataError(f"{source or 'the standard library'}: no text there")
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


def files(source: Path | None) -> Iterator[Path]:
    """The files of `source`, in the same order on every machine."""
    if source is None:
        library = Path(sysconfig.get_path("stdlib"))
        found = (path.relative_to(library) for path in library.rglob("*.py"))
        yield from sorted(library / path for path in found if LEFT_OUT.isdisjoint(path.parts))
    elif source.is_dir():
        found = (path.relative_to(source) for path in source.rglob("*") if path.is_file())
        yield from sorted(source / path for path in found if not is_hidden(path))
    else:
        yield source


def is_hidden(path: Path) -> bool:
    """Whether it, or a folder it is in, is none that people look at: `.git`, `.venv` and the like."""
    return any(part.startswith(".") for part in path.parts)


def is_text(content: bytes) -> bool:
    """Whether it looks like text in some encoding of ASCII's family."""
    return b"\0" not in content


def random_sequences(text: Tensor, count: int, length: int, *, seed: int, step: int) -> Tensor:
    """[count, length] bytes, as int64, from random places of `text`."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - length + 1, (count, 1), generator=generator)
    return text[starts + torch.arange(length)].long()
