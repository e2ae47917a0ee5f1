"""Whatever a file has in a place: one line that names the place, or a plan; and what is said of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import validate_plan
from measurements import parse
from plan_examples import predicted

from mpisgd.errors import InvalidArgument
from mpisgd.tools.plan.checked import checked_by, kind_of
from mpisgd.tools.plan.cluster import Cluster, Link
from mpisgd.tools.plan.files import FAILURES, LINK, SCALARS, read_cluster, read_model, read_step, write_step
from mpisgd.tools.plan.methods import planned_methods
from mpisgd.tools.plan.network import FatTree, Switch

ROOT = Path(__file__).parents[3]
JUNK = [
    0,
    -1,
    1.5,
    "inf",
    "nan",
    '""',
    '"5 us 3"',
    '"1.2.3 GB/s"',
    "true",
    "[]",
    "[1, 2]",
    "{a = 1}",
    10**400,
]
WITHIN = {"latency": '"1 us"', "bandwidth": '"10 GB/s"'}


def cluster_text(where, key, value):
    tables = {
        "": {"hosts": 4, "ranks_per_host": 2},
        "within": dict(WITHIN),
        "between": dict(WITHIN),
        "failures": {"mtbf_hours": 100},
        "network": {"topology": '"fat tree"', "hosts_per_switch": 2},
        "compression": {},
    }
    tables[where][key] = value
    return "\n".join(
        line
        for name, table in tables.items()
        for line in [*([f"[{name}]"] if name else []), *(f"{key} = {value}" for key, value in table.items())]
    )


PLACES = [
    *(("", key) for key in SCALARS),
    *((table, key) for table in ("within", "between") for key in LINK),
    ("within", "shared"),
    *(("failures", key) for key in FAILURES),
    *(("network", key) for key in ("topology", "hosts_per_switch", "oversubscription")),
    ("compression", '"TopK(ratio=0.01)"'),
]


def refusals(path, read, text_of):
    """What is said of the values that are refused; anything but InvalidArgument is a failure."""
    said = {}
    for value in JUNK:
        path.write_text(text_of(value))
        try:
            read(path)
        except InvalidArgument as exc:
            said[str(value)] = str(exc)
    assert not any("\n" in text for text in said.values()), said
    return said


@pytest.mark.parametrize(("where", "key"), PLACES)
def test_junk_in_a_cluster_file_is_named_in_one_line(tmp_path, where, key):
    said = refusals(tmp_path / "cluster.toml", read_cluster, lambda value: cluster_text(where, key, value))
    known = SCALARS | LINK | FAILURES
    names = [key.strip('"'), *known.get(key, ())[:1]]
    assert [text for text in said.values() if not any(name in text for name in names)] == []
    assert [text for text in said.values() if "expected" not in text] == []
    assert len(said) >= 7


MODEL_KEYS = (
    "shapes",
    "parameters",
    "flops",
    "activations",
    "outputs",
    "all_reduces",
    "keys",
    "attention_flops",
    "repeat",
)


@pytest.mark.parametrize("key", MODEL_KEYS)
def test_junk_in_a_model_file_is_named_in_one_line(tmp_path, key):
    others = "" if key in ("shapes", "parameters") else "shapes = [[4, 4]]\n"
    said = refusals(
        tmp_path / "model.toml", read_model, lambda value: f"[[layer]]\n{others}{key} = {value}\n"
    )
    assert len(said) >= 6


@pytest.mark.parametrize(
    "key", ["batch", "forward_s", "gradients", "blocks", "optimizer", "activation_bytes"]
)
def test_junk_in_a_step_file_is_refused(tmp_path, key):
    path = tmp_path / "step.json"
    write_step(path, predicted("Synchronous").profile)
    page = json.loads(path.read_text())
    for value in (None, "x", [1], {"a": 1}, -1):
        path.write_text(json.dumps({**page, key: value}))
        with pytest.raises(InvalidArgument):
            read_step(path)


def test_all_that_was_assumed_is_said(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_text("between", "message", '"1 us"'))
    first, rest = read_cluster(path).assumed
    assert first.startswith('memory_bandwidth = "10 GB/s"')
    for said in ("half_factor = 1", "tensor = 0", "[within] message = 5e-07", "[within] shared = true"):
        assert said in rest
    for given in ("[between] message", "[between] latency", "topology"):
        assert given not in rest


def test_the_list_of_what_was_measured_is_that_of_the_benchmarks():
    """As `scripts/planning/validate_plan.py report` writes it: nobody adds a kind by hand."""
    cases = (ROOT / "benchmarks" / "plan-validation.md").read_text()
    assert validate_plan.KINDS_OF_PLAN.read_text() == validate_plan.measured_kinds(cases)


def test_kinds_differ_by_options_and_not_by_numbers():
    def kinds(text):
        return {kind_of(method) for method in planned_methods(text)}

    assert len(kinds("LocalSGD(4); LocalSGD(8)")) == 1
    assert len(kinds("Synchronous + TopK(ratio=0.01); Synchronous + TopK(ratio=0.5)")) == 1
    apart = (
        "LocalSGD(4); LocalSGD(4, warmup_steps=9); LocalSGD(4, growth=2.0); Sharded(stage=1);"
        "Sharded(stage=2);"
        "Gossip('ring'); Gossip('exponential'); Parallel(pp=2); Parallel(tp=2); Parallel(tp=2, pp=2);"
        "Parallel(pp=2, recompute=True); Parallel(pp=2, schedule='interleaved', stages_per_rank=2)"
    )
    assert len(kinds(apart)) == len(apart.split(";"))


def test_what_is_called_measured_has_been():
    """Of every strategy and compression of the table there are cases in the file, and of other ones none."""
    errors = parse((ROOT / "benchmarks" / "plan-validation.md").read_text()).table("errors")
    names = {name for name, *_ in errors.rows} - {"all"}
    here = Cluster(4, 1, Link(1e-5, 1e9), Link(1e-6, 1e10), Switch())
    assert {checked_by(here, method) for method in planned_methods(";".join(names))} == {"measured"}
    for name, word in {
        "Synchronous + TopK(ratio=0.01)": "simulated",
        "Sharded(stage=2)": "simulated",
        "Parallel(tp=2, pp=2)": "simulated",
        "ParameterServer('sync')": "formula",
    }.items():
        assert checked_by(here, planned_methods(name)[0]) == word
    tree = Cluster(4, 1, Link(1e-5, 1e9), Link(1e-6, 1e10), FatTree(2, 2.0))
    assert checked_by(tree, planned_methods("Synchronous")[0]) == "simulated"
