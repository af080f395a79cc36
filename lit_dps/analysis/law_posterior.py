"""The posterior of the constants of K = c1 / B + c2 + c3 / B^2, on a grid.

Errors of log K follow Student's t, a robust likelihood; bounds count by the probability to keep
them (a censored, or Tobit, likelihood).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from scipy import special

DRAWS = 2000
_RATIOS = 72  # points of the grid of c2 / c1
_BENDS = 32  # points of the grid of c3 / c1
_PLACES = 21  # points of the grid of log c1
_HALF_WIDTH = 5  # of the grid of log c1, in standard errors
# Degrees of freedom of an observation's error: one bad cell may be off by more than it seems to be.
TAILS = 8.0
# Ratios whose share of the probability is below this do not get a finer grid.
_NEGLIGIBLE = 1e-4


def grid_of_bends(batch_sizes: np.ndarray) -> np.ndarray:
    """Return the values of c3 / c1 [examples] to compare."""
    return np.geomspace(0.03 * batch_sizes.min(), batch_sizes.max(), _BENDS)


class _Density(NamedTuple):
    """The log posterior density on a grid of S shapes (c2 / c1, c3 / c1) and P values of log c1."""

    log: np.ndarray  # (S, P)
    ratios: np.ndarray  # (S,), c2 / c1
    bends: np.ndarray  # (S,), c3 / c1
    log_c1: np.ndarray  # (S, P)

    @property
    def mass(self) -> np.ndarray:
        """(S, P): the density, in units of its maximum."""
        return np.exp(self.log - self.log.max())


class _Observed(NamedTuple):
    """What the posterior is given; see `posterior`."""

    batch_sizes: np.ndarray
    log_steps: np.ndarray
    deviation: np.ndarray
    bounds: np.ndarray
    expected: tuple[float, float] | None

    @property
    def is_exact(self) -> np.ndarray:
        """(n,): whether an observation is K itself, no bound."""
        return self.bounds == 0

    @property
    def precision(self) -> np.ndarray:
        """(n,): inverse variances of log K; 0 of bounds."""
        return self.is_exact / self.deviation**2

    def density(self, ratios: np.ndarray, bends: np.ndarray) -> _Density:
        """Return the density at all pairs of ratios c2 / c1 and c3 / c1."""
        r, s = (x.ravel() for x in np.meshgrid(ratios, bends, indexing="ij"))
        shape = 1 / self.batch_sizes + r[:, None] + s[:, None] / self.batch_sizes**2
        residuals = self.log_steps - np.log(shape)  # (S, n), before log c1 is subtracted
        total = self.precision.sum()
        centre = (residuals * self.precision).sum(axis=1) / total
        steps_of_grid = np.linspace(-_HALF_WIDTH, _HALF_WIDTH, _PLACES) / math.sqrt(total)
        log_c1 = centre[:, None] + steps_of_grid
        z = (residuals[:, None] - log_c1[..., None]) / self.deviation
        log = self._log_likelihood(z)
        if self.expected is not None:
            value, spread = self.expected
            log = log - ((np.log(r) + math.log(value)) ** 2 / (2 * spread**2))[:, None]
        return _Density(log, r, s, log_c1)

    def _log_likelihood(self, z: np.ndarray) -> np.ndarray:
        """Return the log likelihood (S, P) of standardised residuals (S, P, n)."""
        exact = self.is_exact
        constant = -np.log(self.deviation[exact]).sum()
        squares = z[..., exact] ** 2
        log = -(TAILS + 1) / 2 * np.log1p(squares / TAILS).sum(axis=-1) + constant
        probability_to_keep = special.stdtr(TAILS, -(self.bounds * z)[..., ~exact])
        return log + np.log(np.maximum(probability_to_keep, 1e-300)).sum(axis=-1)


def posterior(
    batch_sizes: np.ndarray,
    steps: np.ndarray,
    deviation: np.ndarray,
    bounds: np.ndarray,
    has_c3: bool = False,
    expected: tuple[float, float] | None = None,
) -> tuple[np.ndarray, float]:
    """Return draws (DRAWS, 3) of c1, c2, c3, and the log evidence of this form of the law.

    The prior is uniform in log(c2 / c1) over all B_crit from a hundredth of the smallest batch size
    to a hundred times the largest, or normal as `expected`; uniform in log c1, and in log(c3 / c1).

    Args:
        batch_sizes, steps: (n,).
        deviation: (n,), standard deviation of log K about the law.
        bounds: (n,), as of `fit_many`; at least one is 0.
        has_c3: Whether c3 is free, else it is 0.
        expected: B_crit [examples] and the standard deviation of its logarithm by other evidence.

    Returns:
        The draws, and the log of the marginal likelihood, to a constant that is the same for all
        forms.
    """
    observed = _Observed(batch_sizes, np.log(steps), deviation, bounds, expected)
    exact_sizes = batch_sizes[observed.is_exact]
    bends: Any = np.zeros(1)
    if has_c3:
        bends = grid_of_bends(exact_sizes)
    wide = np.geomspace(0.01 / exact_sizes.max(), 100 / exact_sizes.min(), _RATIOS)
    coarse = observed.density(wide, bends)
    mass = coarse.mass
    # The width of the grid of log c1 is c1's share of the evidence.
    width = 2 * _HALF_WIDTH / math.sqrt(observed.precision.sum())
    evidence = float(coarse.log.max() + math.log(mass.mean() * width))
    # A finer grid covers the ratios that are probable.
    probable = np.flatnonzero(mass.reshape(_RATIOS, -1).sum(axis=1) > _NEGLIGIBLE * mass.sum())
    low = wide[max(probable[0] - 1, 0)]
    high = wide[min(probable[-1] + 1, _RATIOS - 1)]
    fine = observed.density(np.geomspace(low, high, _RATIOS), bends)
    return _draw(fine), evidence


def _draw(density: _Density) -> np.ndarray:
    """Return draws (DRAWS, 3) of c1, c2, c3, by systematic sampling of the grid, shuffled."""
    cumulated = density.mass.ravel().cumsum()
    positions = (np.arange(DRAWS) + 0.5) / DRAWS * cumulated[-1]
    chosen = np.searchsorted(cumulated, positions)
    shape, place = np.unravel_index(chosen, density.log.shape)
    c1 = np.exp(density.log_c1[shape, place])
    draws = np.stack([c1, c1 * density.ratios[shape], c1 * density.bends[shape]], axis=1)
    np.random.default_rng(1).shuffle(draws)
    return draws
