"""What pruning keeps of the parameters in a fit, and of their gradients."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lit_dps.training.pruning_callback import PruningCallback


def masks_of(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
    """Which elements of each pruned parameter are kept, on its device."""
    parameters = dict(module.named_parameters())
    masks = (
        c.mask for c in trainer.callbacks if isinstance(c, PruningCallback) and c.mask is not None
    )
    return {name: keep.to(parameters[name].device) for mask in masks for name, keep in mask.items()}


def kept_of(trainer: Trainer, module: LightningModule) -> dict[Tensor, Tensor]:
    """As `masks_of`, by the parameters themselves."""
    parameters = dict(module.named_parameters())
    return {parameters[name]: mask for name, mask in masks_of(trainer, module).items()}


def squared_norm(gradient: Tensor, keep: Tensor | None) -> Tensor:
    """That of the part of a gradient which is kept, all of it without a mask; a scalar in
    float64."""
    return (gradient if keep is None else gradient * keep).double().square().sum()
