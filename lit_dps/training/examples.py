"""ExamplesCallback: counts the examples of every optimizer step."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lit_dps.errors import ConfigError
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import whole
from lit_dps.trial import SHORT_STEPS


class ExamplesCallback(Callback):
    """Holds a run to its batch size: an optimizer step is on so many examples.

    The last batch of an epoch may be shorter; such steps are counted. Examples are the length of a batch's first
    tensor; a DataLoader's own batch size stands where that is another number, as of a batch of graphs.

    Args:
        batch_size: Examples of an optimizer step, of all ranks and all accumulated batches together.
        key: Configuration key of the batch size, for errors.

    Attributes:
        observed: How many steps were short, as in `TrialResult.observed`.

    Raises:
        ConfigError: for a training split of fewer examples, and a step on others than the batch size.
    """

    def __init__(self, batch_size: int, key: str = "data.batch_size"):
        self.batch_size, self.key = batch_size, key
        self._short = self._steps = 0
        self._seen: list[int] = []  # examples of the batches since the last step
        self._known = True

    @property
    def observed(self) -> dict[str, float]:
        return {SHORT_STEPS: self._short} if self._short else {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse_too_large(trainer, self.batch_size)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._step, n = trainer.global_step, examples_in(batch)
        # of several ranks each sees its part; one process has rehearsed the study before
        self._known = self._known and n is not None and ranks.world() == 1
        self._seen.append(n or 0)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        if trainer.global_step == self._step:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if pl_module.automatic_optimization and loss is None:
                self._seen.pop()  # a batch without a loss is no part of a step
            return  # gradients are accumulated
        seen, batches, self._seen = sum(self._seen), len(self._seen), []
        self._steps += 1
        by_hand = batches > trainer.accumulate_grad_batches  # of a module that says itself when it steps
        if not (self._known or by_hand) or seen == self.batch_size:
            return
        size, _ = split_of(whole(trainer.train_dataloader))
        if (
            not by_hand
            and self._steps == 1
            and size is not None
            and size * trainer.accumulate_grad_batches == self.batch_size
        ):
            self._known = False  # the length of its tensors is no number of examples
        elif self._steps == 1 or seen > self.batch_size:
            raise ConfigError(
                "study.batch_size_key",
                self.key,
                "the key that the train dataloader takes its batch size from: at "
                f"{self.batch_size} a step is on {seen} examples",
            )
        else:
            self._short += 1

    def state_dict(self) -> dict[str, Any]:
        return {"short": self._short, "steps": self._steps, "known": self._known}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._short, self._steps, self._known = (state_dict[key] for key in ("short", "steps", "known"))


def refuse_too_large(trainer: Trainer, batch_size: int) -> None:
    """Raises ConfigError for a batch size above the examples of the training split, where the dataloader tells them."""
    size, n = split_of(whole(trainer.train_dataloader))
    if size is not None and n is not None and n < batch_size:
        raise ConfigError("study.batch_sizes", batch_size, f"at most {n}, the examples of the training split")


def examples_in(batch: Any) -> int | None:
    """The number of examples in a batch: the length of its first tensor; None where it holds no tensor."""
    try:
        return extract_batch_size(batch)
    except (MisconfigurationException, RecursionError):
        return None


def split_of(loader: Any) -> tuple[int | None, int | None]:
    """The batch size of a loader and the number of examples that it draws in a pass, where it knows them."""
    if not isinstance(loader, DataLoader):
        return None, None
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    try:
        return size, len(loader.sampler)
    except TypeError:
        return size, None
