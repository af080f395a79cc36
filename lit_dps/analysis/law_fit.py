"""Fits the law K* = c1 / B + c2 of steps to result against batch size (Lee et al. 2021, Section
4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

FEWEST = 3  # batch sizes with a K


# Residuals are differences of log steps. Below about 10 % a point counts as in least squares,
# beyond it only linearly, so that one cell whose search went badly does not bend the curve. 10 % is
# what the best of some tens of trials is uncertain by, check interval included; it is not tuned to
# any data.
LOSS_SCALE = 0.1


# c2 / c1 is searched from 0 to that of a critical batch size of a thousandth of the smallest batch.
# Beyond, the curve is flat to 0.1 % and c1 cannot be told from 0; below the first positive point c2
# adds 0.01 % at the largest batch.
_SMALLEST, _LARGEST, _GRID = 1e-4, 1e3, 48


# The last Newton step of log c1, as a share of the loss scale; the remaining error is about its
# square. The grid needs only the order of its losses, which an error of 1e-10 does not change.
_TOLERANCE, _GRID_TOLERANCE = 1e-8, 1e-5


_ROUNDING = 1e-12  # error of a residual, in units of the loss scale: fifty times that of a double


_CACHED = 1 << 15  # numbers of an array that stays in the processor's cache


AT_LEAST, AT_MOST = (
    1,
    -1,
)  # what steps are that do not say K* itself: the side on which a residual counts


@dataclass(frozen=True)
class Fit:
    """The law K* = c1 / B + c2."""

    c1: float  # examples (steps times batch size) that a run needs where batches are small; above 0
    c2: float  # steps that no batch size can go below; at least 0

    @property
    def critical_batch_size(self) -> float:
        """B_crit = c1 / c2 in examples, where both terms are equal; infinite if c2 is 0."""
        return self.c1 / self.c2 if self.c2 > 0 else math.inf

    def steps(self, batch_size):
        """Fitted steps to result at a batch size (number or array)."""
        return self.c1 / batch_size + self.c2


def fit_scaling(batch_sizes: Sequence[float], steps: Sequence[float]) -> Fit:
    """The law that fits K* at some batch sizes best, by a robust fit of log K*.

    Minimises the sum of 2 s^2 (sqrt(1 + (r / s)^2) - 1) over residuals r = log K* - log(c1 / B +
    c2) ("soft_l1" of scipy.optimize.least_squares, s = `LOSS_SCALE`) with c1 > 0 and c2 >= 0; the
    same data always give the same fit.

    Args:
        batch_sizes, steps: (n,).

    Raises:
        ValueError: for numbers that are not positive and finite, or fewer than two different batch
            sizes.
    """
    batch, k = np.asarray(batch_sizes, float), np.asarray(steps, float)
    if batch.ndim != 1 or batch.shape != k.shape:
        raise ValueError(
            f"as many batch sizes as steps are needed, not shapes {batch.shape} and {k.shape}"
        )
    if not (np.isfinite(batch) & np.isfinite(k) & (batch > 0) & (k > 0)).all():
        raise ValueError("batch sizes and steps must be positive and finite")
    if (known := np.unique(batch).size) < 2:
        raise ValueError(f"a fit needs at least 2 different batch sizes, not {known}")
    ((c1, c2),) = fit_many(batch, k[None])
    return Fit(float(c1), float(c2))


def fit_many(
    batch_sizes: np.ndarray,
    steps: np.ndarray,
    loss_scale: float = LOSS_SCALE,
    weights: np.ndarray | None = None,
    bounds: np.ndarray | None = None,
) -> np.ndarray:
    """The fits of R curves at once, as `fit_scaling` does one: (R, 2), c1 and c2.

    Given r = c2 / c1, log c1 is the location of log K - log(1 / B + r), a convex problem; only r
    has to be searched. A grid finds the basin of the global minimum (0 included, so c2 may be
    exactly 0), bisection of the derivative the minimum in it.

    Args:
        batch_sizes: (n,), or (R, n) where each curve has its own.
        steps: (R, n), nan where a curve has no point; at least two points a curve.
        loss_scale: s; a large one makes it plain least squares of log K*.
        weights: (n,), factors of the terms of the sum; by default 1.
        bounds: (n,): 0 where K* is known, `AT_LEAST` where the steps are a lower bound of it,
            `AT_MOST` where they are an upper one. A bound that the law keeps adds nothing to the
            sum.
    """
    inverse = np.broadcast_to(1.0 / batch_sizes, steps.shape)
    known = np.isfinite(steps)
    log_k = np.log(np.where(known, steps, 1.0))
    weights = known.astype(float) if weights is None else known * weights
    side = np.zeros(steps.shape[1], int) if bounds is None else bounds
    exact = known & (side == 0)
    is_whole = exact.all()  # reductions without a mask are faster

    def profile(
        r: np.ndarray, tolerance: float = _TOLERANCE, start: np.ndarray | float = 0.0
    ) -> _Profile:
        extra = (slice(None), *(None,) * (r.ndim - 1))
        law, w = inverse[extra] + r[..., None], weights[extra]
        y = log_k[extra] - np.log(law)
        mean = np.mean(y, axis=-1, where=True if is_whole else exact[extra])
        mask = True if is_whole else known[extra]
        theta = _location(y, mean + start, mask, w, side, loss_scale, tolerance)
        z = _felt(y - theta[..., None], side) / loss_scale
        return _Profile(theta, theta - mean, law, w, z, np.sqrt(1 + z * z))

    lowest, highest = inverse.min(axis=1), inverse.max(axis=1)
    positive = np.geomspace(_SMALLEST * lowest, _LARGEST * highest, _GRID, axis=1)
    grid = np.concatenate([np.zeros((len(steps), 1)), positive], axis=1)
    rows = np.arange(len(steps))
    losses, start = np.empty(grid.shape), np.zeros((len(steps), 1))
    width = max(1, _CACHED // steps.size)
    for first in range(0, grid.shape[1], width):
        part = slice(first, first + width)
        found = profile(grid[:, part], _GRID_TOLERANCE, start)
        losses[:, part], start = found.loss, found.offset[:, -1:]
    best = losses.argmin(axis=1)
    low, high = grid[rows, np.maximum(best - 1, 0)], grid[rows, np.minimum(best + 1, _GRID)]
    at_zero = (best == 0) & (profile(np.zeros(len(steps))).slope >= 0)
    middle = grid[rows, best]  # first, the side of the best grid point that falls off from it
    start, is_sure = np.zeros(len(steps)), True
    for _ in range(48):
        if is_sure:
            found = profile(middle, start=start)
            start, slope = found.offset, found.slope
            rising = slope > 0
            is_sure = np.all(np.abs(slope) > _ROUNDING * np.sum(found.weights / found.law, axis=-1))
        if not is_sure:
            # Rounding decides the side. From one start, equal data give equal digits.
            rising = profile(middle).slope > 0
        low, high = np.where(rising, low, middle), np.where(rising, middle, high)
        middle = (low + high) / 2
    r = np.where(at_zero, 0.0, middle)
    c1 = np.exp(profile(r).theta)
    return np.stack([c1, c1 * r], axis=1)


class _Profile(NamedTuple):
    """The best fits of R curves at given c2 / c1, (R, ...)."""

    theta: np.ndarray  # (R, ...), log c1
    offset: np.ndarray  # (R, ...), theta less the mean of log K - log(1 / B + c2 / c1)
    law: np.ndarray  # (R, ..., n), 1 / B + c2 / c1
    weights: np.ndarray  # (R, ..., n)
    residuals: np.ndarray  # (R, ..., n), in units of the loss scale
    roots: np.ndarray  # (R, ..., n), of 1 + residuals^2

    @property
    def loss(self) -> np.ndarray:
        """(R, ...): half the sum that is minimised; sqrt(1 + z^2) - 1 without its cancellation."""
        return np.sum(self.weights * self.residuals * self.residuals / (1 + self.roots), axis=-1)

    @property
    def slope(self) -> np.ndarray:
        """(R, ...): derivative of the loss by c2 / c1."""
        return -np.sum(self.weights * self.residuals / self.roots / self.law, axis=-1)


def _felt(residual: np.ndarray, side: np.ndarray) -> np.ndarray:
    """Residuals (..., n), 0 where they are those of a bound (n,) that the law keeps."""
    if not side.any():
        return residual
    return np.where(side * residual < 0, 0.0, residual)


def _location(
    y: np.ndarray,
    theta: np.ndarray,
    known: np.ndarray,
    weights: np.ndarray,
    side: np.ndarray,
    scale: float,
    tolerance: float,
) -> np.ndarray:
    """The theta that minimises the soft_l1 loss of y - theta over the last axis, by Newton steps
    kept in a bracket."""
    has_bounds = side.any()
    low = np.min(y, axis=-1, where=known, initial=np.inf)
    high = np.max(y, axis=-1, where=known, initial=-np.inf)
    for _ in range(100):
        z = _felt(y - theta[..., None], side) / scale
        inner = 1 / np.sqrt(1 + z * z)
        pull = np.sum(weights * z * inner, axis=-1)
        low, high = np.where(pull >= 0, theta, low), np.where(pull <= 0, theta, high)
        felt = weights * ((side == 0) | (z != 0)) if has_bounds else weights
        newton = theta + scale * pull / np.einsum("...i,...i->...", felt * inner, inner * inner)
        step = np.where((newton >= low) & (newton <= high), newton, (low + high) / 2) - theta
        theta = theta + step
        if np.all(np.abs(step) <= tolerance * scale):
            break
    return theta


def overhead_batch_size(fit: Fit, overhead: float, reference_batch: float) -> float:
    """The batch size at which a run needs (1 + overhead) times the examples B x K(B) that it needs
    at another.

    With B K(B) = c1 + c2 B this is (1 + overhead) reference + overhead B_crit: for overhead 0.2 and
    reference 256 the "critical batch size" of Zhang et al. 2024 ("How Does Critical Batch Size
    Scale in Pre-training?").
    """
    return (1 + overhead) * reference_batch + overhead * fit.critical_batch_size
