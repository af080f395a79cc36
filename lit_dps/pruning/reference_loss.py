"""The loss that a mask is scored by: the module's own, or, for fidelity alone, that of the
reference codes."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from lit_dps.core.errors import ConfigError, UserError
from lit_dps.pruning.network import Batches, Network

OWN, REFERENCE = "module", "nll_on_logits"


def check_loss(loss: str) -> None:
    """Raises ConfigError for a loss that there is not."""
    if loss not in (OWN, REFERENCE):
        raise ConfigError("pruning.options.loss", loss, f"{OWN}, or {REFERENCE}")


def losses_of(network: Network, batches: Batches, loss: str) -> Iterator[tuple[Tensor, float]]:
    """The mean loss of each batch, and its weight, as `Network.losses` has them.

    "nll_on_logits" is minus the mean logit of the labels: `nll_loss` without the `log_softmax` that
    it expects, as the codes of SNIP-it and SNAP (fec11fc) and of FORCE (7494eed) have it. It
    ignores all other classes, but their published numbers were made so.

    Raises:
        ConfigError: for "nll_on_logits" where the network is no classifier.
    """
    if loss == OWN:
        yield from network.losses(batches)
        return
    for batch, size in batches:
        try:
            logits, classes = network.logits(batch)
        except UserError as error:
            raise ConfigError("pruning.options.loss", loss, f"{OWN} where {error}") from error
        yield F.nll_loss(logits, classes), size / network.batch_size
