"""Initial weights: TensorFlow's `variance_scaling_initializer()`, which the authors' code uses."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from lit_dps.core.errors import ConfigError

# The deviation of a standard normal distribution that is truncated at +-2. TensorFlow divides by
# it, so that the truncated weights have the deviation sqrt(scale / fan_in).
TRUNCATED_STD = 0.87962566103423978


def scaled(channels: Sequence[int], width: float) -> list[int]:
    """Return numbers of channels times a factor, rounded.

    Raises:
        ConfigError: if a number becomes 0.
    """
    if not math.isfinite(width) or round(width * min(channels)) < 1:
        allowed = "a factor that results in at least one channel"
        raise ConfigError("model.network.width", width, allowed)
    return [round(width * n) for n in channels]


def init_variance_scaling(network: nn.Module) -> None:
    """Initialize all convolutions and linear layers.

    Weights are normal with variance 1 / fan_in, truncated at two deviations; biases are zero. Draws
    from torch's default generator.
    """
    for module in network.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            fan_in = module.weight[0].numel()
            std = math.sqrt(1.0 / fan_in) / TRUNCATED_STD
            nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
            assert module.bias is not None
            nn.init.zeros_(module.bias)
