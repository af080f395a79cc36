"""The learning rate that goes with a batch size: a power law of the best rates that were
measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lit_dps.core.batch_scaling import scaled_beta2, scaled_decay
from lit_dps.core.format import number_text


@dataclass(frozen=True)
class RateLaw:
    """rate = scale B^exponent, fitted to the logarithms of the best rates.

    Attributes:
        scale, exponent: Of the law; sqrt(B) is an exponent of 0.5.
        error: Standard error of the exponent; nan with two batch sizes and no known spacing of the
            rates.
        scatter: Standard deviation of the log of the best rates about the law, at least their
            spacing; likewise.
        range: Smallest and largest batch size measured; beyond them the law says nothing.
        name: What the rate is: "learning_rate", or the effective one, "learning_rate / (1 -
            momentum)".
    """

    scale: float
    exponent: float
    error: float
    scatter: float
    range: tuple[float, float]
    name: str = "learning_rate"

    def at(self, batch_size: float) -> float | None:
        """The rate at a batch size; None beyond what was measured."""
        low, high = self.range
        return self.scale * batch_size**self.exponent if low <= batch_size <= high else None

    def describe(self) -> str:
        """The law in a line."""
        low, high = self.range
        # Adding 0 turns -0.0 into 0.0.
        text = f"{self.name} ~ B^{round(self.exponent, 2) + 0.0:.2f}"
        if not math.isnan(self.error):
            text += f" +- {self.error:.2f} (standard error)"
        text += f" from B = {low:g} to {high:g}"
        if not math.isnan(self.scatter):
            text += f"; single best rates scatter by x{number_text(math.exp(self.scatter))}"
        return text


def rate_law(
    batch_sizes: Sequence[float],
    rates: Sequence[float],
    name: str = "learning_rate",
    spacing: float = 0.0,
) -> RateLaw | None:
    """The power law of the best rates (n,) at some batch sizes (n,); None for fewer than two of
    these.

    Args:
        spacing: Distance of neighbouring rates that were tried, in the logarithm. A best rate is
            not known better than that, however well the best of the grid lie on a line.

    Raises:
        ValueError: for numbers that are not positive and finite.
    """
    batch, rate = np.asarray(batch_sizes, float), np.asarray(rates, float)
    if not (np.isfinite(batch) & np.isfinite(rate) & (batch > 0) & (rate > 0)).all():
        raise ValueError("batch sizes and rates must be positive and finite")
    if np.unique(batch).size < 2:
        return None
    x, y = np.log(batch), np.log(rate)
    exponent, offset = np.polyfit(x - x.mean(), y, 1)
    residual = y - offset - exponent * (x - x.mean())
    free = len(x) - 2
    scatter = math.sqrt(float((residual**2).sum()) / free) if free else math.nan
    if spacing > 0:
        scatter = max(spacing, 0.0 if math.isnan(scatter) else scatter)
    error = scatter / math.sqrt(float(((x - x.mean()) ** 2).sum()))
    scale = math.exp(offset - exponent * x.mean())
    return RateLaw(
        scale, float(exponent), error, scatter, (float(batch.min()), float(batch.max())), name
    )


def adaptive_advice(
    batch_size: float,
    other: float,
    beta2: float | None,
    weight_decay: float,
    rate_ratio: float = 1.0,
) -> str:
    """Return second moment and weight decay at another batch size in words, as
    `AdamScalingCallback` sets them.

    Args:
        batch_size, other: B0, where the values are known, and B.
        beta2, weight_decay: At B0; beta2 is None for a rule without a second moment.
        rate_ratio: Rate at B over the rate at B0.
    """
    factor = other / batch_size
    new, old = [], []
    if beta2 is not None:
        new.append(f"beta2 {scaled_beta2(beta2, factor):.6g}")  # 3 digits would be 1.00
        old.append(f"{beta2:.6g}")
    if weight_decay:
        new.append(f"weight decay {scaled_decay(weight_decay, factor, rate_ratio):.3g}")
        old.append(f"{weight_decay:.3g}")
    return f"B = {other:g}: {', '.join(new)} (from {' and '.join(old)} at B = {batch_size:g})"
