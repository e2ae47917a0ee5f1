"""A checkpoint by its path."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from mpisgd.checkpoint.files import Folder
from mpisgd.checkpoint.format import Document, read


def read_file(path: Path, objects: Collection[str] = ()) -> tuple[Document, dict[str, Tensor]]:
    return read(Folder(path.parent), path.name, objects)
