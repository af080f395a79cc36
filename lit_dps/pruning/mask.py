"""Mask: which elements of a network's parameters are kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

Biases = Literal["paper", "keep"]

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class Mask(Mapping[str, Tensor]):
    """Parameter name -> bool tensor of the parameter's shape, True where it is kept.

    Parameters that are not in the mask are not pruned. Masking the weights once and the gradients at every step equals
    masking in the forward pass, also under momentum and weight decay, and needs no wrapper around the network.

    Raises:
        ValueError: if a value is not a bool tensor.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        for name, tensor in tensors.items():
            if tensor.dtype is not torch.bool:
                raise ValueError(f"mask of {name} must be bool, not {tensor.dtype}")
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def kept(self) -> dict[str, tuple[int, int]]:
        """Kept and all elements of each tensor."""
        return {name: (int(tensor.sum()), tensor.numel()) for name, tensor in self.items()}

    @property
    def sparsity(self) -> float:
        """Share of the masked tensors' elements that is pruned."""
        kept = self.kept().values()
        return 1 - sum(n for n, _ in kept) / sum(total for _, total in kept)

    def apply_to_weights(self, network: nn.Module) -> None:
        """Sets the pruned weights to zero, in place.

        Raises:
            ValueError: if the network lacks a masked parameter, or has it in another shape.
        """
        parameters = dict(network.named_parameters())
        for name, tensor in self.items():
            if name not in parameters or parameters[name].shape != tensor.shape:
                raise ValueError(f"the mask's {name} {tuple(tensor.shape)} is no parameter of this network")
            with torch.no_grad():
                parameters[name].mul_(tensor.to(parameters[name].device))


def prunable(network: nn.Module, biases: Biases = "paper") -> dict[str, nn.Parameter]:
    """The parameters that a pruner scores, weights first, then biases, each in the network's order.

    Weights are the trainable parameters with two or more dimensions; biases the others of all layers but normalization
    layers, which are never pruned.

    Args:
        network: The network.
        biases: "paper" scores the biases as the authors' code does. SNIP gives them exactly 0 at initialization, where
            they are zero, so all are pruned at any sparsity above 0 and stay zero. "keep" leaves them dense.
    """
    weights, others, seen = {}, {}, set()
    for prefix, module in network.named_modules():
        if isinstance(module, _NORMS):
            continue
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:  # a tied parameter goes by its first name
                seen.add(id(parameter))
                (weights if parameter.ndim >= 2 else others)[name] = parameter
    return weights | others if biases == "paper" else weights
