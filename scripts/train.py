"""Train an image classifier on every rank of an MPI job: the program to copy.

    python scripts/train.py                                                      alone
    mpirun -np 8 -hostfile hostfiles/localhost-8 python scripts/train.py         eight ranks, the same curve

Every rank holds the whole model and works on its share of each batch; the gradients are averaged over the
ranks while they are computed. What makes a program data parallel is marked (1) to (5) below. Two rules
keep the result independent of the number of ranks: the batch size is that of the whole job, and nothing in
the model depends on how a batch was divided (BatchNorm does, and dropout draws differently on every rank).

With --checkpoint-folder and --resume the same command goes on where the run was stopped, by a failure or by a
batch system (SIGTERM): `python -m mpisgd run -n 8 --restarts 3 scripts/train.py --checkpoint-folder runs/a
--resume`. Only rank 0 touches files, so they need to be on its host alone.
"""

import importlib.util
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset
from training.image_data import ImageData, load
from training.image_model import (
    DEFAULT_LR,
    REFERENCE_BATCH,
    ModelName,
    OptimizerName,
    build_model,
    build_optimizer,
    scaled_lr,
    warm_up,
)
from training.methods import CompressionOption, Method, StrategyOption, common_model, finish, read_method
from training.ranks import mean_over_ranks, on_rank_0
from training.records import (
    Epoch,
    TensorBoard,
    Terminal,
    append_metrics,
    check_tensorboard,
    check_writable,
    save_plot,
)
from training.train_state import Checkpointer, resume_from

import mpisgd
from mpisgd.tools.cli.program import run_program

Batch = tuple[Tensor, Tensor]


class DtypeName(str, Enum):
    """What --dtype takes."""

    float32 = "float32"
    float64 = "float64"


@dataclass(frozen=True)
class Settings:
    """All that the curve depends on beside the images."""

    model: ModelName
    optimizer: OptimizerName
    lr: float
    warmup_epochs: int
    batch_size: int
    seed: int
    dtype: DtypeName
    strategy: str = "Synchronous"
    compression: str = "none"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the parameters and the images."""
        return torch.float64 if self.dtype is DtypeName.float64 else torch.float32


# --- the data, divided among the ranks ----------------------------------------------------------------


class Order(DistributedSampler[Batch]):
    """(2) This rank's images: the same permutation everywhere, dealt out to the ranks.

    Attributes:
        seen: how many images of this epoch all ranks together have trained on; it begins after them.
    """

    seen = 0

    def __iter__(self) -> Iterator[int]:
        return islice(super().__iter__(), self.seen // self.num_replicas, None)

    def begin(self, epoch: int) -> None:
        """Shuffle anew, unless a checkpoint has left off in this epoch."""
        if epoch != self.epoch:
            self.set_epoch(epoch)
            self.seen = 0

    def state_dict(self) -> dict[str, int]:
        """Nothing in it depends on the number of ranks."""
        return {"epoch": self.epoch, "seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where another one was."""
        self.epoch, self.seen = state["epoch"], state["seen"]


def train_batches(data: TensorDataset, batch_size: int, seed: int) -> DataLoader[Batch]:
    """This rank's part of every batch.

    An incomplete last batch is dropped: it would not divide by the ranks.
    """
    size = mpisgd.size()
    order = Order(data, size, mpisgd.rank(), seed=seed, drop_last=True)
    # A generator of its own: each new loader draws a number, which the model's generator would be short of
    # after a resume in the middle of an epoch.
    return DataLoader(data, batch_size // size, sampler=order, drop_last=True, generator=torch.Generator())


def test_batches(data: TensorDataset) -> DataLoader[Batch]:
    """This rank's share of the test images; shares differ by one image where they must."""
    return DataLoader(Subset(data, range(mpisgd.rank(), len(data), mpisgd.size())), batch_size=512)


def check_batch_size(batch_size: int, num_images: int) -> None:
    """The ranks share each batch evenly, and there must be a whole one."""
    size = mpisgd.size()
    if batch_size % size:
        smaller = batch_size // size * size
        fitting = [str(count) for count in (smaller, smaller + size) if count]
        raise mpisgd.JobError(
            f"--batch-size {batch_size} is for the whole job and must divide by its {size} ranks; "
            f"{' or '.join(fitting)} would"
        )
    if batch_size > num_images:
        raise mpisgd.JobError(f"--batch-size {batch_size} is more than the {num_images} training images")


# --- training -----------------------------------------------------------------------------------------


@dataclass
class Training:
    """What is trained, what trains it, on what, and how it went so far.

    Attributes:
        step: how many there were.
        total_and_count: of this epoch's losses, on this rank.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LambdaLR
    batches: DataLoader[Batch]
    step: int = 0
    total_and_count: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    history: list[Epoch] = field(default_factory=list)


def build_training(
    settings: Settings, images: ImageData, batches: DataLoader[Batch], method: Method | None
) -> Training:
    """The model, its optimizer and the schedule of its learning rate; without a method ranks train alone."""
    torch.manual_seed(settings.seed)
    model = build_model(settings.model, images.image_shape, images.num_classes)
    model.to(settings.torch_dtype)
    optimizer = build_optimizer(settings.optimizer, model, scaled_lr(settings.lr, settings.batch_size))
    if method:  # (3) from here on backward() averages the gradients over the ranks
        optimizer = method.distribute(optimizer, model)
    scheduler = warm_up(optimizer, settings.warmup_epochs * len(batches))
    return Training(model, optimizer, scheduler, batches)


def train_epoch(training: Training, after_step: Callable[[], object]) -> float:
    """One pass over the training images, or the rest of one; its mean loss, over all ranks."""
    training.model.train()
    for images, labels in training.batches:
        training.optimizer.zero_grad()
        loss = cross_entropy(training.model(images), labels)
        loss.backward()
        training.optimizer.step()
        training.scheduler.step()
        added = [loss.item() * len(labels), len(labels)]
        training.total_and_count += torch.tensor(added, dtype=torch.float64)
        training.batches.sampler.seen += len(labels) * mpisgd.size()
        training.step += 1
        after_step()
    mean = mean_over_ranks(training.total_and_count)  # (5) what one rank has seen is only its share
    training.total_and_count.zero_()
    return mean


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterable[Batch]) -> float:
    """The fraction of the test images, over all ranks, that the model gets right."""
    model.eval()
    total_and_count = torch.zeros(2, dtype=torch.float64)
    for images, labels in batches:
        num_right = (model(images).argmax(dim=1) == labels).sum()
        total_and_count += torch.tensor([num_right, len(labels)], dtype=torch.float64)
    return mean_over_ranks(total_and_count)


def run_epochs(
    training: Training, test_loader: DataLoader[Batch], num_epochs: int, after_step: Callable[[], object]
) -> Iterator[Epoch]:
    """Train until the history has `num_epochs` epochs, and give out the figures of each."""
    order = training.batches.sampler
    for number in range(len(training.history) + 1, num_epochs + 1):
        order.begin(number)
        seen_before, start = order.seen, time.perf_counter()
        lr = training.scheduler.get_last_lr()[0]
        loss = train_epoch(training, after_step)
        rate = (order.seen - seen_before) / (time.perf_counter() - start)
        with common_model(training.optimizer):
            epoch = Epoch(number, loss, accuracy(training.model, test_loader), rate, lr)
        training.history.append(epoch)
        yield epoch


# --- files --------------------------------------------------------------------------------------------


def identity(settings: Settings, images: ImageData) -> dict[str, Any]:
    """What a checkpoint must have in common with the run that goes on from it."""
    shape = [len(images.train), *images.image_shape]
    return {
        **{
            f"--{name.replace('_', '-')}": getattr(value, "value", value)
            for name, value in asdict(settings).items()
        },
        "--classes": images.num_classes,
        "training images": " x ".join(map(str, shape)),
    }


def check_method(method: Method, strategy: str, *, checkpoints: bool, sync: bool) -> None:
    """Find out before the data is loaded what does not go together."""
    if not sync and not method.is_default:
        raise mpisgd.JobError("--no-sync does not go with --strategy and --compression")
    if checkpoints and not method.has_one_model:
        raise mpisgd.JobError(
            f"--checkpoint-folder does not go with --strategy {strategy}: every rank has a model of its own, "
            "and a checkpoint of this program has one"
        )


def check_outputs(plot: Path | None, *others: Path | None) -> None:
    """Find out now, not after hours of training, that a result could not be written."""
    if plot and not importlib.util.find_spec("matplotlib"):
        raise mpisgd.JobError("--plot needs matplotlib: pip install matplotlib")
    if plot and plot.suffix not in (".png", ".svg", ".pdf"):
        raise mpisgd.JobError(f"--plot {plot}: the name must end in .png, .svg or .pdf")
    check_writable(*filter(None, (plot, *others)))


# --- the program --------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, rich_markup_mode=None)


def describe(settings: Settings, images: ImageData, model: nn.Module) -> str:
    """The line above the epochs."""
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"{settings.model.value} with {num_parameters:,} parameters, {settings.dtype.value}; "
        f"{len(images.train):,} training and {len(images.test):,} test images; {describe_job(settings)}"
    )


def describe_job(settings: Settings) -> str:
    """For example: 4 ranks on 1 host, batch 48 = 4 x 12."""
    size, num_nodes = mpisgd.size(), mpisgd.num_nodes()
    return (
        f"{size} rank{'s' * (size > 1)} on {num_nodes} host{'s' * (num_nodes > 1)}, "
        f"batch {settings.batch_size} = {size} x {settings.batch_size // size}"
    )


@app.command()
def main(
    data: Annotated[
        Path | None, typer.Option(help="A folder of MNIST-format files, or an .npz file; default: digits.")
    ] = None,
    classes: Annotated[int, typer.Option(min=2, help="Number of classes; labels are 0 to CLASSES - 1.")] = 10,
    model: Annotated[ModelName, typer.Option()] = ModelName.cnn,
    optimizer: Annotated[OptimizerName, typer.Option()] = OptimizerName.sgd,
    lr: Annotated[
        float | None, typer.Option(min=0, help=f"Learning rate for a batch of {REFERENCE_BATCH}.")
    ] = None,
    warmup_epochs: Annotated[int, typer.Option(min=0, help="Epochs of linear warmup.")] = 1,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Images per step, over all ranks.")
    ] = REFERENCE_BATCH,
    epochs: Annotated[int, typer.Option(min=1, help="Total epochs, including those before a resume.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights and of the image order.")] = 0,
    dtype: Annotated[DtypeName, typer.Option()] = DtypeName.float32,
    checkpoint_folder: Annotated[
        Path | None, typer.Option(help="Folder of checkpoints: the last three, one per epoch.")
    ] = None,
    checkpoint_every: Annotated[
        int, typer.Option(min=0, help="Steps between further checkpoints; 0: none.")
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest checkpoint, if any.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(readable=False, help="Plot of loss and accuracy: .png, .svg or .pdf.")
    ] = None,
    tensorboard: Annotated[Path | None, typer.Option(help="Folder of curves for TensorBoard.")] = None,
    metrics: Annotated[
        Path | None, typer.Option(readable=False, help="File for one line of JSON per epoch.")
    ] = None,
    strategy: StrategyOption = "Synchronous",
    compression: CompressionOption = "none",
    no_sync: Annotated[
        bool, typer.Option("--no-sync", help="Train every rank alone, for comparison.")
    ] = False,
) -> None:
    """Train an image classifier on all ranks of the job (mpirun -np N ...), or alone."""
    mpisgd.init()  # (1)
    if checkpoint_folder is None and (resume or checkpoint_every):
        raise mpisgd.JobError("--resume and --checkpoint-every need --checkpoint-folder")
    method = read_method(strategy, compression)
    check_method(method, strategy, checkpoints=checkpoint_folder is not None, sync=not no_sync)
    on_rank_0(lambda: check_outputs(plot, metrics))
    on_rank_0(lambda: check_tensorboard(tensorboard))
    images = on_rank_0(lambda: load(data, num_classes=classes))
    check_batch_size(batch_size, len(images.train))
    lr = DEFAULT_LR[optimizer] if lr is None else lr
    settings = Settings(model, optimizer, lr, warmup_epochs, batch_size, seed, dtype, strategy, compression)
    train_loader = train_batches(images.train.dataset(settings.torch_dtype), batch_size, seed)
    test_loader = test_batches(images.test.dataset(settings.torch_dtype))
    training = build_training(settings, images, train_loader, None if no_sync else method)
    checkpointer, resumed = None, False
    if checkpoint_folder:
        checkpointer = Checkpointer(checkpoint_folder, checkpoint_every, identity(settings, images), training)
        resumed = resume and resume_from(checkpoint_folder, training, checkpointer.identity)
    mpisgd.broadcast_parameters(training.model)  # (4) rank 0's weights to all
    if metrics:
        on_rank_0(lambda: append_metrics(metrics, training.history, afresh=True))
    board = TensorBoard(tensorboard if mpisgd.rank() == 0 else None, training.history)

    num_steps = epochs * len(train_loader)
    with Terminal(visible=mpisgd.rank() == 0, completed=training.step, total=num_steps) as terminal:
        terminal.say(describe(settings, images, training.model))
        if resume:
            terminal.say(
                f"goes on after step {training.step}" if resumed else f"no checkpoint in {checkpoint_folder}"
            )

        def after_step() -> None:
            terminal.advance()
            if checkpointer:
                checkpointer.after_step()

        start = time.perf_counter()
        for epoch in run_epochs(training, test_loader, epochs, after_step):
            terminal.say(
                f"epoch {epoch.epoch:>3}/{epochs}  loss {epoch.loss:.4f}  "
                f"test accuracy {epoch.test_accuracy:7.2%}  {epoch.images_per_s:>9,.0f} images/s"
            )
            board.add(epoch)
            if metrics:
                on_rank_0(lambda: append_metrics(metrics, training.history[-1:]))
            if checkpointer:
                checkpointer.save()
        if checkpointer:
            checkpointer.finish()
        finish(training.optimizer)
        last, seconds = training.history[-1], time.perf_counter() - start
        terminal.say(f"test accuracy {last.test_accuracy:.2%} after {last.epoch} epochs ({seconds:.1f} s)")
        if plot:
            on_rank_0(lambda: save_plot(plot, training.history, f"{model.value}, {describe_job(settings)}"))
            terminal.say(f"loss curve: {plot}")
        if metrics:
            terminal.say(f"metrics: {metrics}")
    board.close()


if __name__ == "__main__":
    run_program(app)
