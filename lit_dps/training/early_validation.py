"""EarlyValidation: validations that stop as soon as they certainly miss the goal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

import lit_dps.training.lightning_private as lightning_private
from lit_dps.module import ImageClassifier, check_classes, is_wrong
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.pruning.network import in_evaluation_mode
from lit_dps.training.inheritance import adopt_former_methods, decides

# Examples of a forward pass: few enough to stop soon, enough to use a processor well.
CHUNK = 256

# Called with numbers of networks and indices of examples, shape (networks, examples). Returns how
# wrong each network is about each example, in the same shape: at least 1, or nan, where its answer
# is wrong.
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


class MistakeCount(NamedTuple):
    """The result of a validation that may have stopped early.

    Attributes:
        mistakes: Wrong examples in the validation split, or a lower bound of their number.
        exact: Whether the number is no bound.
    """

    mistakes: int
    exact: bool

    @staticmethod
    def of(mistakes: int, allowed: int, size: int) -> MistakeCount:
        """Return the result for an allowed number of mistakes.

        A network with more mistakes has the bound `allowed + 1`, however many a validation counted.
        The result therefore does not depend on the order of the examples.

        Args:
            mistakes: Wrong examples. If there are more than allowed, any number above it.
            allowed: Allowed mistakes.
            size: Examples of the validation split. A split of one chunk is always evaluated
                entirely, and `mistakes` is exact.
        """
        if mistakes <= allowed or size <= max(CHUNK, allowed + 1):
            return MistakeCount(mistakes, exact=True)
        return MistakeCount(allowed + 1, exact=False)

    def error(self, size: int) -> float:
        """Return the error on a split of this size, rounded to float32 as in a full validation."""
        return float(torch.tensor(self.mistakes) / size)


class HardestFirst:
    """Decides whether networks exceed an allowed number of mistakes, with few evaluations.

    Examples that a network got wrong, or nearly wrong, in earlier validations come first. So a
    network that misses the goal needs little more than one example for each allowed mistake, and
    one more. The result equals the result of a full validation, whatever the order
    (`MistakeCount.of`).

    Attributes:
        size: Examples of the validation split.
        priority: How wrong each network was about each example in earlier validations, where the
            last one has the largest weight; shape (rows, size).
    """

    def __init__(self, size: int, rows: int = 1, device: torch.device | str = "cpu"):
        self.size = size
        self.priority = torch.zeros(rows, size, device=device)

    def __call__(
        self, per_example_error: PerExampleError, rows: Sequence[int], allowed: Sequence[int]
    ) -> list[MistakeCount]:
        """Evaluate networks until each has more mistakes than allowed, or on all examples.

        The parts of the examples double in size, and the host waits for the device once a part.

        Args:
            per_example_error: Evaluates networks, which it receives as positions in `rows`.
            rows: The row of each network in `priority`. Several networks may have the same row,
                such as one network at several steps.
            allowed: Allowed mistakes of each network.
        """
        device = self.priority.device
        row_of = torch.tensor(rows, device=device)
        order = torch.argsort(self.priority, dim=1, descending=True, stable=True)
        mistakes = [0] * len(rows)
        undecided = list(range(len(rows)))
        start = 0
        part = max(CHUNK, min(allowed) + 1)  # no network is decided before so many examples
        while undecided and start < self.size:
            networks = torch.tensor(undecided, device=device)
            index = order[row_of[networks], start : start + part]
            scores = per_example_error(networks, index)
            # Of several networks with the same row, one sets the priority; which one is of no
            # matter.
            examples = row_of[networks][:, None], index
            self.priority[examples] = self.priority[examples] / 2 + scores
            for network, count in zip(undecided, is_wrong(scores).sum(1).tolist(), strict=True):
                mistakes[network] += count
            undecided = [i for i in undecided if mistakes[i] <= allowed[i]]
            start += part
            part *= 2
        counts = []
        for count, limit in zip(mistakes, allowed, strict=True):
            counts.append(MistakeCount.of(count, limit, self.size))
        return counts

    def begin(self, row: int) -> None:
        """Begin with another network in this row."""
        self.priority[row] = 0.0

    def take(self, rows: Tensor) -> None:
        """Keep only these rows, in this order."""
        self.priority = self.priority[rows]


class EarlyValidation:
    """Validates the module of a trainer by `HardestFirst`, in place of Lightning's validation.

    The module needs `per_example_error(batch)`, and the data module `validation_size` and
    `validation_batch(index)`, as the classes of lit_dps have them. Training continues as after a
    full validation, unless the full one would draw from torch's global generator. Several ranks
    evaluate the same examples as one process, each rank its part.

    Args:
        trainer: The trainer of the fit.
        module: The module.

    Attributes:
        size: Examples of the validation split.
    """

    def __init__(self, trainer: Trainer, module: LightningModule):
        self.trainer = trainer
        self.module = module
        self.data = lightning_private.data_module_of(trainer)
        self.size: int = self.data.validation_size
        self._hardest_first = HardestFirst(self.size)

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

    def __call__(self, allowed: int) -> MistakeCount:
        """Validate until the network has more mistakes than allowed, or on all examples."""
        if isinstance(self.trainer.strategy, SharedBatchDDP):
            self.trainer.strategy.share_buffers()
        with evaluating(self.module), self.trainer.precision_plugin.val_step_context():
            (count,) = self._hardest_first(
                lambda networks, index: self._per_example_error(index[0])[None], [0], [allowed]
            )
        return count

    def _per_example_error(self, index: Tensor) -> Tensor:
        """Return how wrong the module is about examples, over all ranks: float32, on the CPU."""
        scores = torch.zeros(len(index))
        part = ranks.shard(len(index))
        if part.start < part.stop:
            batch = self.data.validation_batch(index[part])
            batch = self.trainer.precision_plugin.convert_input(batch)
            batch = self.trainer.strategy.batch_to_device(batch, self.module.device, 0)
            module: Any = self.module
            method = module.per_example_error
            if getattr(method, "__func__", None) is ImageClassifier.per_example_error:
                check_classes(batch[1])
            scores[part] = method(batch).float().cpu()
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
