"""The public API is what the committed snapshot says: no name and no signature changes unseen."""

from __future__ import annotations

import difflib

import public_api

import mpisgd


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


def test_a_changed_default_is_a_change(monkeypatch):
    node = public_api.definitions("mpisgd.collectives.barrier")["barrier"]
    before = public_api.describe_value("barrier", mpisgd.barrier)
    monkeypatch.setattr(node.args, "defaults", [])
    assert public_api.describe_value("barrier", mpisgd.barrier) != before


def test_the_citation_names_the_version():
    text = (public_api.SNAPSHOT.parents[2] / "CITATION.cff").read_text()
    assert f"\nversion: {mpisgd.__version__}\n" in text
