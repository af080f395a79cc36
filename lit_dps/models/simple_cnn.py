"""Simple-CNN of Lee et al. (2021, Section 2), and a multilayer perceptron for quick work."""

from __future__ import annotations

import math

from torch import Tensor, nn

from lit_dps.core.errors import ConfigError
from lit_dps.models.init import init_variance_scaling, scaled


class SimpleCNN(nn.Module):
    """Two 5 x 5 convolutions with 2 x 2 max-pooling and ReLU, and a linear layer.

    The convolutions have 32 and 64 filters and no padding: 62,346 parameters on (1, 28, 28) images.
    Input (batch, *image_shape), output (batch, num_classes). Width and depth can be axes of a
    study, as the width in Shallue et al. (2019).

    Args:
        image_shape: Channels, height, width.
        num_classes: Classes.
        width: Factor of the filters of all convolutions: 0.5 is narrow, 2 is wide.
        depth: Number of convolutions, at least 2. All after the second are 3 x 3, with as many
            filters as the second, with padding and ReLU and without pooling.

    Raises:
        ConfigError: for a width that leaves no filter, or another depth.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        num_classes: int = 10,
        width: float = 1.0,
        depth: int = 2,
    ):
        super().__init__()
        if depth < 2:
            raise ConfigError("model.network.depth", depth, "at least 2 convolutions")
        first, second = scaled((32, 64), width)
        channels, height, width = image_shape
        sides = [((size - 4) // 2 - 4) // 2 for size in (height, width)]
        if min(sides) < 1:
            raise ValueError(
                f"image_shape {tuple(image_shape)} is too small for Simple-CNN, which needs 16 x 16"
            )
        self.conv1 = nn.Conv2d(channels, first, 5)
        self.conv2 = nn.Conv2d(first, second, 5)
        further: list[nn.Module] = []
        for _ in range(depth - 2):
            further += [nn.Conv2d(second, second, 3, padding=1), nn.ReLU()]
        self.further = nn.Sequential(*further)
        self.linear = nn.Linear(second * sides[0] * sides[1], num_classes)
        self.pool = nn.MaxPool2d(2)
        self.relu = nn.ReLU()
        init_variance_scaling(self)

    def forward(self, x: Tensor) -> Tensor:
        # Max-pooling and ReLU commute; this order computes a quarter of the ReLUs.
        x = self.relu(self.pool(self.conv1(x)))
        x = self.relu(self.pool(self.conv2(x)))
        return self.linear(self.further(x).flatten(1))


class MLP(nn.Module):
    """Linear layers with ReLU between them, on flattened images; initialized as in the paper.

    Args:
        image_shape: Channels, height, width.
        hidden: Widths of the hidden layers.
        num_classes: Classes.
        width: Width of all hidden layers, instead of `hidden`. A number can be an axis of a study.
        depth: Number of hidden layers of that width; by default as many as `hidden` has.

    Raises:
        ConfigError: for widths below 1, and a depth below 0 or without a width.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        hidden: tuple[int, ...] = (300, 100),
        num_classes: int = 10,
        width: int | None = None,
        depth: int | None = None,
    ):
        super().__init__()
        if width is not None and width < 1:
            raise ConfigError("model.network.width", width, "at least 1")
        if any(each < 1 for each in hidden):
            raise ConfigError("model.network.hidden", list(hidden), "widths of at least 1")
        if depth is not None and (depth < 0 or width is None):
            raise ConfigError(
                "model.network.depth", depth, "0 or more hidden layers, beside model.network.width"
            )
        if width is not None:
            hidden = (width,) * (len(hidden) if depth is None else depth)
        widths = [math.prod(image_shape), *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for n_in, n_out in zip(widths[:-1], widths[1:], strict=True):
            layers += [nn.Linear(n_in, n_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))
        init_variance_scaling(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
