"""The paper's networks by name."""

from lit_dps.models.resnet import ResNet8
from lit_dps.models.simple_cnn import MLP, SimpleCNN

__all__ = ["MLP", "ResNet8", "SimpleCNN"]
