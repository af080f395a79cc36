"""ResNet-8 without batch normalization, as in the code of Lee et al. (2021)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lit_dps.models.init import init_variance_scaling


class Block(nn.Module):
    """A pre-activation residual block of two 3 x 3 convolutions.

    As in the authors' code, the identity shortcut takes the block's input *before* its ReLU, while a downsampling
    shortcut is the 2 x 2 average pool of the input *after* it, padded with zero channels.
    """

    def __init__(self, n_in: int, n_out: int):
        super().__init__()
        self.downsample = n_in != n_out
        self.new_channels = n_out - n_in
        stride = 2 if self.downsample else 1
        # TensorFlow's SAME pads a 3 x 3 stride-2 convolution of an even size by (0, 1), not by (1, 1)
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


class ResNet8(nn.Module):
    """A 3 x 3 convolution (16), three blocks (16, 32, 64), ReLU, global mean, linear; biases everywhere.

    Input (batch, channels, height, width) with height and width divisible by 4, output (batch, num_classes).

    Args:
        in_channels: Channels of the images.
        num_classes: Classes.
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 10):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 16, 3, padding=1)
        self.blocks = nn.Sequential(Block(16, 16), Block(16, 32), Block(32, 64))
        self.linear = nn.Linear(64, num_classes)
        init_variance_scaling(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.blocks(self.conv(x)))
        return self.linear(x.mean(dim=(2, 3)))
