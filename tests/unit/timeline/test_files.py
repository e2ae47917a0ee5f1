"""A timeline's files: names, what is in them, and that nothing is needed of their end."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from mpisgd import InvalidArgument
from mpisgd.timeline.clock import Clock
from mpisgd.timeline.files import names_for, read_events
from mpisgd.timeline.recorder import Recorder
from mpisgd.tracing import Track

LANE = Track("group world", (0, 1))


def test_one_name_becomes_a_part_for_each_rank_and_a_whole(tmp_path):
    names = names_for(str(tmp_path / "run.json"), 3)
    assert names == (tmp_path / "run.rank3.json", tmp_path / "run.json")
    assert names_for("plain", 0) == (Path("plain.rank0.json"), Path("plain"))


def test_a_place_for_every_rank_is_left_as_it_is(tmp_path):
    assert names_for(str(tmp_path / "r{rank}.json"), 3) == (tmp_path / "r3.json", None)
    assert names_for(str(tmp_path), 3) == (tmp_path / "rank3.json", None)
    assert names_for("not_there_yet/", 3) == (Path("not_there_yet/rank3.json"), None)


def record(path: Path, num_spans: int, **options) -> Recorder:
    recorder = Recorder(path, 1, Clock(origin_ns=1000, offset_ns=500), **options)
    for i in range(num_spans):
        recorder.span(LANE, f"op {i}", 2000 * i, 2000 * i + 1000, "collective", {"bytes": i})
    return recorder


def test_spans_are_in_the_time_of_rank_0(tmp_path):
    record(tmp_path / "t", 3).close()
    events = json.loads((tmp_path / "t").read_text())
    spans = [event for event in events if event["ph"] == "X"]
    assert [(span["name"], span["ts"], span["dur"]) for span in spans] == [
        ("op 0", -0.5, 1.0),
        ("op 1", 1.5, 1.0),
        ("op 2", 3.5, 1.0),
    ]
    assert all(span["pid"] == 1 for span in spans)
    track = next(event for event in events if event["name"] == "thread_name")
    assert track["args"] == {"name": "group world", "ranks": [0, 1]}
    assert track["tid"] == spans[0]["tid"]


def test_it_can_be_read_however_much_of_it_is_there(tmp_path):
    record(tmp_path / "whole", 20).close()
    whole = list(read_events(tmp_path / "whole"))
    text = (tmp_path / "whole").read_text()
    for end in range(2, len(text), 37):
        (tmp_path / "cut").write_text(text[:end])
        found = list(read_events(tmp_path / "cut"))
        assert found == whole[: len(found)]
        assert len(found) >= text[:end].count(",\n")


def test_what_was_noted_is_in_the_file_while_the_program_runs(tmp_path):
    recorder = record(tmp_path / "t", 1)
    limit = time.monotonic() + 10
    while "op 0" not in (tmp_path / "t").read_text():
        assert time.monotonic() < limit
        time.sleep(0.01)
    recorder.close()


def test_what_does_not_fit_is_counted(tmp_path):
    recorder = Recorder(tmp_path / "t", 0, Clock(), capacity=10)
    with recorder._writing:  # the disk is slow
        for i in range(25):
            recorder.span(LANE, str(i), i, i, "collective", {})
        assert 15 <= recorder.lost + 1 <= 16  # the thread may have taken one already
    recorder.close()
    events = json.loads((tmp_path / "t").read_text())
    lost = next(event for event in events if event["name"] == "lost")["args"]["events"]
    assert lost + sum(event["ph"] == "X" for event in events) == 25


def test_phases_begin_and_end_within_each_other(tmp_path):
    recorder = Recorder(tmp_path / "t", 0, Clock())
    phases = [
        ("g", 0, 90),
        ("WAIT", 0, 40),
        ("QUEUE", 40, 40),
        ("RUN", 40, 90),
        ("IN", 40, 60),
        ("OUT", 60, 90),
    ]
    recorder.overlapping("horovod", "g", phases, {"bytes": 4})
    recorder.close()
    events = [e for e in json.loads((tmp_path / "t").read_text()) if e["ph"] in "be"]
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    open_phases: list[tuple[str, float]] = []
    seen = []
    for event in events:
        if event["ph"] == "b":
            open_phases.append((event["name"], event["ts"]))
        else:
            name, begin = open_phases.pop()
            assert name == event["name"]
            seen.append((name, round(begin * 1000), round(event["ts"] * 1000)))
    assert sorted(seen) == sorted(phases)
    assert events[0]["args"] == {"bytes": 4}


@pytest.mark.parametrize("content", ["", '{"traceEvents": []}', "hello\n"])
def test_another_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(InvalidArgument, match=r"other\.json"):
        list(read_events(tmp_path / "other.json"))


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(InvalidArgument, match="missing"):
        list(read_events(tmp_path / "missing"))


def test_memory_and_what_was_sent_are_sampled(tmp_path):
    recorder = Recorder(tmp_path / "t", 1, Clock())
    for dst, nbytes in ((0, 100), (2, 7), (0, 50)):
        recorder.sent(dst, nbytes)
    recorder.close()
    samples = [e for e in json.loads((tmp_path / "t").read_text()) if e["ph"] == "C"]
    last = {event["name"]: event["args"] for event in samples}
    assert last["bytes sent"] == {"to rank 0": 150, "to rank 2": 7}
    assert last["memory"]["own"] > 2**20
    assert last["memory"]["device"] == 0
    assert all(event["pid"] == 1 for event in samples)
