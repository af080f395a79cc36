"""A narrow ResNet-8 with batch normalization, as a user's own module might have it."""

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3 x 3 convolutions, each with batch normalization, beside a shortcut."""

    def __init__(self, n_in: int, n_out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(n_out), nn.BatchNorm2d(n_out)
        self.shortcut = (
            nn.Identity() if n_in == n_out else nn.Conv2d(n_in, n_out, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        found = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(found + self.shortcut(x))


class NormResNet(nn.Module):
    """The CIFAR ResNet of 8 layers (He et al. 2016), with `width` channels in its first stage
    instead of 16."""

    def __init__(self, width: int = 8, num_classes: int = 10):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            Block(width, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
        )
        self.linear = nn.Linear(4 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.conv(x))))
        return self.linear(x.mean(dim=(2, 3)))
