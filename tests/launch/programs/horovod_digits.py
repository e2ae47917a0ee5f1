"""Train on handwritten digits with Horovod: what its users' scripts have in common.

The batch size is that of the whole job, so that every number of ranks has the same loss curve.
"""

import argparse

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("data", help="an .npz file with images [n, pixels] and labels [n]")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=48)
parser.add_argument("--lr", type=float, default=0.2)


class Net(torch.nn.Module):
    def __init__(self, num_pixels):
        super().__init__()
        self.hidden = torch.nn.Linear(num_pixels, 32)
        self.out = torch.nn.Linear(32, 10)

    def forward(self, images):
        return F.log_softmax(self.out(torch.tanh(self.hidden(images))), dim=1)


def main(args):
    hvd.init()
    torch.manual_seed(hvd.rank())  # everyone starts with other weights, until rank 0's are broadcast
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

    arrays = np.load(args.data)
    images, labels = torch.from_numpy(arrays["images"]).double(), torch.from_numpy(arrays["labels"])
    train_set = TensorDataset(images, labels)
    sampler = DistributedSampler(train_set, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(train_set, batch_size=args.batch_size // hvd.size(), sampler=sampler)

    model = Net(images.shape[1]).double().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for data, target in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data.to(device)), target.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
        mean = hvd.allreduce(torch.tensor(total / len(loader), dtype=torch.float64), name="epoch loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch} loss {mean.item()!r}")


if __name__ == "__main__":
    main(parser.parse_args())
