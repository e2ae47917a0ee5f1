"""A GPT on text: one loss curve in every layout, checkpoints that any layout loads, and users' mistakes."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from launcher import run_python

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
PROGRAM = SCRIPTS / "train_text.py"
TINY = ("--data", PROGRAM, "--layers", 2, "--heads", 2, "--dim", 16, "--context", 16, "--batch-size", 8)
SHORT = (*TINY, "--steps", 20, "--log-every", 1, "--lr", 0.01, "--sample", 4)
SAVED_STEP = 8

LOCAL = ("--strategy", "LocalSGD(3)", "--compression", "TopK(ratio=0.3)")
PIPEDREAM = ("--pipeline", "pipedream", "--checkpoint-activations")
# Starting a job costs far more than the training: one job per number of ranks makes all runs.
RUNS = {
    4: {
        "dp=2,tp=2": ("--parallel", "dp=2,tp=2"),
        "dp=2,pp=2": ("--parallel", "dp=2,pp=2", "--accumulate", 2),  # DDP fails there, see parallelize.py
        "tp=2,pp=2": ("--parallel", "tp=2,pp=2"),
        "dp=2,tp=2 zero 3": ("--parallel", "dp=2,tp=2", "--zero", 3, "--checkpoint-activations"),
        "cp=2,tp=2": ("--parallel", "cp=2,tp=2", "--checkpoint-activations"),
        "dp=2,cp=2 zero 3": ("--parallel", "dp=2,cp=2", "--zero", 3, "--accumulate", 2),
        "1f1b dp=2,pp=2": ("--pipeline", "1f1b", "--parallel", "dp=2,pp=2", "--accumulate", 2),
        "layout on 2 x 2": ("--layout", "batch:dp; heads:tp; hidden:tp; vocab:tp", "--mesh", "dp:2,tp:2"),
    },
    2: {
        "dp=2": ("--parallel", "dp=2"),
        "tp=2": ("--parallel", "tp=2"),
        "pp=2": ("--parallel", "pp=2"),
        "zero 1": ("--zero", 1),
        "zero 2 offloaded": ("--zero", 2, "--offload", tempfile.gettempdir()),
        "zero 3": ("--zero", 3),
        "cp=2": ("--parallel", "cp=2"),
        "cp=2 zero 2": ("--parallel", "cp=2", "--zero", 2),
        "accumulation": ("--accumulate", 4),
        "zero 3 with accumulation": ("--zero", 3, "--accumulate", 2),
        "activation checkpointing": ("--checkpoint-activations",),
        "pp=2 with activation checkpointing": ("--parallel", "pp=2", "--checkpoint-activations"),
        "bf16 dp=2": ("--precision", "bf16"),
        "bf16 tp=2": ("--precision", "bf16", "--parallel", "tp=2"),
        "bf16 zero 3": ("--precision", "bf16", "--zero", 3),
        "all elements by TopK": ("--compression", "TopK(ratio=1.0)", "--accumulate", 2),
        "gpipe": ("--pipeline", "gpipe", "--checkpoint-activations"),
        "layout": ("--layout", "hidden:tp; vocab:tp", "--mesh", "tp:2", "--accumulate", 2),
        "bf16 layout": ("--precision", "bf16", "--layout", "hidden:tp", "--mesh", "tp:2"),
        "pipedream": PIPEDREAM,
        "2bw": ("--pipeline", "2bw"),
        "LocalSGD": LOCAL,
        "without communication": ("--parallel", "dp=2"),
        "muon": ("--optimizer", "muon"),
        "muon zero 2": ("--optimizer", "muon", "--zero", 2, "--accumulate", 2),
        "dion": ("--optimizer", "dion"),
    },
    1: {
        "alone": (),
        "another seed": ("--seed", 1),
        "bf16 alone": ("--precision", "bf16"),
        "muon alone": ("--optimizer", "muon"),
        "dion alone": ("--optimizer", "dion"),
    },
}
# Those that leave a checkpoint, and those that go on from it: number of ranks, from which, options.
SAVED = ("dp=2,tp=2", "zero 1", "LocalSGD", "pipedream", "muon", "dion")
RESUMED = {
    "dp=2,tp=2 to pp=2": (2, "dp=2,tp=2", ("--parallel", "pp=2")),
    "dp=2,tp=2 to zero 1": (2, "dp=2,tp=2", ("--zero", 1)),
    "zero 1 to zero 3": (2, "zero 1", ("--zero", 3)),
    "zero 1 to gpipe": (2, "zero 1", ("--pipeline", "gpipe")),
    "dp=2,tp=2 to layout": (2, "dp=2,tp=2", ("--layout", "length:a", "--mesh", "a:2")),
    "pipedream to itself": (2, "pipedream", PIPEDREAM),
    "LocalSGD to itself": (2, "LocalSGD", LOCAL),
    "LocalSGD to DiLoCo": (2, "LocalSGD", ("--strategy", "DiLoCo(4)")),
    "LocalSGD to zero 3": (2, "LocalSGD", ("--zero", 3)),
    "muon to muon alone": (1, "muon", ("--optimizer", "muon")),
    "dion to dion alone": (1, "dion", ("--optimizer", "dion")),
    "dion to itself": (2, "dion", ("--optimizer", "dion")),
    "dp=2,tp=2 to alone": (1, "dp=2,tp=2", ()),
    "zero 1 to alone": (1, "zero 1", ()),
}
WITH_EIGHT = {
    "dp=2,tp=2,pp=2": ("--parallel", "dp=2,tp=2,pp=2"),
    "dp=2,tp=2,pp=2 zero 3": ("--parallel", "dp=2,tp=2,pp=2", "--zero", 3),
}
EQUAL = [
    name
    for name in (*RUNS[4], *RUNS[2], *RESUMED)
    if not name.startswith(("bf16", "LocalSGD", "pipedream", "2bw", "muon", "dion"))
    and name != "without communication"
]
# What says something that no other run of the short form does; the rest is for --long.
SHORT_FORM = (
    *("dp=2,tp=2", "cp=2,tp=2", "1f1b dp=2,pp=2", "layout on 2 x 2", "pp=2"),
    *("zero 2 offloaded", "all elements by TopK", "gpipe", "bf16 zero 3"),
    *("dp=2,tp=2 to pp=2", "zero 1 to zero 3", "zero 1 to alone"),
    *("pipedream", "LocalSGD to DiLoCo"),
    *("muon", "dion to dion alone"),
)

DRIVER = """
import json, sys
import train_text, typer
from training import parallelize
command, share = typer.main.get_command(train_text.app), parallelize.share
for name, args in json.loads(sys.argv[1]):
    parallelize.share = (lambda model, *_: model) if name == "without communication" else share
    command.main(args, standalone_mode=False)
"""

AXIS = ("--layout", "batch:a", "--mesh", "a:1")
REFUSED = [
    (("--layout", "hidden:tp"), "--layout 'batch:dp; hidden:tp' and --mesh 'dp:2, tp:2' go together"),
    (("--layout", "hidden:tp", "--mesh", "tp:3"), "the mesh has as many places as the job has ranks"),
    (("--layout", "width:a", "--mesh", "a:1"), "each rule names a dimension of the model"),
    ((*AXIS, "--pipeline", "gpipe"), "--pipeline and --layout do not go together"),
    ((*AXIS, "--zero", 3), "--layout goes without --zero"),
    ((*AXIS, "--strategy", "LocalSGD(4)"), "--layout goes without --zero, --strategy"),
    ((*AXIS, "--parallel", "dp=1"), "instead of --parallel"),
    ((*AXIS, "--checkpoint-activations"), "--checkpoint-activations does not go with --layout"),
    (("--pipeline", "pipedream"), "two stages or more"),
    (("--optimizer", "muon", "--zero", 3), "--optimizer muon goes with the whole model on every rank"),
    ((*AXIS, "--optimizer", "dion"), "--optimizer dion goes with the whole model on every rank"),
    (("--optimizer", "dion", "--strategy", "LocalSGD(4)"), "--optimizer dion averages by itself"),
]
REFUSALS = """
import json, sys
import mpisgd, train_text, typer
command = typer.main.get_command(train_text.app)
for args in json.loads(sys.argv[1]):
    try:
        command.main(args, standalone_mode=False)
    except mpisgd.JobError as error:
        print(error)
"""

pytestmark = pytest.mark.timeout(1200)  # the first test waits for all jobs


def runs_named(*names: str) -> pytest.MarkDecorator:
    """A test for each of these runs, those of the long form marked so."""
    marks = {name: () if name in SHORT_FORM else pytest.mark.long for name in names}
    return pytest.mark.parametrize("name", [pytest.param(name, marks=each) for name, each in marks.items()])


def train_text(*args, num_ranks=None):
    return run_python(str(PROGRAM), *map(str, args), num_ranks=num_ranks)


def train_all(runs, num_ranks: int) -> None:
    """Make several runs in one job."""
    path = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
    args = json.dumps([(name, [*map(str, options)]) for name, options in runs.items()])
    env = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
    }  # two threads of one process wait for each other's core
    done = run_python("-c", DRIVER, args, num_ranks=num_ranks, env=env, quiet_s=400)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def losses(path: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def max_difference(ours: list[float], theirs: list[float]) -> float:
    """Relative, and said where pytest shows it."""
    difference = max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
    print(f"max difference {difference:.1e}")
    return difference


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the runs of this file leave their metrics, `NAME`, and their checkpoints, `NAME.saved`."""
    return tmp_path_factory.mktemp("runs")


def wanted_by(items: list[pytest.Item]) -> set[str]:
    """The runs that the selected tests look at, by name or always, and those that others go on from."""
    named = {item.callspec.params.get("name") for item in items if hasattr(item, "callspec")}
    always = (
        "alone",
        "another seed",
        "without communication",
        "LocalSGD to itself",
        "pipedream to itself",
        "muon alone",
        "dion alone",
    )
    return {*named, *SAVED, *always}


def all_runs(folder: Path, num_ranks: int) -> dict[str, tuple[object, ...]]:
    """The options of everything that a job of so many ranks can train."""
    runs = {
        name: (*SHORT, *options, "--metrics", folder / name)
        + (("--save", saved_by(folder, name), "--save-every", SAVED_STEP) if name in SAVED else ())
        for name, options in RUNS[num_ranks].items()
    }
    for name, (wanted, source, options) in RESUMED.items():
        if wanted == num_ranks:
            saved = saved_by(folder, source) / f"step-{SAVED_STEP:08d}"
            runs[name] = (*SHORT, *options, "--metrics", folder / name, "--resume", saved)
    return runs


def saved_by(folder: Path, name: str) -> Path:
    return folder / f"{name}.saved"


@pytest.fixture(scope="module")
def curves(folder, request) -> dict[str, list[float]]:
    """The losses, step by step, of every run that a test will look at."""
    wanted, found = wanted_by(request.session.items), {}
    for num_ranks in RUNS:
        runs = {name: args for name, args in all_runs(folder, num_ranks).items() if name in wanted}
        train_all(runs, num_ranks)
        found |= {name: losses(folder / name) for name in runs}
    return found


# --- the curve ----------------------------------------------------------------------------------------


@runs_named(*EQUAL)
def test_every_layout_gives_the_curve_of_one_process(curves, name):
    alone = curves["alone"]
    assert alone[-1] < alone[0] - 1  # something was learnt, so that there is something to compare
    assert max_difference(curves[name], alone) < 1e-5  # float32; measured: 2e-7


def test_without_communication_the_curve_differs(curves):
    assert max_difference(curves["without communication"], curves["alone"]) > 1e-3


def test_seed_decides_the_curve(curves):
    assert max_difference(curves["another seed"], curves["alone"]) > 1e-3


@runs_named("bf16 alone", "bf16 dp=2", "bf16 tp=2", "bf16 zero 3", "bf16 layout")
def test_bf16_is_used_and_learns(curves, name):
    assert 5e-6 < max_difference(curves[name], curves["alone"]) < 1e-2


def test_ranks_that_train_by_themselves_have_a_curve_of_their_own_and_go_on_with_it(curves):
    alone, local = curves["alone"], curves["LocalSGD"]
    assert max_difference(local, alone) > 1e-3
    assert local[-1] < local[0] - 1
    assert max_difference(curves["LocalSGD to itself"], local) < 1e-12


@runs_named("muon", "muon zero 2", "muon to muon alone", "dion", "dion to dion alone", "dion to itself")
def test_other_optimizers_give_the_curve_of_one_process(curves, name):
    """Muon computes in bfloat16, so that what is rounded otherwise before it may grow."""
    alone = curves[f"{name.split()[0]} alone"]
    assert alone[-1] < alone[0] - 1
    assert max_difference(alone, curves["alone"]) > 1e-3
    assert max_difference(curves[name], alone) < (1e-2 if name.startswith("muon") else 1e-4)


@runs_named("pipedream", "2bw")
def test_older_weights_give_a_curve_of_their_own(curves, name):
    alone, stale = curves["alone"], curves[name]
    assert max_difference(stale, alone) > 1e-3
    assert stale[-1] < stale[0] - 1


def test_a_pipeline_that_is_saved_is_empty_and_goes_on_alike(curves):
    until = 2 * SAVED_STEP  # where the first run is saved, and empty, once more
    resumed, saved = curves["pipedream to itself"], curves["pipedream"]
    assert max_difference(resumed[:until], saved[:until]) < 1e-12


@runs_named("LocalSGD to DiLoCo", "LocalSGD to zero 3")
def test_others_go_on_from_the_common_model(curves, name):
    local, other = curves["LocalSGD"], curves[name]
    assert other[:SAVED_STEP] == local[:SAVED_STEP]
    assert abs(other[SAVED_STEP] / local[SAVED_STEP] - 1) < 0.05  # measured on the mean of the two models
    assert other[-1] < local[SAVED_STEP]


@pytest.mark.long
def test_eight_ranks_in_three_axes_give_the_curve_of_one_process(curves, folder):
    train_all(
        {name: (*SHORT, *options, "--metrics", folder / name) for name, options in WITH_EIGHT.items()}, 8
    )
    for name in WITH_EIGHT:
        assert max_difference(losses(folder / name), curves["alone"]) < 1e-5


# --- what a run says and leaves -----------------------------------------------------------------------


def test_newest_complete_checkpoint_is_resumed_and_a_sample_is_written(curves, folder, tmp_path):
    saved = saved_by(folder, "dp=2,tp=2")
    assert sorted(path.name for path in saved.iterdir()) == [f"step-{step:08d}" for step in (8, 16, 20)]
    (saved / "step-00000020" / ".metadata").rename(tmp_path / ".metadata")  # as if killed while saving
    done = train_text(*SHORT, "--resume", saved, "--steps", 18, "--prompt", "import ")
    assert (done.returncode, done.stderr) == (0, "")
    steps = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("step ")]
    assert steps == ["17/18", "18/18"]
    assert done.stdout.count("a sample:\nimport ") == 1
    assert "\x1b" not in done.stdout  # no bar: this is no terminal


# --- users' mistakes: one line, from one rank, exit code 2 --------------------------------------------


def assert_refused(done, *said: str) -> None:
    """Exit code 2 and one line of ours that says `said`; the launcher may add lines of its own."""
    assert done.returncode == 2, done.stderr
    ours = [line for line in done.stderr.splitlines() if "train_text.py" in line]
    assert len(ours) == 1, done.stderr
    assert [text for text in said if text not in ours[0]] == []
    assert "Traceback" not in done.stderr
    assert "step " not in done.stdout


def test_layout_for_another_number_of_ranks_is_refused_once():
    done = train_text(*TINY, "--parallel", "dp=2,pp=2", num_ranks=2)
    assert_refused(done, "--parallel dp=2,pp=2", "2 x 1 x 2 = 4 ranks", "this job has 2")


def test_a_strategy_for_a_divided_model_is_refused_once():
    done = train_text(*TINY, "--strategy", "LocalSGD(4)", "--zero", 3, num_ranks=2)
    assert_refused(done, "--strategy, --compression and --zero 2", "not with --zero 3")


def test_what_does_not_go_with_a_divided_model_is_refused():
    """All in one process, a job of one."""
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))}
    args = json.dumps([[*map(str, (*TINY, *options))] for options, _ in REFUSED])
    done = run_python("-c", REFUSALS, args, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    for (options, said), line in zip(REFUSED, done.stdout.splitlines(), strict=True):
        assert said in line, options


def test_a_part_of_a_rank_that_is_missing_is_refused(curves, folder, tmp_path):
    saved = tmp_path / "saved"
    shutil.copytree(saved_by(folder, "LocalSGD") / f"step-{SAVED_STEP:08d}", saved)
    (saved / "rank-1.pt").unlink()
    done = train_text(*SHORT, *LOCAL, "--resume", saved, num_ranks=2)
    assert_refused(done, "cannot load checkpoint", "rank-1.pt")


def test_damaged_checkpoint_is_refused(curves, folder):
    damaged = saved_by(folder, "zero 1") / "step-00000016" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:100])
    done = train_text(*SHORT, "--resume", damaged.parent)
    assert_refused(done, "cannot load checkpoint", "step-00000016")


# --- layers that are passed over ------------------------------------------------------------------------


def test_the_same_layers_are_dropped_in_every_layout_and_after_a_restart(folder):
    saved = folder / "dropped.saved"
    options = (*SHORT, "--layers", 4, "--layer-dropping", "0.3,0.2")
    runs = {
        "dropped dp=2": ("--save", saved, "--save-every", SAVED_STEP),
        "dropped pp=2": ("--parallel", "pp=2"),
        "dropped tp=2": ("--parallel", "tp=2", "--resume", saved / f"step-{SAVED_STEP:08d}"),
        "dropped layout": ("--layout", "heads:tp", "--mesh", "tp:2"),
        "all layers": ("--layer-dropping", "1,1"),
    }
    train_all({name: (*options, *more, "--metrics", folder / name) for name, more in runs.items()}, 2)
    curves = {name: losses(folder / name) for name in runs}
    for name in ("dropped pp=2", "dropped tp=2", "dropped layout"):
        assert max_difference(curves[name], curves["dropped dp=2"]) < 1e-5
    assert max_difference(curves["all layers"], curves["dropped dp=2"]) > 1e-3
    assert curves["dropped dp=2"][-1] < curves["dropped dp=2"][0] - 1


def test_a_layer_dropping_that_cannot_be_is_refused():
    assert_refused(train_text(*TINY, "--layer-dropping", "1.5,0.1"), "--layer-dropping 1.5,0.1", "theta=1.5")
