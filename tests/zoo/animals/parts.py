"""Networks made of parts that a pruner has to know."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.nn.utils import parametrizations

from tests.zoo.animals.models import Net


class RootMeanSquareNorm(nn.Module):
    """A normalization that PyTorch does not know as one."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class LayerScale(nn.Module):
    """A factor for each feature."""

    def __init__(self, width: int):
        super().__init__()
        self.gamma = nn.Parameter(0.5 * torch.ones(width))

    def forward(self, x):
        return x * self.gamma


class Temperature(nn.Module):
    """One factor for all."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return x * self.temperature


class OwnNorms(Net):
    """Norm, slope, layer scale and temperature beside its weights."""

    def make_body(self, width: int) -> nn.Module:
        scales = RootMeanSquareNorm(width), nn.PReLU(), LayerScale(width), Temperature()
        return nn.Sequential(nn.Linear(8, width), *scales, nn.Linear(width, width), nn.Tanh())


class FrozenBackbone(Net):
    """Trains its head alone, on features taken without gradients."""

    def forward(self, x):
        with torch.no_grad():
            x = self.body(x)
        return self.head(x)


class HalfTrained(Net):
    """Its first layer has gradients, and no optimizer."""

    def configure_optimizers(self):
        return torch.optim.Adam(
            [*self.body[2].parameters(), *self.head.parameters()], self.hparams.lr
        )


class Nested(Net):
    """Its head has a dot before its name."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.net = nn.ModuleDict({"body": self.body, "head": self.head})
        del self.body, self.head

    def forward(self, x):
        return self.net["head"](self.net["body"](x))


class Residual(nn.Module):
    """A branch that begins as nothing, since the last scale in it is zero."""

    def __init__(self, width: int):
        super().__init__()
        self.branch = nn.Sequential(
            nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)
        )
        self.norm = nn.BatchNorm1d(width)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x):
        return x + self.norm(self.branch(x))


class ZeroGamma(Net):
    """Has such a branch."""

    def make_body(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), Residual(width), nn.Tanh())


class BatchNorm(Net):
    """Has running statistics."""

    def make_body(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Tanh())


class Parametrized(Net):
    """Its middle layer is parametrized.

    Args:
        by: "weight_norm", "spectral_norm", "orthogonal", or "old" for the weight_norm that is no
            parametrization.
    """

    def __init__(self, width: int = 16, lr: float = 1e-2, by: str = "weight_norm"):
        super().__init__(width, lr)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the old function
            (nn.utils.weight_norm if by == "old" else getattr(parametrizations, by))(self.body[2])


class Lazy(Net):
    """Its middle layer does not know its size before it sees a batch."""

    def make_body(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.LazyLinear(width), nn.Tanh())


class Tied(Net):
    """Two of its layers share a weight."""

    def make_body(self, width: int) -> nn.Module:
        first, second = nn.Linear(width, width), nn.Linear(width, width)
        second.weight = first.weight
        return nn.Sequential(nn.Linear(8, width), nn.Tanh(), first, nn.Tanh(), second)


class Words(nn.Module):
    """Looks at the signs of its inputs alone, as words of a dictionary."""

    def __init__(self, width: int):
        super().__init__()
        self.embedding = nn.Embedding(16, width)

    def forward(self, x):
        return self.embedding((x > 0).long() + 2 * torch.arange(8, device=x.device))


class Embedded(Net):
    """Words, added up."""

    def make_body(self, width: int) -> nn.Module:
        return Words(width)

    def forward(self, x):
        return self.head(self.body(x).sum(1))


class Attentive(Net):
    """Words that look at each other."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def make_body(self, width: int) -> nn.Module:
        return Words(width)

    def forward(self, x):
        words = self.body(x)
        return self.head((words + self.attention(words, words, words)[0]).sum(1))
