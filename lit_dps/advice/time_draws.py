"""Draws of the time of each row of an answer, from the posterior of K and of the step time."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from lit_dps.advice.branch_law import Branched
from lit_dps.analysis.answer import NEAR
from lit_dps.analysis.intervals import NORMAL_95, resampling_rng
from lit_dps.analysis.law import Law
from lit_dps.analysis.law_fit import DRAWS


def draw_steps(law: Law | Branched, predictions: pd.DataFrame) -> np.ndarray:
    """Return draws (DRAWS, n) of K at the n rows of `law.predict`, none of which is refused.

    Where K is only measured, or known by forks, the draws are log-normal about the limits.
    """
    if isinstance(law, Law) and not math.isnan(law.reach[0]):
        return law.samples(predictions["batch_size"].to_numpy())
    draws = np.empty((DRAWS, len(predictions)))
    for i, row in enumerate(predictions.to_dict("records")):
        limits = (row["steps"], row["low"], row["high"])
        draws[:, i] = _draw_within_limits(limits, f"steps at {row['batch_size']:g}")
    return draws


def draw_step_seconds(limits: tuple[float, float, float], devices: int) -> np.ndarray:
    """Return draws (DRAWS,) of the seconds of a step on some devices.

    The error of the model is the same at all batch sizes on these devices, in standard deviations.

    Args:
        limits: The seconds, and their lower and upper limit.
        devices: The number of devices.
    """
    return _draw_within_limits(limits, f"seconds on {devices}")


def _draw_within_limits(limits: tuple[float, float, float], name: str) -> np.ndarray:
    """Return draws (DRAWS,) of a number with 95 % limits; a log-normal with two widths."""
    value, low, high = limits
    normal = resampling_rng(name).standard_normal(DRAWS)
    below = math.log(value / low) / NORMAL_95
    above = math.log(high / value) / NORMAL_95
    return value * np.exp(np.where(normal < 0, below, above) * normal)


def near_probability(hours: np.ndarray) -> np.ndarray:
    """Return (n,): the share of draws (draws, n) in which a row is within 10 % of the best row."""
    least = hours.min(axis=1, keepdims=True)
    return (hours <= NEAR * least).mean(axis=0)
