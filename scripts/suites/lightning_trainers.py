"""Trainers of Lightning with `strategy="mpisgd"` on the demonstration models of its wheel, each as a test.

    mpirun -n 2 python scripts/suites/lightning_trainers.py FOLDER LIMIT_S NAME ...      see in_job.py

Lightning's own tests are in no distribution. These runs take what its documentation tells users of several
devices to use, and check steps, metrics and that all ranks end with the same weights.
"""

import logging
import sys
import unittest
from pathlib import Path
from typing import Any

import in_job
import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.callbacks import StochasticWeightAveraging as WeightAveraging
from lightning.pytorch.demos import boring_classes as demos
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

import mpisgd
from mpisgd.integrations.lightning import MpisgdEnvironment, MpisgdStrategy
from mpisgd.torch_backend import bf16_compress

NUM_BATCHES = 64  # of the demonstration model's data, on all ranks together


def trainer(folder: Path, **options: Any) -> lightning.Trainer:
    """A trainer on the ranks of this job."""
    defaults = {
        "strategy": "mpisgd",
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
    }
    return lightning.Trainer(**{**defaults, **options})


def share(number: int) -> int:
    """How many of that many items a rank has, where the last ones are repeated."""
    return -(-number // mpisgd.size())


@in_job.in_folder
def fit_validate_test_predict(folder: Path) -> None:
    """All four loops of one trainer."""
    model, ours = demos.BoringModel(), trainer(folder)
    ours.fit(model)
    assert ours.global_step == share(NUM_BATCHES)
    in_job.check_equal_weights(model)
    ours.validate(model, verbose=False)
    ours.test(model, verbose=False)
    own = range(mpisgd.rank(), NUM_BATCHES, mpisgd.size())  # predictions are not repeated
    assert len(ours.predict(model)) == len(own)


@in_job.in_folder
def data_module(folder: Path) -> None:
    """The data come from a LightningDataModule."""
    model, ours = demos.BoringModel(), trainer(folder)
    ours.fit(model, datamodule=demos.BoringDataModule())
    assert ours.global_step == share(NUM_BATCHES)
    in_job.check_equal_weights(model)


@in_job.in_folder
def data_without_length(folder: Path) -> None:
    """The data are an iterable, of which every rank reads all."""
    model, ours = demos.BoringModel(), trainer(folder)
    ours.fit(model, DataLoader(demos.RandomIterableDataset(32, 10)))
    assert ours.global_step == 10
    in_job.check_equal_weights(model)


@in_job.in_folder
def manual_optimization(folder: Path) -> None:
    """The model calls its optimizer itself."""
    model, ours = demos.ManualOptimBoringModel(), trainer(folder)
    ours.fit(model)
    assert ours.global_step == share(NUM_BATCHES)
    in_job.check_equal_weights(model)


class Logging(demos.BoringModel):
    """Logs the rank, averaged over the ranks, at each step and for the epoch."""

    def training_step(self, batch: Any, index: int) -> Any:
        """Log at steps."""
        self.log("rank", float(self.global_rank), on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", float(self.global_rank), sync_dist=True, reduce_fx="max")
        return super().training_step(batch, index)

    def validation_step(self, batch: Any, index: int) -> None:
        """Log for the epoch."""
        self.log("validated", float(self.global_rank), sync_dist=True)


@in_job.in_folder
def metrics_of_all_ranks(folder: Path) -> None:
    """`self.log(..., sync_dist=True)` has the mean, or the largest, over the ranks."""
    ours = trainer(folder, logger=CSVLogger(folder), log_every_n_steps=1)
    ours.fit(Logging())
    mean = (mpisgd.size() - 1) / 2
    found = {name: ours.callback_metrics[name].item() for name in ("rank_step", "rank_epoch", "validated")}
    assert all(abs(value - mean) < 1e-6 for value in found.values()), found
    assert ours.callback_metrics["largest"].item() == mpisgd.size() - 1


@in_job.in_folder
def accumulated_and_clipped(folder: Path) -> None:
    """Gradients of four batches, clipped, in one step."""
    model = demos.BoringModel()
    ours = trainer(folder, accumulate_grad_batches=4, gradient_clip_val=0.1)
    ours.fit(model)
    assert ours.global_step == -(-share(NUM_BATCHES) // 4)
    in_job.check_equal_weights(model)


@in_job.in_folder
def mixed_precision(folder: Path) -> None:
    """The forward pass in bfloat16."""
    model = demos.BoringModel()
    trainer(folder, precision="bf16-mixed").fit(model)
    in_job.check_equal_weights(model)


@in_job.in_folder
def unused_parameters(folder: Path) -> None:
    """A layer that no loss reaches."""

    class Unused(demos.BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.unused = torch.nn.Linear(3, 3)

    model = Unused()
    trainer(folder, strategy=MpisgdStrategy(find_unused_parameters=True)).fit(model)
    in_job.check_equal_weights(model)


@in_job.in_folder
def compressed_gradients(folder: Path) -> None:
    """DDP's communication hook in bfloat16."""
    model = demos.BoringModel()
    trainer(folder, strategy=MpisgdStrategy(ddp_comm_hook=bf16_compress)).fit(model)
    in_job.check_equal_weights(model)


@in_job.in_folder
def resumed(folder: Path) -> None:
    """Two epochs with a stop between them end where two epochs without one end."""
    ends = []
    for parts in ([2], [1, 2]):
        torch.manual_seed(1)
        model, path = demos.BoringModel(), None
        for epochs in parts:
            saved = ModelCheckpoint(folder / f"{len(parts)}-{epochs}", save_last=True)
            ours = trainer(folder, max_epochs=epochs, callbacks=[saved], enable_checkpointing=True)
            data = DataLoader(demos.RandomDataset(32, NUM_BATCHES), shuffle=False)
            torch.manual_seed(2)
            data.dataset.data = torch.randn(NUM_BATCHES, 32)
            ours.fit(model, data, ckpt_path=path)
            path = saved.last_model_path
            mpisgd.barrier()
        ends.append(model.layer.weight.detach().clone())
        in_job.check_equal_weights(model)
    assert torch.equal(*ends)


@in_job.in_folder
def stopped_early(folder: Path) -> None:
    """All ranks stop in the same epoch, though each sees another metric."""

    class Worse(demos.BoringModel):
        def on_train_epoch_end(self) -> None:
            self.log("loss", float(self.current_epoch * (self.global_rank + 1)), sync_dist=True)

    ours = trainer(
        folder, max_epochs=9, callbacks=[EarlyStopping("loss", patience=2, check_on_train_epoch_end=True)]
    )
    ours.fit(Worse(), DataLoader(demos.RandomDataset(32, 8)))
    assert ours.current_epoch == 3


@in_job.in_folder
def averaged_weights_and_rates(folder: Path) -> None:
    """Callbacks that change the schedule and the weights."""
    model = demos.BoringModel()
    callbacks = [WeightAveraging(swa_lrs=0.01, swa_epoch_start=1), LearningRateMonitor()]
    trainer(folder, max_epochs=3, callbacks=callbacks, logger=CSVLogger(folder)).fit(model)
    in_job.check_equal_weights(model)


@in_job.in_folder
def learning_rate_found(folder: Path) -> None:
    """The tuner's search for a learning rate, which restores the weights afterwards."""

    class Rated(demos.BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.learning_rate = 0.1

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.learning_rate)

    model = Rated()
    found = Tuner(trainer(folder)).lr_find(model, num_training=10)
    assert found is not None
    in_job.check_equal_weights(model)


@in_job.in_folder
def objects_and_files(folder: Path) -> None:
    """What a strategy offers to callbacks: broadcast, all_gather, barrier, reduce, rank-zero-only."""
    ours = trainer(folder)
    ours.fit(demos.BoringModel())
    assert ours.strategy.broadcast(f"of rank {ours.global_rank}") == "of rank 0"
    gathered = ours.strategy.all_gather(torch.tensor([float(ours.global_rank)]))
    assert gathered.flatten().tolist() == list(range(ours.world_size))
    total = ours.strategy.reduce(torch.tensor(float(ours.global_rank)), reduce_op="sum")
    assert total.item() == sum(range(ours.world_size))
    assert ours.strategy.reduce_boolean_decision(ours.global_rank == 0, all=False)
    ours.strategy.barrier("the end")


@in_job.in_folder
def batch_norm_of_all_ranks(folder: Path) -> None:
    """`Trainer(sync_batchnorm=True)`."""

    class Normed(demos.BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Sequential(torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 2))

    model = Normed()
    trainer(folder, sync_batchnorm=True).fit(
        model, DataLoader(demos.RandomDataset(32, NUM_BATCHES), batch_size=4)
    )
    in_job.check_equal_weights(model)


@in_job.in_folder
def fully_sharded(folder: Path) -> None:
    """FSDPStrategy with our environment."""
    if not torch.cuda.is_available():
        raise unittest.SkipTest("Lightning's FSDPStrategy wants a GPU")
    from lightning.pytorch.strategies import FSDPStrategy

    strategy = FSDPStrategy(cluster_environment=MpisgdEnvironment(), process_group_backend="mpisgd")
    trainer(folder, strategy=strategy, accelerator="gpu").fit(demos.BoringModel())


def tests() -> in_job.Tests:
    """All runs by their names."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return in_job.tests_in_folders()


if __name__ == "__main__":
    in_job.main(tests, sys.argv[1:])
