"""ValidationCount: counts what each check looks at, and holds all of them to the same, entire
validation split."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils._pytree import tree_leaves

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.errors import ConfigError
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP, whole
from lit_dps.training.example_count import validation_examples_of
from lit_dps.training.step_count import split_of


class ValidationCount:
    """The batches and examples of a check, by data loader.

    Attributes:
        first: Examples of the first check, as `lit_dps.parallel.example_count` counts them; None
            before.
        batches: Batches of the last check.
    """

    def __init__(self):
        self.first: dict[int, int] | None = None
        self.begin()

    def begin(self) -> None:
        """A check begins."""
        self._batches, self._examples = Counter(), Counter()
        self._sizes: dict[int, set[int]] = defaultdict(set)  # of the batches

    def add(self, trainer: Trainer, batch: Any, loader: int) -> None:
        """A batch of it."""
        size = validation_examples_of(trainer, batch, loader) or 1
        self._batches[loader] += 1
        self._examples[loader] += size
        self._sizes[loader].add(size)

    @property
    def batches(self) -> dict[int, int]:
        return dict(self._batches)

    def end(self, trainer: Trainer) -> None:
        """The check is done.

        Raises:
            ConfigError: if it was empty, or looked at another number of examples than the first
                one.
        """
        found, name = dict(self._examples), _name(trainer)
        if not found and ranks.world() == 1:  # else another rank may have had them
            raise ConfigError("data", name, "a validation dataloader that gives batches")
        if self.first not in (None, found):
            shown = " and ".join(
                " + ".join(map(str, counts.values())) for counts in (self.first, found)
            )
            raise ConfigError(
                "data", name, f"the same validation examples at every check, not {shown}"
            )
        self.first = found

    def why_no_mean(self, trainer: Trainer, monitor: str) -> str | None:
        """Why a metric of the check that just ended is no mean over its entire split; None if it
        is, or may be.

        What a module makes itself at the end of the epoch, and what a torchmetrics object computes,
        is taken as it is. To be called in `on_validation_end`.
        """
        match = _INDEX.fullmatch(monitor)
        name, index = (match["name"], int(match["index"])) if match else (monitor, 0)
        for metric in lightning_private.logged_metrics(trainer):
            meta = metric.meta
            if (
                meta.name != name
                or meta.fx != "validation_step"
                or (match and meta.dataloader_idx != index)
            ):
                continue
            if not meta.on_epoch:
                return "it is logged with on_epoch=False, so that it is of the last batch alone"
            if not metric.is_tensor:
                return None
            if not meta.is_mean_reduction:
                how = getattr(meta.reduce_fx, "__name__", meta.reduce_fx)
                return f"it is logged with reduce_fx={how}, which is no mean"
            logged, weight = metric._update_count, int(metric.cumulated_batch_size)
            if logged < self._batches[index]:
                return f"it is logged in {logged} of {self._batches[index]} validation batches"
            # a weight for each example, or for each of its tokens, is a multiple of them; one for
            # each batch is not
            if (
                len(self._sizes[index]) > 1
                and weight % logged == 0
                and weight % self._examples[index]
            ):
                wrong = (
                    f"it is logged with batch_size={weight // logged} over batches of "
                    "different "
                    "size"
                )
                return f"{wrong}: pass batch_size=, the examples of the batch, to self.log"
        return None


def refuse_dropped(trainer: Trainer) -> None:
    """Raises ConfigError if a validation dataloader leaves examples out, by `drop_last`."""
    for loader in map(whole, tree_leaves(trainer.val_dataloaders)):
        size, n = split_of(loader)
        if size and n is not None and getattr(loader, "drop_last", False) and n % size:
            left_out = f"it leaves out {n % size} of {n} examples"
            raise ConfigError(
                "data", _name(trainer), f"a validation dataloader without drop_last: {left_out}"
            )


def _name(trainer: Trainer) -> str:
    return type(trainer.datamodule or trainer.lightning_module).__name__


_INDEX = re.compile(r"(?P<name>.*)/dataloader_idx_(?P<index>\d+)")
# Metrics that are to be maximised, by the words of their names: val_acc, val/top1,
# MulticlassF1Score
_RISING = re.compile(
    r"acc(uracy)?|top_?\d+|f1(score)?|auc|auroc|precision|recall|iou|jaccard|dice|map|ap|r2(score)?|psnr|ssim|bleu|rouge"
    r"|reward|return|likelihood|correct|hits?",
    re.IGNORECASE,
)
_FALLING = {
    *(
        "error",
        "err",
        "loss",
        "nll",
        "neg",
        "negative",
        "minus",
        "inv",
        "miss",
        "wrong",
        "1",
    ),  # 1 - accuracy
    *(
        "mse",
        "mae",
        "rmse",
        "mape",
        "distance",
        "dist",
        "gap",
        "regret",
        "kl",
        "ce",
        "bce",
        "perplexity",
        "ppl",
    ),
}
_WORD = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+")


def logged(trainer: Trainer, name: str, key: str) -> float:
    """What the module logged, of all ranks. Raises ConfigError, naming the key that asks for it, if
    it did not."""
    value = trainer.callback_metrics.get(name)
    value = (
        None
        if value is None
        else float(value.double() if isinstance(value, torch.Tensor) else value)
    )
    if isinstance(trainer.strategy, SharedBatchDDP):
        value = trainer.strategy.mean_over_examples(
            value
        )  # a rank without validation examples logs nothing
    if value is None:
        names = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
        raise ConfigError(
            key,
            name,
            f"one that each validation logs, with on_epoch=True; this one logged: {names}",
        )
    return value


def rises(name: str) -> bool:
    """Whether a metric's name says that more of it is better."""
    plain = _INDEX.sub(r"\g<name>", name)
    words = {word.lower() for word in (*_WORD.findall(plain), *re.split(r"[^A-Za-z0-9]+", plain))}
    return not words & _FALLING and any(_RISING.fullmatch(word) for word in words)
