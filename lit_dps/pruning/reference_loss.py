"""The loss by which a mask is scored: the module's training loss, or the reference codes' loss."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from lit_dps.core.errors import ConfigError, UserError
from lit_dps.pruning.network import Batches, Network

TRAINING_LOSS = "module"
REFERENCE_LOSS = "nll_on_logits"


def check_loss(loss: str) -> None:
    """Raise ConfigError for an unknown loss."""
    if loss not in (TRAINING_LOSS, REFERENCE_LOSS):
        allowed = f"{TRAINING_LOSS}, or {REFERENCE_LOSS}"
        raise ConfigError("pruning.options.loss", loss, allowed)


def losses_of(network: Network, batches: Batches, loss: str) -> Iterator[tuple[Tensor, float]]:
    """Yield the mean loss of each batch, and its weight, as `Network.losses` does.

    "nll_on_logits" is minus the mean logit of the labels: `nll_loss` without the `log_softmax` that
    it expects. It ignores all other classes. The codes of SNIP-it and SNAP (fec11fc) and of FORCE
    (7494eed) compute it, and their published results depend on it.

    Raises:
        ConfigError: for "nll_on_logits" if the network is no classifier.
    """
    if loss == TRAINING_LOSS:
        yield from network.losses(batches)
        return
    for batch, size in batches:
        try:
            logits, classes = network.logits(batch)
        except UserError as error:
            allowed = f"{TRAINING_LOSS} where {error}"
            raise ConfigError("pruning.options.loss", loss, allowed) from error
        yield F.nll_loss(logits, classes), size / network.batch_size
