"""Initial weights: TensorFlow's `variance_scaling_initializer()`, which the authors' code uses."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn

from lit_dps.core.errors import ConfigError

# The deviation of a standard normal truncated at +-2, by which TensorFlow divides so that the
# truncated weights have the deviation sqrt(scale / fan_in) that was asked for.
TRUNCATED_STD = 0.87962566103423978


def scaled(channels: Iterable[int], width: float) -> list[int]:
    """Numbers of channels times a factor, rounded. Raises ConfigError for a factor that leaves none
    of some."""
    found = [round(width * n) for n in channels] if math.isfinite(width) else [0]
    if min(found) < 1:
        raise ConfigError("model.network.width", width, "a factor that leaves at least one channel")
    return found


def init_variance_scaling(network: nn.Module) -> None:
    """Weights truncated normal at two deviations with variance 1 / fan_in, biases zero, for all
    conv and linear layers.

    Draws from torch's default generator.
    """
    for module in network.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            fan_in = module.weight[0].numel()
            std = math.sqrt(1.0 / fan_in) / TRUNCATED_STD
            nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
            nn.init.zeros_(module.bias)
