"""The noisy quadratic model, exactly: the true K* of studies of `lit_dps.models.NoisyQuadratic`.

The loss is 1/2 sum h w^2 and the gradient of a batch is h w + z, with noise z of variance h / B
along each axis. At the start E w^2 = 1; E z = 0 (Zhang et al. 2019, "Which Algorithmic Choices
Matter at Which Batch Sizes?"). Updates are linear in w and z, so second moments have a closed
recursion, and K* is computed instead of measured.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

MAX_STEPS = 2**30  # of the closed form
MAX_MOMENTUM_STEPS = 2**24  # of the recursion with momentum
DIVERGED = 1e3  # a loss of this many times the initial loss has diverged


@dataclass(frozen=True)
class NoisyQuadraticModel:
    """The model with curvatures 1 / i, i = 1 to `dimensions`, as in the paper.

    Attributes:
        dimensions: Number of axes.
        bins: Number of geometric bins that the curvatures are rounded to, for speed. The authors'
            notebook rounds 10,000 curvatures to 100. None keeps each curvature.
        guard: Added to the denominator of the stationary moment. It is 1e-8 in the authors'
            notebook, which changes K* by less than 1 % at small rates (batch size 4); 0 is exact.
    """

    dimensions: int = 10_000
    bins: int | None = None
    guard: float = 0.0

    @property
    def _exact_curvatures(self) -> np.ndarray:
        """h of each axis, descending from 1."""
        return 1 / np.arange(1, self.dimensions + 1)

    @cached_property
    def curvatures(self) -> np.ndarray:
        """h of each axis or bin, descending from 1."""
        if self.bins is None:
            return self._exact_curvatures
        return np.geomspace(1, 1 / self.dimensions, self.bins)

    @cached_property
    def counts(self) -> np.ndarray:
        """Number of axes of each curvature: from it up to the next higher one."""
        if self.bins is None:
            return np.ones(self.dimensions)
        # The lowest curvature and the last bin are equal up to rounding.
        exact = self._exact_curvatures * (1 + 1e-12)
        bin_of_axis = np.searchsorted(-self.curvatures, -exact)
        return np.bincount(bin_of_axis, minlength=self.bins).astype(float)

    @property
    def initial_loss(self) -> float:
        """The expected loss before the first step."""
        return self.expected_loss(np.ones_like(self.curvatures))

    @property
    def noise(self) -> float:
        """sigma^2, the trace of the covariance of the per-example gradient: sum h at any w."""
        return float(self.counts @ self.curvatures)

    def expected_loss(self, moments: np.ndarray) -> Any:
        """Return the expected loss 1/2 sum h E w^2 of second moments (..., curvatures)."""
        return 0.5 * moments @ (self.curvatures * self.counts)

    def moments(
        self, rate: float | np.ndarray, batch_size: float, steps: int | np.ndarray
    ) -> np.ndarray:
        """Return E w^2 after some steps of SGD (Zhang et al. 2019, Section 3.1).

        Args:
            rate: Learning rates, any shape.
            batch_size: In examples; may be infinite.
            steps: A number, or numbers in the shape of the rates.

        Returns:
            (..., curvatures), with the shape of the rates first.
        """
        rates = np.asarray(rate, float)[..., None]
        decay = (1 - rates * self.curvatures) ** 2
        stationary = rates**2 * self.curvatures / batch_size / (1 - decay + self.guard)
        return stationary + decay ** np.asarray(steps)[..., None] * (1 - stationary)

    def steps(self, target: float, rate: np.ndarray, batch_size: float) -> np.ndarray:
        """Return the steps of SGD to an expected loss of at most `target`.

        The loss falls in every step, or rises in every step on some axes. So bisection finds the
        first step that meets the target.

        Args:
            target: Expected loss.
            rate: Learning rates, any shape.
            batch_size: In examples; may be infinite.

        Returns:
            In the shape of the rates; infinite if the target is missed.
        """
        rates = np.asarray(rate, float)
        low = np.zeros(rates.shape, np.int64)
        high = np.full(rates.shape, MAX_STEPS)
        with np.errstate(all="ignore"):
            is_met = self.expected_loss(self.moments(rates, batch_size, high)) <= target
            while (high - low > 1).any():
                middle = (low + high) // 2
                met = self.expected_loss(self.moments(rates, batch_size, middle)) <= target
                low = np.where(met, low, middle)
                high = np.where(met, middle, high)
        return np.where(is_met, high, np.inf)

    def schedule_moments(
        self, rates: Sequence[float] | np.ndarray, batch_sizes: Sequence[float] | np.ndarray
    ) -> np.ndarray:
        """Return E w^2 after each step of SGD whose rate and batch size change along the run.

        Args:
            rates: (steps,), the learning rate of each step.
            batch_sizes: (steps,), the examples of each step; may be infinite.

        Returns:
            (steps, curvatures).
        """
        moments = np.ones_like(self.curvatures)
        after = []
        for rate, batch_size in zip(rates, batch_sizes, strict=True):
            decay = (1 - rate * self.curvatures) ** 2
            moments = decay * moments + rate**2 * self.curvatures / batch_size
            after.append(moments)
        return np.array(after)

    def noise_weights(self, rate: float, steps: int) -> np.ndarray:
        """Return what the noise of each step of SGD adds to the last expected loss, times B.

        The noise of step t, of an example, adds 1/2 sum rate^2 h^2 (1 - rate h)^(2 (T - 1 - t)) to
        the expected loss after T steps. With batch sizes B(t), the loss is the loss of gradients
        without noise, plus the sum of these weights over B(t).

        Returns:
            (steps,), from the first step to the last one.
        """
        weights = []
        of_axis = 0.5 * rate**2 * self.counts * self.curvatures**2
        for _ in range(steps):
            weights.append(of_axis.sum())
            of_axis = of_axis * (1 - rate * self.curvatures) ** 2
        return np.array(weights[::-1])

    def best_batch_sizes(self, rate: float, steps: int, examples: float) -> np.ndarray:
        """Return the batch sizes of the least expected loss after some steps of SGD.

        The loss adds weight(t) / B(t) for each step. Under a fixed sum of B(t) the least sum has
        B(t) in proportion to the root of weight(t). The rate is constant. Sizes are real numbers.

        Args:
            rate: Learning rate.
            steps: Steps of the run.
            examples: The sum of the batch sizes.

        Returns:
            (steps,), from the first step to the last one. They grow if every axis is stable.
        """
        roots = np.sqrt(self.noise_weights(rate, steps))
        return examples * roots / roots.sum()

    def scheduled_steps(
        self, target: float, rate: float, examples: float, max_steps: int = 20_000
    ) -> tuple[float, float]:
        """Return the fewest steps of SGD to an expected loss with a number of examples.

        Args:
            target: Expected loss.
            rate: Learning rate, constant along the run.
            examples: Examples of the whole run.
            max_steps: The target is missed after these steps.

        Returns:
            The steps with the best batch sizes (`best_batch_sizes`), and with a constant batch
            size; infinite if the target is missed.
        """
        squares = (1 - rate * self.curvatures) ** 2
        bias = np.ones_like(self.curvatures)
        of_axis = 0.5 * rate**2 * self.counts * self.curvatures**2
        sum_of_roots = 0.0
        sum_of_weights = 0.0
        best = math.inf
        for step in range(1, max_steps + 1):
            bias = bias * squares
            weight = of_axis.sum()
            of_axis = of_axis * squares
            sum_of_roots += math.sqrt(weight)
            sum_of_weights += weight
            without_noise = self.expected_loss(bias)
            if best == math.inf and without_noise + sum_of_roots**2 / examples <= target:
                best = float(step)
            if without_noise + step * sum_of_weights / examples <= target:
                return best, float(step)
        return best, math.inf

    def momentum_steps(
        self, target: float, rate: np.ndarray, momentum: float, batch_size: float
    ) -> np.ndarray:
        """Return the steps of SGD with momentum: v <- m v - rate g, w <- w + v.

        The moments of each axis take a linear step per update (Zhang et al. 2019, Equation 21).
        Powers of two of that step find the first one that meets the target. If the loss oscillates,
        the result is one of the steps that meet it, as in the authors' notebook.

        Args:
            target: Expected loss.
            rate: (n,), learning rates.
            momentum: m in [0, 1).
            batch_size: In examples; may be infinite.

        Returns:
            (n,), infinite if the target is missed.
        """
        rates = np.asarray(rate, float)[:, None]
        noise = rates**2 * self.curvatures / batch_size
        powers = [_momentum_step(rates * self.curvatures, noise, momentum)]
        state = np.zeros((*noise.shape, 4, 1))
        # At the start E w^2 = 1 and v = 0.
        state[..., (0, 3), 0] = 1
        missed_steps = np.zeros(len(rates), np.int64)
        with np.errstate(all="ignore"):
            while 2 ** len(powers) < MAX_MOMENTUM_STEPS:
                powers.append(powers[-1] @ powers[-1])
            for exponent in reversed(range(len(powers))):
                next_state = powers[exponent] @ state
                is_missed = ~(self.expected_loss(next_state[..., 0, 0]) <= target)
                missed_steps += is_missed * 2**exponent
                state = np.where(is_missed[:, None, None, None], next_state, state)
        is_never_met = missed_steps == 2 ** len(powers) - 1
        return np.where(is_never_met, np.inf, missed_steps + 1)

    def delayed_steps(
        self,
        target: float,
        rate: np.ndarray,
        batch_size: float,
        delay: int,
        momentum: float = 0.0,
        max_steps: int = 20_000,
    ) -> np.ndarray:
        """Return the steps of SGD with delayed gradients: u <- m u + g(t - tau), w <- w - rate u.

        w does not change while the queue of gradients fills (`lit_dps.optim.delay`). With the
        response a(t) of w to its start, and b(s) to the noise of a gradient s steps ago,
        E w(t)^2 = a(t)^2 + h / B sum over s <= t - tau of b(s)^2.

        Args:
            target: Expected loss.
            rate: (n,), learning rates.
            batch_size: In examples; may be infinite.
            delay: tau, in steps.
            momentum: m in [0, 1).
            max_steps: The target is missed after these steps.

        Returns:
            (n,), infinite if the target is missed, or if another rate meets it in fewer steps.
        """
        rates = np.array(rate, float)[:, None]
        # The responses a and b have the same recursion: the first index is 0 for a, and 1 for b.
        start = np.zeros((2, len(rates), len(self.curvatures)))
        start[0] = 1
        responses = deque([start] * (delay + 1), maxlen=delay + 1)
        update = np.zeros_like(start)
        noise = np.zeros(start.shape[1:])
        for step in range(delay + 1, max_steps + 1):
            update = momentum * update + self.curvatures * responses[0]
            if step == delay + 1:
                # The noise of the first gradient.
                update[1] += 1
            responses.append(responses[-1] - rates * update)
            to_start, to_noise = responses[-1]
            noise = noise + to_noise**2
            loss = self.expected_loss(to_start**2 + self.curvatures / batch_size * noise)
            # A rate that diverged becomes 0: its loss cannot fall any more, nor overflow.
            rates[~(loss < DIVERGED * self.initial_loss)] = 0
            if (loss <= target).any() or not rates.any():
                return np.where(loss <= target, float(step), np.inf)
        return np.full(len(rates), np.inf)

    def k_star(
        self,
        target: float,
        batch_size: float,
        rates: np.ndarray,
        momenta: Iterable[float] = (0.0,),
        delay: int = 0,
    ) -> float:
        """Return K*, the fewest steps to an expected loss of at most `target` at any of the rates.

        Args:
            target: Expected loss.
            batch_size: In examples; may be infinite.
            rates: (n,), learning rates.
            momenta: Each is combined with all rates.
            delay: tau, in steps.
        """
        steps = []
        for momentum in momenta:
            if delay:
                steps.append(self.delayed_steps(target, rates, batch_size, delay, momentum))
            elif momentum:
                steps.append(self.momentum_steps(target, rates, momentum, batch_size))
            else:
                steps.append(self.steps(target, rates, batch_size))
        return float(np.min(steps))


def _momentum_step(x: np.ndarray, noise: np.ndarray, momentum: float) -> np.ndarray:
    """Return the linear step (..., 4, 4) of (E w^2, E v^2, E w v, 1) of each axis.

    Args:
        x: rate h.
        noise: rate^2 h / B, in the same shape.
        momentum: m.
    """
    zero = np.zeros_like(x)
    one = np.ones_like(x)
    m = momentum
    rows = [
        [(1 - x) ** 2, m * m * one, 2 * (1 - x) * m, noise],
        [x * x, m * m * one, -2 * x * m, noise],
        [-(1 - x) * x, m * m * one, (1 - 2 * x) * m, noise],
        [zero, zero, zero, one],
    ]
    return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)
