"""Simple-CNN of Lee et al. (2021, Section 2), and a multilayer perceptron for quick work."""

from __future__ import annotations

from torch import Tensor, nn

from lit_dps.models.init import init_variance_scaling


class SimpleCNN(nn.Module):
    """Two 5 x 5 convolutions (32 and 64 filters, no padding), each with 2 x 2 max-pooling and ReLU, and a linear layer.

    62,346 parameters on (1, 28, 28) images. Input (batch, *image_shape), output (batch, num_classes).

    Args:
        image_shape: Channels, height, width.
        num_classes: Classes.
    """

    def __init__(self, image_shape: tuple[int, int, int] = (1, 28, 28), num_classes: int = 10):
        super().__init__()
        channels, height, width = image_shape
        side = [((size - 4) // 2 - 4) // 2 for size in (height, width)]
        if min(side) < 1:
            raise ValueError(f"image_shape {tuple(image_shape)} is too small for Simple-CNN, which needs 16 x 16")
        self.conv1 = nn.Conv2d(channels, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.linear = nn.Linear(64 * side[0] * side[1], num_classes)
        self.pool = nn.MaxPool2d(2)
        self.relu = nn.ReLU()
        init_variance_scaling(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.pool(self.conv1(x)))  # max-pooling and ReLU commute; this order does a quarter of the ReLUs
        x = self.relu(self.pool(self.conv2(x)))
        return self.linear(x.flatten(1))


class MLP(nn.Module):
    """Linear layers with ReLU between them on flattened images, initialized as the paper's networks are.

    Args:
        image_shape: Channels, height, width.
        hidden: Widths of the hidden layers.
        num_classes: Classes.
    """

    def __init__(
        self,
        image_shape: tuple[int, int, int] = (1, 28, 28),
        hidden: tuple[int, ...] = (300, 100),
        num_classes: int = 10,
    ):
        super().__init__()
        channels, height, width = image_shape
        widths = [channels * height * width, *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for n_in, n_out in zip(widths[:-1], widths[1:], strict=True):
            layers += [nn.Linear(n_in, n_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))
        init_variance_scaling(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
