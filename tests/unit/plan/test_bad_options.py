"""Whatever an option of `python -m mpisgd plan` is given: one line of what was expected, and exit code 2."""

from __future__ import annotations

import pytest
from plan_examples import profile
from test_plan_command import example, run

from mpisgd.errors import JobError
from mpisgd.tools.plan.files import write_step

MANY_DIGITS = "9" * 5000
PROGRAM = """
import sys
def nothing(): return None
def fails(): raise RuntimeError("one line\\nand another")
def ends(): sys.exit(3)
def takes(one): return one
other = 3
"""
BAD = {
    "--ranks": ["0", "-1", "1,,2", "1.5", "\u00b2", MANY_DIGITS, ",", "12", "many"],
    "--batch": ["0", "-3", "x", "1e3"],
    "--top": ["0", "-3", "x"],
    "--model": [
        *("", "large", "no.toml", "no.json", "no.py:f", "FOLDER", "FOLDER/junk.json", "FOLDER/junk.toml"),
        *("gpt(", "gptx(dim=8)", "gpt(layers=0)", "gpt(layers='a')", "gpt(layers=1000000000)"),
        *("gpt(heads=3)", "gpt(speed=3)", "gpt(1, 2, 3, 4, 5, 6, 7)", "gpt()()", f"gpt(dim={10**400})"),
        *(f"FOLDER/program.py:{name}" for name in ("nothing", "fails", "ends", "takes", "other", "missing")),
        *("FOLDER/wrong.py:f", "no.module:f", ":f", "..:f", "program.py:"),
    ],
    "--methods": [
        *(";;", "Synchron", "Synchronous +", "+ bf16", "LocalSGD(4", "LocalSGD(4) + nothing", "\0"),
        *("LocalSGD(-1)", "Sharded(stage=9)", "Gossip('star of rings')", "Hogwild("),
        *("Synchronous with Nothing", "Synchronous + bf16 + bf16", "Overlap('x')", "FullyShard('x')"),
        *("FullyShard(1, 2, 3)", "Parallel(tp=0)", "Parallel(tp=True)", "Parallel(foo=1)", "Parallel(tp=2)"),
        *(
            "Parallel(pp=2, schedule='x')",
            "Parallel(pp=2, schedule=3)",
            "Parallel(pp=2, schedule='pipedream')",
        ),
        *("Parallel(tp=2) + TopK(ratio=0.01)", "Parallel(pp=1000000)", "Parallel(pp=2, stages_per_rank=2)"),
    ],
    "--algorithm": ["star", "", "RING"],
    "--collectives": ["x", "-1", "0", MANY_DIGITS, "1.5MiB", "999999999999GiB"],
    "--optimizer": ["lion", "adam"],  # the step was measured with its own
    "--json": ["FOLDER", "FOLDER/none/x.json"],
    "--save": ["FOLDER", "FOLDER/none/x.json"],
    "--measure": ["none.py", "FOLDER"],
    "--nonsense": ["1"],
}
CLUSTERS = ["none.toml", "FOLDER", "FOLDER/junk.json", "FOLDER/junk.toml", "FOLDER/profile.toml"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "cluster.toml").write_text(example("cluster"))
    (tmp_path / "junk.json").write_text("{")
    (tmp_path / "junk.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "profile.toml").write_text("profile = 3\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "wrong.py").write_text("def f(:\n")
    write_step(tmp_path / "step.json", profile(10**6))
    return tmp_path


def refuse(*words):
    """Run a plan that has to be refused, and return what it said."""
    error = None
    try:
        found = run(*words)
    except JobError as exc:
        error = exc
    if error is None:  # what typer itself refuses
        assert found.exit_code == 2, found.output
        return found.output
    assert error.exit_code == 2
    assert "\n" not in str(error)
    return str(error)


@pytest.mark.parametrize(("option", "value"), [(option, value) for option in BAD for value in BAD[option]])
def test_a_bad_option_is_refused_in_one_line(folder, option, value):
    value = value.replace("FOLDER", str(folder))
    words = [option, value]
    if option not in ("--model", "--measure"):
        words += ["--model", "mlp" if option == "--batch" else str(folder / "step.json")]
    if option not in ("--ranks", "--measure"):
        words = ["--ranks", "8", *words]
    assert refuse(str(folder / "cluster.toml"), *words)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_bad_cluster_is_refused_in_one_line(folder, cluster):
    path = cluster.replace("FOLDER", str(folder))
    assert path in refuse(path, "--model", str(folder / "step.json")) or "profile" in path


def test_a_batch_beside_a_measured_step_is_refused(folder):
    words = ("--model", folder / "step.json", "--batch", "4")
    assert "--batch 4" in refuse(folder / "cluster.toml", *words)
