"""The small network and the images on which pruning methods and readings are tested."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lit_dps.data import ImageData
from lit_dps.data.image_pass import ImagePass, validation_batches
from lit_dps.data.images import prepare
from lit_dps.module import ImageClassifier
from lit_dps.pruning import prunable
from lit_dps.training.hidden_state import preserve_rng_state
from lit_dps.training.training_pass import copy_of

CLASSES = 3
BATCH_SIZE = 8
FILE_SIZES = (60, 20)  # images of the training file and of the test file
LEARNING_RATE = 0.1
UNTRAINED = "network.0.bias"  # the parameter of `ToyRun` that no optimizer trains


def toy_network(channels: int, hidden: int) -> nn.Sequential:
    """Return a network with a convolution and two linear layers, of images with 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9 * channels, hidden),
        nn.ReLU(),
        nn.Linear(hidden, CLASSES),
    )


class ToyImages(ImageData):
    """Random images of `CLASSES` classes."""

    def setup(self, stage: str = "") -> None:
        generator = torch.Generator().manual_seed(1)
        files = []
        for size in FILE_SIZES:
            x = torch.randn(size, 8, 8, 1, generator=generator)
            y = torch.randint(0, CLASSES, (size,), generator=generator)
            files.append((x.numpy(), y.numpy()))
        # Not by `load`, whose results of other data sets would leave the cache.
        self.images = prepare(*files)


class ToyRun:
    """A run in training, as readings look at it: 52 parameters, plain gradient descent.

    The bias of the convolution is not trained, and not frozen.

    Args:
        sparsity: The share of the weights that random masks prune; 0 has no masks.

    Attributes:
        module, data_module, masks, batch_size, trained: As in `lit_dps.readings.reading.ReadRun`.
    """

    batch_size = BATCH_SIZE

    def __init__(self, sparsity: float):
        self.sparsity = sparsity
        self.data_module = ToyImages(batch_size=BATCH_SIZE)
        self.data_module.setup()
        with preserve_rng_state(seed=2):
            self.module = ImageClassifier(toy_network(1, 3), learning_rate=LEARNING_RATE)
        self.masks: dict[str, Tensor] = {}
        if sparsity:
            generator = torch.Generator().manual_seed(3)
            for name, weight in prunable(self.module).items():
                self.masks[name] = torch.rand(weight.shape, generator=generator) >= sparsity
        self._trained_weights = []
        for name, weight in self.module.named_parameters():
            if name != UNTRAINED:
                self._trained_weights.append(weight)
        self.trained = set(map(id, self._trained_weights))
        self._batches = iter(self.data_module.train_dataloader())
        self._mask_weights()

    def __str__(self) -> str:
        return f"a network of sparsity {self.sparsity:g}"

    def train_step(self) -> None:
        """Take one optimizer step."""
        batch: Any = self.data_module.transfer_batch_to_device(
            next(self._batches), self.module.device
        )
        gradients = torch.autograd.grad(self.module.loss(batch), self._trained_weights)
        with torch.no_grad():
            for weight, gradient in zip(self._trained_weights, gradients, strict=True):
                weight -= LEARNING_RATE * gradient
        self._mask_weights()

    def _mask_weights(self) -> None:
        parameters = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, mask in self.masks.items():
                parameters[name].mul_(mask)

    @contextmanager
    def copied(self) -> Iterator[LightningModule]:
        """Yield a copy of the module; the generators are as before afterwards."""
        with preserve_rng_state(self.data_module):
            yield copy_of(self.module)

    def training_pass(self, batch_size: int, examples: int | None) -> ImagePass:
        """Return a fresh pass over the first examples of the training split; None for all."""
        return ImagePass(self.data_module, self.module.device, batch_size, examples)

    def validation_batches(self) -> Iterator[Any]:
        """Yield the batches of the whole validation split on the device."""
        return validation_batches(self.data_module, self.module.device)

    def loss_of(self, module: Any, batch: Any) -> Tensor | None:
        """Return the mean training loss of a batch by a copy of the module."""
        return module.loss(batch)
