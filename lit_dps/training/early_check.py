"""EarlyCheck: validations that stop as soon as they certainly miss the goal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.goal import Goal
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.pruning.network import in_evaluation_mode
from lit_dps.training.inheritance import adopt_former_methods, decides

# Examples of a forward pass: few enough to stop soon, enough to use a processor well.
CHUNK = 256

# Called with rows of networks and indices of examples, shape (rows, examples). Returns how wrong
# each network is about each example, in the same shape: at least 1 where its answer is wrong.
PerExampleError = Callable[[Tensor, Tensor], Tensor]

# A module may change the validation in these hooks.
_VALIDATION_HOOKS = (
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_validation_model_eval",
    "on_validation_model_train",
)


class Check(NamedTuple):
    """The result of a validation that may have stopped early.

    Attributes:
        mistakes: Wrong examples among those evaluated.
        exact: Whether all examples were evaluated. Otherwise the mistakes are a lower bound, above
            the allowed number.
    """

    mistakes: int
    exact: bool

    def error(self, size: int) -> float:
        """Return the error on a split of this size, rounded to float32 as in a full validation."""
        return float(torch.tensor(self.mistakes) / size)


def min_evaluated_share(goal: Goal, size: int) -> float:
    """Return the least share of a validation split that shows that a network misses the goal."""
    return min(1.0, max(CHUNK, goal.max_mistakes(size) + 1) / size)


class HardestFirst:
    """Decides whether networks exceed an allowed number of mistakes, with few evaluations.

    Examples that a network got wrong, or nearly wrong, in earlier validations come first. So a
    network that misses the goal needs little more than one example for each allowed mistake, and
    one more. The decision equals the decision of a full validation, whatever the order.

    Attributes:
        size: Examples of the validation split.
        priority: How wrong each network was about each example in earlier validations, where the
            last one has the largest weight; shape (networks, size).
    """

    def __init__(self, size: int, networks: int = 1, device: torch.device | str = "cpu"):
        self.size = size
        self.priority = torch.zeros(networks, size, device=device)

    def __call__(
        self, per_example_error: PerExampleError, rows: Sequence[int], allowed: Sequence[int]
    ) -> list[Check]:
        """Evaluate networks until each has more mistakes than allowed, or on all examples.

        Args:
            per_example_error: Evaluates networks.
            rows: Rows of the networks in `priority`.
            allowed: Allowed mistakes of each network.
        """
        device = self.priority.device
        networks = torch.tensor(rows, device=device)
        limits = torch.tensor(allowed, device=device)
        order = torch.argsort(self.priority[networks], dim=1, descending=True, stable=True)
        mistakes = torch.zeros_like(limits)
        evaluated = torch.zeros_like(limits)
        undecided = torch.arange(len(rows), device=device)
        start = 0
        while start < self.size and len(undecided):
            # No network is decided before this number of further examples.
            needed = int((limits - mistakes)[undecided].min()) + 1
            index = order[undecided, start : start + max(CHUNK, needed)]
            scores = per_example_error(networks[undecided], index)
            self._update_priority(networks[undecided], index, scores)
            mistakes[undecided] += (scores >= 1).sum(1)
            evaluated[undecided] += index.shape[1]
            start += index.shape[1]
            undecided = undecided[(mistakes <= limits)[undecided]]
        is_exact = (evaluated == self.size).tolist()
        return [Check(*pair) for pair in zip(mistakes.tolist(), is_exact, strict=True)]

    def _update_priority(self, rows: Tensor, index: Tensor, scores: Tensor) -> None:
        priority = self.priority[rows]
        updated = priority.gather(1, index) / 2 + scores
        self.priority[rows] = priority.scatter(1, index, updated)

    def begin(self, row: int, priority: Tensor | None = None) -> None:
        """Begin with another network in this row, or resume with its earlier priorities."""
        self.priority[row] = 0.0 if priority is None else priority

    def take(self, rows: Tensor) -> None:
        """Keep only these networks, in this order."""
        self.priority = self.priority[rows]


class EarlyCheck:
    """Validates the module of a trainer by `HardestFirst`, in place of Lightning's validation.

    The module needs `per_example_error(batch)`, and the data module `validation_size` and
    `validation_batch(index)`, as the classes of lit_dps have them. Training continues as after a
    full validation, unless the full one would draw from torch's global generator. Several ranks
    evaluate the same examples as one process, each rank its part.

    Args:
        trainer: The trainer of the fit.
        module: The module.
        priority: The priorities of a resumed run, shape (size,); None for a new run.

    Attributes:
        size: Examples of the validation split.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, priority: Tensor | None = None):
        self.trainer = trainer
        self.module = module
        self.data = lightning_private.data_module_of(trainer)
        self.size: int = self.data.validation_size
        self._hardest_first = HardestFirst(self.size)
        self._hardest_first.begin(0, priority)

    @property
    def priority(self) -> Tensor:
        """How wrong each example was in earlier validations, shape (size,)."""
        return self._hardest_first.priority[0]

    @staticmethod
    def supports(trainer: Trainer, module: LightningModule, monitor: str = "val_error") -> bool:
        """Return True if this gives the same results as Lightning's validation.

        Then module and data have the methods that it needs, no subclass overrides their validation
        without these methods, and no callback of the user acts in a validation.
        """
        adopt_former_methods(module)
        data = getattr(trainer, "datamodule", None)
        if monitor != "val_error" or not hasattr(data, "validation_size"):
            return False
        if trainer.world_size > 1 and not isinstance(trainer.strategy, SharedBatchDDP):
            return False
        if any(map(_acts_in_validation, lightning_private.callbacks_of(trainer))):
            return False
        return decides(
            module, "per_example_error", "validation_step", *_VALIDATION_HOOKS
        ) and decides(data, "validation_batch", "val_dataloader")

    def __call__(self, allowed: int) -> Check:
        """Validate until the network has more mistakes than allowed, or on all examples."""
        if isinstance(self.trainer.strategy, SharedBatchDDP):
            self.trainer.strategy.share_buffers()
        with evaluating(self.module), self.trainer.precision_plugin.val_step_context():
            (check,) = self._hardest_first(
                lambda rows, index: self._per_example_error(index[0])[None], [0], [allowed]
            )
        return check

    def _per_example_error(self, index: Tensor) -> Tensor:
        """Return how wrong the module is about examples, over all ranks: float32, on the CPU."""
        scores = torch.zeros(len(index))
        part = ranks.shard(len(index))
        if part.start < part.stop:
            batch = self.data.validation_batch(index[part])
            batch = self.trainer.precision_plugin.convert_input(batch)
            batch = self.trainer.strategy.batch_to_device(batch, self.module.device, 0)
            module: Any = self.module
            scores[part] = module.per_example_error(batch).float().cpu()
        # The other ranks add zeros, so the sum is exact.
        return ranks.all_reduce_sum(scores)


def _acts_in_validation(callback: Callback) -> bool:
    """Return True if a callback from outside of lit_dps overrides a hook of the validation."""
    kind = type(callback)
    if kind.__module__.startswith("lit_dps."):
        return False
    hooks = [name for name in dir(Callback) if name.startswith("on_validation_")]
    return any(getattr(kind, name) is not getattr(Callback, name) for name in hooks)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluate a module in this block: in evaluation mode, and without gradients."""
    with in_evaluation_mode(module), torch.no_grad():
        yield
