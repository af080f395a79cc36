"""Fits K* = c1 / B + c2, steps to result against batch size (Lee et al. 2021, Section 4).

`fit_scaling` fits one curve, `fit_many` the many curves of a bootstrap at once. Both are an
M-estimator of log K* with the pseudo-Huber loss ("soft_l1" of `scipy.optimize.least_squares`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

# Any two points lie on the law, so a fit takes at least three batch sizes.
MIN_BATCH_SIZES = 3

# Residuals are differences of log steps. Below about 10 % a point counts as in least squares,
# beyond it only linearly, so that one cell whose search went badly does not bend the curve. 10 % is
# the uncertainty of the best of some tens of trials, check interval included. It is not tuned to
# any data.
LOSS_SCALE = 0.1

# c2 / c1 is searched from 0 to that of a critical batch size of a thousandth of the smallest batch.
# Beyond, the curve is flat to 0.1 % and c1 cannot be told from 0. Below the first positive point c2
# adds 0.01 % at the largest batch size.
_SMALLEST = 1e-4
_LARGEST = 1e3
_GRID_POINTS = 48
_BISECTIONS = 48

# The last Newton step of log c1, as a share of the loss scale. The remaining error is about its
# square. The grid needs only the order of its losses, which an error of 1e-10 does not change.
_TOLERANCE = 1e-8
_GRID_TOLERANCE = 1e-5
_MAX_NEWTON_STEPS = 100
_ROUNDING = 1e-12  # error of a residual, in units of the loss scale: fifty times that of a double
_CACHED = 1 << 15  # numbers of an array that stays in the processor's cache

# Kinds of observations that are not K* itself: the side on which a residual counts.
AT_LEAST = 1
AT_MOST = -1


@dataclass(frozen=True)
class Fit:
    """The law K* = c1 / B + c2.

    Attributes:
        c1: Examples (steps times batch size) that a run needs at small batch sizes; above 0.
        c2: Steps that a run needs at any batch size; at least 0.
    """

    c1: float
    c2: float

    @property
    def critical_batch_size(self) -> float:
        """Return B_crit = c1 / c2 in examples, where both terms are equal; infinite if c2 is 0."""
        if self.c2 > 0:
            return self.c1 / self.c2
        return math.inf

    def steps(self, batch_size: Any) -> Any:
        """Return the fitted steps to result at a batch size (number or array)."""
        return self.c1 / batch_size + self.c2


def fit_scaling(batch_sizes: Sequence[float], steps: Sequence[float]) -> Fit:
    """Return the robust fit of K* = c1 / B + c2 to log K*.

    The M-estimator minimises the pseudo-Huber loss, the sum of 2 s^2 (sqrt(1 + (r / s)^2) - 1) over
    the residuals r = log K* - log(c1 / B + c2), with s = `LOSS_SCALE`, c1 > 0 and c2 >= 0. The same
    data always give the same fit.

    Args:
        batch_sizes: (n,), in examples.
        steps: (n,), K* at each.

    Raises:
        ValueError: for numbers that are not positive and finite, or fewer than two different batch
            sizes.
    """
    batch = np.asarray(batch_sizes, float)
    k_star = np.asarray(steps, float)
    if batch.ndim != 1 or batch.shape != k_star.shape:
        raise ValueError(
            f"batch sizes and steps must have one shape (n,), not {batch.shape} and {k_star.shape}"
        )
    if not (np.isfinite(batch) & np.isfinite(k_star) & (batch > 0) & (k_star > 0)).all():
        raise ValueError("batch sizes and steps must be positive and finite")
    different = np.unique(batch).size
    if different < 2:
        raise ValueError(f"a fit needs at least 2 different batch sizes, not {different}")
    ((c1, c2),) = fit_many(batch, k_star[None])
    return Fit(float(c1), float(c2))


class _Profile(NamedTuple):
    """The best fits of R curves at fixed ratios c2 / c1, one or G of them a curve."""

    log_c1: np.ndarray  # (R, ...)
    offset: np.ndarray  # (R, ...), log c1 less the mean of log K - log(1 / B + c2 / c1)
    law: np.ndarray  # (R, ..., n), 1 / B + c2 / c1
    weights: np.ndarray  # (R, ..., n)
    residuals: np.ndarray  # (R, ..., n), in units of the loss scale
    roots: np.ndarray  # (R, ..., n), the square root of 1 + residuals^2

    @property
    def loss(self) -> np.ndarray:
        """(R, ...): half the loss; sqrt(1 + z^2) - 1 without cancellation."""
        return np.sum(self.weights * self.residuals * self.residuals / (1 + self.roots), axis=-1)

    @property
    def slope(self) -> np.ndarray:
        """(R, ...): derivative of the loss by c2 / c1."""
        return -np.sum(self.weights * self.residuals / self.roots / self.law, axis=-1)

    @property
    def rounding_error_of_slope(self) -> np.ndarray:
        """(R, ...): the slope below which rounding decides its sign."""
        return _ROUNDING * np.sum(self.weights / self.law, axis=-1)


class _Curves:
    """R curves of steps at n batch sizes, whose laws are fitted at once; arguments as `fit_many`.

    Given r = c2 / c1, log c1 is the location of log K - log(1 / B + r), a convex problem. So only r
    has to be searched (variable projection).
    """

    def __init__(
        self,
        batch_sizes: np.ndarray,
        steps: np.ndarray,
        loss_scale: float,
        weights: np.ndarray | None,
        bounds: np.ndarray | None,
    ):
        self.inverse_batch = np.broadcast_to(1.0 / batch_sizes, steps.shape)
        self.is_observed = np.isfinite(steps)
        self.log_steps = np.log(np.where(self.is_observed, steps, 1.0))
        self.loss_scale = loss_scale
        if weights is None:
            self.weights = self.is_observed.astype(float)
        else:
            self.weights = self.is_observed * weights
        if bounds is None:
            self.sides = np.zeros(steps.shape[1], int)
        else:
            self.sides = bounds
        self.is_exact = self.is_observed & (self.sides == 0)
        # Reductions without a mask are faster.
        self.needs_no_mask = bool(self.is_exact.all())

    def profile(
        self,
        ratios: np.ndarray,
        tolerance: float = _TOLERANCE,
        start: np.ndarray | float = 0.0,
    ) -> _Profile:
        """Return the best fits at ratios c2 / c1 of shape (R,) or (R, G).

        Args:
            ratios: c2 / c1.
            tolerance: The last step of log c1, in units of the loss scale.
            start: First guess of the profile's offset.
        """
        # Arrays (R, n) get an axis for the G ratios of a curve.
        expand = (slice(None), *(None,) * (ratios.ndim - 1))
        law = self.inverse_batch[expand] + ratios[..., None]
        weights = self.weights[expand]
        y = self.log_steps[expand] - np.log(law)
        if self.needs_no_mask:
            exact: Any = True
            observed: Any = True
        else:
            exact = self.is_exact[expand]
            observed = self.is_observed[expand]
        mean = np.mean(y, axis=-1, where=exact)
        log_c1 = _location(
            y, mean + start, observed, weights, self.sides, self.loss_scale, tolerance
        )
        residuals = _without_kept_bounds(y - log_c1[..., None], self.sides) / self.loss_scale
        roots = np.sqrt(1 + residuals * residuals)
        return _Profile(log_c1, log_c1 - mean, law, weights, residuals, roots)

    def grid(self) -> np.ndarray:
        """Return the ratios c2 / c1 to compare, (R, G): 0, then ascending by equal factors."""
        lowest = self.inverse_batch.min(axis=1)
        highest = self.inverse_batch.max(axis=1)
        positive = np.geomspace(_SMALLEST * lowest, _LARGEST * highest, _GRID_POINTS, axis=1)
        return np.concatenate([np.zeros((len(lowest), 1)), positive], axis=1)

    def best_on_grid(self, grid: np.ndarray) -> np.ndarray:
        """Return the index (R,) of the ratio of least loss in each row of a grid."""
        losses = np.empty(grid.shape)
        start = np.zeros((len(grid), 1))
        width = max(1, _CACHED // self.log_steps.size)
        for first in range(0, grid.shape[1], width):
            part = slice(first, first + width)
            found = self.profile(grid[:, part], _GRID_TOLERANCE, start)
            losses[:, part] = found.loss
            start = found.offset[:, -1:]
        return losses.argmin(axis=1)

    def bisect(self, low: np.ndarray, middle: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Return the ratio (R,) between two others at which the loss is least.

        Args:
            low, high: (R,), ratios that bracket the minimum.
            middle: (R,), the first ratio whose slope is looked at.
        """
        start = np.zeros(len(middle))
        is_sure = True
        rising = np.zeros(len(middle), bool)
        for _ in range(_BISECTIONS):
            if is_sure:
                found = self.profile(middle, start=start)
                start = found.offset
                slope = found.slope
                rising = slope > 0
                is_sure = bool(np.all(np.abs(slope) > found.rounding_error_of_slope))
            if not is_sure:
                # Rounding decides the side. From one start, equal data give equal digits.
                rising = self.profile(middle).slope > 0
            low = np.where(rising, low, middle)
            high = np.where(rising, middle, high)
            middle = (low + high) / 2
        return middle


def fit_many(
    batch_sizes: np.ndarray,
    steps: np.ndarray,
    loss_scale: float = LOSS_SCALE,
    weights: np.ndarray | None = None,
    bounds: np.ndarray | None = None,
) -> np.ndarray:
    """Return c1 and c2 of R curves, (R, 2), each fitted as `fit_scaling` fits one.

    A grid of c2 / c1 finds the basin of the global minimum; it contains 0, so c2 may be exactly 0.
    Bisection of the derivative finds the minimum within the basin.

    Args:
        batch_sizes: (n,), or (R, n) where each curve has its own.
        steps: (R, n), nan where a curve has no point; at least two points a curve.
        loss_scale: s of `fit_scaling`; a large one makes it least squares of log K*.
        weights: (n,), factors of the terms of the sum; by default 1.
        bounds: (n,): 0 where K* is exact, `AT_LEAST` where the steps are a lower bound of it,
            `AT_MOST` where they are an upper bound. A bound that the law keeps adds nothing to the
            sum.
    """
    curves = _Curves(batch_sizes, steps, loss_scale, weights, bounds)
    grid = curves.grid()
    best = curves.best_on_grid(grid)
    rows = np.arange(len(steps))
    low = grid[rows, np.maximum(best - 1, 0)]
    high = grid[rows, np.minimum(best + 1, _GRID_POINTS)]
    c2_is_zero = (best == 0) & (curves.profile(np.zeros(len(steps))).slope >= 0)
    # The first slope, at the best grid point, tells on which side of it the minimum is.
    minimum = curves.bisect(low, grid[rows, best], high)
    ratio = np.where(c2_is_zero, 0.0, minimum)
    c1 = np.exp(curves.profile(ratio).log_c1)
    return np.stack([c1, c1 * ratio], axis=1)


def _without_kept_bounds(residuals: np.ndarray, sides: np.ndarray) -> np.ndarray:
    """Return residuals (..., n), set to 0 where the law keeps a bound (n,)."""
    if not sides.any():
        return residuals
    return np.where(sides * residuals < 0, 0.0, residuals)


def _location(
    y: np.ndarray,
    start: np.ndarray,
    is_observed: Any,
    weights: np.ndarray,
    sides: np.ndarray,
    scale: float,
    tolerance: float,
) -> np.ndarray:
    """Return the M-estimate of location of y over its last axis, with the pseudo-Huber loss.

    Newton steps, each replaced by bisection where it leaves the bracket of the minimum.
    """
    theta = start
    has_bounds = sides.any()
    low = np.min(y, axis=-1, where=is_observed, initial=np.inf)
    high = np.max(y, axis=-1, where=is_observed, initial=-np.inf)
    for _ in range(_MAX_NEWTON_STEPS):
        z = _without_kept_bounds(y - theta[..., None], sides) / scale
        inner = 1 / np.sqrt(1 + z * z)
        pull = np.sum(weights * z * inner, axis=-1)
        low = np.where(pull >= 0, theta, low)
        high = np.where(pull <= 0, theta, high)
        active_weights = weights
        if has_bounds:
            active_weights = weights * ((sides == 0) | (z != 0))
        curvature = np.einsum("...i,...i->...", active_weights * inner, inner * inner)
        newton = theta + scale * pull / curvature
        is_inside = (newton >= low) & (newton <= high)
        step = np.where(is_inside, newton, (low + high) / 2) - theta
        theta = theta + step
        if np.all(np.abs(step) <= tolerance * scale):
            break
    return theta


def overhead_batch_size(fit: Fit, overhead: float, reference_batch: float) -> float:
    """Return the batch size at which a run needs (1 + overhead) times the examples of another.

    With B K(B) = c1 + c2 B this is (1 + overhead) reference + overhead B_crit: for overhead 0.2 and
    reference 256 the "critical batch size" of Zhang et al. 2024 ("How Does Critical Batch Size
    Scale in Pre-training?").
    """
    return (1 + overhead) * reference_batch + overhead * fit.critical_batch_size
