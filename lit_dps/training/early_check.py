"""Checks of the validation split that stop when they know the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lit_dps.core.goal import Goal
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.pruning.network import in_evaluation_mode
from lit_dps.training.inheritance import decides

# examples a forward pass beyond the first: small enough to stop soon, large enough to fill a core
CHUNK = 256
Wrongness = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_VALIDATION_HOOKS = (
    *(
        "on_validation_start",
        "on_validation_epoch_start",
        "on_validation_batch_start",
        "on_validation_batch_end",
    ),
    *(
        "on_validation_epoch_end",
        "on_validation_end",
        "on_validation_model_eval",
        "on_validation_model_train",
    ),
)


class Check(NamedTuple):
    """What a check found: the wrong examples among those looked at.

    It is exact if all were looked at; else the mistakes are a lower bound, above what was allowed.
    """

    mistakes: int
    exact: bool

    def error(self, size: int) -> float:
        """The share of a split of so many examples that is wrong, rounded as a full pass rounds it:
        to float32."""
        return float(torch.tensor(self.mistakes) / size)


def fewest(goal: Goal, size: int) -> float:
    """The share of a validation split of so many examples that has to be looked at to find that a
    goal is missed."""
    return min(1.0, max(CHUNK, goal.allowed(size) + 1) / size)


class HardestFirst:
    """Asks whether networks make at most so many mistakes, and looks at no more examples than that
    takes.

    Examples that a network was wrong about at earlier checks, or nearly so, are looked at first, so
    that a refusal costs little more than one example for each mistake that is allowed and one more.
    The answer is that of a full pass, whatever the order.

    Attributes:
        size: Examples of the validation split.
        priority: How wrong each network was about each example at earlier checks, the last one
            weighing most: shape (networks, size).
    """

    def __init__(self, size: int, networks: int = 1, device: torch.device | str = "cpu"):
        self.size, self.priority = size, torch.zeros(networks, size, device=device)

    def __call__(
        self, wrongness: Wrongness, rows: Sequence[int], allowed: Sequence[int]
    ) -> list[Check]:
        """Looks at the hardest examples of these rows first, until more than the mistakes allowed
        each, or at all.

        `wrongness` tells how wrong some networks are about examples: (rows, index) -> float, of the
        index's shape (rows, examples), at least 1 where the network is wrong.
        """
        device = self.priority.device
        networks, limits = torch.tensor(rows, device=device), torch.tensor(allowed, device=device)
        order = torch.argsort(self.priority[networks], dim=1, descending=True, stable=True)
        mistakes, looked = torch.zeros_like(limits), torch.zeros_like(limits)
        asked, seen = torch.arange(len(rows), device=device), 0
        while seen < self.size and len(asked):
            index = order[
                asked, seen : seen + max(CHUNK, int((limits - mistakes)[asked].min()) + 1)
            ]
            found, priority = wrongness(networks[asked], index), self.priority[networks[asked]]
            self.priority[networks[asked]] = priority.scatter(
                1, index, priority.gather(1, index) / 2 + found
            )
            mistakes[asked] += (found >= 1).sum(1)
            looked[asked] += index.shape[1]
            seen += index.shape[1]
            asked = asked[(mistakes <= limits)[asked]]
        return [
            Check(n, exact)
            for n, exact in zip(mistakes.tolist(), (looked == self.size).tolist(), strict=True)
        ]

    def begin(self, row: int, priority: torch.Tensor | None = None) -> None:
        """Another network begins in this row, or goes on with the priorities that it had."""
        self.priority[row] = 0.0 if priority is None else priority

    def take(self, rows: torch.Tensor) -> None:
        """Goes on with these networks alone, in this order."""
        self.priority = self.priority[rows]


class EarlyCheck:
    """`HardestFirst` in Lightning's loop, for the module of a trainer; `priority` is that of a run
    that is taken up.

    It needs a module with `wrongness(batch)`, a tensor of the batch's length that is at least 1
    where the example is wrong, and a data module with `validation_size` and
    `validation_batch(index)`; those of lit_dps have them. Training goes on as after a full pass,
    unless that one draws from torch's global generator. Several ranks look at the same examples as
    one would, each at its part of them.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, priority: torch.Tensor | None = None
    ):
        self.trainer, self.module, self.data = trainer, module, trainer.datamodule
        self.size, self._check = self.data.validation_size, HardestFirst(self.data.validation_size)
        self._check.begin(0, priority)

    @property
    def priority(self) -> torch.Tensor:
        """How wrong each example was at earlier checks: shape (size,)."""
        return self._check.priority[0]

    @staticmethod
    def supports(trainer: Trainer, module: LightningModule, monitor: str = "val_error") -> bool:
        """Whether module and data offer what it needs, and nobody would miss Lightning's
        validation.

        A subclass that validates in a way of its own must say so in `wrongness` too, or one that
        takes other data for it in `validation_batch`, else its own way is taken.
        """
        data, hooks = (
            getattr(trainer, "datamodule", None),
            [n for n in dir(Callback) if n.startswith("on_validation_")],
        )
        others = [
            type(c) for c in trainer.callbacks if not type(c).__module__.startswith("lit_dps.")
        ]
        return (
            monitor == "val_error"
            and hasattr(data, "validation_size")
            and (trainer.world_size == 1 or isinstance(trainer.strategy, SharedBatchDDP))
            and all(
                getattr(kind, hook) is getattr(Callback, hook) for kind in others for hook in hooks
            )
            and decides(module, "wrongness", "validation_step", *_VALIDATION_HOOKS)
            and decides(data, "validation_batch", "val_dataloader")
        )

    def __call__(self, allowed: int) -> Check:
        """Looks at the hardest examples first until more than `allowed` are wrong, or at all."""
        if isinstance(self.trainer.strategy, SharedBatchDDP):
            self.trainer.strategy.share_buffers()
        with evaluating(self.module), self.trainer.precision_plugin.val_step_context():
            (check,) = self._check(
                lambda rows, index: self._wrongness(index[0])[None], [0], [allowed]
            )
        return check

    def _wrongness(self, index: torch.Tensor) -> torch.Tensor:
        """How wrong examples are: float32, shape of the index, on the CPU."""
        wrongness, mine = torch.zeros(len(index)), ranks.shard(len(index))
        if mine.start < mine.stop:
            batch = self.trainer.precision_plugin.convert_input(
                self.data.validation_batch(index[mine])
            )
            batch = self.trainer.strategy.batch_to_device(batch, self.module.device, 0)
            wrongness[mine] = self.module.wrongness(batch).float().cpu()
        return ranks.all_reduce_sum(wrongness)  # to zeros, so exactly


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """In here a module evaluates, without gradients; each of its parts gets its mode back."""
    with in_evaluation_mode(module), torch.no_grad():
        yield
