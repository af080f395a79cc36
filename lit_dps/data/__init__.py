"""Data modules by name."""

from lit_dps.data.digits import Digits
from lit_dps.data.images import CIFAR10, MNIST, FashionMNIST, ImageData
from lit_dps.data.quadratic import GradientNoise
from lit_dps.data.text import Text

__all__ = ["CIFAR10", "MNIST", "Digits", "FashionMNIST", "GradientNoise", "ImageData", "Text"]
