"""`python -m mpisgd plan`: what it prints, writes and refuses; and the examples of its page."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from plan_examples import profile
from typer.testing import CliRunner

from mpisgd.errors import JobError
from mpisgd.tools.cli.main import app
from mpisgd.tools.plan.files import read_cluster, read_model, write_step

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "plan.md").read_text()


def example(name):
    return re.search(rf"<!-- test: {name} -->\n```[^\n]+\n(.*?)```", PAGE, re.DOTALL)[1]


@pytest.fixture
def files(tmp_path):
    cluster, step = tmp_path / "cluster.toml", tmp_path / "step.json"
    cluster.write_text(example("cluster"))
    write_step(step, profile(*[10**6] * 4, optimizer_s=0.01))
    return [str(cluster), "--model", str(step)]


def run(*words):
    return CliRunner().invoke(app, ["plan", *map(str, words)], catch_exceptions=False)


def test_it_prints_a_table_and_what_follows(files):
    found = run(*files, "--ranks", "1,8,128", "--collectives", "64MiB")
    assert found.exit_code == 0
    for said in (
        "predicted, the fastest first",
        "Sharded(stage=2)",
        "all_reduce of 64 MiB",
        "what rules its step: compute",
        "best: ",
        "ranks that compute twice as fast",
        "failures: one every",
        "start it with: python -m mpisgd run -n 128 --hostfile hosts train.py",
    ):
        assert said in found.stdout, said


def test_it_names_the_best_that_is_the_same_algorithm(files):
    found = run(*files, "--ranks", "128", "--methods", "Synchronous; DiLoCo(100)")
    assert "best: DiLoCo(100)" in found.stdout
    assert "the best that equals one process: Synchronous on 128 rank(s)" in found.stdout


def test_what_is_left_out_is_said_in_plain_words(files):
    found = run(*files, "--ranks", "8", "--methods", "Synchronous; Sharded(stage=2)+TopK(0.1)")
    line = next(line for line in found.stdout.splitlines() if line.startswith("left out"))
    assert line.startswith(
        "left out: Sharded(stage=2)+TopK(0.1) on 8 ranks: Sharded(stage=2) with TopK(ratio=0.1)"
    )
    assert "[mpisgd:" not in found.stdout


def test_rows_are_sorted_and_their_parts_add_up(files, tmp_path):
    out = tmp_path / "plan.json"
    assert run(*files, "--ranks", "8,128", "--json", out).exit_code == 0
    page = json.loads(out.read_text())
    assert page["kind"] == "plan"
    rates = [row["examples_per_s"] for row in page["rows"]]
    assert rates == sorted(rates, reverse=True)
    for row in page["rows"]:
        parts = row["compute_s"] + row["straggler_s"] + row["exposed_s"] + row["optimizer_s"]
        assert parts == pytest.approx(row["step_s"])
        assert row["memory_total_bytes"] == pytest.approx(sum(row["memory_bytes"].values()))


def test_methods_and_an_algorithm_that_were_asked_for(files):
    found = run(
        *files, "--ranks", "128", "--methods", "LocalSGD(4) + bf16; FullyShard", "--algorithm", "tree"
    )
    assert "LocalSGD(4)" in found.stdout
    assert "DiLoCo" not in found.stdout


MANY = """
hosts = 12500
ranks_per_host = 8
flops = "20 Tflop/s"
memory_bandwidth = "2 TB/s"
[within]
latency = "5 us"
bandwidth = "200 GB/s"
shared = false
[between]
latency = "10 us"
bandwidth = "100 Gbit/s"
[network]
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "network",
    [
        'topology = "switch"',
        'topology = "fat tree"\nhosts_per_switch = 32\noversubscription = 4',
        'topology = "torus"\nshape = [24, 24, 22]',
    ],
)
def test_a_hundred_thousand_ranks_take_seconds(tmp_path, network):
    """Of a processor, all methods and layouts and what would make the best faster; without imports.

    The whole command took 9 s, 10 s and 14 s, in the order of the networks, while others used the processor.
    """
    path = tmp_path / "many.toml"
    path.write_text(MANY + network)
    begun = time.process_time()
    assert run(path, "--model", "gpt(layers=24, heads=16, dim=2048, context=2048)").exit_code == 0
    assert time.process_time() - begun < 20


@pytest.mark.parametrize(
    ("network", "said"),
    [
        ('topology = "switch"', "one switch"),
        (
            'topology = "fat tree"\nhosts_per_switch = 32\noversubscription = 4',
            "fat tree, 32 hosts per switch, oversubscription 4",
        ),
        ('topology = "torus"\nshape = [24, 24, 22]', "torus of 24 x 24 x 22"),
    ],
)
def test_it_says_what_was_planned_in_words(files, tmp_path, network, said):
    path = tmp_path / "many.toml"
    path.write_text(MANY + network)
    found = run(path, *files[1:], "--ranks", "8", "--methods", "Synchronous")
    assert f"4,000,000 parameters, batch 8 per rank; 12500 hosts of 8 ranks, {said}" in " ".join(
        found.stdout.split()
    )


def test_pictures_have_the_model_and_the_cluster_in_two_lines(files, tmp_path, monkeypatch):
    lines = []
    for name in ("draw_throughput", "draw_timelines"):
        monkeypatch.setattr(
            f"mpisgd.tools.plan.pictures.{name}", lambda path, predictions, title: lines.append(title)
        )
    some = ["--methods", "Synchronous", "--plot", tmp_path / "a.png", "--timeline", tmp_path / "b.png"]
    assert run(*files, "--ranks", "8", *some).exit_code == 0
    cluster = "16 hosts of 8 ranks, fat tree, 4 hosts per switch, oversubscription 4"
    assert [title[1] for title in lines] == [cluster, cluster]
    assert all(title[0].endswith("4,000,000 parameters, batch 8 per rank") for title in lines)


def test_pictures_are_written(files, tmp_path):
    pytest.importorskip("matplotlib")
    plot, timeline = tmp_path / "plot.png", tmp_path / "step.png"
    few = ["--methods", "Synchronous; LocalSGD(4)"]
    assert run(*files, "--ranks", "8,128", *few, "--plot", plot, "--timeline", timeline).exit_code == 0
    for path in (plot, timeline):
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.toml", "--model", "mlp"], "No such file"),
        (["CLUSTER", "--model", "large"], "mlp, deep, transformer"),
        (["CLUSTER"], "expected --model, or --measure and a program"),
        (
            ["CLUSTER", "--model", "mlp", "train.py"],
            "expected --model, or --measure and a program",
        ),
        (["CLUSTER", "--model", "mlp", "--ranks", "12"], "12 ranks"),
        (["CLUSTER", "--model", "mlp", "--ranks", "many"], "expected for example 1,2,4"),
        (["CLUSTER", "--model", "mlp", "--methods", "Synchron"], "Synchron is no strategy"),
        (["CLUSTER", "--model", "mlp", "--algorithm", "star"], "algorithm='star'"),
        (["CLUSTER", "--model", "mlp", "--optimizer", "lion"], "optimizer='lion'"),
    ],
)
def test_mistakes_are_named(files, words, said):
    with pytest.raises(JobError, match=re.escape(said)):
        run(*(files[0] if word == "CLUSTER" else word for word in words))


def test_the_examples_of_the_page(tmp_path):
    cluster, model = tmp_path / "cluster.toml", tmp_path / "model.toml"
    cluster.write_text(example("cluster"))
    model.write_text(example("model"))
    assert read_cluster(cluster).cluster.size == 128
    assert read_model(model).numel == 52352 * 2048 + 24 * (12 * 2048**2 + 9 * 2048) + 4096
    assert (
        run(cluster, "--model", model, "--batch", "4", "--methods", "Synchronous; FullyShard").exit_code == 0
    )
