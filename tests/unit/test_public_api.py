"""The public API is what the committed snapshot says: no name and no signature changes unseen."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import public_api
import pytest

import mpisgd

CHANGELOG = public_api.SNAPSHOT.parents[2] / "CHANGELOG.md"
RELEASES = sorted(public_api.SNAPSHOT.parent.glob(f"{public_api.SNAPSHOT.stem}-*.txt"))


def test_the_public_api_is_that_of_the_snapshot():
    expected, found = public_api.SNAPSHOT.read_text(), public_api.describe()
    diff = difflib.unified_diff(
        expected.splitlines(), found.splitlines(), "snapshot", "package", lineterm="", n=0
    )
    text = "\n".join(diff)
    assert not text, (
        f"the public API has changed:\n{text}\nIf that is meant: "
        "python scripts/checking/public_api.py --write, and a line in CHANGELOG.md "
        "(docs/releasing.md says what may change when)"
    )


def test_the_snapshot_has_every_public_name():
    text = public_api.SNAPSHOT.read_text().split("# mpisgd.checkpoint")[0]
    assert all(f"{name}" in text for name in mpisgd.__all__)


def test_a_release_has_a_snapshot_of_its_own():
    file = public_api.released(mpisgd.__version__)
    if public_api.is_release(mpisgd.__version__):
        assert file.read_text() == public_api.SNAPSHOT.read_text(), "run: public_api.py --write"
    else:
        assert not file.exists()


@pytest.mark.parametrize("file", RELEASES, ids=lambda file: file.stem)
def test_what_is_gone_since_a_release_stands_in_the_changelog(file):
    """A name that is removed, or whose signature changed, is named above the section of that release."""
    later = CHANGELOG.read_text().split(f"## [{version_of(file)}]")[0]
    gone = gone_since(file.read_text(), public_api.SNAPSHOT.read_text())
    assert [line for line in gone if name_of(line) not in later] == []


def test_a_removed_name_is_gone():
    before = "# mpisgd\n\ndef one(x: int) -> int\nclass Two(Base)\n    def f(self) -> None\n"
    after = before.replace("x: int", "x: int, y: int=0").replace("    def f(self) -> None\n", "")
    assert gone_since(before, after) == ["def one(x: int) -> int", "    def f(self) -> None"]
    assert [name_of(line) for line in gone_since(before, after)] == ["one", "f"]


def gone_since(before: str, now: str) -> list[str]:
    """The lines of an older snapshot that a newer one lacks."""
    there = set(now.splitlines())
    return [line for line in before.splitlines() if line not in there]


def name_of(line: str) -> str:
    """The name that a line of a snapshot describes."""
    return (
        re.sub(r"^(?:@\S+ )*(?:def |class |module )?", "", line.strip())
        .split("(")[0]
        .split(":")[0]
        .split(" ")[0]
    )


def version_of(file: Path) -> str:
    return file.stem.removeprefix(f"{public_api.SNAPSHOT.stem}-")


def test_a_changed_default_is_a_change(monkeypatch):
    node = public_api.definitions("mpisgd.collectives.barrier")["barrier"]
    before = public_api.describe_value("barrier", mpisgd.barrier)
    monkeypatch.setattr(node.args, "defaults", [])
    assert public_api.describe_value("barrier", mpisgd.barrier) != before


def test_the_citation_and_the_changelog_name_the_version():
    text = (public_api.SNAPSHOT.parents[2] / "CITATION.cff").read_text()
    assert f"\nversion: {mpisgd.__version__}\n" in text
    if public_api.is_release(mpisgd.__version__):
        assert f"\n## [{mpisgd.__version__}]" in CHANGELOG.read_text()
