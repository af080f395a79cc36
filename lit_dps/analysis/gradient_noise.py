"""The noise of the gradient along training, and the line sigma^2 + M |grad|^2 through it.

The noise is E |g - grad|^2 of the gradient g of one example, the trace of its covariance. The noise
of a batch of B examples is 1 / B of that. Stich, Mohtashami, Jaggi 2021 assume the line as an upper
bound; here it is fitted to what was measured. sigma^2 is the noise where the gradient vanishes, and
M is the noise that grows with the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from lit_dps.analysis.summary import is_comparable
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.noise_scale import BLOCKS, LEVEL
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import LIPSCHITZ, Series, TrialResult

# Points of a drawn line.
LINE_POINTS = 64
# Rounds of reweighting; the line is stable to 1e-6 after about 5.
ROUNDS = 10
# Measurements that a line needs.
MIN_MEASUREMENTS = 4


class Readings(NamedTuple):
    """Measurements along a trial, in the order of the steps."""

    squared_gradient: np.ndarray  # (n,), |grad|^2
    noise: np.ndarray  # (n,)


@dataclass(frozen=True)
class NoiseLaw:
    """noise = sigma^2 + M |grad|^2, by least squares of the relative deviations.

    Noise falls by orders of magnitude along training. With relative deviations, the end near the
    goal counts as much as the beginning. Measurements along a run are correlated. So the errors are
    from a jackknife that leaves out one trial at a time, or one of 8 blocks of neighbouring
    measurements of a single trial.

    Attributes:
        variance: sigma^2, in (nats / w)^2 examples.
        variance_error: Its standard error.
        factor: M, in examples.
        factor_error: Its standard error.
        measurements: The number of measurements.
        groups: The number of trials, or of blocks of one trial.
    """

    variance: float
    variance_error: float
    factor: float
    factor_error: float
    measurements: int
    groups: int

    @property
    def quantile(self) -> float:
        """Standard errors in half a 95 % interval."""
        return float(special.stdtrit(self.groups - 1, 0.5 + LEVEL / 2))

    @property
    def is_variance_significant(self) -> bool:
        """Whether sigma^2 is above 0 by its 95 % interval."""
        return self.variance > self.quantile * self.variance_error

    @property
    def is_factor_significant(self) -> bool:
        """Whether M is above 0 by its 95 % interval."""
        return self.factor > self.quantile * self.factor_error

    def at(self, squared_gradient: Any) -> Any:
        """Return the noise at a squared norm of the gradient (number or array)."""
        return self.variance + self.factor * squared_gradient


def readings_of(result: TrialResult) -> Readings | None:
    """Return the positive and finite measurements of a comparable trial; None without any."""
    curve = result.readings.get(LIPSCHITZ, {})
    if not curve.get("noise") or not is_comparable(result):
        return None
    pairs = np.array([curve["squared_gradient"], curve["noise"]], float)
    pairs = pairs[:, (np.isfinite(pairs) & (pairs > 0)).all(axis=0)]
    if not pairs.shape[1]:
        return None
    return Readings(*pairs)


def noise_law(readings: Sequence[Readings]) -> NoiseLaw | None:
    """Return the line through the measurements of some trials.

    None for fewer than `MIN_MEASUREMENTS`, or if a line without one group is not determined.
    """
    groups = list(readings)
    if len(groups) == 1:
        groups = _blocks(groups[0])
    count = sum(len(group.noise) for group in groups)
    if count < MIN_MEASUREMENTS or len(groups) < 2:
        return None
    line = _line(groups)
    jackknife = np.array([_line(groups[:i] + groups[i + 1 :]) for i in range(len(groups))])
    if not (np.isfinite(line).all() and np.isfinite(jackknife).all()):
        return None
    squares = ((jackknife - jackknife.mean(axis=0)) ** 2).sum(axis=0)
    errors = np.sqrt((len(groups) - 1) / len(groups) * squares)
    return NoiseLaw(
        variance=float(line[0]),
        variance_error=float(errors[0]),
        factor=float(line[1]),
        factor_error=float(errors[1]),
        measurements=count,
        groups=len(groups),
    )


def _blocks(readings: Readings) -> list[Readings]:
    """Return the measurements of a trial in `BLOCKS` blocks of neighbours, or in single ones."""
    count = min(BLOCKS, len(readings.noise))
    squared_gradients = np.array_split(readings.squared_gradient, count)
    noises = np.array_split(readings.noise, count)
    return [Readings(*pair) for pair in zip(squared_gradients, noises, strict=True)]


def _line(groups: Sequence[Readings]) -> np.ndarray:
    """Return sigma^2 and M of a line, (2,); nan if all squared gradients are equal.

    Iteratively reweighted least squares of the deviations relative to the fit.
    """
    x, y = map(np.concatenate, zip(*groups, strict=True))
    # In these units both columns have the same order of magnitude.
    scale = x.max()
    columns = np.stack([np.ones_like(x), x / scale], axis=1)
    constants = np.full(2, math.nan)
    rank = 0
    # Relative to y itself, low values would count more than high ones.
    size = y
    for _ in range(ROUNDS):
        constants, _, rank, _ = np.linalg.lstsq(columns / size[:, None], y / size, rcond=1e-10)
        size = np.maximum(columns @ constants, y / 10)  # a line may cross 0
    if rank < 2:
        return np.full(2, math.nan)
    return constants / np.array([1, scale])


def reading_rows(record: StudyRecord) -> pd.DataFrame:
    """Return every measurement, by series, batch size, point, then step.

    Columns: sparsity and further axes, batch_size [examples], point, squared_gradient, noise.
    """
    rows = []
    for cell in record.cells:
        for result in record.results[cell]:
            readings = readings_of(result)
            if readings is None:
                continue
            names = {**columns_of(cell.series), "batch_size": cell.batch_size}
            names["point"] = result.trial.point
            for squared_gradient, noise in zip(*readings, strict=True):
                rows.append({**names, "squared_gradient": squared_gradient, "noise": noise})
    return frame(rows)


def noise_laws(record: StudyRecord) -> dict[Series, NoiseLaw]:
    """Return the line through the measurements of all trials of each series that has one."""
    readings: dict[Series, list[Readings]] = {}
    for cell, results in record.results.items():
        for result in results:
            measured = readings_of(result)
            if measured is not None:
                readings.setdefault(cell.series, []).append(measured)
    laws = {}
    for series, of_series in readings.items():
        law = noise_law(of_series)
        if law is not None:
            laws[series] = law
    return laws


def line_rows(law: NoiseLaw, squared_gradients: Any) -> pd.DataFrame:
    """Return points of a line over the range of some squared gradients, where it is above 0.

    Columns: squared_gradient, noise.

    Args:
        law: The line.
        squared_gradients: (n,), of the measurements.
    """
    x = np.geomspace(squared_gradients.min(), squared_gradients.max(), LINE_POINTS)
    rows = pd.DataFrame({"squared_gradient": x, "noise": law.at(x)})
    return rows.loc[rows["noise"] > 0]
