"""The uncertainty of K = c1 / B + c2: a posterior of its constants, and the error of the law.

The posterior of the constants is computed on a grid. Errors of log K follow Student's t, a robust
likelihood. A bound counts by the probability that the law keeps it (a censored, or Tobit,
likelihood).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import special

DRAWS = 2000

# Prior of the error of the law: the root mean square of log K at a batch size that the fit has not
# seen, and the number of points that the prior counts as. With 0.05 and `law.ERROR_PER_DOUBLING` =
# 0.03, the 80 % intervals hold 87 % of the 275 held-out K of public runs (`python -m benchmarks
# law`); with 0.07 and 0.11 they held 95 %.
TYPICAL_ERROR = 0.05
PRIOR_POINTS = 3.0

# The grid: ratios c2 / c1, and for each ratio values of log c1 within some standard errors.
_RATIO_POINTS = 72
_C1_POINTS = 21
_HALF_WIDTH = 5

# Degrees of freedom of an observation's error: one bad cell may be off by more than it seems to be.
TAILS = 8.0
# B_crit is searched up to this times the largest batch size, and down to the smallest one over it.
_MAX_DISTANCE = 100
# Ratios whose share of the probability is below this do not get a finer grid.
_NEGLIGIBLE = 1e-4


class CriticalPrior(NamedTuple):
    """B_crit by other evidence than K, such as a noise scale.

    Attributes:
        value: In examples.
        log_deviation: Standard deviation of its logarithm.
    """

    value: float
    log_deviation: float


class _Density(NamedTuple):
    """The posterior density on a grid of R ratios c2 / c1 and P values of log c1."""

    mass: np.ndarray  # (R, P), in units of the maximum
    ratios: np.ndarray  # (R,), c2 / c1
    log_c1: np.ndarray  # (R, P)


class _Observed(NamedTuple):
    """The arguments of `posterior`, with steps as logarithms."""

    batch_sizes: np.ndarray
    log_steps: np.ndarray
    deviation: np.ndarray
    bounds: np.ndarray
    prior: CriticalPrior | None

    @property
    def is_exact(self) -> np.ndarray:
        """(n,): whether an observation is K itself, not a bound."""
        return self.bounds == 0

    def density(self, ratios: np.ndarray) -> _Density:
        """Return the density at ratios c2 / c1, each with a grid of log c1 around its best."""
        # (R, n), the residuals of log K before log c1 is subtracted
        residuals = self.log_steps - np.log(1 / self.batch_sizes + ratios[:, None])
        precision = self.is_exact / self.deviation**2
        centre = (residuals * precision).sum(axis=1) / precision.sum()
        offsets = np.linspace(-_HALF_WIDTH, _HALF_WIDTH, _C1_POINTS) / math.sqrt(precision.sum())
        log_c1 = centre[:, None] + offsets
        z = (residuals[:, None] - log_c1[..., None]) / self.deviation
        log = self._log_likelihood(z)
        if self.prior is not None:
            distance = np.log(ratios) + math.log(self.prior.value)
            log = log - (distance**2 / (2 * self.prior.log_deviation**2))[:, None]
        return _Density(np.exp(log - log.max()), ratios, log_c1)

    def _log_likelihood(self, z: np.ndarray) -> np.ndarray:
        """Return the log likelihood (R, P) of standardised residuals (R, P, n), to a constant."""
        squares = z[..., self.is_exact] ** 2
        log = -(TAILS + 1) / 2 * np.log1p(squares / TAILS).sum(axis=-1)
        probability_to_keep = special.stdtr(TAILS, -(self.bounds * z)[..., ~self.is_exact])
        return log + np.log(np.maximum(probability_to_keep, 1e-300)).sum(axis=-1)


def posterior(
    batch_sizes: np.ndarray,
    steps: np.ndarray,
    deviation: np.ndarray,
    bounds: np.ndarray,
    prior: CriticalPrior | None = None,
) -> np.ndarray:
    """Return draws (DRAWS, 2) of c1 and c2.

    The prior is uniform in log(c2 / c1) over all B_crit from a hundredth of the smallest batch size
    to a hundred times the largest, or normal as `prior`; uniform in log c1.

    Args:
        batch_sizes, steps: (n,).
        deviation: (n,), standard deviation of log K about the law.
        bounds: (n,), as in `fit_scaling`; at least one is 0.
        prior: B_crit by other evidence.
    """
    observed = _Observed(batch_sizes, np.log(steps), deviation, bounds, prior)
    sizes = batch_sizes[observed.is_exact]
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
