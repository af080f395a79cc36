"""The noise of the gradient along training: noise = sigma^2 + M |grad|^2 (Stich, Mohtashami, Jaggi
2021).

The noise is E |g - grad|^2 of the gradient g of one example, the trace of its covariance; of a
batch of B it is 1 / B of that. Their assumption is an upper bound; this is the line through what
was measured. sigma^2 is the noise where the gradient vanishes, M that which grows with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from lit_dps.analysis.summary import comparable
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.noise_scale import BLOCKS, LEVEL
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Series, TrialResult

LINE_POINTS = 64  # of a line that is drawn
ROUNDS = 10  # of reweighting; the line is stable to 1e-6 after some 5
Readings = tuple[
    np.ndarray, np.ndarray
]  # |grad|^2 and noise of a trial, each (n,), in the order of the steps


@dataclass(frozen=True)
class NoiseLaw:
    """noise = sigma^2 + M |grad|^2, by least squares of the relative deviations.

    Relative, since noise falls by orders of magnitude along training: the end, near the goal,
    counts as the beginning. Errors are of a jackknife that leaves out one trial at a time, or of a
    single trial one of 8 stretches of neighbouring measurements: what is measured along one run
    drifts together.

    Attributes:
        variance: sigma^2, in (nats / w)^2 examples.
        variance_error: Its standard error.
        factor: M, in examples.
        factor_error: Its standard error.
        measurements: How many there were.
        groups: Trials, or stretches of one, that the errors rest on.
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
    def variance_resolved(self) -> bool:
        return self.variance > self.quantile * self.variance_error

    @property
    def factor_resolved(self) -> bool:
        return self.factor > self.quantile * self.factor_error

    def at(self, squared_gradient):
        """The noise where the gradient has this squared norm (number or array)."""
        return self.variance + self.factor * squared_gradient


def readings_of(result: TrialResult) -> Readings | None:
    """What was measured of a trial, without what is not positive and finite; None if nothing is
    left."""
    curve = result.smoothness
    if not curve.get("noise") or not comparable(result):
        return None
    pairs = np.array([curve["squared_gradient"], curve["noise"]], float)
    pairs = pairs[:, (np.isfinite(pairs) & (pairs > 0)).all(axis=0)]
    return (pairs[0], pairs[1]) if pairs.shape[1] else None


def noise_law(readings: Sequence[Readings]) -> NoiseLaw | None:
    """The line through the measurements of some trials; None of fewer than 4 in fewer than 2
    groups."""
    groups = list(readings)
    if len(groups) == 1:
        blocks = min(BLOCKS, len(groups[0][0]))
        groups = list(zip(*(np.array_split(part, blocks) for part in groups[0]), strict=True))
    count = sum(len(x) for x, _ in groups)
    if count < 4 or len(groups) < 2:
        return None
    whole = _line(groups)
    without = np.array([_line(groups[:i] + groups[i + 1 :]) for i in range(len(groups))])
    if not (np.isfinite(whole).all() and np.isfinite(without).all()):
        return None
    errors = np.sqrt(
        (len(groups) - 1) / len(groups) * ((without - without.mean(axis=0)) ** 2).sum(axis=0)
    )
    (variance, factor), (of_variance, of_factor) = whole, errors
    return NoiseLaw(
        float(variance), float(of_variance), float(factor), float(of_factor), count, len(groups)
    )


def _line(groups: Sequence[Readings]) -> np.ndarray:
    """Return intercept and slope of y against x; nan where x is one number.

    Iteratively reweighted least squares of the deviations relative to the fit.
    """
    x, y = (np.concatenate(parts) for parts in zip(*groups, strict=True))
    scale = x.max()  # units in which both columns are alike
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


def noise_rows(record: StudyRecord) -> pd.DataFrame:
    """sigma^2 and M of each cell, over all its trials that were measured, then of each of these
    trials.

    By series, batch size, then point. Columns: sparsity and further axes, batch_size [examples],
    point (missing in the row of the cell), measurements, sigma2 and m, each with its standard error
    (`_error`) and whether that resolves it (`_resolved`).
    """
    rows = []
    for cell in record.cells:
        trials = {
            r.trial.point: found
            for r in record.results[cell]
            if (found := readings_of(r)) is not None
        }
        names = {**columns_of(cell.series), "batch_size": cell.batch_size}
        if trials:
            rows.append({**names, "point": None, **_columns(noise_law(list(trials.values())))})
            rows += [
                {**names, "point": point, **_columns(noise_law([found]))}
                for point, found in trials.items()
            ]
    return frame(rows)


def _columns(law: NoiseLaw | None) -> dict[str, object]:
    names = {"variance": "sigma2", "factor": "m"}
    row: dict[str, object] = {"measurements": law.measurements if law else None}
    for attribute, name in names.items():
        row[name] = getattr(law, attribute, None)
        row[f"{name}_error"] = getattr(law, f"{attribute}_error", None)
        row[f"{name}_resolved"] = getattr(law, f"{attribute}_resolved", None)
    return row


def reading_rows(record: StudyRecord) -> pd.DataFrame:
    """Return every measurement, by series, batch size, sample, then step.

    Columns: sparsity and further axes, batch_size [examples], point, squared_gradient, noise.
    """
    rows = []
    for cell in record.cells:
        for result in record.results[cell]:
            names = {**columns_of(cell.series), "batch_size": cell.batch_size}
            names["point"] = result.trial.point
            squared_gradients, noises = readings_of(result) or ((), ())
            for squared_gradient, noise in zip(squared_gradients, noises, strict=True):
                rows.append({**names, "squared_gradient": squared_gradient, "noise": noise})
    return frame(rows)


def series_noise_laws(record: StudyRecord) -> dict[Series, NoiseLaw]:
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
