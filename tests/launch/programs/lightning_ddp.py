"""Train with Lightning, save a checkpoint and load it: `lightning_ddp.py FOLDER`."""

import sys

import lightning
from lightning.pytorch.plugins.io import TorchCheckpointIO
from one_process import BATCH_SIZE, loss_of, make_data, make_net, make_optimizer, max_difference
from torch.utils.data import DataLoader

import mpisgd
import mpisgd.integrations.lightning


class Module(lightning.LightningModule):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = make_net(seed)

    def training_step(self, batch, _):
        loss = loss_of(self.net, batch)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, i):
        self.log("batch", float(self.global_rank + 2 * i), sync_dist=True)

    def configure_optimizers(self):
        return make_optimizer(self.net)


class LoudCheckpointIO(TorchCheckpointIO):
    def save_checkpoint(self, *args, **kwargs):
        print("a checkpoint is written")
        super().save_checkpoint(*args, **kwargs)


trainer = lightning.Trainer(
    strategy="mpisgd",
    accelerator="cpu",
    max_epochs=1,
    log_every_n_steps=1,
    logger=False,
    default_root_dir=sys.argv[1],
    plugins=[LoudCheckpointIO()],
)
rank, size = mpisgd.rank(), mpisgd.size()
module = Module(seed=rank)  # DDP gives everyone rank 0's weights
data = DataLoader(make_data(size), batch_size=BATCH_SIZE)
trainer.fit(module, data, data)  # Lightning always shuffles
saved = Module.load_from_checkpoint(trainer.checkpoint_callback.best_model_path, seed=9)

print(f"rank {trainer.global_rank} of {trainer.world_size} took {trainer.global_step} steps")
print("validated:", trainer.callback_metrics["batch"].item())
for what, net in {"trained": module.net, "saved": saved.net}.items():
    print(f"{what}: max difference {max_difference(net, size, shuffle=True):.1e}")
for wrong in {"devices": 5}, {"num_nodes": 3}:
    try:
        lightning.Trainer(strategy="mpisgd", accelerator="cpu", logger=False, **wrong)
    except ValueError as exc:
        print("refused:", exc)
