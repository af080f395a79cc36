"""UnmaskedWeights: counts prunable weights that are trained without a mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor
from torch.optim import Optimizer

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.trial import IN_NO_MASK, JOINED_AT, TRAINED_THEN
from lit_dps.core.trial_config import Biases
from lit_dps.optim.parameter_groups import parameters_of
from lit_dps.pruning import prunable
from lit_dps.pruning.mask import hidden_tensors


class UnmaskedWeights:
    """Counts the weights that an optimizer trains and pruning would cover, but that have no mask.

    The mask is made before the first step. Weights can join the training later: a callback
    unfreezes a backbone, a hook adds a layer or a parameter group, or the loss begins to use a
    head. A weight counts as trained from the first optimizer step that updates it with a gradient.

    Args:
        biases: As in `lit_dps.pruning.prunable`.
        exclude: Patterns of names that stay dense.
        is_masked: Returns whether the tensor of this name is masked. It may mask the tensor first.

    Attributes:
        flags: The number of trained elements without a mask, the number of all trained elements,
            and the step at which the last elements without a mask joined. The keys are keys of
            `TrialResult.flags`. Empty if the mask covers all.
    """

    def __init__(
        self, biases: Biases, exclude: Sequence[str], is_masked: Callable[[str, Tensor], bool]
    ):
        self.biases: Biases = biases
        self.exclude = tuple(exclude)
        self.is_masked = is_masked
        self.flags: dict[str, float] = {}
        # Tensors by id. A reference to the tensor ensures that its id is not reused.
        self._trained: dict[int, Tensor] = {}
        self._step = 1

    def begin_batch(self, trainer: Trainer) -> None:
        """Store the number of the step of this batch, from 1.

        Only between two batches `trainer.global_step` counts as `StepCount` does. Within a batch it
        counts the step of each optimizer, except for optimizers without Lightning's wrapper.
        """
        self._step = trainer.global_step + 1

    def update(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        """Count again if this step trained a tensor for the first time.

        Call this after the step, before the gradients are cleared.
        """
        stepped: dict[int, Tensor] = {}
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                stepped[id(parameter)] = parameter
        if stepped.keys() <= self._trained.keys():
            return
        held: dict[int, Tensor] = {}
        for each in (*trainer.optimizers, optimizer):
            for parameter in parameters_of(each):
                held[id(parameter)] = parameter
        for key in self._trained.keys() - held.keys():
            del self._trained[key]
        self._trained.update(stepped)
        candidates: dict[str, Tensor] = {}
        candidates |= prunable(module, self.biases, self.exclude, self._trained)
        candidates |= self._unregistered(module)
        count = 0
        for name, tensor in candidates.items():
            if not self.is_masked(name, tensor):
                count += tensor.numel()
        if count > self.flags.get(IN_NO_MASK, 0):
            self.flags[IN_NO_MASK] = count
            self.flags[TRAINED_THEN] = sum(p.numel() for p in held.values() if p.requires_grad)
            self.flags[JOINED_AT] = self._step

    def _unregistered(self, module: LightningModule) -> dict[str, Tensor]:
        """Return the trained matrices in lists and dicts of the module, by path."""
        matrices = {}
        for path, tensor in hidden_tensors(module).items():
            is_excluded = any(fnmatchcase(path, pattern) for pattern in self.exclude)
            if id(tensor) in self._trained and tensor.ndim >= 2 and not is_excluded:
                matrices[path] = tensor
        return matrices


def later_weights_note(trainer: Trainer, flags: Mapping[str, float]) -> str:
    """Return a note if weights join the training after pruning; "" if none are known to join.

    A short run shows the weights that join within its steps. A finetuning callback may unfreeze
    weights later.

    Args:
        trainer: The trainer of a pruned run that has ended.
        flags: The `flags` of its pruning callback.
    """
    finetuning = lightning_private.callbacks_of(trainer, BaseFinetuning)
    if not finetuning and not flags.get(IN_NO_MASK):
        return ""
    by = ""
    if finetuning:
        by = f" by {', '.join(type(callback).__name__ for callback in finetuning)}"
    return (
        f"weights that join the training after pruning{by} are in no mask and stay dense; a note "
        "below the table counts them. To prune them, let an optimizer train them from the first "
        "step"
    )
