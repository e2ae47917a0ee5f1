"""A record of `bench` becomes a file of benchmarks/ that says where its numbers come from."""

from __future__ import annotations

import json

import pytest
from measurements import parse
from record_table import main, measurement

HEADER = {
    "when": "2026-11-23T18:20:52+00:00",
    "machine": {"processor": "a processor", "cores": 2, "architecture": "x86_64"},
    "versions": {"mpisgd": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6", "MPI": "Open MPI v5.0.11"},
}


def spread(variant, *seconds, **more):
    return {"variant": variant, "median_s": seconds[1], "min_s": seconds[0], "max_s": seconds[2], **more}


def step(model, variant, *seconds):
    ratios = {"ratio_to_no_communication": 1.5, "ratio_to_one_process": None}
    return spread(variant, *seconds, model=model, threads=1, examples_per_s=600.0, **ratios)


STEP = {
    "kind": "step",
    **HEADER,
    "command": "python -m mpisgd bench step --rounds 3 --json runs/a.json --plot b.png",
    "size": 2,
    "hosts": 1,
    "peers": {"gloo": "torch 2.13.0", "horovod": "horovod 0.28.1"},
    "peers_left_out": {"nccl": "no GPU"},
    "left_out": [{"model": "deep", "variant": "FSDP2 gloo", "reason": "too slow"}],
    "rows": [step("mlp", "none", 0.05, 0.06, 0.07), step("mlp", "mpisgd", 0.08, 0.1, 0.2)],
}
TIMED = {**HEADER, "command": "python scripts/bench/x.py", "size": 2, "rows": []}


def test_a_record_of_steps_is_a_table_with_medians_and_spread_below_their_provenance():
    made = measurement(STEP, "Training steps", "mpirun -n 2")
    assert parse(made.text) == made
    assert dict(made.facts) == {
        "command": "`mpirun -n 2 python -m mpisgd bench step --rounds 3`",
        "machine": "a processor, 2 cores",
        "versions": "mpisgd 0.1.0, torch 2.13.0, Open MPI v5.0.11, horovod 0.28.1",
        "date": "2026-11-23",
        "ranks": "2 ranks on 1 host",
        "missing": "FSDP2 gloo (deep): too slow",
    }
    assert made.all_of("missing") == ["nccl: no GPU", "FSDP2 gloo (deep): too slow"]
    (table,) = made.tables
    assert [row[:6] for row in table.rows] == [
        ["mlp", "none", "1", "60.0 ms", "50.0 ms", "70.0 ms"],
        ["mlp", "mpisgd", "1", "100 ms", "80.0 ms", "200 ms"],
    ]
    assert list(table.columns[3:6]) == ["median", "min", "max"]


@pytest.mark.parametrize(
    ("kind", "section", "field"),
    [
        ("checkpoint", "model", "ratio_to_step"),
        ("data_parallel", "model", "ratio_to_ddp"),
        ("fusion", "gradients", "ratio_to_fused"),
    ],
)
def test_records_of_scripts_are_tables_too(kind, section, field):
    row = spread("a step", 0.2, 0.25, 0.4, **{section: "mlp", field: 1.0})
    made = measurement({**TIMED, "kind": kind, "rows": [row]}, "")
    assert parse(made.text) == made
    assert made.tables[0].rows == [["mlp", "a step", "250 ms", "200 ms", "400 ms", "1.00"]]


def test_faults_have_the_table_that_was_printed(tmp_path):
    record = {"kind": "faults", **HEADER, "command": "python scripts/fault_injection/fault_rounds.py"}
    record |= {"columns": ["kind", "faults"], "cells": [["kill", "15"]], "outcomes": []}
    source, out = tmp_path / "faults.json", tmp_path / "faults.md"
    source.write_text(json.dumps(record))
    main(source, out, title="Faults")
    made = parse(out.read_text())
    assert made.title == "Faults"
    assert made.tables[0].rows == [["kill", "15"]]


def test_the_overview_has_a_column_for_each_library_and_one_process_in_every_row():
    def row(network, variant, rate, seconds):
        return {
            "network": network,
            "variant": variant,
            "examples_per_s": {"median": rate, "min": rate - 1, "max": rate + 1},
            "seconds_to_target": {"median": seconds, "min": seconds, "max": seconds},
        }

    rows = [
        row("one host", "one process, 2 threads", 4000.0, 2.5),
        row("one host", "mpisgd", 5000.0, 2.25),
        row("2 hosts", "mpisgd", 1000.0, None),
    ]
    record = {"kind": "overview", **TIMED, "title": "Digits", "target": 0.97, "rows": rows}
    first, spread = measurement(record, "Overview").tables
    assert list(first.columns) == ["network", "what", "one process, 2 threads", "mpisgd"]
    assert first.rows == [
        ["one host", "examples per second", "4,000", "5,000"],
        ["one host", "seconds to 97%", "2.50", "2.25"],
        ["2 hosts", "examples per second", "4,000", "1,000"],
        ["2 hosts", "seconds to 97%", "2.50", "not reached"],
    ]
    assert ["2 hosts", "mpisgd", "examples per second", "1,000", "999", "1,001"] in spread.rows
