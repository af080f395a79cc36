"""What the gradient noise scale of one run says of K at other batch sizes (`lit_dps.noise` estimates it).

The noise scale phi = tr(Sigma) / |G|^2 is the batch size at which the noise of a gradient is as large as the gradient
(McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", Section 2.2 and appendix A.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lit_dps.noise import NoiseScale, noise_scale, two_sizes

# Beyond this multiple of the pilot's batch size, predictions on public runs had 10 % to a factor of 2 too many steps.
TRUSTED = 8.0
# Standard deviation of log(noise scale / B_crit of the law) on public runs: 0.67, 0.87, 0.97 and 4.1 as ratios, and
# as large or larger elsewhere. As a prior of B_crit for `lit_dps.analysis.law_of`.
PRIOR_SPREAD = 1.0


def scale_of_pairs(
    small: Sequence[float], large: Sequence[float], small_batch: int, large_batch: int
) -> NoiseScale | None:
    """The noise scale from squared norms of gradients of two batch sizes, pairs from the same weights.

    Args:
        small, large: (n,), squared norms of the mean gradient of b and of B examples, in the order of the steps.
        small_batch, large_batch: b < B, in examples.

    Returns:
        As `lit_dps.noise.noise_scale`: not resolved where |G|^2 is not above 0 by its error; None for fewer than 2.

    Raises:
        ValueError: for other shapes, or b not below B.
    """
    g_b, g_B = np.asarray(small, float), np.asarray(large, float)
    if g_b.ndim != 1 or g_b.shape != g_B.shape:
        raise ValueError(f"pairs of squared norms are needed, not shapes {g_b.shape} and {g_B.shape}")
    if not 0 < small_batch < large_batch:
        raise ValueError(f"the small batch size, {small_batch}, must be below the large one, {large_batch}")
    squared, variance = two_sizes(small_batch, large_batch, g_b, g_B)
    return noise_scale({"squared_gradient": squared, "variance": variance}, large_batch)


def expected_critical(scale: NoiseScale) -> tuple[float, float] | None:
    """What a noise scale says of B_crit, for `lit_dps.analysis.law_of`: [examples], and how uncertain its log is.

    None where it is not resolved. Its own error is added to how far noise scales were off on public runs.
    """
    if not scale.resolved or scale.low <= 0:
        return None
    return scale.value, math.hypot(PRIOR_SPREAD, math.log(scale.high / scale.low) / 3.92)


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
