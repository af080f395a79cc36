"""Networks: the paper's and those of other width and depth, a transformer, the noisy quadratic."""

from lit_dps.models.quadratic import NoisyQuadratic
from lit_dps.models.resnet import ResNet, ResNet8
from lit_dps.models.simple_cnn import MLP, SimpleCNN
from lit_dps.models.transformer import Transformer

__all__ = ["MLP", "NoisyQuadratic", "ResNet", "ResNet8", "SimpleCNN", "Transformer"]
