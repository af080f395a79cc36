"""The noisy quadratic model, exactly: what a study of `lit_dps.models.NoisyQuadratic` has to find.

The loss is 1/2 sum h w^2 and the gradient of a batch h w + z with noise z of variance h / B, both
along each of the axes; E w^2 = 1 at the start, and E z = 0 (Zhang et al. 2019, "Which Algorithmic
Choices Matter at Which Batch Sizes?"). Updates are linear in w and z, so second moments follow
their own recursion and K* can be computed instead of measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

LONGEST = 2**30  # steps that are looked at where the moments are known in closed form
DIVERGED = 1e3  # times the loss at the start


@dataclass(frozen=True)
class NoisyQuadraticModel:
    """Curvatures 1 / i, i = 1 to `dimensions`, as in the paper.

    Attributes:
        dimensions: Number of axes.
        bins: Quantises the curvatures into so many geometric bins, as the authors' notebook does
            (10,000 in 100), which is faster; None takes each as it is.
        guard: What the authors' notebook adds to the denominator of the stationary moment, 1e-8. It
            moves K* by less than 1 % where rates are small (batch size 4), and is 0 here, the true
            value.
    """

    dimensions: int = 10_000
    bins: int | None = None
    guard: float = 0.0

    @cached_property
    def curvatures(self) -> np.ndarray:
        """h of each axis or bin, falling from 1."""
        full = 1 / np.arange(1, self.dimensions + 1)
        return full if self.bins is None else np.geomspace(1, 1 / self.dimensions, self.bins)

    @cached_property
    def counts(self) -> np.ndarray:
        """How many axes have each of these curvatures: those from it up to the next higher one."""
        if self.bins is None:
            return np.ones(self.dimensions)
        full = 1 / np.arange(1, self.dimensions + 1)
        within = np.searchsorted(
            -self.curvatures, -full * (1 + 1e-12)
        )  # the last ones are equal but for rounding
        return np.bincount(within, minlength=self.bins).astype(float)

    @property
    def initial_loss(self) -> float:
        """The expected loss before the first step."""
        return self.expected_loss(np.ones_like(self.curvatures))

    @property
    def noise(self) -> float:
        """sigma^2: the trace of the covariance of the per-example gradient, sum h. It is the same
        everywhere: M = 0."""
        return float(self.counts @ self.curvatures)

    def expected_loss(self, moments: np.ndarray) -> Any:
        """The expected loss 1/2 sum h E w^2 of second moments, shape (..., curvatures)."""
        return 0.5 * moments @ (self.curvatures * self.counts)

    def moments(
        self, rate: float | np.ndarray, batch_size: float, steps: int | np.ndarray
    ) -> np.ndarray:
        """E w^2 after some steps of SGD (Zhang et al. 2019, Section 3.1).

        Args:
            rate: Learning rates, any shape.
            batch_size: In examples; may be infinite.
            steps: Of the shape of the rates, or a number.

        Returns:
            Of the rates' shape, then (curvatures,).
        """
        h, rate = self.curvatures, np.asarray(rate, float)[..., None]
        decay = (1 - rate * h) ** 2
        stationary = rate**2 * h / batch_size / (1 - decay + self.guard)
        return stationary + decay ** np.asarray(steps)[..., None] * (1 - stationary)

    def steps(self, target: float, rate: np.ndarray, batch_size: float) -> np.ndarray:
        """Steps of SGD to an expected loss of at most `target`, infinite where it is never met;
        shape of the rates.

        The loss falls in every step, or rises in every step on some axes, so bisection finds the
        first one.
        """
        rate = np.asarray(rate, float)
        low, high = np.zeros(rate.shape, np.int64), np.full(rate.shape, LONGEST)
        with np.errstate(all="ignore"):
            never = ~(self.expected_loss(self.moments(rate, batch_size, high)) <= target)
            while (high - low > 1).any():
                middle = (low + high) // 2
                met = self.expected_loss(self.moments(rate, batch_size, middle)) <= target
                low, high = np.where(met, low, middle), np.where(met, middle, high)
        return np.where(never, np.inf, high)

    def momentum_steps(
        self, target: float, rate: np.ndarray, momentum: float, batch_size: float
    ) -> np.ndarray:
        """As `steps`, with momentum: v <- m v - rate g, w <- w + v (Zhang et al. 2019, Equation
        21).

        (E w^2, E v^2, E w v, 1) of each axis takes one linear step an update; powers of two of that
        step find the first one that meets the target. Where the loss oscillates it is one of those
        at which the target is met, as in the authors' notebook.

        Args:
            target: Expected loss.
            rate: Shape (n,).
            momentum: m in [0, 1).
            batch_size: In examples.
        """
        rate, h, m = np.asarray(rate, float)[:, None], self.curvatures, momentum
        x, noise = np.broadcast_arrays(rate * h, rate**2 * h / batch_size)
        step = np.zeros((*x.shape, 4, 4))
        step[..., :3, 1], step[..., 3, 3] = m * m, 1
        step[..., 0, 0], step[..., 1, 0], step[..., 2, 0] = (1 - x) ** 2, x * x, -(1 - x) * x
        step[..., 0, 2], step[..., 1, 2], step[..., 2, 2] = (
            2 * (1 - x) * m,
            -2 * x * m,
            (1 - 2 * x) * m,
        )
        step[..., :3, 3] = noise[..., None]
        state = np.broadcast_to(np.array([1.0, 0, 0, 1])[:, None], (*x.shape, 4, 1))
        powers = [step]
        with np.errstate(all="ignore"):
            while 2 ** len(powers) < LONGEST // 64:
                powers.append(powers[-1] @ powers[-1])
            taken = np.zeros(len(rate), np.int64)
            for i, power in reversed(list(enumerate(powers))):  # as far as the target is not met
                further = power @ state
                missed = ~(self.expected_loss(further[..., 0, 0]) <= target)
                taken += missed * 2**i
                state = np.where(missed[:, None, None, None], further, state)
        return np.where(taken == 2 ** len(powers) - 1, np.inf, taken + 1)

    def delayed_steps(
        self,
        target: float,
        rate: np.ndarray,
        batch_size: float,
        delay: int,
        momentum: float = 0.0,
        longest: int = 20_000,
    ) -> np.ndarray:
        """As `steps`, with gradients of `delay` steps ago and momentum, step by step: w <- w - rate
        u, u <- m u + g.

        Nothing moves while the queue of gradients fills (`lit_dps.optim.delay`). The response of w
        to its start and that to the noise of one gradient give the moment: E w(t)^2 = a(t)^2 + h /
        B sum over s <= t - delay of b(s)^2.

        Args:
            target: Expected loss.
            rate: Shape (n,).
            batch_size: In examples.
            delay: tau, in steps.
            momentum: m in [0, 1).
            longest: Steps looked at.

        Returns:
            Shape (n,): infinite where the target is not met until then, or another of the rates is
                sooner.
        """
        rate, h = np.asarray(rate, float)[:, None], self.curvatures
        found = np.full(len(rate), np.inf)
        live: Any = np.arange(len(rate))
        one, zero = np.ones((len(rate), len(h))), np.zeros((len(rate), len(h)))
        start, push, kick, pull, noise = [one] * (delay + 1), zero, [zero] * (delay + 1), zero, zero
        for t in range(1, longest + 1):
            if t > delay:
                push = momentum * push + h * start[0]
                pull = momentum * pull + h * kick[0] + (t == delay + 1)
            start, kick = [*start[1:], start[-1] - rate * push], [*kick[1:], kick[-1] - rate * pull]
            if t <= delay:
                continue
            noise = noise + kick[-1] ** 2
            loss = self.expected_loss(start[-1] ** 2 + h / batch_size * noise)
            found[live[loss <= target]] = t
            if (loss <= target).any():
                return found
            keep = loss < DIVERGED * self.initial_loss
            if not keep.all():
                live, rate, push, pull, noise = (
                    part[keep] for part in (live, rate, push, pull, noise)
                )
                start, kick = [part[keep] for part in start], [part[keep] for part in kick]
                if not len(live):
                    break
        return found

    def k_star(
        self,
        target: float,
        batch_size: float,
        rates: np.ndarray,
        momenta: Iterable[float] = (0.0,),
        delay: int = 0,
    ) -> float:
        """K*: the fewest steps to an expected loss of at most `target` at any of these rates and
        momenta."""
        if delay:
            found = [self.delayed_steps(target, rates, batch_size, delay, m) for m in momenta]
        else:
            found = [
                self.momentum_steps(target, rates, m, batch_size)
                if m
                else self.steps(target, rates, batch_size)
                for m in momenta
            ]
        return float(np.min(found))
