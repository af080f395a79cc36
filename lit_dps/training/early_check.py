"""EarlyCheck: a check of the validation split that stops when it knows the answer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.goal import Goal
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP

CHUNK = 256  # examples a forward pass beyond the first: small enough to stop soon, large enough to fill a core


_VALIDATION_HOOKS = (
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end"),
    *("on_validation_epoch_end", "on_validation_end", "on_validation_model_eval", "on_validation_model_train"),
)


class Check(NamedTuple):
    """What a check found.

    Attributes:
        mistakes: Wrong examples among those looked at.
        exact: Whether all were looked at; else `mistakes` is a lower bound, above what was allowed.
    """

    mistakes: int
    exact: bool

    def error(self, size: int) -> float:
        """The share of a split of so many examples that is wrong, rounded as a full pass rounds it: to float32."""
        return float(torch.tensor(self.mistakes) / size)


def fewest(goal: Goal, size: int) -> float:
    """The share of a validation split of so many examples that has to be looked at to find that a goal is missed."""
    return min(1.0, max(CHUNK, goal.allowed(size) + 1) / size)


class EarlyCheck:
    """Asks whether a validation split has at most so many mistakes, and looks at no more examples than that takes.

    Examples that were wrong at earlier checks, or nearly so, are looked at first, so that a refusal costs little more
    than one example for each mistake that is allowed and one more. The answer is that of a full pass, whatever the
    order. Several ranks look at the same examples as one would, each at its part of them.

    It needs a module with `wrongness(batch)`, a tensor of the batch's length that is at least 1 where the example is
    wrong, and a data module with `validation_size` and `validation_batch(index)`; those of lit_dps have them. Training
    goes on as after a full pass, unless that one draws from torch's global generator.

    Args:
        trainer: The trainer.
        module: Its module.
        priority: Of a run that is taken up, as it was left.

    Attributes:
        priority: How wrong each example was at earlier checks, the last one weighing most: shape (size,).
    """

    def __init__(self, trainer: Trainer, module: LightningModule, priority: torch.Tensor | None = None):
        self.trainer, self.module, self.data = trainer, module, trainer.datamodule
        self.size = self.data.validation_size
        self.priority = torch.zeros(self.size) if priority is None else priority

    @staticmethod
    def supports(trainer: Trainer, module: LightningModule, monitor: str = "val_error") -> bool:
        """Whether module and data offer what it needs, and nobody would miss Lightning's validation.

        A subclass that validates in a way of its own must say so in `wrongness` too, or one that takes other data for
        it in `validation_batch`, else its own way is taken.
        """
        data = getattr(trainer, "datamodule", None)
        if not (hasattr(data, "validation_size") and hasattr(data, "validation_batch")):
            return False
        if trainer.world_size > 1 and not isinstance(trainer.strategy, SharedBatchDDP):
            return False
        hooks = [name for name in dir(Callback) if name.startswith("on_validation_")]
        watched = any(
            getattr(type(c), hook) is not getattr(Callback, hook)
            for c in trainer.callbacks
            for hook in hooks
            if not type(c).__module__.startswith("lit_dps.")
        )
        return (
            monitor == "val_error"
            and not watched
            and _first_to_define(module, "wrongness", "validation_step", *_VALIDATION_HOOKS) == "wrongness"
            and _first_to_define(data, "validation_batch", "val_dataloader") == "validation_batch"
        )

    def __call__(self, allowed: int) -> Check:
        """Looks at the hardest examples first until more than `allowed` are wrong, or at all."""
        if isinstance(self.trainer.strategy, SharedBatchDDP):
            self.trainer.strategy.share_buffers()
        order = torch.argsort(self.priority, descending=True, stable=True)
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()
        mistakes = seen = 0
        try:
            with torch.no_grad(), self.trainer.precision_plugin.val_step_context():
                while seen < self.size and mistakes <= allowed:
                    index = order[seen : seen + max(CHUNK, allowed + 1 - mistakes)]
                    wrongness = self._wrongness(index)
                    self.priority[index] = self.priority[index] / 2 + wrongness
                    mistakes, seen = mistakes + int((wrongness >= 1).sum()), seen + len(index)
        finally:
            for module, training in modes.items():
                module.training = training
        return Check(mistakes, seen == self.size)

    def _wrongness(self, index: torch.Tensor) -> torch.Tensor:
        """How wrong examples are: float32, shape of the index, on the CPU."""
        wrongness, mine = torch.zeros(len(index)), ranks.shard(len(index))
        if mine.start < mine.stop:
            batch = self.trainer.precision_plugin.convert_input(self.data.validation_batch(index[mine]))
            batch = self.trainer.strategy.batch_to_device(batch, self.module.device, 0)
            wrongness[mine] = self.module.wrongness(batch).float().cpu()
        return ranks.all_reduce_sum(wrongness)  # to zeros, so exactly


def _first_to_define(instance: object, wanted: str, *others: str) -> str | None:
    """The wanted method's name if the most derived class that defines it or one of the others defines it."""
    for c in type(instance).__mro__:
        if wanted in c.__dict__:
            return wanted
        if any(other in c.__dict__ for other in others):
            return None
    return None
