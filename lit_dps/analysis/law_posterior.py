"""Draws of the constants of K = c1 / B + c2 + c3 / B^2 given what was observed of K, from their
posterior on a grid.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import special

DRAWS = 2000


_RATIOS, _BENDS, _PLACES = 72, 32, 21  # points of the grids of c2 / c1, c3 / c1 and log c1


# degrees of freedom of an observation's error: one bad cell may be off by more than it seems to be
TAILS = 8.0


def bends_of(batch_sizes: np.ndarray) -> np.ndarray:
    """The grid of c3 / c1 [examples] that is looked at."""
    return np.geomspace(0.03 * batch_sizes.min(), batch_sizes.max(), _BENDS)


def posterior(
    batch_sizes: np.ndarray,
    steps: np.ndarray,
    deviation: np.ndarray,
    bounds: np.ndarray,
    bent: bool = False,
    expected: tuple[float, float] | None = None,
) -> tuple[np.ndarray, float]:
    """Draws of c1, c2, c3, and how likely this form of the law makes what was observed.

    Before anything is observed, log(c2 / c1) is even over all B_crit from a hundredth of the
    smallest batch size to a hundred times the largest, or as `expected`; log c1 is even, and c3 /
    c1 in its logarithm. Errors of log K have the tails of Student's t; a bound counts by the
    probability to keep it.

    Args:
        batch_sizes, steps: (n,).
        deviation: (n,), standard deviation of log K about the law.
        bounds: (n,), as of `fit_many`; at least one is 0.
        bent: Whether c3 is free, else it is 0.
        expected: B_crit [examples] and the standard deviation of its logarithm by other knowledge.

    Returns:
        (DRAWS, 3), and the log of the evidence, to a constant that is the same for all forms.
    """
    sure = bounds == 0
    precision = sure / deviation**2
    y = np.log(steps)
    constant = -np.log(deviation[sure]).sum()

    def density(ratios):
        """Log density (shapes, places), with c2 / c1 and c3 / c1 of the shapes, and log c1 of
        all."""
        bends = bends_of(batch_sizes[sure]) if bent else np.zeros(1)
        r, s = (x.ravel() for x in np.meshgrid(ratios, bends, indexing="ij"))
        left = y - np.log(1 / batch_sizes + r[:, None] + s[:, None] / batch_sizes**2)  # (shapes, n)
        centre = (left * precision).sum(axis=1) / precision.sum()
        place = centre[:, None] + np.linspace(-5, 5, _PLACES) / math.sqrt(precision.sum())
        z = (left[:, None] - place[..., None]) / deviation
        log = -(TAILS + 1) / 2 * np.log1p(z[..., sure] ** 2 / TAILS).sum(axis=-1) + constant
        kept = special.stdtr(TAILS, -(bounds * z)[..., ~sure])
        log = log + np.log(np.maximum(kept, 1e-300)).sum(axis=-1)
        if expected is not None:
            value, spread = expected
            log = log - ((np.log(r) + math.log(value)) ** 2 / (2 * spread**2))[:, None]
        return log, r, s, place

    wide = np.geomspace(0.01 / batch_sizes[sure].max(), 100 / batch_sizes[sure].min(), _RATIOS)
    log, *_ = density(wide)
    mass = np.exp(log - log.max())
    width = 10 / math.sqrt(precision.sum())  # of the places: c1's share of the evidence
    evidence = float(log.max() + math.log(mass.mean() * width))
    held = np.flatnonzero(mass.reshape(_RATIOS, -1).sum(axis=1) > 1e-4 * mass.sum())
    log, r, s, place = density(
        np.geomspace(wide[max(held[0] - 1, 0)], wide[min(held[-1] + 1, _RATIOS - 1)], _RATIOS)
    )
    cumulated = np.exp(log - log.max()).ravel().cumsum()
    chosen = np.searchsorted(cumulated, (np.arange(DRAWS) + 0.5) / DRAWS * cumulated[-1])
    which, at = np.unravel_index(chosen, log.shape)
    c1 = np.exp(place[which, at])
    draws = np.stack([c1, c1 * r[which], c1 * s[which]], axis=1)
    np.random.default_rng(1).shuffle(draws)
    return draws, evidence
