"""Images per second of a residual network on made-up images, in the usual shape of a Horovod benchmark."""

import argparse
import timeit

import horovod.torch as hvd
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
parser.add_argument("--batch-size", type=int, default=8, help="of each rank")
parser.add_argument("--image-size", type=int, default=32)
parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=5)
parser.add_argument("--num-iters", type=int, default=5)
parser.add_argument("--no-cuda", action="store_true")


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.around = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.around = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.around(x))


def residual_network(width, num_classes=1000):
    stages = [Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, num_classes)]
    return nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), *stages, *head)


def log(text):
    if hvd.rank() == 0:
        print(text)


args = parser.parse_args()
hvd.init()
device = "cpu" if args.no_cuda or not torch.cuda.is_available() else "cuda"
if device == "cuda":
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())

model = residual_network(args.width).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=compression, op=hvd.Average
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
labels = torch.randint(1000, (args.batch_size,), device=device)


def step():
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()


log(f"Batch size: {args.batch_size}, {sum(p.numel() for p in model.parameters())} parameters, {device}")
timeit.timeit(step, number=args.num_warmup_batches)
rates = []
for i in range(args.num_iters):
    seconds = timeit.timeit(step, number=args.num_batches_per_iter)
    rates.append(args.batch_size * args.num_batches_per_iter / seconds)
    log(f"Iter #{i}: {rates[-1]:.1f} img/sec per rank")

mean, spread = np.mean(rates), 1.96 * np.std(rates)
log(f"Img/sec per rank: {mean:.1f} +-{spread:.1f}")
log(f"Total img/sec on {hvd.size()} rank(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")
