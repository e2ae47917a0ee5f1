"""Cluster, model and step files: what is understood, and what is said of mistakes."""

from __future__ import annotations

import json

import pytest
from plan_examples import profile

from mpisgd.errors import InvalidArgument
from mpisgd.tools.plan.cluster import Cluster, Failures, Link
from mpisgd.tools.plan.files import link_from_times, read_cluster, read_model, read_step, write_step
from mpisgd.tools.plan.models.model import profile_of
from mpisgd.tools.plan.network import FatTree, Torus
from mpisgd.tools.plan.simulation.collectives import cost_of
from mpisgd.tools.plan.units import as_flops, as_nbytes, as_rate, as_seconds
from mpisgd.tuning.curve import Curve, LineSegment
from mpisgd.tuning.model import MeasuredCurves
from mpisgd.tuning.profile import as_profile

CLUSTER = """
hosts = 16
ranks_per_host = 8
flops = "20 Tflop/s"
memory = "80 GiB"
price_per_hour = 12.0
[within]
latency = "5 us"
bandwidth = "200 GB/s"
shared = false
[between]
latency = 1e-5
bandwidth = "100 Gbit/s"
[network]
topology = "fat tree"
hosts_per_switch = 4
oversubscription = 2
[failures]
mtbf_hours = 1000
checkpoint = "2 min"
[compression]
"PowerSGD(rank=4)" = "0.2 ns"
"""


def write(folder, text, name="cluster.toml"):
    path = folder / name
    path.write_text(text)
    return path


def test_a_cluster_file(tmp_path):
    found = read_cluster(write(tmp_path, CLUSTER))
    assert found.cluster == Cluster(
        hosts=16,
        ranks_per_host=8,
        between=Link(1e-5, 12.5e9, message_s=5e-7),
        within=Link(5e-6, 2e11, message_s=5e-7),
        network=FatTree(4, 2),
        within_is_shared=False,
        flops_per_s=2e13,
        memory_bytes=80 * 2**30,
        price_per_hour=12.0,
        failures=Failures(1000, checkpoint_s=120),
    )
    assert found.compression_s == {"PowerSGD(rank=4)": pytest.approx(2e-10)}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("hosts = 16", "", "`hosts` is missing"),
        ("hosts = 16", "hosts = 0", "hosts=0"),
        ("hosts = 16", "host = 16", "unknown host"),
        ('"100 Gbit/s"', '"fast"', "between: bandwidth='fast'"),
        ('bandwidth = "100 Gbit/s"', "", r"\[between\] needs bandwidth"),
        ('"fat tree"', '"star"', "topology='star'"),
        ("oversubscription = 2", "oversubscription = -2", "oversubscription=-2"),
        ("hosts_per_switch = 4", "switches = 4", "network: .*switches"),
        ("mtbf_hours = 1000", "", "needs mtbf_hours"),
        ("[failures]", "[failure", "cluster.toml: "),
    ],
)
def test_mistakes_are_named(tmp_path, before, after, said):
    assert before in CLUSTER
    with pytest.raises(InvalidArgument, match=said):
        read_cluster(write(tmp_path, CLUSTER.replace(before, after)))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(InvalidArgument, match="No such file"):
        read_cluster(tmp_path / "none.toml")


def test_a_torus_file(tmp_path):
    text = CLUSTER.replace('"fat tree"', '"torus"').replace("hosts_per_switch = 4", "shape = [4, 4]")
    found = read_cluster(write(tmp_path, text.replace("oversubscription = 2", "")))
    assert found.cluster.network == Torus((4, 4))


def test_ranks_fill_hosts(tmp_path):
    cluster = read_cluster(write(tmp_path, CLUSTER)).cluster
    assert [(c.hosts, c.ranks_per_host) for c in map(cluster.at, (1, 8, 24, 128))] == [
        (1, 1),
        (1, 8),
        (3, 8),
        (16, 8),
    ]
    for wrong in (0, 12, 136):
        with pytest.raises(InvalidArgument, match=f"{wrong} ranks"):
            cluster.at(wrong)


# -- from a profile ------------------------------------------------------------------------------------


def test_two_all_reduces_tell_what_links_do():
    """What the cost model makes of the links is what was measured, but for latency."""
    for hosts, k in ((1, 4), (2, 1), (4, 2)):
        within, between, operation_s = link_from_times(hosts, k, 1e-4, 1.0, 1e8)
        cluster = Cluster(hosts, k, between, within, operation_s=operation_s)
        assert cost_of(cluster, "hierarchical").seconds(1e8) == pytest.approx(1.0, rel=0.03)


def measured(ranks_per_host, algorithm, alpha, beta):
    points = tuple((float(n), alpha + beta * n) for n in (256, 2**20, 2**24))
    curve = Curve(algorithm, False, (LineSegment(float("inf"), alpha, beta),), points=points)
    return MeasuredCurves(ranks_per_host, (curve,))


def test_a_profile_of_tune_is_a_cluster(tmp_path):
    curves = [measured((2, 2), "hierarchical", 2e-4, 8e-9), measured((2,), "node", 1e-5, 1e-10)]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(as_profile(curves, {})))
    cluster = read_cluster(path).cluster
    assert (cluster.hosts, cluster.ranks_per_host) == (2, 2)
    assert cluster.between.bytes_per_s == pytest.approx(1 / 8e-9, rel=1e-3)
    assert cluster.within.bytes_per_s == pytest.approx(2e10, rel=1e-3)
    assert cluster.between.latency_s + cluster.operation_s == pytest.approx(2e-4, rel=0.02)


def test_a_cluster_file_may_name_a_profile_and_say_the_rest(tmp_path):
    (tmp_path / "p.json").write_text(
        json.dumps(as_profile([measured((1, 1), "hierarchical", 1e-4, 1e-8)], {}))
    )
    found = read_cluster(write(tmp_path, 'profile = "p.json"\nhosts = 64\nflops = "1 Tflop/s"\n'))
    assert (found.cluster.hosts, found.cluster.ranks_per_host, found.cluster.flops_per_s) == (64, 1, 1e12)
    assert found.cluster.between.bytes_per_s == pytest.approx(1e8, rel=1e-3)


# -- models and steps ----------------------------------------------------------------------------------


def test_a_model_file_and_its_step(tmp_path):
    text = """
    name = "small"
    itemsize = 2
    [[layer]]
    name = "block"
    repeat = 2
    shapes = [[10, 10], [10]]
    flops = "1 kflop"
    activations = "1 KiB"
    [[layer]]
    name = "head"
    parameters = 50
    flops = 2000
    """
    model = read_model(write(tmp_path, text, "model.toml"))
    assert [layer.name for layer in model.layers] == ["block.0", "block.1", "head"]
    assert (model.numel, model.itemsize) == (270, 2)
    cluster = Cluster(1, 1, Link(0, 1), Link(0, 1), flops_per_s=1000.0)
    step = profile_of(model, cluster, batch=3, optimizer="adamw")
    assert (step.forward_s, step.backward_s) == (12.0, 24.0)
    assert [(g.place, g.ready_s) for g in step.gradients] == [
        (4, 24.0),
        (3, 30.0),
        (2, 30.0),
        (1, 36.0),
        (0, 36.0),
    ]
    assert step.activation_bytes == 2 * 1024 * 3
    assert step.state_bytes == 2 * 270 * 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = 'x'", "no \\[\\[layer\\]\\]"),
        ("[[layer]]\nflops = 1", "either shapes or parameters"),
        ("[[layer]]\nparameters = 1\nwidth = 2", "unknown width"),
        ("[[layer]]\nparameters = 0", "no parameters"),
        ("colour = 1\n[[layer]]\nparameters = 1", "unknown colour"),
    ],
)
def test_mistakes_in_a_model_are_named(tmp_path, text, said):
    with pytest.raises(InvalidArgument, match=said):
        read_model(write(tmp_path, text, "model.toml"))


def test_a_model_needs_a_cluster_with_flops(tmp_path):
    model = read_model(write(tmp_path, "[[layer]]\nparameters = 5", "model.toml"))
    with pytest.raises(InvalidArgument, match="flops"):
        profile_of(model, Cluster(1, 1, Link(0, 1), Link(0, 1)), 1)


def test_a_step_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "step.json"
    write_step(path, profile(10, 20, optimizer="adamw"))
    assert read_step(path) == profile(10, 20, optimizer="adamw")


@pytest.mark.parametrize("text", ["", "{}", '{"format": "mpisgd step"}', "[]"])
def test_what_is_no_step_is_refused(tmp_path, text):
    with pytest.raises(InvalidArgument, match="no step"):
        read_step(write(tmp_path, text, "step.json"))


# -- units ---------------------------------------------------------------------------------------------


def test_units():
    assert as_rate("x", "100 Gbit/s") == as_rate("x", "12.5 GB/s") == as_rate("x", 12.5e9) == 12.5e9
    assert as_rate("x", "100 Gb/s") == as_rate("x", "1e11 b/s") == 12.5e9
    assert as_rate("x", "8 Mbps") == as_rate("x", "1 MBps") == as_rate("x", "8 MBit/s") == 1e6
    assert as_rate("x", "2 KiB/s") == 2048
    assert as_nbytes("x", "1.5 GiB") == 1.5 * 2**30
    assert as_nbytes("x", "80 GB") == 80e9
    assert as_flops("x", "312 Tflops") == as_flops("x", "312 Tflop/s") == 3.12e14
    assert as_seconds("x", "5 us") == as_seconds("x", "5 µs") == pytest.approx(5e-6)
    assert as_seconds("x", "2 h") == 7200


@pytest.mark.parametrize(
    ("convert", "text"),
    [
        (as_rate, "5"),
        (as_rate, "5 GB"),
        (as_rate, "5 gb/s"),
        (as_nbytes, "5 s"),
        (as_seconds, "5 GB"),
        (as_flops, True),
        (as_rate, "1.2.3 GB/s"),
        (as_rate, "1e999 GB/s"),
        (as_nbytes, "."),
        (as_seconds, "1e999"),
        (as_seconds, float("nan")),
        (as_nbytes, 10**400),
    ],
)
def test_other_units_are_refused(convert, text):
    with pytest.raises(InvalidArgument, match="x="):
        convert("x", text)
