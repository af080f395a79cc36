"""The optimizer steps of a run: how many there were, and on how many examples each."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import lit_dps.training.lightning_private as lightning_private
from lit_dps.errors import ConfigError
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import whole
from lit_dps.trial import SHORT_STEPS


class StepCount:
    """Counts optimizer steps as the paper does: one update of the network each, and lets Lightning count so too.

    Of a module that steps its optimizers itself (manual optimization) a step is a batch in which one of them stepped,
    however many did, where Lightning counts each. A batch without a loss, or whose optimizer was not called, makes no
    step. `trainer.global_step` is put right after each batch, so that limits, schedules and checkpoints go by it.

    Attributes:
        steps: Steps so far; None before a run, unless it goes on from there.
    """

    def __init__(self):
        self.steps: int | None = None
        self._before = self._fired = 0
        self._hooked = False
        self._optimizers: list[Optimizer] = []

    def begin(self, trainer: Trainer) -> None:
        """To be called when training starts."""
        if self.steps is None:
            self.steps = trainer.global_step
        self._hook(trainer)

    def _hook(self, trainer: Trainer) -> None:
        """Counts the steps of the trainer's optimizers, also of one that a hook put in another's place."""
        self._hooked = all(hasattr(optimizer, "register_step_post_hook") for optimizer in trainer.optimizers)
        for optimizer in trainer.optimizers if self._hooked else ():
            if not any(optimizer is other for other in self._optimizers):
                optimizer.register_step_post_hook(self._fire)
                self._optimizers.append(optimizer)

    def before_batch(self, trainer: Trainer) -> None:
        self._hook(trainer)
        self._before, self._fired = trainer.global_step, 0

    def after_batch(self, trainer: Trainer, skipped: bool) -> bool:
        """Counts the steps of a batch, unless it was `skipped`: without a loss. Returns whether there were any."""
        lightnings = trainer.global_step - self._before
        fired = self._fired if self._hooked else lightnings
        if trainer.lightning_module.automatic_optimization:
            made = 0 if skipped else min(fired, lightnings)
        else:
            made = min(fired, 1)
        self.steps += made
        if trainer.global_step != self.steps:
            lightning_private.put_steps_right(trainer, self.steps)
        return made > 0

    def _fire(self, *args: Any) -> None:
        self._fired += 1


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
        # of several ranks each sees its part; one process has made a dry run before
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
        first, (size, _) = self._steps == 1, split_of(whole(trainer.train_dataloader))
        if first and not by_hand and (size or 0) * trainer.accumulate_grad_batches == self.batch_size:
            self._known = False  # the length of its tensors is no number of examples
        elif first or seen > self.batch_size:
            found = f"at {self.batch_size} a step is on {seen} examples"
            expected = f"the key that the train dataloader takes its batch size from: {found}"
            raise ConfigError("study.batch_size_key", self.key, expected)
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
