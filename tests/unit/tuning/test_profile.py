"""Profile files: what is written is read again, what is damaged is refused with a reason."""

from __future__ import annotations

import json
import math
import os
from itertools import groupby

import pytest

from mpisgd.tuning import CostModel, Curve, LineSegment, MeasuredCurves
from mpisgd.tuning.model import kind
from mpisgd.tuning.profile import (
    ProfileError,
    as_profile,
    built_in,
    default_path,
    read,
    topology_name,
    write,
)

LINE = (LineSegment(4096.0, 1e-6, 0.0), LineSegment(math.inf, 2e-6, 3e-10))
POINTS = ((256.0, 1e-6), (2.0**20, 3.2e-4))
MEASURED = (
    MeasuredCurves(
        (2, 2), (Curve("mpi", False, LINE, 1, POINTS), Curve("hierarchical", True, LINE, 2, POINTS))
    ),
    MeasuredCurves((2,), (Curve("node", False, LINE), Curve("mpi", False, LINE, collective="broadcast"))),
)
HEADER = {"command": "python -m mpisgd tune", "machine": {"cores": 2}}


@pytest.fixture
def page() -> dict:
    return json.loads(json.dumps(as_profile(MEASURED, HEADER)))


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        ([2], "2"),
        ([2, 2], "2+2"),
        ([1, 3], "3+1"),
        ([2, 1, 2], "2+2+1"),
        ([8] * 64, "64x8"),
        ([4] * 5 + [2], "5x4+2"),
    ],
)
def test_topologies_have_short_names(ranks, wanted):
    assert topology_name(ranks) == wanted


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "new folder" / "profile.json"
    write(path, as_profile(MEASURED, HEADER))
    assert read(path) == CostModel(str(path), MEASURED)
    assert json.loads(path.read_text())["command"] == HEADER["command"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_writing_replaces_the_file_as_a_whole(tmp_path, page):
    path = tmp_path / "profile.json"
    write(path, page)
    before = os.stat(path).st_ino
    with pytest.raises(TypeError):
        write(path, {**page, "machine": object()})  # breaks off in the middle
    assert read(path).measured == MEASURED
    write(path, page)
    assert os.stat(path).st_ino != before
    assert os.listdir(tmp_path) == ["profile.json"]


def damage(page, *keys, value):
    """Put `value` at a place deep inside."""
    place = page
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value


CURVE = ("measured", 0, "curves", 0)


@pytest.mark.parametrize(
    ("keys", "value", "said"),
    [
        (("format",), "of another program", "no mpisgd profile"),
        (("version",), 3, "version 3"),
        (("measured",), None, "damaged"),
        (("measured", 0), {}, "ranks_per_host"),
        (("measured", 0, "ranks_per_host"), [1], "two ranks"),
        (("measured", 0, "ranks_per_host"), [2.5], "2.5"),
        ((*CURVE, "speakers"), 0, "above zero"),
        ((*CURVE, "segments"), [], "last one open"),
        ((*CURVE, "segments"), [[None, 1e-6]], "damaged"),
        ((*CURVE, "segments", 1, 0), 8192.0, "last one open"),
        ((*CURVE, "segments", 0, 0), None, "ascending"),
        ((*CURVE, "segments", 0, 1), -1e-6, "below zero"),
        ((*CURVE, "segments", 0, 2), math.nan, "below zero"),
        ((*CURVE, "segments", 0, 2), "fast", "damaged"),
        ((*CURVE, "points"), [[1]], "damaged"),
        ((*CURVE, "points", 0, 0), 10**400, "damaged"),
    ],
)
def test_damage_is_refused_with_a_reason(tmp_path, page, keys, value, said):
    damage(page, *keys, value=value)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(page))
    with pytest.raises(ProfileError, match=said):
        read(path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b'{"format": 1}'])
def test_what_is_no_profile_is_refused(tmp_path, content):
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ProfileError):
        read(path)


def test_a_folder_is_refused_and_a_missing_file_is_missing(tmp_path):
    with pytest.raises(ProfileError):
        read(tmp_path)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none.json")


def test_the_usual_place_follows_the_environment(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert str(default_path([2, 2])) == "/caches/mpisgd/profile-2+2.json"


def test_there_are_built_in_values_for_every_kind_of_ranks():
    model = built_in()
    kinds = sorted(kind(measured.ranks_per_host) for measured in model.measured)
    assert kinds == ["one host", "one rank per host", "several ranks per host"]
    for shape in ([2], [8], [1, 1], [4, 4, 4], [3, 2]):
        names = ["mpi", "node"] if len(shape) == 1 else ["mpi", "all_to_all"]
        for half in (False, True):
            assert all(model.at(shape).seconds(name, 2**20, half) < math.inf for name in names)


NODE = ("direct", "node", "mpi", "all_to_all")
HOSTS = ("hierarchical", "mpi", "ring", "halving_doubling", "all_to_all")
WITHOUT_SHARED_MEMORY = ("mpi", "ring", "halving_doubling", "all_to_all")


@pytest.mark.parametrize(
    ("ranks", "candidates", "half", "wanted"),
    [
        ([2], NODE, False, {4: "node", 2**18: "direct"}),
        ([2], NODE, True, {4: "node", 2**16: "direct"}),
        ([8], NODE, False, {4: "node", 2**19: "direct"}),
        ([8], NODE, True, {4: "node", 2**17: "direct"}),
        ([1] * 8, HOSTS, False, {4: "hierarchical", 2**13: "mpi", 2**14: "hierarchical"}),
        ([1] * 8, HOSTS, True, {4: "hierarchical", 2**12: "mpi", 2**13: "hierarchical"}),
        ([4, 4, 4], HOSTS, False, {4: "hierarchical"}),
        ([1] * 2, WITHOUT_SHARED_MEMORY, True, {4: "mpi", 2**13: "all_to_all"}),
        ([1] * 8, WITHOUT_SHARED_MEMORY, True, {4: "mpi", 2**14: "all_to_all"}),
        ([2, 2], WITHOUT_SHARED_MEMORY, False, {4: "mpi"}),
    ],
)
def test_what_the_built_in_values_choose_from_which_size_on(ranks, candidates, half, wanted):
    model = built_in().at(ranks)
    runs = groupby(
        (2**power for power in range(2, 29)), lambda nbytes: model.choose(candidates, nbytes, half)
    )
    assert {next(sizes): name for name, sizes in runs} == wanted


def test_the_draft_follows_no_link_and_the_mode_is_what_the_umask_allows(tmp_path, page, monkeypatch):
    """Its name could be told beforehand: what somebody had put there was overwritten; its mode was 0644."""
    path, victim = tmp_path / "profile.json", tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda _: "known")
    (tmp_path / ".profile.json-known").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write(path, page)
    assert victim.read_text() == "precious"
    monkeypatch.undo()
    old = os.umask(0o077)
    try:
        write(path, page)
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
