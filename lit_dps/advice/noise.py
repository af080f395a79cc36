"""The gradient noise scale: its estimate with an error, and what it says of K at other batch sizes.

The noise scale phi = tr(Sigma) / |G|^2 is the batch size at which the noise of a gradient is as large as the gradient
(McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", Section 2.2 and appendix A.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

# Beyond this multiple of the pilot's batch size, predictions on public runs had 10 % to a factor of 2 too many steps.
TRUSTED = 8.0
RESOLVED = 2.0  # standard errors that |G|^2 has to lie above 0
# Standard deviation of log(noise scale / B_crit of the law) on public runs: 0.67, 0.87, 0.97 and 4.1 as ratios, and
# as large or larger elsewhere. As a prior of B_crit for `lit_dps.analysis.law_of`.
PRIOR_SPREAD = 1.0


class NoiseScale(NamedTuple):
    """An estimate of the noise scale.

    Attributes:
        value: phi in examples; nan where it is not resolved.
        error: Its standard error in log phi, by the jackknife over blocks of steps.
        gradient: Mean of |G|^2, the squared norm of the true gradient.
        gradient_error: Its standard error.
        noise: Mean of tr(Sigma), the variance of an example's gradient.
    """

    value: float
    error: float
    gradient: float
    gradient_error: float
    noise: float

    @property
    def resolved(self) -> bool:
        """Whether the true gradient stands out of the noise."""
        return not math.isnan(self.value)

    def describe(self) -> str:
        """The estimate in a line."""
        if not self.resolved:
            size = f"|G|^2 = {self.gradient:.3g} +- {self.gradient_error:.3g}"
            return f"the noise scale is not resolved: {size} is not {RESOLVED:g} standard errors above 0"
        low, high = (self.value * math.exp(side * 1.96 * self.error) for side in (-1, 1))
        return f"noise scale {self.value:.3g} examples [{low:.3g}, {high:.3g}]"


def noise_scale(
    small: Sequence[float], large: Sequence[float], small_batch: float, large_batch: float, blocks: int = 20
) -> NoiseScale:
    """The noise scale from squared norms of gradients of two batch sizes, pairs from the same weights.

    |G|^2 = (B g_B - b g_b) / (B - b) and tr(Sigma) = (g_b - g_B) / (1/b - 1/B), each averaged over the steps before
    they are divided (McCandlish et al. 2018, equations A.2 and A.3): a mean of quotients has no finite variance.

    Args:
        small, large: (n,), squared norms of the mean gradient of b and of B examples; at least two pairs.
        small_batch, large_batch: b < B, in examples.
        blocks: Blocks of adjacent steps that the jackknife leaves out one by one; adjacent steps are alike.

    Raises:
        ValueError: for fewer pairs, other shapes, or b not below B.
    """
    g_b, g_B = np.asarray(small, float), np.asarray(large, float)
    if g_b.ndim != 1 or g_b.shape != g_B.shape or len(g_b) < 2:
        raise ValueError(f"two or more pairs of squared norms are needed, not shapes {g_b.shape} and {g_B.shape}")
    if not (np.isfinite(g_b) & np.isfinite(g_B)).all():
        raise ValueError("squared norms must be finite")
    if not 0 < small_batch < large_batch:
        raise ValueError(f"the small batch size, {small_batch}, must be below the large one, {large_batch}")
    gradient = (large_batch * g_B - small_batch * g_b) / (large_batch - small_batch)
    noise = (g_b - g_B) / (1 / small_batch - 1 / large_batch)
    parts = np.array_split(np.arange(len(g_b)), min(blocks, len(g_b)))
    sums = np.array([[x[part].sum() for part in parts] for x in (gradient, noise)])
    left = (sums.sum(axis=1, keepdims=True) - sums) / (len(g_b) - np.array([len(part) for part in parts]))
    mean_gradient, mean_noise = float(gradient.mean()), float(noise.mean())
    factor = (len(parts) - 1) / len(parts)
    error = math.sqrt(factor * float(((left[0] - left[0].mean()) ** 2).sum()))
    if not mean_gradient > RESOLVED * error or mean_noise <= 0 or (left <= 0).any():
        return NoiseScale(math.nan, math.nan, mean_gradient, error, mean_noise)
    logs = np.log(left[1] / left[0])
    spread = math.sqrt(factor * float(((logs - logs.mean()) ** 2).sum()))
    return NoiseScale(mean_noise / mean_gradient, spread, mean_gradient, error, mean_noise)


def steps_ratio(scales: Sequence[float], pilot: float, batch_sizes) -> np.ndarray:
    """K(B) / K(B0) from the noise scales along one run at batch size B0: (n,).

    A step of B makes as much progress as (1 + phi / B0) / (1 + phi / B) steps of B0 (McCandlish et al. 2018, equation
    2.7), at the same place of the training: the mean over its steps. It is pessimistic beyond `TRUSTED` times B0.

    Args:
        scales: phi at steps spread evenly over the run, in examples.
        pilot: B0.
        batch_sizes: (n,).

    Raises:
        ValueError: for no scales, or any that is negative or not finite.
    """
    phi, batch = np.asarray(scales, float), np.asarray(batch_sizes, float)
    if not phi.size or not np.isfinite(phi).all() or (phi < 0).any():
        raise ValueError("noise scales must be finite and at least 0")
    return ((1 + phi / batch[..., None]) / (1 + phi / pilot)).mean(axis=-1)


def pessimistic(pilot: float, batch_size: float) -> str | None:
    """What to say of a prediction far above the pilot's batch size; None near it."""
    if batch_size <= TRUSTED * pilot:
        return None
    return (
        f"B = {batch_size:g} is {batch_size / pilot:.3g} times the pilot's: there the noise scale predicted 10 % to a "
        "factor of 2 too many steps on public runs; a run at a large batch size would settle it"
    )
