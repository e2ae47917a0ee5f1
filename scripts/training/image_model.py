"""The classifiers that `train.py` trains, and their optimizers, as one process would have them."""

import math
from enum import Enum

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


class ModelName(str, Enum):
    """What --model takes."""

    linear = "linear"
    mlp = "mlp"
    cnn = "cnn"


class OptimizerName(str, Enum):
    """What --optimizer takes."""

    sgd = "sgd"
    adam = "adam"
    adamw = "adamw"
    rmsprop = "rmsprop"
    adagrad = "adagrad"


def build_model(name: ModelName, image_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A classifier of images [n, channels, height, width].

    All of it is smooth. At the kink of a ReLU, or where two pixels tie in a max pooling, rounding in the
    seventh digit selects another gradient: float32 curves at different numbers of ranks then part for good.
    """
    channels, height, width = image_shape
    num_pixels = channels * height * width
    if name is ModelName.linear:
        return nn.Sequential(nn.Flatten(), nn.Linear(num_pixels, num_classes))
    if name is ModelName.mlp:
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(num_pixels, 128),
            nn.GELU(),
            nn.Linear(128, 128),
            nn.GELU(),
            nn.Linear(128, num_classes),
        )
    return nn.Sequential(
        nn.Conv2d(channels, 16, kernel_size=3, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.GELU(),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(32 * math.ceil(height / 2) * math.ceil(width / 2), num_classes),
    )


DEFAULT_LR = {
    OptimizerName.sgd: 0.1,
    OptimizerName.adam: 2e-3,
    OptimizerName.adamw: 2e-3,
    OptimizerName.rmsprop: 1e-3,
    OptimizerName.adagrad: 2e-2,
}
REFERENCE_BATCH = 48  # divides by 1, 2, 3, 4, 6 and 8 ranks


def build_optimizer(name: OptimizerName, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Any torch optimizer would do."""
    if name is OptimizerName.sgd:
        return torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True)
    others = {
        OptimizerName.adam: torch.optim.Adam,
        OptimizerName.adamw: torch.optim.AdamW,
        OptimizerName.rmsprop: torch.optim.RMSprop,
        OptimizerName.adagrad: torch.optim.Adagrad,
    }
    return others[name](model.parameters(), lr)


def scaled_lr(lr: float, batch_size: int) -> float:
    """The linear scaling rule: of twice the batch there are half the steps, so each goes twice as far.

    `lr` is the one for a batch of REFERENCE_BATCH images.

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD"; they warm up for the same reason.
    """
    return lr * batch_size / REFERENCE_BATCH


def warm_up(optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    """Raise the learning rate evenly over the first `num_steps` steps, then keep it."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (num_steps + 1)))
