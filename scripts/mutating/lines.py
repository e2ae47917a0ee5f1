"""Which items of the checks execute a line of the package: found once, without a fault."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import coverage

from mutating.items import Item

__all__ = ["Lines", "Trace"]


class Trace:
    """What this process executes from now on. Names of items are their check, a blank and their text.

    Attributes:
        failed: tests that are red.
        refused: names of the programs that mpisgd refuses.
    """

    def __init__(self) -> None:
        found = importlib.util.find_spec("mpisgd")
        assert found is not None
        assert found.origin is not None
        self._package = Path(found.origin).parent
        self.failed, self.refused = set[str](), set[str]()
        self._took_s: dict[str, float] = {}
        self._traced = coverage.Coverage(data_file=None, source=[str(self._package)], config_file=False)
        self._traced.start()

    def begin(self, name: str) -> None:
        """Note what follows as lines of an item."""
        self._traced.switch_context(name)

    def took(self, name: str, seconds: float) -> None:
        """Note how long an item took, or a part of it."""
        self._took_s[name] = self._took_s.get(name, 0.0) + seconds

    def save(self, folder: str) -> None:
        """Write what was found, in a file of this process."""
        self._traced.stop()
        data, lines = self._traced.get_data(), {}
        numbers = {name: number for number, name in enumerate(self._took_s)}
        for file in data.measured_files():
            path = str(Path(file).relative_to(self._package))
            lines[path] = {
                line: [numbers[name] for name in names if name in numbers]
                for line, names in data.contexts_by_lineno(file).items()
            }
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".json", delete=False) as out:
            told = {"failed": sorted(self.failed), "refused": sorted(self.refused)}
            json.dump({"took_s": self._took_s, "lines": lines, **told}, out)


class Lines:
    """What executes what.

    Args:
        folder: of the files that traces have written.

    Attributes:
        took_s: seconds of each item, traced.
        failed: tests that were red.
        refused: programs that mpisgd refuses.
    """

    def __init__(self, folder: Path) -> None:
        self.took_s: dict[Item, float] = {}
        self.failed, self.refused = set[str](), set[Item]()
        self._executing: dict[tuple[str, int], int] = {}  # by bits: the items, by their places in `took_s`
        places: dict[str, int] = {}
        for path in sorted(folder.glob("*/*.json")):
            found = json.loads(path.read_text())
            self.failed.update(found["failed"])
            self.refused.update(map(Item.named, found["refused"]))
            for name, seconds in found["took_s"].items():
                item = Item.named(name)
                places.setdefault(name, len(places))
                self.took_s[item] = max(seconds, self.took_s.get(item, 0.0))
            here = [1 << places[name] for name in found["took_s"]]
            for file, lines in found["lines"].items():
                for line, numbers in lines.items():
                    bits = self._executing.get((file, int(line)), 0)
                    for number in numbers:
                        bits |= here[number]
                    self._executing[file, int(line)] = bits

    def items(self, path: str, lines: Iterable[int]) -> set[Item]:
        """Return what executes one of these lines of a file of the package."""
        bits = 0
        for line in lines:
            bits |= self._executing.get((path, line), 0)
        return {item for place, item in enumerate(self.took_s) if bits >> place & 1}
