"""The gradient noise scale, from repeated readings of the gradient's mean and variance. No torch.

B_simple = tr(Sigma) / |G|^2 (McCandlish et al. 2018, Section 2.2): the batch size at which the
noise of the gradient of a batch is as large as the gradient. It is a first guess of the critical
batch size near the batch size that it was read at, and often lies below it (Merrill et al. 2025).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lit_dps.core.text import number_text

if TYPE_CHECKING:  # a configuration is read without them, in no time
    import numpy as np

SMALL = 32  # examples: smaller batches say little of the mean gradient
BLOCKS = 8  # of neighbouring readings, whose means are taken to be independent
LEVEL = 0.95


def read_at(batch_sizes: Iterable[int]) -> int:
    """The batch size of a study at which its noise scale is read: the smallest one of at least
    `SMALL`, or the largest.

    The choice from parts of a grid, then from what was chosen, is that from the whole.
    """
    sizes = list(batch_sizes)
    return min((size for size in sizes if size >= SMALL), default=max(sizes))


@dataclass(frozen=True)
class NoiseScale:
    """The noise scale of a stretch of training.

    Attributes:
        squared_gradient: |G|^2, the squared norm of the mean gradient, averaged over the readings.
        squared_gradient_error: Its standard error.
        variance: tr(Sigma), the trace of the covariance of the per-example gradient, averaged over
            the readings.
        variance_error: Its standard error.
        low, high: 95 % limits of the noise scale, in examples (Fieller's of a ratio of means);
            `high` is infinite and
            `low` a lower bound where |G|^2 is not resolved.
        readings: How many readings there were.
        batch_size: Examples of an optimizer step while they were taken.
    """

    squared_gradient: float
    squared_gradient_error: float
    variance: float
    variance_error: float
    low: float
    high: float
    readings: int
    batch_size: int

    @property
    def resolved(self) -> bool:
        """Whether |G|^2 lies above 0 by more than its error allows: else there is no noise scale,
        but a lower bound."""
        return math.isfinite(self.high)

    @property
    def value(self) -> float:
        """tr(Sigma) / |G|^2, in examples; nan where it is not resolved."""
        return self.variance / self.squared_gradient if self.resolved else math.nan

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON; without a finite upper limit that is null."""
        return asdict(self) | {"high": self.high if self.resolved else None}

    @property
    def sentence(self) -> str:
        """What a study says of it."""
        return (
            f"noise scale {self} by {self.readings} readings at B = {self.batch_size}: a first "
            "guess of B_crit"
        )

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> NoiseScale:
        """The inverse of `stored`."""
        return cls(**{**stored, "high": math.inf if stored["high"] is None else stored["high"]})

    def __str__(self) -> str:
        if self.resolved:
            low, high = number_text(self.low), number_text(self.high)
            return f"{number_text(self.value)} [{low}, {high}]"
        wide = _quantile(self.readings) * self.squared_gradient_error
        low = number_text(self.squared_gradient - wide)
        high = number_text(self.squared_gradient + wide)
        squared = (
            f"|G|^2 = {number_text(self.squared_gradient)}, and its 95 % interval [{low}, "
            f"{high}] "
            "includes 0"
        )
        bound = f" (above {number_text(self.low)})" if self.low > 0 else ""
        return f"not resolved{bound}: {squared}"


def two_sizes(
    small: float, large: float, small_square: float, large_square: float
) -> tuple[float, float]:
    """Unbiased |G|^2 and tr(Sigma) from squared norms of the gradient at two batch sizes.

    E |g_b|^2 = |G|^2 + tr(Sigma) / b (McCandlish et al. 2018, Appendix A.1). Either may be negative
    in one reading.

    Args:
        small, large: Examples of the parts and of the whole.
        small_square, large_square: Squared norms of the mean gradient over each; of several parts
            the mean.
    """
    squared = (large * large_square - small * small_square) / (large - small)
    return squared, (small_square - large_square) / (1 / small - 1 / large)


def noise_scale(readings: Mapping[str, Sequence[float]], batch_size: int) -> NoiseScale | None:
    """The noise scale of readings in the order of the steps; None of fewer than 2 finite ones.

    Both parts are averaged over the readings first, then divided: the mean of ratios would be
    biased, and infinite where one reading has no gradient. Limits are Fieller's for the ratio of
    two means, with the covariance of the means of blocks of neighbouring readings, since what is
    measured drifts along training.

    Args:
        readings: Equally long "squared_gradient" and "variance", as `two_sizes` gives them.
        batch_size: Examples of an optimizer step.
    """
    import numpy as np

    pairs = np.array([readings["variance"], readings["squared_gradient"]], dtype=float).reshape(
        2, -1
    )
    pairs = pairs[:, np.isfinite(pairs).all(axis=0)]
    count = pairs.shape[1]
    if count < 2:
        return None
    blocks = min(BLOCKS, count)
    means = np.array([part.mean(axis=1) for part in np.array_split(pairs, blocks, axis=1)])
    top, bottom = pairs.mean(axis=1)
    covariance = np.cov(means.T) / blocks
    low, high = _fieller(top, bottom, covariance, _quantile(count))
    errors = np.sqrt(np.diag(covariance))
    return NoiseScale(
        float(bottom),
        float(errors[1]),
        float(top),
        float(errors[0]),
        max(low, 0.0),
        high,
        count,
        batch_size,
    )


def _quantile(readings: int) -> float:
    """Return the half width of a mean's interval in standard errors (Student's t)."""
    from scipy.stats import t as student

    return float(student.ppf(0.5 + LEVEL / 2, min(BLOCKS, readings) - 1))


def _fieller(top: float, bottom: float, covariance: np.ndarray, t: float) -> tuple[float, float]:
    """Limits of top / bottom: all r with |top - r bottom| within t standard errors; (lower bound,
    inf) if unbounded."""
    (vt, c), (_, vb) = covariance
    a, b, d = bottom**2 - t**2 * vb, top * bottom - t**2 * c, top**2 - t**2 * vt
    if bottom > 0 and a > 0:
        root = math.sqrt(max(b * b - a * d, 0.0))
        return (b - root) / a, (b + root) / a
    largest = bottom + t * math.sqrt(
        vb
    )  # the largest gradient and the smallest variance that the data allow
    smallest = max(top - t * math.sqrt(vt), 0.0)
    return (smallest / largest if largest > 0 else 0.0), math.inf
