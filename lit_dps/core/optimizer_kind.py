"""Kinds of optimizers, by what their update does with the size of a gradient.

The kind decides how the learning rate follows the batch size B. An update that grows with the
gradient takes a rate that grows with B, because the steps of k batches add up (Goyal et al. 2017,
arXiv 1706.02677). The size of other updates does not depend on the gradient. Their noise is
1 / sqrt(B) of their size, so their rate grows with sqrt(B) (Malladi et al. 2022, arXiv 2205.10287,
for RMSprop and Adam; Adam without averages takes the sign). For Muon beside AdamW, nanochat uses
sqrt(B) for both (github.com/karpathy/nanochat, scripts/base_train.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class OptimizerKind(StrEnum):
    """What an update does with the size of a gradient.

    `ADAPTIVE` divides by a second moment of the gradients, `SIGN` takes the sign of their average,
    and `SPECTRAL` makes the matrix of a layer orthogonal, or preconditions it. The update of
    `SGD_LIKE` optimizers grows with the gradient.
    """

    ADAPTIVE = "adaptive"
    SIGN = "sign"
    SPECTRAL = "spectral"
    SGD_LIKE = "SGD-like"

    @property
    def rate_power(self) -> float:
        """The power of B by which the learning rate grows."""
        if self is OptimizerKind.SGD_LIKE:
            return 1.0
        return 0.5


# Names of classes, and of the rules of this package, in lower case. Only the classes of torch.optim
# are here, and optimizers whose name is that of one published algorithm.
KIND_OF_NAME = {
    "adadelta": OptimizerKind.ADAPTIVE,
    "adafactor": OptimizerKind.ADAPTIVE,
    "adagrad": OptimizerKind.ADAPTIVE,
    "adam": OptimizerKind.ADAPTIVE,
    "adamax": OptimizerKind.ADAPTIVE,
    "adamw": OptimizerKind.ADAPTIVE,
    "nadam": OptimizerKind.ADAPTIVE,
    "radam": OptimizerKind.ADAPTIVE,
    "rmsprop": OptimizerKind.ADAPTIVE,
    "schedule_free_adamw": OptimizerKind.ADAPTIVE,
    "sparseadam": OptimizerKind.ADAPTIVE,
    "lion": OptimizerKind.SIGN,
    "rprop": OptimizerKind.SIGN,
    "signsgd": OptimizerKind.SIGN,
    "signum": OptimizerKind.SIGN,
    "muon": OptimizerKind.SPECTRAL,
    "muonwithauxadam": OptimizerKind.SPECTRAL,
    "shampoo": OptimizerKind.SPECTRAL,
    "singledevicemuonwithauxadam": OptimizerKind.SPECTRAL,
    "soap": OptimizerKind.SPECTRAL,
    "asgd": OptimizerKind.SGD_LIKE,
    "lbfgs": OptimizerKind.SGD_LIKE,
    "momentum": OptimizerKind.SGD_LIKE,
    "nesterov": OptimizerKind.SGD_LIKE,
    "schedule_free_sgd": OptimizerKind.SGD_LIKE,
    "sgd": OptimizerKind.SGD_LIKE,
}


def kind_of_name(name: str) -> OptimizerKind | None:
    """Return the kind of an optimizer by the name or path of its class; None if it is unknown."""
    return KIND_OF_NAME.get(name.rpartition(".")[2].lower())


def common_rate_power(kinds: Iterable[OptimizerKind]) -> float | None:
    """Return the power of B by which all rates grow; None if the kinds differ in it."""
    powers = {kind.rate_power for kind in kinds}
    if len(powers) != 1:
        return None
    return powers.pop()
