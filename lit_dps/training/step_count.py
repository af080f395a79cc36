"""The optimizer steps of a run: how many there are, and how many examples each uses."""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.batch_schedule import CONSTANT_BATCH, BatchSchedule
from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import SHORT_STEPS, UNCOUNTED_STEPS
from lit_dps.parallel.ddp import unsharded
from lit_dps.parallel.example_count import Sizes, batch_size_of, can_be_cut, counted
from lit_dps.training.example_count import examples_of, record_batches
from lit_dps.training.training_pass import copy_loader, loss_of_output

FIRST_STEPS = 64  # a run without a full step among these is refused


class BatchLoss(NamedTuple):
    """The loss of a batch: the value that `training_step` returned, and this rank's share."""

    value: Any
    share: float


class StepCount:
    """Counts optimizer steps as the paper does, where each step is one update of the network.

    With manual optimization, one step is one batch in which at least one optimizer stepped.
    Lightning counts every optimizer's step. A batch without a loss, or whose optimizer was not
    called, makes no step. A step whose scaled gradients overflow counts, as in Lightning, although
    it changes no weights. `trainer.global_step` is corrected after each batch, so that limits,
    schedules and checkpoints use the same count.

    Attributes:
        steps: Steps so far; None before training, unless a checkpoint restored them.
    """

    def __init__(self):
        self.steps: int | None = None
        self._lightning_steps_before = 0
        self._calls = 0  # of optimizers in this batch
        self._begun_steps = 0  # of optimizers in this batch, also those that a scaler skipped
        self._counts_calls = False  # whether all optimizers can be hooked
        self._hooked_optimizers: list[Optimizer] = []
        self._losses: list[BatchLoss] = []  # of the batches since the last step
        self._has_stepped = False  # whether the last batch ended a step

    def begin(self, trainer: Trainer) -> None:
        """Prepare the count. Call this when training starts."""
        if self.steps is None:
            self.steps = trainer.global_step
        self._hook_optimizers(trainer)

    def _hook_optimizers(self, trainer: Trainer) -> None:
        """Count the calls of the trainer's optimizers, also of one that a hook has replaced."""
        optimizers = trainer.optimizers
        self._counts_calls = all(hasattr(o, "register_step_post_hook") for o in optimizers)
        if not self._counts_calls:
            return
        for optimizer in optimizers:
            if not any(optimizer is hooked for hooked in self._hooked_optimizers):
                optimizer.register_step_post_hook(self._count_call)
                self._hooked_optimizers.append(optimizer)

    def _count_call(self, *args: Any) -> None:
        self._calls += 1

    def begin_step(self) -> None:
        """Note that a step of an optimizer begins. Call this in `on_before_optimizer_step`."""
        self._begun_steps += 1

    def before_batch(self, trainer: Trainer) -> None:
        """Begin to count the steps of a batch."""
        if self._has_stepped:
            self._losses = []
        self._hook_optimizers(trainer)
        self._lightning_steps_before = trainer.global_step
        self._calls = 0
        self._begun_steps = 0

    def add_loss(self, trainer: Trainer, loss: Any) -> None:
        """Add the loss of a batch that has ended."""
        # The loss stays a tensor here, because a number would wait for the device.
        self._losses.append(BatchLoss(loss, getattr(trainer.strategy, "share", 1.0)))

    def mean_loss(self, trainer: Trainer) -> float | None:
        """Return this rank's part of the mean loss of the last step; None if no loss is known."""
        if not self._losses:
            return None
        total = sum(loss.share * float(loss.value) for loss in self._losses)
        # Lightning divides the loss of each accumulated batch by their number.
        return trainer.accumulate_grad_batches * total / len(self._losses)

    def after_batch(self, trainer: Trainer) -> bool:
        """Count the steps of a batch, and return True if there are any."""
        assert self.steps is not None
        lightning_steps = trainer.global_step - self._lightning_steps_before
        calls = self._calls if self._counts_calls else lightning_steps
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            # It does not call `Optimizer.step` if gradients overflow.
            calls = self._begun_steps
        if not trainer.lightning_module.automatic_optimization:
            steps = min(calls, 1)
        elif not self._losses:  # no batch since the last step had a loss
            steps = 0
        else:
            steps = min(calls, lightning_steps)
        self.steps += steps
        if trainer.global_step != self.steps:
            lightning_private.set_global_step(trainer, self.steps)
        self._has_stepped = steps > 0
        return self._has_stepped


class ExamplesCallback(Callback):
    """Check that optimizer steps use the number of examples that the batch size states.

    Any step may have fewer examples, such as the last step of an epoch; short steps are counted.
    The largest step of the first epoch must have all examples. `lit_dps.parallel.example_count`
    counts the examples.

    Args:
        batch_size: Examples of an optimizer step, of all ranks and all accumulated batches
            together.
        key: Configuration key of the batch size, for errors.
        schedule: The examples of each step; by default all have `batch_size`.

    Attributes:
        flags: Short steps and steps with an unknown number of examples, as in
            `TrialResult.flags`.
        waits: Whether only `find_full_batch` refuses a run without a full step. Set it before a run
            with shortened epochs.
        can_be_cut: Whether the first batch can be divided among ranks; None before the first batch.
        volume: The most numbers in a batch with an unknown number of examples; 0 without such a
            batch.

    Raises:
        ConfigError: if the training split is smaller than the batch size, or if the largest step
            has another number of examples.
    """

    def __init__(
        self,
        batch_size: int,
        key: str = "data.batch_size",
        schedule: BatchSchedule = CONSTANT_BATCH,
    ):
        self.batch_size = batch_size
        self.key = key
        self._schedule = schedule
        self.waits = False
        self.can_be_cut: bool | None = None
        self.volume = 0
        self._steps = 0
        self._short_steps = 0
        self._uncounted_steps = 0
        self._largest_step = 0
        self._batch_examples: list[int | None] = []  # of the batches since the last step
        self._step_before_batch = 0
        self._is_in_batch = False

    @property
    def flags(self) -> dict[str, float]:
        counts = {SHORT_STEPS: self._short_steps, UNCOUNTED_STEPS: self._uncounted_steps}
        return {name: count for name, count in counts.items() if count}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            batch_size = None
            if self._schedule.is_constant:
                batch_size = self.batch_size // trainer.accumulate_grad_batches
            record_batches(trainer, batch_size)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        refuse_too_large(trainer, self.batch_size)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if pl_module.automatic_optimization:
            # Lightning drops accumulated gradients if a hook skipped the rest of the epoch.
            self._batch_examples = []
            self._is_in_batch = False

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step_before_batch = trainer.global_step
        examples = examples_of(trainer, batch)
        if self.can_be_cut is None:
            self.can_be_cut = can_be_cut(batch, examples)
        if examples is None:
            self.volume = max(self.volume, _volume(batch))
        if self._is_in_batch:
            # The last batch was skipped, with the rest of its epoch.
            self._batch_examples.pop()
        self._batch_examples.append(examples)
        self._is_in_batch = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        if not self._is_in_batch:
            # The dataloader gave None, and no `on_train_batch_start` was called.
            return
        self._is_in_batch = False
        if trainer.global_step == self._step_before_batch:
            # Gradients are accumulated, but not of a batch without a loss.
            if pl_module.automatic_optimization and loss_of_output(outputs) is None:
                self._batch_examples.pop()
            return
        examples = [number for number in self._batch_examples if number is not None]
        is_counted = len(examples) == len(self._batch_examples)
        self._batch_examples = []
        if is_counted:
            self._count_step(sum(examples))
        else:
            self._uncounted_steps += 1

    def _count_step(self, examples: int) -> None:
        before = self._schedule.examples_of(self._steps, self.batch_size)
        self._steps += 1
        size = self._schedule.examples_of(self._steps, self.batch_size) - before
        # If a step has all examples that it should have, it counts as a full one.
        full_or_less = self.batch_size - int(size) + examples
        self._largest_step = max(self._largest_step, full_or_less)
        if examples > size:
            raise self._error()
        if examples < size:
            self._short_steps += 1
        if self._steps >= FIRST_STEPS:
            self._check_full_step()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check_full_step()

    def find_full_batch(self, trainer: Trainer) -> None:
        """Look for a full batch among the next batches of the data, if no step was full.

        Call this after a run that ended early.

        Raises:
            ConfigError: if there is no full batch.
        """
        self.waits = False
        if not self._steps or self._largest_step == self.batch_size:
            return
        batches_per_step = trainer.accumulate_grad_batches
        loader = next(iter(tree_leaves(unsharded(trainer.train_dataloader))))
        sizes = Sizes(self.batch_size // batches_per_step)
        for _, examples in islice(counted(copy_loader(loader), sizes), FIRST_STEPS):
            self._largest_step = max(self._largest_step, batches_per_step * (examples or 0))
            if self._largest_step >= self.batch_size:
                break
        self._check_full_step()

    def _check_full_step(self) -> None:
        if self._steps and self._largest_step != self.batch_size and not self.waits:
            raise self._error()

    def _error(self) -> ConfigError:
        return ConfigError(
            "study.batch_size_key",
            self.key,
            "the key that the train dataloader takes its batch size from: at "
            f"{self.batch_size} a step is on {self._largest_step} examples",
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "short": self._short_steps,
            "steps": self._steps,
            "uncounted": self._uncounted_steps,
            "largest": self._largest_step,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._short_steps = state_dict["short"]
        self._steps = state_dict["steps"]
        self._largest_step = state_dict["largest"]
        self._uncounted_steps = state_dict["uncounted"]


def _volume(batch: Any) -> int:
    """Return how many numbers the tensors of a batch have."""
    return sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


class LoaderSizes(NamedTuple):
    """The batch size of a dataloader and the examples of one pass; None if unknown."""

    batch_size: int | None
    examples: int | None

    @property
    def short_batch_examples(self) -> int:
        """The examples of a short last batch; 0 if all batches are full, or if it is unknown."""
        if not self.batch_size or self.examples is None:
            return 0
        return self.examples % self.batch_size


def sizes_of_loader(loader: Any) -> LoaderSizes:
    """Return the batch size of a dataloader, and the number of examples of one pass."""
    if not isinstance(loader, DataLoader):
        return LoaderSizes(None, None)
    sampler: Any = loader.sampler
    try:
        examples = len(sampler)
    except TypeError:
        examples = None
    return LoaderSizes(batch_size_of(loader), examples)


def refuse_too_large(trainer: Trainer, batch_size: int) -> None:
    """Raise ConfigError if a batch size is above the size of the training split, if it is known."""
    sizes = sizes_of_loader(unsharded(trainer.train_dataloader))
    if sizes.batch_size is None or sizes.examples is None:
        return
    if sizes.examples < batch_size:
        raise ConfigError(
            "study.batch_sizes",
            batch_size,
            f"at most {sizes.examples}, the number of training examples",
        )
