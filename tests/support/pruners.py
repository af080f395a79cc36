"""A small network, its data and its masks by each pruning method."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_dps.pruning import PRUNERS, Mask, Network, prunable, pruner_of
from lit_dps.pruning.moving import FallingDensity

# Methods of the package that need no options and make masks of any sparsity.
GENERAL = [method for method in PRUNERS if method not in ("two_four", "from_file")]
# Of these the methods that prune before the first step.
AT_START = [method for method in GENERAL if not issubclass(PRUNERS[method], FallingDensity)]


def small(seed: int = 0, norm: bool = False) -> nn.Sequential:
    """A convolutional network of three layers, 1,374 prunable elements."""
    torch.manual_seed(seed)
    norms = [nn.BatchNorm2d(4)] if norm else []
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        *norms,
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 20),
        nn.ReLU(),
        nn.Linear(20, 3),
    )


def images(
    n: int = 24, seed: int = 0, classes: int = 3, shape=(1, 8, 8)
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *shape, generator=generator), torch.randint(
        0, classes, (n,), generator=generator
    )


def network(module: nn.Module, data=None, size: int = 8, loss=F.cross_entropy) -> Network:
    x, y = images() if data is None else data
    x = x.to(next(module.parameters()).dtype)
    batches = [((a, b), len(b)) for a, b in zip(x.split(size), y.split(size), strict=True)]
    return Network(
        module,
        prunable(module),
        size,
        lambda: len(batches),
        lambda: iter(batches),
        lambda batch, i: loss(module(batch[0]), batch[1]),
    )


def mask(method: str, net: Network, sparsity: float, seed: int = 0, **options) -> Mask:
    return pruner_of(method, options).mask(net, sparsity, torch.Generator().manual_seed(seed))


def scores(method: str, net: Network, seed: int = 0, **options) -> dict[str, Tensor]:
    return pruner_of(method, options).scores(net, torch.Generator().manual_seed(seed))


def equal(one: Mask, other: Mask) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def kept(found: Mask) -> int:
    return sum(n for n, _ in found.kept().values())
