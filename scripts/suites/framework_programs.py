"""Programs of the shapes that users of other frameworks have, each as a test of a minute at most.

    mpirun -n 2 python scripts/suites/framework_programs.py FOLDER LIMIT_S NAME ...      see in_job.py

Each trains on data that it makes itself, and checks what only working communication gives: equal weights on
all ranks, the metrics of the joined data, or the training of one process.
"""

import functools
import os
import sys
import unittest
from pathlib import Path

import in_job
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import mpisgd

OPERATORS = torch.library.Library("torchvision", "FRAGMENT")  # what it has declared it takes back at its end


def labelled_data(num_examples: int = 64) -> TensorDataset:
    """Points of two classes, the same on all ranks."""
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(num_examples, 4, generator=draw)
    return TensorDataset(points, (points.sum(1) > 0).long())


@in_job.in_folder
def hugging_face_trainer(folder: Path) -> None:
    """The Trainer of transformers on a small GPT, with evaluation and a checkpoint."""
    from mpisgd.integrations.accelerate import use_mpi

    use_mpi(cpu=True)
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    sizes = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes))
    texts = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": text, "labels": text} for text in texts]
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=4, num_train_epochs=1, report_to=[], disable_tqdm=True
    )
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
    trainer.train()
    assert trainer.state.global_step == -(-len(data) // (4 * mpisgd.size()))
    assert trainer.evaluate()["eval_loss"] > 0
    in_job.check_equal_weights(model)


def load_torchvision() -> None:
    """Import torchvision from beside the environment, without its compiled operators if these do not fit.

    The package index has it for torch with CUDA. With another torch its import fails, and with it that of
    TorchMetrics and Lightning, which take what there is. It describes two operators, which must be declared
    for that; the models for classification use none.
    """
    sys.path.append(str(Path(sys.prefix, "beside")))
    try:
        import torchvision
    except ImportError as exc:
        raise unittest.SkipTest("there is no torchvision") from exc
    except RuntimeError:
        for name in ("nms", "qnms"):
            OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision  # noqa: F401


@in_job.in_folder
def torchvision_reference(folder: Path) -> None:
    """As torchvision's script for classification: ranks of the environment, DDP, SyncBatchNorm, meters."""
    load_torchvision()
    from torchvision.datasets import FakeData
    from torchvision.models import resnet18
    from torchvision.transforms import ToTensor

    mpisgd.init()  # sets RANK, WORLD_SIZE and LOCAL_RANK, which the script reads
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("mpisgd", init_method="env://", world_size=size, rank=rank)
    data = FakeData(size=12, image_size=(3, 32, 32), num_classes=3, transform=ToTensor())
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data), num_workers=1)
    model = mpisgd.SyncBatchNorm.convert_sync_batchnorm(resnet18(num_classes=3))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01, momentum=0.9)
    seen = torch.zeros(2, dtype=torch.float64)  # a meter: count and total
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(parallel(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += torch.tensor([len(images), loss.item() * len(images)], dtype=torch.float64)
    dist.barrier()
    dist.all_reduce(seen)
    assert seen[0] == len(data)
    if rank == 0:
        torch.save(model.state_dict(), folder / "model.pt")
    dist.barrier()
    assert torch.load(folder / "model.pt", weights_only=True).keys() == model.state_dict().keys()
    in_job.check_equal_weights(model)
    dist.destroy_process_group()


@in_job.in_folder
def nano_gpt_style(folder: Path) -> None:
    """As nanoGPT's script: RANK decides about DDP, micro-steps without a reduction, clipping, one writer."""
    mpisgd.init()
    assert int(os.environ.get("RANK", "-1")) != -1, "this would train on one process"
    dist.init_process_group(backend="mpisgd")
    rank, num_micro_steps = int(os.environ["RANK"]), 3
    torch.manual_seed(1337 + rank)
    block = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(32, 16), block, torch.nn.Linear(16, 32))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    for _ in range(4):
        for micro_step in range(num_micro_steps):
            parallel.require_backward_grad_sync = micro_step == num_micro_steps - 1
            tokens = torch.randint(32, (2, 9))
            logits = parallel(tokens[:, :-1]).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()) / num_micro_steps
            loss.backward()
        torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if rank == 0:
        torch.save({"model": model.state_dict()}, folder / "ckpt.pt")
    in_job.check_equal_weights(model)
    dist.destroy_process_group()


@in_job.in_folder
def torchmetrics_over_ranks(folder: Path) -> None:
    """Metrics that gather over the ranks when they are computed are those of all the data."""
    from torchmetrics import MeanMetric
    from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

    dist.init_process_group("mpisgd")
    draw = torch.Generator().manual_seed(0)
    scores, labels = torch.rand(10, generator=draw), torch.randint(2, (10,), generator=draw)
    mine = slice(dist.get_rank(), None, dist.get_world_size())  # unequal shares
    for make in (BinaryAUROC, functools.partial(MulticlassAccuracy, num_classes=2)):
        predicted = scores if make is BinaryAUROC else (scores > 0.5).long()
        metric, whole = make(), make(sync_on_compute=False)
        metric.update(predicted[mine], labels[mine])
        whole.update(predicted, labels)
        torch.testing.assert_close(metric.compute(), whole.compute())
    mean = MeanMetric()
    mean.update(scores[mine])
    torch.testing.assert_close(mean.compute(), scores.mean())
    dist.destroy_process_group()


@in_job.in_folder
def optuna_under_mpirun(folder: Path) -> None:
    """One trial at a time, which all ranks train together: rank 0 has the study."""
    import optuna
    from optuna_integration import TorchDistributedTrial

    dist.init_process_group("mpisgd")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    data, num_trials = labelled_data(), 3

    def objective(single: optuna.Trial | None) -> float:
        trial = TorchDistributedTrial(single, group=dist.group.WORLD)
        lr = trial.suggest_float("lr", 1e-3, 1.0, log=True)
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        loss = torch.zeros(())
        for points, labels in DataLoader(data, batch_size=8, sampler=DistributedSampler(data)):
            loss = torch.nn.functional.cross_entropy(model(points), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        in_job.check_equal_weights(model)
        mean = mpisgd.average(loss.item())
        trial.report(mean, 0)
        return mean

    if dist.get_rank() == 0:
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        study.optimize(objective, n_trials=num_trials)
        assert len({trial.params["lr"] for trial in study.trials}) == num_trials
    else:
        for _ in range(num_trials):
            objective(None)
    dist.destroy_process_group()


if __name__ == "__main__":
    in_job.main(in_job.tests_in_folders, sys.argv[1:])
