"""Bad arguments and files of the commands that start no job: one line that names them, and exit code 2."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from mpisgd.errors import JobError
from mpisgd.tools.cli.main import app

CLUSTER = """
hosts = 4
ranks_per_host = 2
{more}
[within]
latency = "1 us"
bandwidth = "10 GB/s"
[between]
latency = "10 us"
bandwidth = "10 Gbit/s"
{tables}
"""


def refused(*words) -> str:
    """What a command says that ends with exit code 2."""
    with pytest.raises(JobError) as caught:
        CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("more", "tables", "said"),
    [
        ("", '[network]\ntopology = ["a"]', "topology"),
        ("", '[network]\ntopology = "fat tree"', "hosts_per_switch"),
        ("", '[network]\ntopology = "torus"\nshape = 4', "Torus: shape=4"),
        ("", '[network]\ntopology = "torus"\nshape = [2, 2]\nwidth = 3', "expected shape"),
        ("compression = 3", "", "compression=3"),
        ('memory_bandwidth = "5 gb/s"', "", "GB/s for bytes"),
    ],
)
def test_a_cluster_file(tmp_path, more, tables, said):
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER.format(more=more, tables=tables))
    assert said in refused("plan", path, "--model", "mlp")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layer = 3", "layer=3"),
        ("layer = [3]", "layer=3"),
        ("[[layer]]\nshapes = [3]", r"shapes=[3]"),
        ("[[layer]]\nshapes = 3", "shapes=3"),
    ],
)
def test_a_model_file(tmp_path, text, said):
    (tmp_path / "cluster.toml").write_text(CLUSTER.format(more="", tables=""))
    (tmp_path / "model.toml").write_text(text)
    assert said in refused("plan", tmp_path / "cluster.toml", "--model", tmp_path / "model.toml")


def test_options_that_a_saved_step_would_ignore(tmp_path):
    cluster, step = tmp_path / "cluster.toml", tmp_path / "step.json"
    cluster.write_text(CLUSTER.format(more='flops = "1 Tflop/s"', tables=""))
    done = CliRunner().invoke(app, ["plan", str(cluster), "--model", "mlp", "--save", str(step)])
    assert done.exit_code == 0, done.output
    assert 'assumed, as the cluster file does not say: memory_bandwidth = "10 GB/s"' in done.output
    assert "--batch 64" in refused("plan", cluster, "--model", step, "--batch", 64)
    assert "--optimizer adam" in refused("plan", cluster, "--model", step, "--optimizer", "adam")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "os:nothing"), "expected such as train:make_model"),
        (("--model", "json:loads"), "json:loads: loads() has raised TypeError"),
        (("--parameters", "1e30"), "--parameters 1e+30"),
        (("--parameters", "0.5"), "--parameters 0.5"),
        (("--parameters", 100, "--optimizer", "LBFGS"), "LBFGS"),
        (("--parameters", 100, "--optimizer", "Optimizer"), "a step of Optimizer cannot be done"),
        (("--parameters", 100, "--dtype", "int8"), "int8"),
        (("--parameters", 100, "--dtype", "bfloat16", "--master", "float16"), "--master float16"),
        (("--parameters", 100, "--ranks", 2, "--ranks-per-host", 3), "--ranks-per-host 3"),
        (("--model", "train:make", "--parameters", 3), "pass one of"),
    ],
)
def test_what_memory_is_estimated_of(words, said):
    assert said in refused("memory", *words)


@pytest.mark.parametrize("text", ["[1, 2]", "[\n3,\n", '[\n{"name":"mpisgd"},\n', "\xff\xfe"])
def test_a_timeline(tmp_path, text):
    path = tmp_path / "timeline.json"
    path.write_bytes(text.encode("latin-1"))
    assert "timeline" in refused("trace", path)


def test_a_folder_that_cannot_be_written_to(tmp_path):
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER.format(more='flops = "1 Tflop/s"', tables=""))
    there = tmp_path / "nothing" / "here.json"
    assert "No such file" in refused("plan", cluster, "--model", "mlp", "--json", there)
