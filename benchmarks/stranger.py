"""Somebody else's small GPT: the time of a step by `lit-dps fit` and by a bare loop.

The module, the data and the loader know nothing of lit_dps. Tokens are random, because their values
do not change the time of a step.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset

from benchmarks.numbers import Sample, interleaved
from benchmarks.step import now

VOCABULARY = 256
BATCH_SIZE = 32
WARM_STEPS = 10  # before the clock starts
VALIDATION_WINDOWS = 64
BARE = "bare loop"
LIGHTNING = "Lightning's Trainer"
FIT = "`lit-dps fit`"


@dataclass(frozen=True)
class Size:
    """Size of the network and of its input, and the precision of the trainer."""

    width: int
    layers: int
    heads: int
    context: int
    precision: str


SIZES = {
    "cuda": Size(width=384, layers=6, heads=6, context=128, precision="bf16-mixed"),
    "cpu": Size(width=32, layers=1, heads=2, context=32, precision="32-true"),
}


class Windows(Dataset):
    """Overlapping windows of a sequence of tokens, each with the next tokens as targets."""

    def __init__(self, tokens: Tensor, context: int, stride: int):
        self.tokens = tokens
        self.context = context
        self.stride = stride

    def __len__(self) -> int:
        return (len(self.tokens) - self.context - 1) // self.stride

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.stride
        end = start + self.context
        return self.tokens[start:end], self.tokens[start + 1 : end + 1]


class Tokens(LightningDataModule):
    """Random tokens."""

    def __init__(self, batch_size: int = BATCH_SIZE, context: int = 128, tokens: int = 400_000):
        super().__init__()
        self.batch_size = batch_size
        self.context = context
        self.tokens = tokens

    def setup(self, stage: str | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        train = torch.randint(VOCABULARY, (self.tokens,), generator=generator)
        length = VALIDATION_WINDOWS * self.context + 1
        val = torch.randint(VOCABULARY, (length,), generator=generator)
        self.train = Windows(train, self.context, stride=16)
        self.val = Windows(val, self.context, stride=self.context)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, VALIDATION_WINDOWS)


class Block(nn.Module):
    """A transformer block: causal attention and a feed-forward network."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.attention(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.norm2(x))


class GPT(LightningModule):
    """A GPT with AdamW and a warm-up: 10.9 million parameters by default."""

    def __init__(
        self,
        lr: float = 1e-3,
        width: int = 384,
        layers: int = 6,
        heads: int = 6,
        context: int = 128,
        warmup_steps: int = 50,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.token_embedding(x) + self.position_embedding.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(embedded)))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val_loss", self._loss(batch))

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x).flatten(0, 1), y.flatten())

    def configure_optimizers(self) -> dict:
        hparams: Any = self.hparams
        optimizer = torch.optim.AdamW(self.parameters(), hparams.lr, betas=(0.9, 0.95))
        warmup = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / hparams.warmup_steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warmup, "interval": "step"}}


@dataclass(frozen=True)
class StrangerSteps:
    """Seconds of a step of the GPT.

    Attributes:
        parameters: Parameters of the network.
        context: Tokens of a window.
        precision: Precision of the trainer.
        steps: Steps that were timed.
        seconds: Seconds a step, by way.
        ratios: Ratios to the bare loop, by way.
    """

    parameters: int
    context: int
    precision: str
    steps: int
    seconds: dict[str, Sample]
    ratios: dict[str, Sample]


def measure_stranger(device: str, steps: int, repeats: int) -> StrangerSteps:
    """Time the steps of the GPT by a bare loop, by Lightning's Trainer and by `lit-dps fit`."""
    size = SIZES[device]
    seconds = interleaved(
        {
            BARE: lambda: _bare_seconds(size, device, steps),
            LIGHTNING: lambda: _lightning_seconds(size, device, steps),
            FIT: lambda: _fit_seconds(size, device, steps),
        },
        repeats,
    )
    ratios = {}
    for name in (LIGHTNING, FIT):
        ratios[name] = seconds[name].over(seconds[BARE])
    parameters = sum(p.numel() for p in _network(size).parameters())
    return StrangerSteps(parameters, size.context, size.precision, steps, seconds, ratios)


def _network(size: Size) -> GPT:
    return GPT(width=size.width, layers=size.layers, heads=size.heads, context=size.context)


def _bare_seconds(size: Size, device: str, steps: int) -> float:
    """Return seconds a step of a loop in PyTorch, with the same loader and the same precision."""
    module = _network(size).to(device)
    data = Tokens(context=size.context)
    data.setup()
    configured = module.configure_optimizers()
    optimizer = configured["optimizer"]
    schedule = configured["lr_scheduler"]["scheduler"]
    mixed = size.precision == "bf16-mixed"
    clock = StepClock(device, steps)
    with clock:
        for batch in itertools.islice(data.train_dataloader(), WARM_STEPS + steps):
            x, y = batch[0].to(device), batch[1].to(device)
            with torch.autocast(device, torch.bfloat16, enabled=mixed):
                loss = F.cross_entropy(module(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return clock.seconds_per_step


def _lightning_seconds(size: Size, device: str, steps: int) -> float:
    """Return seconds a step of `Trainer.fit` without lit_dps."""
    trainer = Trainer(
        accelerator="gpu" if device == "cuda" else device,
        precision=cast("Any", size.precision),
        max_steps=WARM_STEPS + steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    clock = StepClock(device, steps)
    with clock:
        trainer.fit(_network(size), Tokens(context=size.context))
    return clock.seconds_per_step


def _fit_seconds(size: Size, device: str, steps: int) -> float:
    """Return seconds a step of `lit-dps fit`. Its only check comes after the last step."""
    from lit_dps.cli import main

    arguments = {
        "width": size.width,
        "layers": size.layers,
        "heads": size.heads,
        "context": size.context,
    }
    config = {
        "model": {"class_path": f"{__name__}.GPT", "init_args": arguments},
        "data": {"class_path": f"{__name__}.Tokens", "init_args": {"context": size.context}},
        "trainer": {
            "accelerator": "gpu" if device == "cuda" else device,
            "precision": size.precision,
        },
        "goal": {
            "metric": "val_loss",
            "at_most": 0.01,
            "check_interval": WARM_STEPS + steps,
            "max_steps": WARM_STEPS + steps,
        },
    }
    clock = StepClock(device, steps)
    output = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "gpt.yaml")
        file.write_text(yaml.safe_dump(config))
        command = ["fit", "--config", str(file), "--storage.folder", folder]
        with clock, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = main(command)
    if code != 0 or clock.count < WARM_STEPS + steps:
        print(output.getvalue(), file=sys.stderr)
        raise RuntimeError(f"lit-dps fit took {clock.count} steps and exited with {code}")
    return clock.seconds_per_step


class StepClock:
    """Times optimizer steps of any loop in this process, while it is entered as a context.

    Args:
        device: "cpu" or "cuda".
        steps: Steps to time, after `WARM_STEPS`.
    """

    def __init__(self, device: str, steps: int):
        self.device = device
        self.steps = steps
        self.count = 0
        self._begin = math.nan
        self._end = math.nan

    def __enter__(self) -> StepClock:
        self._hook = register_optimizer_step_post_hook(self._after_step)
        return self

    def __exit__(self, *args: object) -> None:
        self._hook.remove()

    def _after_step(self, *args: object) -> None:
        self.count += 1
        if self.count == WARM_STEPS:
            self._begin = now(self.device)
        elif self.count == WARM_STEPS + self.steps:
            self._end = now(self.device)

    @property
    def seconds_per_step(self) -> float:
        return (self._end - self._begin) / self.steps
