"""The gradient noise scale, from repeated readings of the gradient's mean and variance. No torch.

B_simple = tr(Sigma) / |G|^2 (McCandlish et al. 2018, Section 2.2): the batch size at which the
noise of the gradient of a batch is as large as the gradient. It is a first guess of the critical
batch size, near the batch size of the readings, and often too small (Merrill et al. 2025).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lit_dps.core.text import format_duration, number_text

if TYPE_CHECKING:  # at run time NumPy and SciPy are imported only for readings: they are slow
    import numpy as np

# Examples: smaller batches have little information on the mean gradient.
MIN_BATCH_SIZE = 32
# Blocks of neighbouring readings. The means of blocks are assumed to be independent.
BLOCKS = 8
# Of the intervals.
LEVEL = 0.95


def reading_batch_size(batch_sizes: Iterable[int]) -> int:
    """Return the smallest of some batch sizes of at least `MIN_BATCH_SIZE`, or the largest.

    A study reads its noise scale there. The choice among the choices from parts of a grid is the
    choice from the entire grid.
    """
    sizes = list(batch_sizes)
    return min((size for size in sizes if size >= MIN_BATCH_SIZE), default=max(sizes))


@dataclass(frozen=True)
class NoiseScale:
    """The noise scale of a stretch of training.

    Attributes:
        squared_gradient: |G|^2, the squared norm of the mean gradient, averaged over the readings.
        squared_gradient_error: Its standard error.
        variance: tr(Sigma), the trace of the covariance of the per-example gradient, averaged over
            the readings.
        variance_error: Its standard error.
        low, high: 95 % limits of the noise scale, in examples (Fieller's, of a ratio of means). If
            |G|^2 is not resolved, `high` is infinite and `low` is a lower bound.
        readings: The number of readings.
        batch_size: Examples of an optimizer step at the readings.
        planned: The number of readings that the run would have; None if it was not set or, in an
            earlier version, not stored.
        stopped_after: The seconds after which the run ended with fewer readings; None if it had
            all of its steps.
        axes: The values of the study's axes at the readings, by key; None without axes or, in an
            earlier version, not stored.
    """

    squared_gradient: float
    squared_gradient_error: float
    variance: float
    variance_error: float
    low: float
    high: float
    readings: int
    batch_size: int
    planned: int | None = None
    stopped_after: float | None = None
    axes: dict[str, Any] | None = None

    @property
    def resolved(self) -> bool:
        """Whether |G|^2 is above 0 by its 95 % interval; else only a lower bound is known."""
        return math.isfinite(self.high)

    @property
    def value(self) -> float:
        """tr(Sigma) / |G|^2, in examples; nan if it is not resolved."""
        if not self.resolved:
            return math.nan
        return self.variance / self.squared_gradient

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON; an infinite upper limit is null."""
        stored = asdict(self)
        if not self.resolved:
            stored["high"] = None
        return stored

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> NoiseScale:
        """Return the noise scale from the output of `to_dict`."""
        fields = dict(stored)
        if fields["high"] is None:
            fields["high"] = math.inf
        return cls(**fields)

    @property
    def sentence(self) -> str:
        """The noise scale as a first guess of B_crit, with its readings, in words."""
        count = str(self.readings)
        if self.planned is not None and self.planned != self.readings:
            count += f" of {self.planned}"
        stopped = ""
        if self.stopped_after is not None:
            stopped = f", stopped after {format_duration(self.stopped_after, 2)}"
        place = f"B = {self.batch_size}"
        for key, value in (self.axes or {}).items():
            place += f", {key} = {value}"
        readings = f"{count} readings at {place}{stopped}"
        if self.resolved:
            return f"first guess of B_crit: {self} (gradient noise scale, {readings})"
        if self.low > 0:
            bound = f"above {number_text(self.low, 3)}"
            return f"first guess of B_crit: {bound} (gradient noise scale, only {readings})"
        return f"no first guess of B_crit: the gradient noise scale needs more than {readings}"

    def __str__(self) -> str:
        if self.resolved:
            limits = f"[{number_text(self.low, 3)}, {number_text(self.high, 3)}]"
            return f"{number_text(self.value, 3)} {limits}"
        bound = ""
        if self.low > 0:
            bound = f" (above {number_text(self.low, 3)})"
        half_width = _quantile(self.readings) * self.squared_gradient_error
        low = number_text(self.squared_gradient - half_width)
        high = number_text(self.squared_gradient + half_width)
        squared = number_text(self.squared_gradient)
        interval = f"its 95 % interval [{low}, {high}] includes 0"
        return f"not resolved{bound}, because |G|^2 = {squared} and {interval}"


def unbiased_moments(
    small: float, large: float, small_square: float, large_square: float
) -> tuple[float, float]:
    """Return unbiased |G|^2 and tr(Sigma) from squared norms of the gradient at two batch sizes.

    E |g_b|^2 = |G|^2 + tr(Sigma) / b (McCandlish et al. 2018, Appendix A.1). Either may be negative
    in one reading.

    Args:
        small, large: Examples of the parts and of the entire batch.
        small_square, large_square: Squared norms of the mean gradient over each; of several parts
            the mean.
    """
    squared = (large * large_square - small * small_square) / (large - small)
    return squared, (small_square - large_square) / (1 / small - 1 / large)


def moments_of_parts(
    sizes: Sequence[int], squares: Sequence[float], whole: float
) -> tuple[float, float]:
    """Return `unbiased_moments` from the parts of a batch.

    E |g_i|^2 = |G|^2 + tr(Sigma) / b_i, so the mean square of parts of different sizes belongs to
    the harmonic mean of their sizes.

    Args:
        sizes: Examples of each part.
        squares: Squared norm of the mean gradient over each part.
        whole: Squared norm of the mean gradient over the entire batch.
    """
    mean_size = len(sizes) / sum(1 / size for size in sizes)
    return unbiased_moments(mean_size, sum(sizes), sum(squares) / len(squares), whole)


def noise_scale(readings: Mapping[str, Sequence[float]], batch_size: int) -> NoiseScale | None:
    """Return the noise scale of readings in the order of the steps; None for fewer than 2 finite.

    Both parts are averaged over the readings first, then divided: the mean of ratios would be
    biased, and infinite if one reading has no gradient. Limits are Fieller's for the ratio of
    two means, with the covariance of the means of blocks of neighbouring readings, since readings
    drift along training.

    Args:
        readings: Equally long "squared_gradient" and "variance", from `unbiased_moments`.
        batch_size: Examples of an optimizer step.
    """
    import numpy as np

    pairs = np.array([readings["variance"], readings["squared_gradient"]], float).reshape(2, -1)
    pairs = pairs[:, np.isfinite(pairs).all(axis=0)]
    count = pairs.shape[1]
    if count < 2:
        return None
    blocks = min(BLOCKS, count)
    means = np.array([part.mean(axis=1) for part in np.array_split(pairs, blocks, axis=1)])
    variance, squared_gradient = pairs.mean(axis=1)
    covariance = np.cov(means.T) / blocks
    low, high = _fieller(variance, squared_gradient, covariance, _quantile(count))
    errors = np.sqrt(np.diag(covariance))
    return NoiseScale(
        squared_gradient=float(squared_gradient),
        squared_gradient_error=float(errors[1]),
        variance=float(variance),
        variance_error=float(errors[0]),
        low=max(low, 0.0),
        high=high,
        readings=count,
        batch_size=batch_size,
    )


def _quantile(readings: int) -> float:
    """Return the half width of a mean's interval in standard errors (Student's t)."""
    from scipy.stats import t as student

    return float(student.ppf(0.5 + LEVEL / 2, min(BLOCKS, readings) - 1))


def _fieller(top: float, bottom: float, covariance: np.ndarray, t: float) -> tuple[float, float]:
    """Return the limits of top / bottom; a lower bound and infinity if they are unbounded.

    They contain all r with |top - r bottom| within t standard errors (Fieller 1954).

    Args:
        top, bottom: The numerator and the denominator.
        covariance: Theirs, (2, 2).
        t: Standard errors in half an interval.
    """
    (top_variance, shared), (_, bottom_variance) = covariance
    # The limits solve a r^2 - 2 b r + c = 0.
    a = bottom**2 - t**2 * bottom_variance
    b = top * bottom - t**2 * shared
    c = top**2 - t**2 * top_variance
    if bottom > 0 and a > 0:
        root = math.sqrt(max(b * b - a * c, 0.0))
        return (b - root) / a, (b + root) / a
    # The smallest numerator over the largest denominator that the readings allow.
    smallest = max(top - t * math.sqrt(top_variance), 0.0)
    largest = bottom + t * math.sqrt(bottom_variance)
    if largest <= 0:
        return 0.0, math.inf
    return smallest / largest, math.inf
