"""`python -m mpisgd plan`: what each method of training would take on a cluster, sorted.

python -m mpisgd plan cluster.toml --model transformer --batch 4 --ranks 8,64,512
python -m mpisgd plan cluster.toml --model model.toml --batch 16 --plot throughput.png --timeline step.png
python -m mpisgd plan cluster.toml --model "gpt(layers=24, heads=16, dim=2048, context=2048)" --batch 4
python -m mpisgd plan cluster.toml --batch 32 --measure train.py --lr 0.1
"""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpisgd.errors import InvalidArgument
from mpisgd.tools.cli.bench.options import Json, counts_of
from mpisgd.tools.cli.program import bad_input

if TYPE_CHECKING:
    from mpisgd.tools.plan.cluster import Cluster
    from mpisgd.tools.plan.files import ClusterFile
    from mpisgd.tools.plan.models.model import StepProfile
    from mpisgd.tools.plan.prediction import Prediction

__all__ = ["plan"]

ClusterPath = Annotated[Path, typer.Argument(metavar="CLUSTER", help="A .toml file, or a profile of `tune`.")]
Program = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PROGRAM [ARGS]...]", help="With --measure: the program and its arguments."),
]
BATCH = 32
MODEL = (
    "mlp, deep, transformer (those of `bench step`); gpt(layers=24, heads=16, dim=2048, context=2048), as in "
    "train_text.py; file.py:function, which returns (module, inputs) or a NamedModel; a .toml file of "
    "layers; a .json file that --save has written."
)
Model = Annotated[str, typer.Option(help=MODEL, show_default=False)]
Measure = Annotated[
    bool, typer.Option("--measure", help="Run PROGRAM for some steps, and use its measured step.")
]
Save = Annotated[
    Path | None, typer.Option(readable=False, help="Write the step into this file, for --model.")
]
Batch = Annotated[
    int | None, typer.Option(min=1, help=f"Examples of one rank; default: {BATCH}.", show_default=False)
]
Optimizer = Annotated[
    str, typer.Option(help="sgd, momentum, adam or adamw; default: sgd.", show_default=False)
]
Ranks = Annotated[
    str, typer.Option(help="Numbers of ranks; default: all ranks of the cluster.", show_default=False)
]
Methods = Annotated[
    str,
    typer.Option(
        help="Methods, separated by semicolons: strategies, with a compression after +, and layouts.",
        show_default=False,
    ),
]
Layouts = Annotated[
    bool, typer.Option(help="Also plan tensor and pipeline parallelism, where the model's blocks are known.")
]
Algorithm = Annotated[
    str, typer.Option(help="auto, hierarchical, ring, halving_doubling, tree or all_to_all.")
]
Collectives = Annotated[
    str,
    typer.Option(
        help="Also show the times of an all-reduce of this size, such as 64MiB.", show_default=False
    ),
]
Top = Annotated[int, typer.Option(min=1, help="Number of rows of the table.")]
Throughput = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        readable=False,
        help="Draw examples per second of a rank over the number of ranks into this PNG file.",
    ),
]
Timeline = Annotated[
    Path | None, typer.Option(readable=False, help="Draw the step of the first rows into this PNG file.")
]


def plan(
    cluster: ClusterPath,
    program: Program = None,
    model: Model = "",
    measure: Measure = False,
    save: Save = None,
    batch: Batch = None,
    optimizer: Optimizer = "",
    ranks: Ranks = "",
    methods: Methods = "",
    layouts: Layouts = True,
    algorithm: Algorithm = "auto",
    collectives: Collectives = "",
    top: Top = 20,
    json_file: Json = None,
    plot_file: Throughput = None,
    timeline: Timeline = None,
) -> None:
    """Predict step time, memory, bytes and price of each strategy and compression on a cluster."""
    # Here, since they load torch: seconds that `--help` need not take.
    from mpisgd.job.lazy_dynamo import defer_import
    from mpisgd.tools.bench.cases import parse_bytes
    from mpisgd.tools.plan.files import read_cluster, write_step

    defer_import()  # outer optimizers are made, to see whether they take their options
    with bad_input():
        found = read_cluster(cluster)
        nbytes = parse_bytes(collectives) if collectives else 0
        sizes = counts_of("--ranks", ranks) if ranks else [found.cluster.size]
        profile = _profile(found.cluster, program or [], model, measure, batch, optimizer)
        if save is not None:
            write_step(save, profile)
        report = _Report(found, profile, sizes, methods, algorithm, layouts=layouts and not methods)
        report.defaults = _defaults(profile, model, measure, batch, optimizer, ranks, algorithm)
        report.show(top, nbytes)
        report.write(json_file, plot_file, timeline)


def _profile(
    cluster: "Cluster", program: list[str], model: str, measure: bool, batch: int | None, optimizer: str
) -> "StepProfile":
    """Return the step of a rank: measured, maybe with a model's blocks, or from a file, or of a model and the
    cluster's flops.
    """
    from mpisgd.tools.plan.models.model import profile_of
    from mpisgd.tools.plan.recorder import measure_step

    if bool(program) != measure or not (measure or model):
        raise InvalidArgument("plan: expected --model, or --measure and a program, or all of them")
    is_saved = model.endswith(".json")
    if optimizer and (measure or is_saved):
        raise InvalidArgument(f"plan: --optimizer {optimizer} beside a step that was measured with its own")
    if batch is not None and is_saved and not measure:
        raise InvalidArgument(f"plan: --batch {batch} beside {model}, a step that was measured with its own")
    if measure:
        measured = measure_step(program, batch=batch or BATCH)
        return measured.with_blocks_of(_model(model)) if model else measured
    if is_saved:
        from mpisgd.tools.plan.files import read_step

        return read_step(Path(model))
    return profile_of(_model(model), cluster, batch or BATCH, optimizer or "sgd")


def _defaults(
    profile: "StepProfile",
    model: str,
    measure: bool,
    batch: int | None,
    optimizer: str,
    ranks: str,
    algorithm: str,
) -> list[str]:
    """Return the options that count and were not given, with what was taken for them."""
    is_saved = model.endswith(".json") and not measure
    taken = {
        f"--batch {profile.batch:g}": batch is None and not is_saved,
        f"--optimizer {profile.optimizer}": not (optimizer or measure or is_saved),
        "--ranks all": not ranks,
        "--algorithm auto, the fastest of mpisgd's": algorithm == "auto",
    }
    return [text for text, is_default in taken.items() if is_default]


def _model(text: str) -> Any:
    from mpisgd.tools.plan.files import read_model
    from mpisgd.tools.plan.models.count_model import bench_model, model_from_function
    from mpisgd.tools.plan.models.gpt import gpt_from_text

    if text.endswith(".toml"):
        return read_model(Path(text))
    if text.startswith("gpt"):
        return gpt_from_text(text)
    return model_from_function(text) if ":" in text else bench_model(text)


class _Report:
    """What comes out of a plan.

    Args:
        found: the cluster file.
        profile: of a rank's step.
        sizes: numbers of ranks.
        text: the methods, "" for the usual ones.
        algorithm: of all-reduces.
        layouts: whether tensor and pipeline parallelism are planned, too.
    """

    def __init__(
        self,
        found: "ClusterFile",
        profile: "StepProfile",
        sizes: list[int],
        text: str,
        algorithm: str,
        *,
        layouts: bool,
    ) -> None:
        from mpisgd.tools.plan.methods import DEFAULT_METHODS, planned_methods
        from mpisgd.tools.plan.prediction import Options, predict_all
        from mpisgd.tools.plan.simulation.collectives import check_algorithm

        check_algorithm(algorithm)
        self.assumed = found.assumed
        self.defaults: list[str] = []
        self.cluster, self.profile, self.sizes = found.cluster, profile, sizes
        self.options = Options(algorithm, found.compression_s)
        self.methods = planned_methods(text or ";".join(DEFAULT_METHODS))
        clusters = [found.cluster.at(size) for size in sizes]
        self.predictions, self.left_out = predict_all(
            clusters, profile, self.methods, self.options, layouts=layouts
        )

    @property
    def best(self) -> "Prediction":
        """The fastest that fits."""
        return self.predictions[0]

    @property
    def title(self) -> str:
        """What was planned."""
        return "; ".join(self._title_lines)

    @property
    def _title_lines(self) -> tuple[str, str]:
        """The model, and the cluster."""
        from mpisgd.tools.bench.report.rows import as_number

        cluster, profile = self.cluster, self.profile
        hosts = f"{as_number(cluster.hosts, 'host')} of {as_number(cluster.ranks_per_host, 'rank')}"
        return (
            f"{profile.name}, {profile.numel:,} parameters, batch {profile.batch:g} per rank",
            f"{hosts}, {cluster.network.description}",
        )

    def show(self, top: int, nbytes: int) -> None:
        """Print the table, that of an all-reduce of `nbytes` if these are any, and what follows from it."""
        from mpisgd.tools.bench.report.tables import show
        from mpisgd.tools.plan.tables import collectives_table, plan_table

        tables = [plan_table(self.predictions[:top], "predicted, the fastest first")]
        if nbytes:
            tables.append(collectives_table(self.cluster, self.sizes, nbytes))
        show(tables, self.notes(top))

    def notes(self, top: int) -> list[str]:
        """Return the lines below the table."""
        from mpisgd.tools.plan.advice import changes, code_line, command_line
        from mpisgd.tools.plan.methods import planned_methods
        from mpisgd.tools.plan.tables import checked_lines, failure_lines, left_out_lines, what_to_change

        best = self.best
        method = planned_methods(best.method)[0]
        hidden = len(self.predictions) - top
        return [
            self.title,
            *([f"{hidden} more row(s): --top, --json"] if hidden > 0 else []),
            *(["!: more than a rank's memory"] if not all(each.fits for each in self.predictions) else []),
            *left_out_lines(self.left_out),
            *checked_lines(self.predictions[:top]),
            f"best: {best.method} on {best.cluster.size} rank(s); what rules its step: {best.bound}",
            *self._exact(),
            *what_to_change(changes(best.cluster, self.profile, method, self.options)),
            *failure_lines(best),
            *(f"assumed, as the cluster file does not say: {each}" for each in self.assumed),
            *([f"assumed, as no option says: {', '.join(self.defaults)}"] if self.defaults else []),
            f"in the program: {code_line(method)}",
            f"start it with: {command_line(best, method)}",
        ]

    def _exact(self) -> list[str]:
        """Return the best that computes what one process does, where that is another one."""
        from mpisgd.tools.bench.report.rows import as_time
        from mpisgd.tools.plan.advice import command_line, equals_one_process
        from mpisgd.tools.plan.methods import planned_methods

        fit = (each for each in self.predictions if each.fits)
        found = next((each for each in fit if equals_one_process(planned_methods(each.method)[0])), None)
        if found is None or found is self.best:
            return []
        step = f"{found.method} on {found.cluster.size} rank(s), {as_time(found.step_s)} a step"
        start = command_line(found, planned_methods(found.method)[0])
        return [
            f"examples per second tell nothing of accuracy; the best that equals one process: {step}",
            f"start that one with: {start}",
        ]

    def write(self, json_file: Path | None, plot_file: Path | None, timeline: Path | None) -> None:
        """Write what was asked for."""
        from mpisgd.tools.cli.provenance import provenance
        from mpisgd.tools.plan.pictures import draw_throughput, draw_timelines
        from mpisgd.tools.plan.tables import rows_of

        if json_file is not None:
            record = {
                "kind": "plan",
                **provenance(),
                "title": self.title,
                "cluster": dataclasses.asdict(self.cluster),
                "rows": rows_of(self.predictions),
                "left_out": [dataclasses.asdict(each) for each in self.left_out],
            }
            json_file.write_text(json.dumps(record, indent=1) + "\n")
        if plot_file is not None:
            draw_throughput(plot_file, self.predictions, self._title_lines)
        if timeline is not None:
            draw_timelines(timeline, self.predictions, self._title_lines)
