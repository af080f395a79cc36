"""The paper's networks by name, and the noisy quadratic."""

from lit_dps.models.quadratic import NoisyQuadratic
from lit_dps.models.resnet import ResNet8
from lit_dps.models.simple_cnn import MLP, SimpleCNN

__all__ = ["MLP", "NoisyQuadratic", "ResNet8", "SimpleCNN"]
