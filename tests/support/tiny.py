"""A tiny network, data and trainer that know nothing of lit_dps, and small data sets written as
files."""

from __future__ import annotations

import gzip
import io
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": -1,
}


def points(n: int = 20, features: int = 4, classes: int = 3) -> TensorDataset:
    """n normal points with random classes, always the same."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(n, features, generator=generator)
    return TensorDataset(x, torch.randint(classes, (n,), generator=generator))


def loader(n: int = 20, batch_size: int = 4, **arguments) -> DataLoader:
    """Batches of `points`, in their order unless `shuffle` is given."""
    return DataLoader(points(n), batch_size, **arguments)


def two_layers(seed: int = 3) -> nn.Sequential:
    """4 -> 5 -> 3 with biases that are not zero, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


class Plain(LightningModule):
    """Any network, cross-entropy and optimizer; logs the validation errors of a script, the last
    one on and on.

    Attributes:
        taken: Optimizer steps really made, counted by the optimizer.
        losses: Loss of every training step, in float64.
        batches: First feature of every training batch.
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        make_optimizer: Callable = lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        errors: Sequence[float] = (0.9,),
        name: str = "val_error",
    ):
        super().__init__()
        self.network = network if network is not None else two_layers()
        self.make_optimizer, self.errors, self.name = make_optimizer, list(errors), name
        self.taken, self.checks, self.losses, self.batches = 0, 0, [], []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.network(x), y)
        self.losses.append(float(loss.detach().double()))
        self.batches.append(x[:, 0].tolist())
        return loss

    def validation_step(self, batch, batch_idx):
        self.log(
            self.name,
            torch.tensor(self.errors[min(self.checks, len(self.errors) - 1)]),
            batch_size=len(batch[0]),
        )

    def on_validation_epoch_end(self):
        self.checks += 1

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        optimizer.register_step_post_hook(lambda *_: setattr(self, "taken", self.taken + 1))
        return optimizer


class Recorder(Callback):
    """Keeps what `read(trainer, module)` says before every optimizer step."""

    def __init__(self, read: Callable):
        self.read, self.values = read, []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.values.append(self.read(trainer, pl_module))


def fit(
    module: LightningModule,
    train=None,
    val=None,
    callbacks=(),
    ckpt_path=None,
    datamodule=None,
    **arguments,
):
    """Trainer.fit without output, on `loader()` unless other data are given; returns the
    trainer."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = Trainer(**{**QUIET, **arguments}, callbacks=list(callbacks))
    if datamodule is None:
        train = loader() if train is None else train
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no validation loader, few workers: as meant here
        trainer.fit(module, train, val, datamodule=datamodule, ckpt_path=ckpt_path)
    return trainer


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy of all parameters."""
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}"
        )


def idx(array: np.ndarray) -> bytes:
    """An array of bytes in the IDX format: 0, 0, type 8, dimensions, big-endian sizes, data."""
    return (
        bytes([0, 0, 8, array.ndim])
        + np.array(array.shape, ">u4").tobytes()
        + array.astype(np.uint8).tobytes()
    )


def gray(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """n images of 28 x 28 bytes and their classes."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, 28, 28), dtype=np.uint8), rng.integers(0, 10, n, dtype=np.uint8)


def write_idx(folder: Path, train, test, gz: bool = False) -> None:
    """The four files of the MNIST family in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, (x, y) in (("train", train), ("t10k", test)):
        for name, array in ((f"{part}-images-idx3-ubyte", x), (f"{part}-labels-idx1-ubyte", y)):
            data = idx(array)
            (folder / (f"{name}.gz" if gz else name)).write_bytes(
                gzip.compress(data) if gz else data
            )


def png(image: np.ndarray) -> bytes:
    """An image as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "png")
    return file.getvalue()


def write_parquet(
    path: Path, images: np.ndarray, labels: Sequence, column: str = "img", label: str = "label"
) -> None:
    """Images and labels as Hugging Face writes them."""
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"bytes": image if isinstance(image, bytes) else png(image), "path": None}
        for image in images
    ]
    pyarrow.parquet.write_table(pyarrow.table({column: rows, label: list(labels)}), path)
