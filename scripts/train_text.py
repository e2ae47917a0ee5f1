"""Train a GPT on the bytes of any text, over the ranks of an MPI job, with any of torch's parallelisms.

    python scripts/train_text.py                                                 alone
    mpirun -np 4 python scripts/train_text.py                                    data parallel
    mpirun -np 4 python scripts/train_text.py --zero 3                           sharded model
    mpirun -np 8 python scripts/train_text.py --parallel dp=2,tp=2,pp=2          three axes
    mpirun -np 4 python scripts/train_text.py --parallel dp=2,cp=2               long sequences in parts
    mpirun -np 4 python scripts/train_text.py --strategy "DiLoCo(50)"            data parallel on a slow link
    mpirun -np 4 python scripts/train_text.py --strategy "SparseLoCo(30)"        by far fewer bytes
    mpirun -np 4 python scripts/train_text.py --optimizer muon                   matrices by Muon
    mpirun -np 4 python scripts/train_text.py --pipeline pipedream               stages that never wait
    mpirun -np 4 python scripts/train_text.py --layout "batch:dp; hidden:tp; vocab:tp" --mesh dp:2,tp:2

The first four are torch's own (DDP, fully_shard, parallelize_module, pipelining, distributed checkpoints),
and run over MPI by the name of a backend, at (1). The loss is the same in every layout. How a model is
divided at (3) is in parallelize.py; forward and backward are in training_pass.py. --strategy and
--compression are mpisgd's (methods.py), for whole models on all ranks, as --pipeline and --layout are for
divided ones.

Only rank 0 reads text; checkpoints are written by all ranks, into a folder that all hosts share.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from training.division import Division, Zero, check_division, choose_layout, choose_method
from training.layout import Layout, check_fit
from training.methods import CompressionOption, StrategyOption, common_model, finish
from training.optimizers import OptimizerName, OptimizerOption, make_optimizer, method_for
from training.parallelize import parallelize
from training.ranks import mean_over_ranks, on_rank_0
from training.records import TensorBoard, Terminal, append_metrics, check_tensorboard, check_writable
from training.text_data import load, random_sequences
from training.text_model import GPT, ModelSize, build_model
from training.text_state import read_run, read_state, write_checkpoint
from training.training_pass import (
    InParts,
    LaidOut,
    Pass,
    Pipelined,
    Scheduled,
    ScheduleName,
    Whole,
    read_mesh_layout,
)

import mpisgd
from mpisgd.nn import ProgressiveLayerDropping
from mpisgd.tools.cli.program import run_program

BATCH_SIZE = 48  # divides by 1, 2, 3, 4, 6 and 8 ranks


class Precision(str, Enum):
    """What --precision takes."""

    float32 = "float32"
    bf16 = "bf16"


@dataclass(frozen=True)
class Settings:
    """All that the curve depends on beside the text."""

    layers: int
    heads: int
    dim: int
    context: int
    batch_size: int
    lr: float
    warmup_steps: int
    seed: int
    precision: Precision
    layer_dropping: str | None = None
    optimizer: OptimizerName = OptimizerName.adamw

    @property
    def model_size(self) -> ModelSize:
        """The part that decides shapes."""
        return ModelSize(self.layers, self.heads, self.dim, self.context)

    def autocast(self) -> AbstractContextManager[Any]:
        """Matrices are multiplied in bfloat16 inside; parameters, gradients and sums stay float32."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.precision is Precision.bf16)


@dataclass(frozen=True)
class Figures:
    """How training went since the figures before, over all ranks."""

    step: int
    loss: float
    bytes_per_s: float
    lr: float


@dataclass
class Training:
    """This rank's part of what is trained, and how it went so far."""

    model: nn.Module
    model_pass: Pass
    optimizer: torch.optim.Optimizer
    batch_slice: slice
    step: int = 0
    history: list[Figures] = field(default_factory=list)
    dropping: ProgressiveLayerDropping | None = None


# --- training -----------------------------------------------------------------------------------------


def build_training(whole: GPT, settings: Settings, division: Division) -> Training:
    """This rank's part of the model and of every batch. Collective."""
    dropping = drop_layers(whole, settings)
    everything = slice(settings.batch_size)
    if division.schedule is not None:
        staged = Scheduled(
            whole,
            division.layout,
            division.schedule,
            division.num_micro_batches,
            lambda params: torch.optim.AdamW(params, lr=settings.lr),
            recompute=division.recompute,
        )
        return Training(staged.model, staged, staged.optimizer, everything)
    for block in whole.blocks.values():
        block.checkpointed = division.recompute
    if division.mesh_layout is not None:
        laid_out = LaidOut(whole, division.mesh_layout, division.num_micro_batches, settings.batch_size)
        optimizer = torch.optim.AdamW(laid_out.model.parameters(), lr=settings.lr)
        return Training(laid_out.model, laid_out, optimizer, everything, dropping=dropping)
    return build_parallel(whole, settings, division, dropping)


def build_parallel(
    whole: GPT, settings: Settings, division: Division, dropping: ProgressiveLayerDropping | None
) -> Training:
    """The same of torch's layouts, and of whole models. Collective."""
    layout, method, num_micro_batches = division.layout, division.method, division.num_micro_batches
    mesh = layout.mesh()  # (2) the ranks as a grid
    model: nn.Module = whole
    if method.is_default and settings.optimizer is not OptimizerName.dion:  # which averages by itself
        model = parallelize(whole, layout, mesh, drops_layers=dropping is not None)  # (3)
    if layout.pp > 1:
        model_pass: Pass = Pipelined(model, num_micro_batches, mesh.get_group("pp"))
    elif layout.cp > 1:
        model_pass = InParts(model, num_micro_batches, whole, layout.context_mesh())
    else:
        model_pass = Whole(model, num_micro_batches)
    share = settings.batch_size // layout.dp
    place = (mesh.get_local_rank("replicate") + mesh.get_local_rank("shard")) // layout.cp  # one is 0
    batch_slice = slice(place * share, (place + 1) * share)
    optimizer = build_optimizer(settings, layout, model, mesh)
    if not method.is_default:
        optimizer = method.distribute(optimizer, model, backward_passes_per_step=num_micro_batches)
    return Training(model, model_pass, optimizer, batch_slice, dropping=dropping)


def drop_layers(model: GPT, settings: Settings) -> ProgressiveLayerDropping | None:
    """Let steps pass over layers as --layer-dropping says, the same ones in every layout. Collective."""
    if settings.layer_dropping is None:
        return None
    try:
        theta, _, gamma = settings.layer_dropping.partition(",")
        dropping = ProgressiveLayerDropping(float(theta), float(gamma), seed=settings.seed)
    except ValueError as error:
        raise mpisgd.JobError(f"--layer-dropping {settings.layer_dropping}: {error}") from error
    dropping.wrap(model.blocks, branches=("attention", "feed_forward"))
    return dropping


def build_optimizer(
    settings: Settings, layout: Layout, model: nn.Module, mesh: DeviceMesh
) -> torch.optim.Optimizer:
    """With --zero 1 each data-parallel rank keeps AdamW's state for a share of the parameters."""
    if layout.zero == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # compiles for 0.2 s when it is imported

        group = mesh.get_group("replicate")
        return ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, process_group=group, lr=settings.lr
        )
    return make_optimizer(settings.optimizer, model, settings.lr)


def train_step(training: Training, settings: Settings, sequences: Tensor) -> Tensor | None:
    """One step; the mean loss of this rank's share, None on stages of a pipeline that do not see it."""
    share = sequences[training.batch_slice]
    for group in training.optimizer.param_groups:
        group["lr"] = lr_at(training.step, settings)
    if not training.model_pass.updates:
        training.optimizer.zero_grad()
    with settings.autocast():
        loss = training.model_pass.backward(share[:, :-1], share[:, 1:])
    if not training.model_pass.updates:
        training.optimizer.step()
    training.step += 1
    if training.dropping is not None:
        training.dropping.step()
    return loss


def lr_at(step: int, settings: Settings) -> float:
    """Raised evenly over the first steps, then kept."""
    return settings.lr * min(1.0, (step + 1) / (settings.warmup_steps + 1))


def run_steps(
    training: Training, settings: Settings, text: Tensor, num_steps: int, log_every: int
) -> Iterator[Figures | None]:
    """Train until `num_steps` steps are done; after each give the figures, or None where none are due."""
    total_and_count, start, first = torch.zeros(2, dtype=torch.float64), time.perf_counter(), training.step
    while training.step < num_steps:
        sequences = random_sequences(
            text, settings.batch_size, settings.context + 1, seed=settings.seed, step=training.step
        )
        loss = train_step(training, settings, sequences)
        if loss is not None:
            total_and_count += torch.tensor([loss.item(), 1.0])
        if training.step % log_every and training.step < num_steps:
            yield None
            continue
        num_bytes = (training.step - first) * settings.batch_size * settings.context
        loss_of_all = mean_over_ranks(total_and_count)
        speed = num_bytes / (time.perf_counter() - start)
        training.history.append(
            Figures(training.step, loss_of_all, speed, lr_at(training.step - 1, settings))
        )
        yield training.history[-1]
        total_and_count, start, first = torch.zeros_like(total_and_count), time.perf_counter(), training.step


# --- writing --------------------------------------------------------------------------------------------

TEMPERATURE = 0.8  # below 1: rather what is likely


@torch.no_grad()
def write_text(training: Training, settings: Settings, prompt: bytes, num_bytes: int) -> bytes:
    """What the model thinks comes after `prompt`, which is included. Collective: each byte takes all."""
    training.model.eval()  # with all layers
    text = list(prompt)
    generator = torch.Generator().manual_seed(settings.seed)
    for _ in range(num_bytes):
        seen = text[-settings.context :]
        tokens = torch.zeros(1, settings.context, dtype=torch.int64)  # of one length, as pipelines want it
        tokens[0, : len(seen)] = torch.tensor(seen)
        with settings.autocast():
            logits = training.model_pass.logits(tokens)
        byte = torch.zeros(1, dtype=torch.int64)
        if logits is not None:
            likely = (logits[0, len(seen) - 1].float() / TEMPERATURE).softmax(dim=0)
            byte = torch.multinomial(likely, 1, generator=generator)
        mpisgd.broadcast(byte, src=training.model_pass.logits_rank % mpisgd.size())
        text.append(int(byte))
    return bytes(text)


# --- files ----------------------------------------------------------------------------------------------


def load_text(source: Path | None, context: int) -> Tensor:
    """The text that rank 0 reads, on every rank; long enough for one sequence at least. Collective."""
    text = None

    def read() -> int:
        nonlocal text
        text = load(source)
        if len(text) <= context:
            raise mpisgd.JobError(f"{source}: {len(text)} bytes, too few for --context {context}")
        return len(text)

    num_bytes = on_rank_0(read)
    if text is None:
        text = torch.empty(num_bytes, dtype=torch.uint8)
    mpisgd.broadcast(text, src=0)
    return text


def identity(settings: Settings, text: Tensor) -> dict[str, Any]:
    """What a checkpoint must have in common with the run that goes on from it; the layout is not in it."""
    options = {
        f"--{name.replace('_', '-')}": getattr(value, "value", value)
        for name, value in asdict(settings).items()
    }
    return {**options, "bytes of text": len(text)}


def resume(folder: Path, training: Training, identity: dict[str, Any]) -> None:
    """Go on where the run that wrote `folder` was, in whatever layout, by whatever method. Collective."""
    path, run = on_rank_0(lambda: read_run(folder, identity))
    read_state(path, run, training.model, training.optimizer)
    training.step = run["step"]
    if training.dropping is not None:
        training.dropping.load_state_dict({**training.dropping.state_dict(), "num_steps": training.step})
    training.history = [Figures(**figures) for figures in run["history"]]


def save(folder: Path, training: Training, identity: dict[str, Any]) -> None:
    """Write all that `resume` needs. Collective."""
    training.model_pass.flush()
    history = [asdict(figures) for figures in training.history]
    run = {"identity": identity, "step": training.step, "history": history}
    write_checkpoint(folder, training.model, training.optimizer, run)


def check_outputs(save: Path | None, metrics: Path | None) -> None:
    """Find out now, not after hours of training, that a result could not be written."""
    if save:
        save.mkdir(parents=True, exist_ok=True)
    check_writable(*([save / "probe"] if save else []), *([metrics] if metrics else []))


# --- the program ----------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def describe(settings: Settings, division: Division, model: nn.Module, text: Tensor) -> str:
    """The line above the steps; `model` is the whole one."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_replicas, num_micro_batches = division.layout.dp, division.num_micro_batches
    split = (
        f"{num_replicas} x {num_micro_batches} x {settings.batch_size // num_replicas // num_micro_batches}"
    )
    return (
        f"GPT with {num_parameters:,} parameters, {settings.precision.value}; {len(text):,} bytes of text; "
        f"{division}; batch {settings.batch_size} = {split}"
    )


@app.command()
def main(
    data: Annotated[
        Path | None, typer.Option(help="A file or a folder of text; default: Python's standard library.")
    ] = None,
    parallel: Annotated[
        str | None, typer.Option(help="Ranks per axis of dp, cp, tp, pp: dp=2,tp=2; default: all along dp.")
    ] = None,
    zero: Annotated[
        Zero, typer.Option(help="Shard over dp: nothing (0), optimizer state (1), gradients (2), all (3).")
    ] = Zero.nothing,
    offload: Annotated[
        Path | None, typer.Option(help="With --zero 2: folder for the optimizer's state.")
    ] = None,
    pipeline: Annotated[
        ScheduleName | None, typer.Option(help="Stages by a schedule of mpisgd.pipeline; default: pp=ranks.")
    ] = None,
    layout_rules: Annotated[
        str | None, typer.Option("--layout", help="Dimensions by axis: 'batch:dp; hidden:tp; vocab:tp'.")
    ] = None,
    mesh: Annotated[str | None, typer.Option(help="With --layout: ranks per axis, 'dp:2, tp:2'.")] = None,
    precision: Annotated[Precision, typer.Option(help="bf16: autocast to bfloat16.")] = (Precision.float32),
    checkpoint_activations: Annotated[
        bool, typer.Option("--checkpoint-activations", help="Recompute activations in backward.")
    ] = False,
    accumulate: Annotated[
        int | None, typer.Option(min=1, help="Micro-batches per rank and step; default: 1, or 2 x pp.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Transformer layers.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    dim: Annotated[int, typer.Option(min=1, help="Hidden dimension.")] = 128,
    context: Annotated[int, typer.Option(min=1, help="Context length in bytes.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per step, over all ranks.")] = BATCH_SIZE,
    steps: Annotated[int, typer.Option(min=1, help="Total steps, including those before a resume.")] = 500,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 2e-3,
    warmup_steps: Annotated[int, typer.Option(min=0, help="Steps of linear warmup.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights and of the text order.")] = 0,
    save_to: Annotated[
        Path | None, typer.Option("--save", help="Folder of checkpoints; the last is written at the end.")
    ] = None,
    save_every: Annotated[int | None, typer.Option(min=1, help="Steps between checkpoints.")] = None,
    resume_from: Annotated[
        Path | None, typer.Option("--resume", help="Resume from a folder of --save, in any layout.")
    ] = None,
    optimizer: OptimizerOption = OptimizerName.adamw,
    strategy: StrategyOption = "Synchronous",
    compression: CompressionOption = "none",
    sample: Annotated[int, typer.Option(min=0, help="Bytes to generate at the end.")] = 200,
    prompt: Annotated[str, typer.Option(help="Prompt of the generated text.")] = "def ",
    log_every: Annotated[int, typer.Option(min=1, help="Steps between log lines.")] = 20,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder of curves for TensorBoard.")] = None,
    metrics: Annotated[
        Path | None, typer.Option(readable=False, help="File for one line of JSON per log line.")
    ] = None,
    layer_dropping: Annotated[
        str | None, typer.Option(metavar="THETA,GAMMA", help="Progressive layer dropping, such as 0.5,0.01.")
    ] = None,
) -> None:
    """Train a GPT on text, on all ranks of the job (mpirun -np N ...), or alone."""
    mpisgd.init()
    division = Division(
        layout := choose_layout(parallel, zero, pipeline, layout_rules),
        choose_method(strategy, compression, zero, offload),
        pipeline,
        read_mesh_layout(layout_rules, mesh),
        accumulate or (2 * layout.pp if layout.pp > 1 else 1),
        checkpoint_activations,
        layer_dropping is not None,
    )
    sizes = (layers, heads, dim, context, batch_size)
    settings = Settings(*sizes, lr, warmup_steps, seed, precision, layer_dropping, optimizer)
    check_division(division, parallel)
    division = replace(division, method=method_for(optimizer, division))
    check_fit(layout, settings.model_size, batch_size, division.num_micro_batches)
    on_rank_0(lambda: check_outputs(save_to, metrics))
    on_rank_0(lambda: check_tensorboard(tensorboard))
    text = load_text(data, context)
    run_identity = identity(settings, text)

    dist.init_process_group("mpisgd")  # (1)
    model = build_model(settings.model_size, seed)
    headline = describe(settings, division, model, text)
    training = build_training(model, settings, division)
    if resume_from:
        resume(resume_from, training, run_identity)
    if metrics:
        on_rank_0(lambda: append_metrics(metrics, training.history, afresh=True))
    board = TensorBoard(tensorboard if mpisgd.rank() == 0 else None, training.history)

    with Terminal(visible=mpisgd.rank() == 0, completed=training.step, total=steps) as terminal:
        terminal.say(headline)
        for figures in run_steps(training, settings, text, steps, log_every):
            terminal.advance()
            if figures:
                terminal.say(
                    f"step {figures.step:>5}/{steps}  loss {figures.loss:.4f}  "
                    f"{figures.bytes_per_s:>9,.0f} bytes/s"
                )
                board.add(figures)
                if metrics:
                    on_rank_0(lambda: append_metrics(metrics, training.history[-1:]))
            if save_to and (training.step == steps or (save_every and training.step % save_every == 0)):
                save(save_to, training, run_identity)
        finish(training.optimizer)
        training.model_pass.flush()
        if sample:
            with common_model(training.optimizer):
                written = write_text(training, settings, (prompt or "\n").encode(), sample)
            terminal.say(f"a sample:\n{written.decode(errors='replace')}")
        if save_to:
            terminal.say(f"checkpoint: {save_to}")
    board.close()
    training.model_pass.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_program(app)
