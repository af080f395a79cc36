"""ResNets without batch normalization: ResNet-8 of Lee et al. (2021), and deeper or wider ones."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lit_dps.core.errors import ConfigError
from lit_dps.models.init import init_variance_scaling, scaled


class Block(nn.Module):
    """A pre-activation residual block of two 3 x 3 convolutions.

    As in the authors' code, the identity shortcut takes the block's input *before* its ReLU, while
    a downsampling shortcut is the 2 x 2 average pool of the input *after* it, padded with zero
    channels.
    """

    def __init__(self, n_in: int, n_out: int, downsample: bool):
        super().__init__()
        self.downsample = downsample
        self.new_channels = n_out - n_in
        stride = 2 if self.downsample else 1
        # TensorFlow's SAME pads a 3 x 3 convolution of stride 2 by (0, 1) if the size is even.
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride=stride, padding=0 if self.downsample else 1)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(x)
        if self.downsample:
            shortcut = F.pad(F.avg_pool2d(active, 2), (0, 0, 0, 0, 0, self.new_channels))
            active = F.pad(active, (0, 1, 0, 1))
        else:
            shortcut = x
        return shortcut + self.conv2(F.relu(self.conv1(active)))


class ResNet(nn.Module):
    """A convolution (16 channels), three stages of blocks (16, 32, 64), global mean, linear layer.

    All layers have biases. These are the CIFAR ResNets of He et al. (2016, Section 4.2) without
    batch normalization, with 8, 20, 32, ... layers. Input (batch, channels, height, width) with
    height and width divisible by 4, output (batch, num_classes).

    Args:
        in_channels: Channels of the images.
        num_classes: Classes.
        depth: Layers with weights, 6 n + 2 for n blocks a stage.
        width: Factor of the channels of all stages.

    Raises:
        ConfigError: for another depth, and a width that leaves no channel.
    """

    def __init__(
        self, in_channels: int = 3, num_classes: int = 10, depth: int = 8, width: float = 1.0
    ):
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ConfigError("model.network.depth", depth, "8, 14, 20, 26, 32, ...: 6 n + 2")
        stages = scaled((16, 32, 64), width)
        first = stages[0]
        self.conv = nn.Conv2d(in_channels, first, 3, padding=1)
        blocks = []
        n_in = first
        for stage, n_out in enumerate(stages):
            for i in range((depth - 2) // 6):
                blocks.append(Block(n_in, n_out, downsample=stage > 0 and i == 0))
                n_in = n_out
        self.blocks = nn.Sequential(*blocks)
        self.linear = nn.Linear(n_in, num_classes)
        init_variance_scaling(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.blocks(self.conv(x)))
        return self.linear(x.mean(dim=(2, 3)))


class ResNet8(ResNet):
    """The `ResNet` of the paper, with 8 layers.

    Args:
        in_channels: Channels of the images.
        num_classes: Classes.
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 10):
        super().__init__(in_channels, num_classes)
