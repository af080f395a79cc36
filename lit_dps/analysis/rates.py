"""The learning rate that goes with a batch size: a power law of the best rates that were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RateLaw:
    """rate = scale B^exponent, fitted to the logarithms of the best rates.

    Attributes:
        scale, exponent: Of the law; sqrt(B) is an exponent of 0.5.
        error: Standard error of the exponent; nan with two batch sizes.
        scatter: Standard deviation of the log of the best rates about the law; nan with two batch sizes.
        range: Smallest and largest batch size measured; beyond them the law says nothing.
        name: What the rate is: "learning_rate", or the effective one, "learning_rate / (1 - momentum)".
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
        error = "" if math.isnan(self.error) else f" +- {self.error:.2f}"
        scatter = (
            ""
            if math.isnan(self.scatter)
            else f", single best ones scatter by a factor of {math.exp(self.scatter):.2g}"
        )
        low, high = self.range
        return f"{self.name} ~ B^{self.exponent:.2f}{error} from B = {low:g} to {high:g}{scatter}"


def rate_law(batch_sizes: Sequence[float], rates: Sequence[float], name: str = "learning_rate") -> RateLaw | None:
    """The power law of the best rates (n,) at some batch sizes (n,); None for fewer than two of these.

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
    error = scatter / math.sqrt(float(((x - x.mean()) ** 2).sum()))
    scale = math.exp(offset - exponent * x.mean())
    return RateLaw(scale, float(exponent), error, scatter, (float(batch.min()), float(batch.max())), name)


def adaptive_advice(batch_size: float, other: float, beta2: float, weight_decay: float) -> str:
    """Second moment and weight decay of an Adam-like rule at another batch size, as `AdamScalingCallback` has them.

    beta2' = beta2^(B' / B) keeps the half-life of the second moment in examples (Marek et al. 2025, arXiv 2507.07101);
    a weight decay proportional to B keeps the time scale of AdamW in examples (Bergsma et al. 2025, "Power Lines").
    """
    factor = other / batch_size
    parts = [f"beta2 {beta2**factor:.6g}"]  # 3 digits would be 1.00
    parts += [f"weight decay {weight_decay * factor:.3g}"] if weight_decay else []
    decay = f" and {weight_decay:.3g}" if weight_decay else ""
    return f"B = {other:g}: {', '.join(parts)} (from {beta2:.6g}{decay} at B = {batch_size:g})"
