"""Mask: which elements of a network's parameters are kept."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from lit_dps.core.trial_config import Biases

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_NORM = re.compile(
    "norm(alization)?[0-9]*d?$", re.IGNORECASE
)  # LlamaRMSNorm, LayerNorm2d, FilterResponseNormalization
_BIAS = re.compile(
    "bias|^b[0-9_]*$|^b_", re.IGNORECASE
)  # bias, in_proj_bias, bias_hh_l0, b, b1, b_ih


class Mask(Mapping[str, Tensor]):
    """Parameter name -> bool tensor of the parameter's shape, True where it is kept.

    Parameters that are not in the mask are not pruned. Masking the weights once and the gradients
    at every step equals masking in the forward pass, also under momentum and weight decay, and
    needs no wrapper around the network.

    Args:
        tensors: The mask of each parameter.
        by_place: Elements that are kept though their score is 0, by their place alone.

    Raises:
        ValueError: if a value is not a bool tensor.
    """

    def __init__(self, tensors: Mapping[str, Tensor], by_place: int = 0):
        for name, tensor in tensors.items():
            if tensor.dtype is not torch.bool:
                raise ValueError(f"mask of {name} must be bool, not {tensor.dtype}")
        self._tensors, self.by_place = dict(tensors), by_place

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
                raise ValueError(
                    f"the mask's {name} {tuple(tensor.shape)} is no parameter of this network"
                )
            with torch.no_grad():
                parameters[name].mul_(tensor.to(parameters[name].device))


def prunable(
    network: nn.Module,
    biases: Biases = "paper",
    exclude: Sequence[str] = (),
    held: Container[int] | None = None,
) -> dict[str, nn.Parameter]:
    """The parameters that a pruner scores, weights first, then biases, each in the network's order.

    Weights are the trainable parameters with two or more dimensions. Biases are those with one that
    are called so. Everything else of one dimension scales: the slope of a PReLU, a temperature, a
    layer scale; it is never pruned, and neither is any parameter of a normalization layer. A layer
    is one if it is torch's, if its class is called so, or if it has scales and no weights of its
    own.

    Args:
        network: The network.
        biases: "paper" scores the biases as the authors' code does. SNIP gives them exactly 0 at
            initialization, where they are zero, so all are pruned at any sparsity above 0 and stay
            zero. "keep" leaves them dense.
        exclude: Patterns of names that are left out, as a shell has them: "head.*", "*.cls_token".
        held: `id` of the parameters that an optimizer trains; by default all that are trainable.
    """
    weights, others, seen = {}, {}, set()
    for prefix, module in network.named_modules():
        if _normalizes(module):
            continue
        for name, parameter in module.named_parameters(prefix, recurse=False):
            trained = parameter.requires_grad and (held is None or id(parameter) in held)
            if (
                not trained
                or id(parameter) in seen
                or any(fnmatchcase(name, pattern) for pattern in exclude)
            ):
                continue
            seen.add(id(parameter))  # a tied parameter goes by its first name
            if parameter.ndim >= 2:
                weights[name] = parameter
            elif parameter.ndim == 1 and _BIAS.search(name.rsplit(".", 1)[-1]):
                others[name] = parameter
    return weights | others if biases == "paper" else weights


def _normalizes(module: nn.Module) -> bool:
    if isinstance(module, _NORMS) or _NORM.search(type(module).__name__):
        return True
    own = dict(module.named_parameters(recurse=False))
    scales = any(p.ndim == 1 and not _BIAS.search(name) for name, p in own.items())
    return scales and all(p.ndim <= 1 for p in own.values())


def multiply(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Multiply each first tensor by the second one, in place.

    A mask of numbers costs less than one of bools.
    """
    pairs = list(pairs)
    if pairs:
        tensors = [tensor for tensor, _ in pairs]
        factors = [factor for _, factor in pairs]
        torch._foreach_mul_(tensors, factors)  # pyright: ignore[reportPrivateImportUsage]
