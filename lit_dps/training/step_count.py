"""The optimizer steps of a run: how many there were, and on how many examples each."""

from __future__ import annotations

from itertools import islice
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import SHORT_STEPS, UNCOUNTED_STEPS
from lit_dps.parallel.ddp import whole
from lit_dps.parallel.example_count import Sizes, batch_size_of, can_be_cut, counted
from lit_dps.training.example_count import examples_of, record_batches
from lit_dps.training.training_pass import fresh

FIRST_STEPS = 64  # a run without a full step among these is refused


class StepCount:
    """Counts optimizer steps as the paper does: one update of the network each, and lets Lightning
    count so too.

    Of a module that steps its optimizers itself (manual optimization) a step is a batch in which
    one of them stepped, however many did, where Lightning counts each. A batch without a loss, or
    whose optimizer was not called, makes no step. `trainer.global_step` is put right after each
    batch, so that limits, schedules and checkpoints go by it.

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
        """Count the steps of the trainer's optimizers, also of one that a hook has replaced."""
        self._hooked = all(
            hasattr(optimizer, "register_step_post_hook") for optimizer in trainer.optimizers
        )
        for optimizer in trainer.optimizers if self._hooked else ():
            if not any(optimizer is other for other in self._optimizers):
                optimizer.register_step_post_hook(self._fire)
                self._optimizers.append(optimizer)

    def before_batch(self, trainer: Trainer) -> None:
        self._hook(trainer)
        self._before, self._fired = trainer.global_step, 0

    def after_batch(self, trainer: Trainer, skipped: bool) -> bool:
        """Counts the steps of a batch, unless it was `skipped`: without a loss. Returns whether
        there were any."""
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
    """Checks that an optimizer step uses as many examples as the batch size says.

    Any step may have fewer examples, such as the last step of an epoch; short steps are counted.
    The largest step of the first epoch must have all examples. `lit_dps.parallel.example_count`
    counts the examples.

    Args:
        batch_size: Examples of an optimizer step, of all ranks and all accumulated batches
            together.
        key: Configuration key of the batch size, for errors.

    Attributes:
        flags: Short steps and steps with an unknown number of examples, as in
            `TrialResult.flags`.
        waits: Whether only `settle` refuses a run without a full step. Set it before a run with
            shortened epochs.
        can_be_cut: Whether the first batch can be divided among ranks; None before the first batch.
        volume: The most numbers in a batch with an unknown number of examples; 0 without such a
            batch.

    Raises:
        ConfigError: for a training split of fewer examples, and a step on others than the batch
            size.
    """

    def __init__(self, batch_size: int, key: str = "data.batch_size"):
        self.batch_size, self.key = batch_size, key
        self.waits = False
        self.can_be_cut: bool | None = None
        self.volume = 0
        self._short = self._steps = self._uncounted = 0
        self._largest = 0
        self._seen: list[int | None] = []  # examples of the batches since the last step
        self._is_begun = False  # whether a batch has begun and not ended

    @property
    def flags(self) -> dict[str, float]:
        counts = {SHORT_STEPS: self._short, UNCOUNTED_STEPS: self._uncounted}
        return {name: count for name, count in counts.items() if count}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            record_batches(trainer, self.batch_size // trainer.accumulate_grad_batches)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse_too_large(trainer, self.batch_size)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step, number = trainer.global_step, examples_of(trainer, batch)
        if self.can_be_cut is None:
            self.can_be_cut = can_be_cut(batch, number)
        if number is None:
            self.volume = max(self.volume, _volume(batch))
        if self._is_begun:  # the last batch was skipped, with the rest of its epoch
            self._seen.pop()
        self._seen.append(number)
        self._is_begun = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        if not self._is_begun:  # the loader gave None
            return
        self._is_begun = False
        if trainer.global_step == self._step:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if pl_module.automatic_optimization and loss is None:
                self._seen.pop()  # a batch without a loss is no part of a step
            return  # gradients are accumulated
        batches, self._seen = self._seen, []
        if None in batches:
            self._uncounted += 1
            return
        self._count(sum(batches))

    def _count(self, examples: int) -> None:
        self._steps += 1
        self._largest = max(self._largest, examples)
        if examples > self.batch_size:
            self._refuse()
        self._short += examples < self.batch_size
        if self._steps >= FIRST_STEPS:
            self._refuse_without_full_step()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (
            pl_module.automatic_optimization
        ):  # Lightning drops gradients of an epoch that was skipped before a step
            self._seen = []
            self._is_begun = False

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._refuse_without_full_step()

    def settle(self, trainer: Trainer) -> None:
        """Look for a full batch among the next batches of the data, if no step was full.

        Call this after a run that ended early.

        Raises:
            ConfigError: if there is no full batch.
        """
        self.waits = False
        if not self._steps or self._largest == self.batch_size:
            return
        parts = trainer.accumulate_grad_batches
        loader = next(iter(tree_leaves(whole(trainer.train_dataloader))))
        sizes = Sizes(self.batch_size // parts)
        for _, number in islice(counted(fresh(loader), sizes), FIRST_STEPS):
            self._largest = max(self._largest, parts * (number or 0))
            if self._largest >= self.batch_size:
                break
        self._refuse_without_full_step()

    def _refuse_without_full_step(self) -> None:
        if self._steps and self._largest != self.batch_size and not self.waits:
            self._refuse()

    def _refuse(self) -> None:
        steps = f"at {self.batch_size} a step is on {self._largest} examples"
        expected = f"the key that the train dataloader takes its batch size from: {steps}"
        raise ConfigError("study.batch_size_key", self.key, expected)

    def state_dict(self) -> dict[str, Any]:
        return {
            "short": self._short,
            "steps": self._steps,
            "uncounted": self._uncounted,
            "largest": self._largest,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._short, self._steps = state_dict["short"], state_dict["steps"]
        # An earlier version refused a first step that was not full.
        self._largest = state_dict.get("largest", self.batch_size)
        self._uncounted = state_dict.get("uncounted", 0)


def _volume(batch: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def refuse_too_large(trainer: Trainer, batch_size: int) -> None:
    """Raise ConfigError if a batch size is above the size of the training split, if it is known."""
    size, n = split_of(whole(trainer.train_dataloader))
    if size is not None and n is not None and n < batch_size:
        raise ConfigError(
            "study.batch_sizes", batch_size, f"at most {n}, the examples of the training split"
        )


def split_of(loader: Any) -> tuple[int | None, int | None]:
    """The batch size of a loader and the number of examples that it draws in a pass, where it knows
    them."""
    if not isinstance(loader, DataLoader):
        return None, None
    size = batch_size_of(loader)
    try:
        return size, len(loader.sampler)
    except TypeError:
        return size, None
