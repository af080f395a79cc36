"""UnmaskedWeights: counts the prunable weights that are trained although no mask covers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor
from torch.optim import Optimizer

from lit_dps.pruning import prunable
from lit_dps.pruning.attributes import hidden_tensors
from lit_dps.pruning.mask import Biases
from lit_dps.trial import IN_NO_MASK, JOINED_AT, TRAINED_THEN


class UnmaskedWeights:
    """Counts the weights that an optimizer trains, that pruning would cover, and that are in no mask.

    The mask is made before the first step. Weights can join the training later: a callback
    unfreezes a backbone, a hook adds a layer or a parameter group, the loss begins to use a head.
    A weight is trained from the first step of an optimizer that holds it and finds a gradient.

    Args:
        biases: As `lit_dps.pruning.prunable` takes it.
        exclude: Patterns of names that stay dense.
        is_masked: Returns whether a tensor is masked. It may mask the tensor under this name first.

    Attributes:
        observed: Elements in no mask, all trained elements, and the step at which the last of the
            former joined, as `TrialResult.observed` has them; empty where the mask covers all.
    """

    def __init__(self, biases: Biases, exclude: Sequence[str], is_masked: Callable[[str, Tensor], bool]):
        self.biases, self.exclude, self.is_masked = biases, tuple(exclude), is_masked
        self.observed: dict[str, float] = {}
        # By id; the tensors themselves keep their ids from being used again.
        self._known: dict[int, Tensor] = {}
        self._step = 1

    def begin_batch(self, trainer: Trainer) -> None:
        """Notes the number of the step that this batch belongs to, counted from 1.

        Between two batches `trainer.global_step` counts as `StepCount` does. Within a batch it
        counts each optimizer's step, and none of an optimizer without Lightning's wrapper.
        """
        self._step = trainer.global_step + 1

    def look(self, trainer: Trainer, module: LightningModule, optimizer: Optimizer) -> None:
        """Counts anew if this optimizer stepped on a tensor that it did not train before.

        To be called after the step, while the gradients are there.
        """
        stepped = [p for p in _parameters(optimizer) if p.grad is not None]
        if all(id(parameter) in self._known for parameter in stepped):
            return
        held = {id(p): p for each in (*trainer.optimizers, optimizer) for p in _parameters(each)}
        trained_before = {key: p for key, p in self._known.items() if key in held}
        self._known = trained_before | {id(parameter): parameter for parameter in stepped}
        candidates = dict(prunable(module, self.biases, self.exclude, self._known))
        candidates |= self._unregistered(module)
        dense = [t for name, t in candidates.items() if not self.is_masked(name, t)]
        count = sum(tensor.numel() for tensor in dense)
        if count > self.observed.get(IN_NO_MASK, 0):
            self.observed[IN_NO_MASK] = count
            self.observed[TRAINED_THEN] = sum(p.numel() for p in held.values() if p.requires_grad)
            self.observed[JOINED_AT] = self._step

    def _unregistered(self, module: LightningModule) -> dict[str, Tensor]:
        """Trained matrices that the module keeps in a list or a dict, by their path."""
        found = {}
        for path, tensor in hidden_tensors(module).items():
            excluded = any(fnmatchcase(path, pattern) for pattern in self.exclude)
            if id(tensor) in self._known and tensor.ndim >= 2 and not excluded:
                found[path] = tensor
        return found


def later_weights_note(trainer: Trainer, observed: Mapping[str, float]) -> str:
    """Return a line if weights will join the training after pruning; empty if none are known to.

    A short run shows weights that join within its steps. A finetuning callback may wait longer.

    Args:
        trainer: Of a pruned run that has ended.
        observed: What its pruning callback observed.
    """
    finetuning = [type(c).__name__ for c in trainer.callbacks if isinstance(c, BaseFinetuning)]
    if not finetuning and not observed.get(IN_NO_MASK):
        return ""
    by = f" by {', '.join(finetuning)}" if finetuning else ""
    return (
        f"weights that join the training after pruning{by} are in no mask and stay dense; a note "
        "below the table counts them. Let an optimizer train them from the first step to prune them"
    )


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
