"""Fits K* = c1 / B + c2, with uncertainty (Lee et al. 2021, Section 4).

`fit_scaling` is an M-estimator of log K* with the pseudo-Huber loss ("soft_l1" of
`scipy.optimize.least_squares`). It minimises the sum of 2 s^2 (sqrt(1 + (r / s)^2) - 1) over the
residuals r = log K* - log(c1 / B + c2), with the scale s.

Given the ratio c2 / c1, log c1 is the location of log K* - log(1 / B + c2 / c1), a convex problem.
So only the ratio is searched (variable projection). A grid of ratios finds the basin of the global
minimum, and bisection of the derivative finds the minimum in the basin.

`posterior` draws c1 and c2 from their posterior on a grid. Errors of log K follow Student's t, a
robust likelihood. A bound counts by the probability that the law keeps it (a censored, or Tobit,
likelihood).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from lit_dps.analysis.critical_prior import CriticalPrior
from lit_dps.analysis.observations import Observation

# The law fits any two points, so a fit needs at least three batch sizes.
MIN_BATCH_SIZES = 3

# Residuals are differences of log steps. Below about 10 % a point counts as in least squares,
# beyond it only linearly, so that one cell whose search went badly does not bend the curve. 10 % is
# the uncertainty of the best of some tens of trials, check interval included. It is not tuned to
# any data.
LOSS_SCALE = 0.1

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

DRAWS = 2000

# Prior of the error of the law: the root mean square of log K at a batch size that the fit has not
# seen, and the number of points that the prior counts as. With 0.05 and `law.ERROR_PER_DOUBLING` =
# 0.03, the 80 % intervals hold 87 % of the 275 held-out K of public runs (`python -m benchmarks
# advice`); with 0.07 and 0.11 they held 95 %.
TYPICAL_ERROR = 0.05
PRIOR_POINTS = 3.0

# The grid: ratios c2 / c1, and for each ratio values of log c1 within some standard errors.
_RATIO_POINTS = 72
_C1_POINTS = 21
_HALF_WIDTH = 5

# Degrees of freedom of an observation's error: one bad cell may be off by more than it seems to be.
TAILS = 8.0
# Degrees of freedom of a prior of log B_crit: few public runs determine its scale, and K at a
# second batch size has to correct a prior that is wrong.
PRIOR_TAILS = 4.0
# B_crit is searched up to this times the largest batch size, and down to the smallest one over it.
_MAX_DISTANCE = 100
# Ratios whose share of the probability is below this do not get a finer grid.
_NEGLIGIBLE = 1e-4


@dataclass(frozen=True)
class LawConstants:
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
) -> LawConstants:
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
    return LawConstants(c1, c1 * ratio)


def _check(batch: np.ndarray, steps: np.ndarray) -> None:
    """Raise ValueError for a curve that cannot be fitted."""
    if batch.ndim != 1 or batch.shape != steps.shape:
        raise ValueError(
            f"batch_sizes have shape {batch.shape} and steps {steps.shape}; both must have one "
            "shape (n,)"
        )
    if not (np.isfinite(batch) & np.isfinite(steps) & (batch > 0) & (steps > 0)).all():
        raise ValueError("batch sizes and steps must be positive and finite")
    different = np.unique(batch).size
    if different < 2:
        raise ValueError(f"a fit needs at least 2 different batch sizes, and has {different}")


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


def overhead_batch_size(fit: LawConstants, overhead: float, reference_batch: float) -> float:
    """Return the batch size at which a run needs (1 + overhead) times the reference's examples.

    With B K(B) = c1 + c2 B this is (1 + overhead) reference + overhead B_crit: for overhead 0.2 and
    reference 256 the "critical batch size" of Zhang et al. 2024 ("How Does Critical Batch Size
    Scale in Pre-training?").
    """
    return (1 + overhead) * reference_batch + overhead * fit.critical_batch_size


class Data(NamedTuple):
    """Observations as arrays (n,)."""

    batch_sizes: np.ndarray
    steps: np.ndarray
    variance: np.ndarray
    bounds: np.ndarray

    @property
    def is_exact(self) -> np.ndarray:
        """(n,): whether an observation is K itself, not a bound."""
        return self.bounds == 0


def data_of(observations: Sequence[Observation]) -> Data:
    """Return observations as arrays.

    If the noise of some K is known, an unknown noise counts as `Observation.assumed_variance`. Such
    a K would otherwise count as the most exact one. If no noise is known, the error of the law
    contains it.
    """
    knows_noise = any(o.noise for o in observations if not o.bound)
    rows = []
    for o in observations:
        variance = o.assumed_variance if knows_noise else o.variance
        rows.append((o.batch_size, o.expected_k, variance, o.bound))
    columns = np.array(rows, float).reshape(-1, len(Data._fields)).T
    return Data(*np.ascontiguousarray(columns))


class Residuals(NamedTuple):
    """The residuals of log K about a fit.

    Attributes:
        squares: Sum of their squares.
        excess: The part of it that the noise of the observations does not explain.
        free: Degrees of freedom.
    """

    squares: float
    excess: float
    free: int


def weighted_fit(data: Data, error: float) -> LawConstants:
    """Return the fit whose weights are inverse variances: of the noise plus the law's error."""
    weights = 1 / (data.variance + error**2)
    weights = weights / weights[data.is_exact].mean()
    return fit_scaling(data.batch_sizes, data.steps, weights, data.bounds)


def residuals_about(data: Data, fit: LawConstants) -> Residuals:
    """Return the residuals of the K that are not bounds."""
    residuals = np.log(data.steps) - np.log(fit.steps(data.batch_sizes))
    squares = residuals[data.is_exact] ** 2
    # All n variances, though the residuals have n - 2 of them: the excess of few noisy K is often
    # above 0 by chance. Of 150 made-up curves of a true law (4 K, noise 35 %), this refuses 12 %,
    # and n - 2 variances refuse 33 %. The 95 % limits hold K in 96 to 100 % of the cases.
    excess = max(0.0, float((squares - data.variance[data.is_exact]).sum()))
    return Residuals(float(squares.sum()), excess, len(squares) - 2)


class _Density(NamedTuple):
    """The posterior density on a grid of R ratios c2 / c1 and P values of log c1."""

    mass: np.ndarray  # (R, P), in units of the maximum
    ratios: np.ndarray  # (R,), c2 / c1
    log_c1: np.ndarray  # (R, P)


class _Observed(NamedTuple):
    """Observations, with the standard deviation (n,) of log K about the law."""

    data: Data
    deviation: np.ndarray
    prior: CriticalPrior | None

    def density(self, ratios: np.ndarray) -> _Density:
        """Return the density at ratios c2 / c1, each with a grid of log c1 around its best."""
        # (R, n), the residuals of log K before log c1 is subtracted
        law = 1 / self.data.batch_sizes + ratios[:, None]
        residuals = np.log(self.data.steps) - np.log(law)
        precision = self.data.is_exact / self.deviation**2
        centre = (residuals * precision).sum(axis=1) / precision.sum()
        offsets = np.linspace(-_HALF_WIDTH, _HALF_WIDTH, _C1_POINTS) / math.sqrt(precision.sum())
        log_c1 = centre[:, None] + offsets
        z = (residuals[:, None] - log_c1[..., None]) / self.deviation
        log = self._log_likelihood(z)
        if self.prior is not None:
            distance = (np.log(ratios) + math.log(self.prior.value)) / self.prior.log_deviation
            log_prior = -(PRIOR_TAILS + 1) / 2 * np.log1p(distance**2 / PRIOR_TAILS)
            log = log + log_prior[:, None]
        return _Density(np.exp(log - log.max()), ratios, log_c1)

    def _log_likelihood(self, z: np.ndarray) -> np.ndarray:
        """Return the log likelihood (R, P) of standardised residuals (R, P, n), to a constant."""
        is_exact = self.data.is_exact
        squares = z[..., is_exact] ** 2
        log = -(TAILS + 1) / 2 * np.log1p(squares / TAILS).sum(axis=-1)
        probability_to_keep = special.stdtr(TAILS, -(self.data.bounds * z)[..., ~is_exact])
        return log + np.log(np.maximum(probability_to_keep, 1e-300)).sum(axis=-1)


def posterior(data: Data, error: float, prior: CriticalPrior | None) -> np.ndarray:
    """Return draws (DRAWS, 2) of c1 and c2.

    The prior is uniform in log(c2 / c1) over all B_crit from a hundredth of the smallest batch size
    to a hundred times the largest, or normal as `prior`; uniform in log c1.

    Args:
        data: The observations; at least one is no bound.
        error: Standard deviation of the law's error in log K, added to the noise in quadrature.
        prior: B_crit by other evidence; None without any.
    """
    observed = _Observed(data, np.sqrt(data.variance + error**2), prior)
    sizes = data.batch_sizes[data.is_exact]
    lowest = 1 / (_MAX_DISTANCE * sizes.max())
    wide = np.geomspace(lowest, _MAX_DISTANCE / sizes.min(), _RATIO_POINTS)
    mass = observed.density(wide).mass.sum(axis=1)
    # A finer grid covers the ratios that are probable.
    probable = np.flatnonzero(mass > _NEGLIGIBLE * mass.sum())
    low = wide[max(probable[0] - 1, 0)]
    high = wide[min(probable[-1] + 1, _RATIO_POINTS - 1)]
    return _draw(observed.density(np.geomspace(low, high, _RATIO_POINTS)))


def _draw(density: _Density) -> np.ndarray:
    """Return draws (DRAWS, 2) of c1 and c2, by systematic sampling of the grid, shuffled."""
    cumulated = density.mass.ravel().cumsum()
    positions = (np.arange(DRAWS) + 0.5) / DRAWS * cumulated[-1]
    chosen = np.searchsorted(cumulated, positions)
    row, column = np.unravel_index(chosen, density.mass.shape)
    c1 = np.exp(density.log_c1[row, column])
    draws = np.stack([c1, c1 * density.ratios[row]], axis=1)
    np.random.default_rng(1).shuffle(draws)
    return draws


def error_of_law(excess: float, free: int) -> float:
    """Return the standard deviation of log K about the law, shrunk towards `TYPICAL_ERROR`.

    Args:
        excess: Sum of the squared residuals of log K, less their noise.
        free: Their degrees of freedom.
    """
    return math.sqrt((PRIOR_POINTS * TYPICAL_ERROR**2 + excess) / (PRIOR_POINTS + free))


def error_draws(free: int) -> np.ndarray:
    """Return draws (DRAWS,) of the law's error, in units of `error_of_law`.

    That error is an estimate from few residuals, so deviations from the law follow Student's t.
    """
    draws = special.stdtrit(PRIOR_POINTS + free, (np.arange(DRAWS) + 0.5) / DRAWS)
    np.random.default_rng(0).shuffle(draws)
    return draws
