"""MaskedTensors: keeps the pruned weights of a module at zero while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lit_dps.core.errors import ConfigError
from lit_dps.optim.parameter_groups import parameters_of
from lit_dps.pruning import Mask
from lit_dps.pruning.mask import hidden_tensors, multiply


class MaskedTensor(NamedTuple):
    """A tensor and its mask, as numbers of the same type: this is faster than a bool mask."""

    tensor: Tensor
    mask: Tensor


class MaskedTensors:
    """Keeps pruned weights and copies of them at zero, and the gradients of pruned weights.

    Gradients are masked in the backward pass. The other methods are called at the moments when a
    module, an optimizer or a hook may have moved a weight.

    Args:
        module: The module in training.
        mask: The mask of its parameters.
        copies: Name of each copy of a masked parameter -> name of the parameter.
        callbacks: Lists of callbacks that may hold copies, by name.

    Raises:
        ConfigError: if the module has no tensor of a masked parameter's name and shape.
    """

    def __init__(
        self,
        module: LightningModule,
        mask: Mask,
        copies: Mapping[str, str],
        callbacks: Mapping[str, Any],
    ):
        self.module = module
        self.mask = mask
        self.copies = copies
        self.callbacks = callbacks
        self._masked: dict[str, MaskedTensor] = {}
        self._hooks: list[RemovableHandle] = []
        self.find()

    def find(self) -> None:
        """Find the tensors to mask, which the module may have replaced, by their names."""
        tensors = self._tensors()
        present = {id(tensor) for tensor in tensors.values()}
        for name, masked in self._masked.items():
            if name not in tensors and id(masked.tensor) in present:
                # Its layer was wrapped, so that it has another name now.
                tensors[name] = masked.tensor
        masks = dict(self.mask)
        for copy, name in self.copies.items():
            if copy in tensors:
                masks[copy] = self.mask[name]
        for name, mask in masks.items():
            if name not in tensors or tensors[name].shape != mask.shape:
                raise ConfigError(
                    "model",
                    type(self.module).__name__,
                    f"a module that does not replace its parameter {name} during training",
                )
        self._masked = {}
        for name, mask in masks.items():
            self._masked[name] = MaskedTensor(tensors[name], mask.to(tensors[name]))
        self._hook_gradients()

    def find_replaced(self) -> bool:
        """Mask tensors that replaced masked ones, and return True if there are any."""
        tensors = self._tensors()
        for name, masked in self._masked.items():
            if tensors.get(name) is not masked.tensor:
                self.find()
                return True
        return False

    def includes(self, name: str, tensor: Tensor) -> bool:
        """Return True if a tensor is masked. A tensor that replaced a masked one gets its mask."""
        if name in self.mask and self._masked[name].tensor is not tensor:
            self.find()
        return any(tensor is masked.tensor for masked in self._masked.values())

    def _tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the module, and of callbacks if copies need them, by name."""
        tensors: dict[str, Tensor] = dict(self.module.named_parameters(remove_duplicate=False))
        tensors |= dict(self.module.named_buffers())
        if self.copies.keys() - tensors.keys():
            return {**hidden_tensors(self.module, self.callbacks), **tensors}
        return tensors

    def _hook_gradients(self) -> None:
        """Mask the gradients of parameters as they leave a backward pass, so before clipping."""
        self.remove_hooks()
        for name in self.mask:
            masked = self._masked[name]
            if masked.tensor.requires_grad:
                self._hooks.append(masked.tensor.register_hook(partial(torch.mul, masked.mask)))

    def set(self, mask: Mask) -> None:
        """Replace the mask, and set the weights that it prunes to zero."""
        self.mask = mask
        self.find()
        self.zero()

    def dense_gradients(self) -> dict[str, Tensor]:
        """Return copies of the gradients of masked parameters, zeros for a missing gradient."""
        gradients = {}
        for name in self.mask:
            tensor = self._masked[name].tensor
            gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.clone()
            gradients[name] = gradient
        return gradients

    def weights(self) -> dict[str, Tensor]:
        """Return the masked parameters by name, without gradients."""
        return {name: self._masked[name].tensor.detach() for name in self.mask}

    def parameters_with_masks(self) -> list[MaskedTensor]:
        """Return each masked parameter with its mask, without copies."""
        return [self._masked[name] for name in self.mask]

    def remove_hooks(self) -> None:
        """Let pruned weights have gradients in the backward passes until the mask is set."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def update_copies(self) -> None:
        """Give each copy the values of its parameter."""
        tensors = self._tensors()
        with torch.no_grad():
            for copy, name in self.copies.items():
                tensors[copy].copy_(tensors[name])

    def mask_gradients(self) -> None:
        """Set the gradients of pruned weights to zero, because a module may have set them."""
        pairs = []
        for name in self.mask:
            masked = self._masked[name]
            if masked.tensor.grad is not None:
                pairs.append((masked.tensor.grad, masked.mask))
        multiply(pairs)

    def zero(self) -> None:
        """Set all pruned weights to zero."""
        with torch.no_grad():
            multiply(self._masked.values())

    def zero_weights_of(self, optimizer: Optimizer) -> None:
        """Set pruned weights to zero that this optimizer trains.

        Other weights may still be needed unchanged by a backward pass.
        """
        ids = set(map(id, parameters_of(optimizer)))
        with torch.no_grad():
            multiply(masked for masked in self._masked.values() if id(masked.tensor) in ids)


def loss_scale(trainer: Trainer) -> float:
    """Return the factor of the loss in the last backward pass; above 1 in half precision."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return getattr(scaler, "get_scale", lambda: 1.0)()


def gradient_scale(trainer: Trainer, optimizer: Any) -> float:
    """Return the factor of the gradients before an optimizer steps; above 1 for a fused one.

    Lightning unscales gradients before a step, unless the optimizer does so in its step.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        return loss_scale(trainer)
    return 1.0


def gradients_of(module: LightningModule, optimizer: Any, scale: float = 1.0) -> dict[str, Tensor]:
    """Return the gradients of the parameters that an optimizer trains, by name, as copies.

    Args:
        module: The module.
        optimizer: Its optimizer.
        scale: The factor of the present gradients.
    """
    trained_ids = set(map(id, parameters_of(optimizer)))
    gradients = {}
    for name, parameter in module.named_parameters():
        if id(parameter) in trained_ids and parameter.grad is not None:
            gradients[name] = parameter.grad.detach() / scale
    return gradients


def squared_norm(gradient: Tensor, mask: Tensor | None) -> Tensor:
    """Return the squared norm of the kept part of a gradient, as a float64 scalar.

    Args:
        gradient: A gradient.
        mask: The mask of its parameter; None if the parameter is not pruned.
    """
    if mask is not None:
        gradient = gradient * mask
    return gradient.double().square().sum()
