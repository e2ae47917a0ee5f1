"""`python -m mpisgd bench strategies` and `bench compression`: ways of training together, compared.

mpirun -np 4 -hostfile hosts python -m mpisgd bench strategies --plot strategies.png
mpirun -np 4 -hostfile hosts python -m mpisgd bench strategies --task text --table text.txt
mpirun -np 4 -hostfile hosts python -m mpisgd bench compression
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import mpisgd
from mpisgd.tools.bench import cases
from mpisgd.tools.cli.bench.options import Json, Models, Plot, Quick, TimeLimit, choice_of
from mpisgd.tools.cli.program import is_reporting_rank
from mpisgd.tools.cli.record import Output, measure_in_job

if TYPE_CHECKING:
    from mpisgd.methods.from_text import OptimizerChoice
    from mpisgd.tools.bench.strategies.method import Method
    from mpisgd.tools.bench.strategies.tasks import Task

__all__ = ["compression", "strategies"]

Methods = Annotated[
    str,
    typer.Option(
        help="Methods, separated by semicolons: STRATEGY, + COMPRESSION and with OPTIMIZER if needed.",
        show_default=False,
    ),
]
MODELS = tuple(cases.BATCHES)


def strategies(
    methods: Methods = "",
    task: Annotated[str, typer.Option(help="digits, or text: a GPT on bytes.")] = "digits",
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each training on digits.")] = 15,
    steps: Annotated[int, typer.Option(min=6, help="Steps of each training on text.")] = 300,
    seeds: Annotated[int, typer.Option(min=1, help="Number of trainings of each method.")] = 3,
    batch: Annotated[
        int,
        typer.Option(min=0, help="Images or sequences per step, over all ranks; 0: 48 images, 32 sequences."),
    ] = 0,
    width: Annotated[int, typer.Option(min=1, help="Width of the hidden layers, for digits.")] = 128,
    optimizer: Annotated[
        str,
        typer.Option(help="Optimizer of methods that name none; default: SGD for digits, AdamW for text."),
    ] = "",
    json_file: Json = None,
    plot_file: Plot = None,
    text_file: Annotated[
        Path | None, typer.Option("--table", readable=False, help="Also write the tables into this file.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Reuse the results of these methods in the file of --json.")
    ] = False,
    quick: Quick = False,
    limit_s: TimeLimit = 3600.0,
) -> None:
    """Compare accuracy or loss, time and bytes of strategies and compressions; best on several hosts.

    A method is a strategy, if needed + a compression and with an optimizer: "LocalSGD(8) with SGD(lr=0.3)".
    Files are written after each training, so that --resume can continue a run that was ended.
    """
    from mpisgd.tools.bench.strategies.curves import StrategiesPlan, run_strategies
    from mpisgd.tools.bench.strategies.tasks import Digits, Text

    output = Output(json_file, plot_file, text_file)
    (chosen,) = choice_of("--task", task, ("digits", "text"))
    make_task: Callable[[], Task] = partial(Digits, 2 if quick else epochs, batch or 48, width)
    if chosen == "text":
        make_task = partial(Text, *((8, 2) if quick else (steps, 6)), batch or 32)
    usual = _optimizer(optimizer) if optimizer else None
    before = _rows_of(json_file) if resume else []
    plan = StrategiesPlan(_methods(methods), make_task, 1 if quick else seeds, usual, before)
    kind = "strategies" if chosen == "digits" else "strategies of text"
    measure_in_job(kind, run_strategies, plan, output, limit_s=limit_s)


def compression(
    methods: Methods = "",
    models: Models = "transformer",
    steps: Annotated[
        int, typer.Option(min=1, help="Steps of a timed block; a multiple of the strategies' periods.")
    ] = 32,
    json_file: Json = None,
    plot_file: Plot = None,
    quick: Quick = False,
    limit_s: TimeLimit = 3600.0,
) -> None:
    """Time steps of strategies and compressions, count what they send, and say which do not pay."""
    from mpisgd.tools.bench.strategies.step_time import CompressionPlan, run_compression

    output = Output(json_file, plot_file)
    chosen = choice_of("--models", models, MODELS)
    plan = CompressionPlan(_methods(methods), chosen, 2 if quick else steps, quick)
    measure_in_job("compression", run_compression, plan, output, limit_s=limit_s)


def _rows_of(file: Path | None) -> list[dict[str, Any]]:
    """Return the rows of a record, none where there is none; on the rank that writes it."""
    if file is None or not is_reporting_rank() or not file.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


def _methods(text: str) -> "list[Method]":
    from mpisgd.tools.bench.strategies.method import DEFAULT_METHODS, methods_of

    try:
        return methods_of(text or ";".join(DEFAULT_METHODS))
    except mpisgd.InvalidArgument as exc:
        raise mpisgd.JobError(f"--methods: {exc}") from exc


def _optimizer(text: str) -> "OptimizerChoice":
    from mpisgd.methods.from_text import optimizer_from_text

    try:
        return optimizer_from_text(text)
    except mpisgd.InvalidArgument as exc:
        raise mpisgd.JobError(f"--{exc}") from exc
