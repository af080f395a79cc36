"""SNIP (Lee et al. 2019): the connections whose removal changes the loss most are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from lit_dps.pruning.network import Losses, Network, Parameters, gradient_sum
from lit_dps.pruning.pruner import OneShot


def signed_saliency(parameters: Parameters, losses: Losses) -> dict[str, Tensor]:
    """The sum over the batches of all ranks of w * dL/dw, signed, of the parameters that the loss depends on."""
    return _times_weights(gradient_sum(parameters, losses), parameters)


def _times_weights(gradients: dict[str, Tensor], parameters: Parameters) -> dict[str, Tensor]:
    return {name: (g * parameters[name].detach()).to(parameters[name].dtype) for name, g in gradients.items()}


class Snip(OneShot):
    """|sum over the batches of w * dL/dw| (Lee et al. 2019, Eq. 6; Lee et al. 2021, Section 2).

    The signed gradients are summed over the whole training split before the absolute value is taken, as in the
    authors' code. Parameters that the loss does not depend on have no score, and are not pruned: they would be kept or
    pruned by their place alone.
    """

    def scores(self, network: Network, generator: torch.Generator) -> dict[str, Tensor]:
        signed = _times_weights(network.gradients(), network.parameters)
        return {name: saliency.abs() for name, saliency in signed.items()}
