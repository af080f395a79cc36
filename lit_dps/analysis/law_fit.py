"""Fits K* = c1 / B + c2, steps to result against batch size (Lee et al. 2021, Section 4).

`fit_scaling` is an M-estimator of log K* with the pseudo-Huber loss ("soft_l1" of
`scipy.optimize.least_squares`). It minimises the sum of 2 s^2 (sqrt(1 + (r / s)^2) - 1) over the
residuals r = log K* - log(c1 / B + c2), with the scale s.

Given the ratio c2 / c1, log c1 is the location of log K* - log(1 / B + c2 / c1), a convex problem.
So only the ratio is searched (variable projection). A grid of ratios finds the basin of the global
minimum, and bisection of the derivative finds the minimum in the basin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

# The law fits any two points, so a fit needs at least three batch sizes.
MIN_BATCH_SIZES = 3

# Residuals are differences of log steps. Below about 10 % a point counts as in least squares,
# beyond it only linearly, so that one cell whose search went badly does not bend the curve. 10 % is
# the uncertainty of the best of some tens of trials, check interval included. It is not tuned to
# any data.
LOSS_SCALE = 0.1

# Kinds of observations that are bounds of K*: the side on which a residual counts.
AT_LEAST = 1
AT_MOST = -1

# Ratios c2 / c1 are searched from 0 up to 1000 over the smallest batch size. Beyond it the curve is
# flat to 0.1 %, so that c1 has no effect. At the first positive ratio, c2 adds 0.01 % to K* at the
# largest batch size.
_SMALLEST_RATIO = 1e-4
_LARGEST_RATIO = 1e3
_GRID_POINTS = 48
_BISECTIONS = 48

# The last Newton step of log c1, as a share of the loss scale. The remaining error is about its
# square. The grid needs only the order of its losses, which an error of 1e-10 does not change.
_TOLERANCE = 1e-8
_GRID_TOLERANCE = 1e-5
_MAX_NEWTON_STEPS = 100


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
        """B_crit = c1 / c2 in examples, where both terms are equal; infinite if c2 is 0."""
        if self.c2 > 0:
            return self.c1 / self.c2
        return math.inf

    def steps(self, batch_size: Any) -> Any:
        """Return the fitted steps to result at a batch size (number or array)."""
        return self.c1 / batch_size + self.c2


def fit_scaling(
    batch_sizes: Sequence[float] | np.ndarray,
    steps: Sequence[float] | np.ndarray,
    weights: np.ndarray | None = None,
    bounds: np.ndarray | None = None,
    loss_scale: float = LOSS_SCALE,
) -> Fit:
    """Return the robust fit of K* = c1 / B + c2 to log K*, with c1 > 0 and c2 >= 0.

    Args:
        batch_sizes: (n,), in examples.
        steps: (n,), K* at each, or a bound of it.
        weights: (n,), factors of the terms of the sum; by default 1.
        bounds: (n,): 0 for an exact K*, `AT_LEAST` for a lower bound, `AT_MOST` for an upper bound;
            by default all are exact. A bound that the law keeps adds nothing to the sum.
        loss_scale: s; with a large one this is least squares of log K*.

    Raises:
        ValueError: for numbers that are not positive and finite, or fewer than two different batch
            sizes.
    """
    batch = np.asarray(batch_sizes, float)
    k_star = np.asarray(steps, float)
    _check(batch, k_star)
    if weights is None:
        weights = np.ones(len(batch))
    if bounds is None:
        bounds = np.zeros(len(batch), int)
    curve = _Curve(1 / batch, np.log(k_star), weights, bounds, loss_scale)
    ratio = _best_ratio(curve)
    c1 = float(np.exp(curve.profile(ratio).log_c1))
    return Fit(c1, c1 * ratio)


def _check(batch: np.ndarray, steps: np.ndarray) -> None:
    """Raise ValueError for a curve that cannot be fitted."""
    if batch.ndim != 1 or batch.shape != steps.shape:
        raise ValueError(
            f"batch sizes and steps must have one shape (n,), not {batch.shape} and {steps.shape}"
        )
    if not (np.isfinite(batch) & np.isfinite(steps) & (batch > 0) & (steps > 0)).all():
        raise ValueError("batch sizes and steps must be positive and finite")
    different = np.unique(batch).size
    if different < 2:
        raise ValueError(f"a fit needs at least 2 different batch sizes, not {different}")


def _best_ratio(curve: _Curve) -> float:
    """Return the ratio c2 / c1 of least loss."""
    lowest, highest = curve.inverse_batch.min(), curve.inverse_batch.max()
    positive = np.geomspace(_SMALLEST_RATIO * lowest, _LARGEST_RATIO * highest, _GRID_POINTS)
    grid = np.append(0.0, positive)
    best = int(curve.profile(grid, _GRID_TOLERANCE).loss.argmin())
    if best == 0 and curve.profile(0.0).slope >= 0:
        return 0.0
    low = float(grid[max(best - 1, 0)])
    middle = float(grid[best])
    high = float(grid[min(best + 1, _GRID_POINTS)])
    for _ in range(_BISECTIONS):
        if curve.profile(middle).slope > 0:
            high = middle
        else:
            low = middle
        middle = (low + high) / 2
    return middle


class _Profile(NamedTuple):
    """The best fits of a curve at G ratios c2 / c1; G is absent for a single ratio."""

    log_c1: np.ndarray  # (G,)
    law: np.ndarray  # (G, n), 1 / B + c2 / c1
    residuals: np.ndarray  # (G, n), in units of the loss scale
    weights: np.ndarray  # (n,)

    @property
    def loss(self) -> np.ndarray:
        """(G,): half the loss, in units of s^2; sqrt(1 + z^2) - 1 without cancellation."""
        squares = self.residuals * self.residuals
        return np.sum(self.weights * squares / (1 + np.sqrt(1 + squares)), axis=-1)

    @property
    def slope(self) -> np.ndarray:
        """(G,): derivative of the loss by c2 / c1, up to a positive factor."""
        roots = np.sqrt(1 + self.residuals * self.residuals)
        return -np.sum(self.weights * self.residuals / roots / self.law, axis=-1)


class _Curve(NamedTuple):
    """Steps at n batch sizes, as `fit_scaling` gets them."""

    inverse_batch: np.ndarray  # (n,)
    log_steps: np.ndarray  # (n,)
    weights: np.ndarray  # (n,)
    bounds: np.ndarray  # (n,)
    loss_scale: float

    def profile(self, ratios: np.ndarray | float, tolerance: float = _TOLERANCE) -> _Profile:
        """Return the best fits at ratios c2 / c1, a number or (G,).

        Args:
            ratios: c2 / c1.
            tolerance: The last step of log c1, in units of the loss scale.
        """
        law = self.inverse_batch + np.asarray(ratios)[..., None]
        log_c1 = self._location(self.log_steps - np.log(law), tolerance)
        residuals = self._residuals(self.log_steps - np.log(law), log_c1)
        return _Profile(log_c1, law, residuals, self.weights)

    def _residuals(self, y: np.ndarray, location: np.ndarray) -> np.ndarray:
        """Return the residuals (..., n) of y, in units of the loss scale; 0 for kept bounds."""
        residuals = y - location[..., None]
        if self.bounds.any():
            residuals = np.where(self.bounds * residuals < 0, 0.0, residuals)
        return residuals / self.loss_scale

    def _location(self, y: np.ndarray, tolerance: float) -> np.ndarray:
        """Return the M-estimate of location (...) of y (..., n) with the pseudo-Huber loss.

        Newton steps, each replaced by bisection if it leaves the bracket of the minimum or is
        longer than half of the step before (Press et al. 2007, Numerical Recipes, `rtsafe`): around
        a bound, where the curvature jumps, Newton steps alone may cycle.
        """
        is_exact = self.bounds == 0
        theta = np.mean(y, axis=-1, where=is_exact)
        low = np.min(y, axis=-1)
        high = np.max(y, axis=-1)
        step = np.full(theta.shape, np.inf)
        for _ in range(_MAX_NEWTON_STEPS):
            z = self._residuals(y, theta)
            inner = 1 / np.sqrt(1 + z * z)
            pull = np.sum(self.weights * z * inner, axis=-1)
            low = np.where(pull >= 0, theta, low)
            high = np.where(pull <= 0, theta, high)
            active_weights = self.weights * (is_exact | (z != 0))
            curvature = np.einsum("...i,...i->...", active_weights * inner, inner * inner)
            newton = self.loss_scale * pull / curvature
            is_inside = (theta + newton >= low) & (theta + newton <= high)
            is_shrinking = np.abs(newton) <= np.abs(step) / 2
            step = np.where(is_inside & is_shrinking, newton, (low + high) / 2 - theta)
            theta = theta + step
            if np.all(np.abs(step) <= tolerance * self.loss_scale):
                break
        return theta


def overhead_batch_size(fit: Fit, overhead: float, reference_batch: float) -> float:
    """Return the batch size at which a run needs (1 + overhead) times the reference's examples.

    With B K(B) = c1 + c2 B this is (1 + overhead) reference + overhead B_crit: for overhead 0.2 and
    reference 256 the "critical batch size" of Zhang et al. 2024 ("How Does Critical Batch Size
    Scale in Pre-training?").
    """
    return (1 + overhead) * reference_batch + overhead * fit.critical_batch_size
