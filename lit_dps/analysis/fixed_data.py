"""Which batch size costs how much loss, if the number of examples is fixed: `fixed_data_losses`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lit_dps.analysis.intervals import NORMAL_95, Interval, percentile_interval, resampling_rng
from lit_dps.analysis.tables import numbers
from lit_dps.core.errors import ConfigError
from lit_dps.core.text import number_text

# The loss is fitted as a quadratic in log examples, from examples / WINDOW to examples.
WINDOW = 8.0
COEFFICIENTS = 3
MIN_POINTS = 6
# For batch sizes below B0, the curve is extrapolated to at most this multiple of the examples.
MAX_BEYOND = 2.0
DRAWS = 4000


@dataclass(frozen=True)
class FixedData:
    """Losses after a fixed number of examples, by batch size.

    Attributes:
        examples: The number of examples.
        reference: The batch size of the curve, to whose loss others are compared.
        tolerance: Largest share of the loss that a batch size may cost.
        table: A row per batch size: batch_size, steps (examples / batch_size), cost (the loss over
            the loss of the reference, minus 1), low and high (its 95 % limits), known: "law",
            "extrapolated" for a batch size below the reference, or "refused" where the curve is
            too short for the loss.
    """

    examples: float
    reference: float
    tolerance: float
    table: pd.DataFrame

    @property
    def largest(self) -> float | None:
        """The largest batch size that likely costs at most the tolerance.

        None if no batch size from the reference on does.
        """
        largest = None
        for row in self.table.sort_values("batch_size").to_dict("records"):
            if row["batch_size"] < self.reference:
                continue
            if not row["cost"] <= self.tolerance:
                break
            largest = float(row["batch_size"])
        return largest

    def describe(self) -> str:
        """Return the answer in a line."""
        share = f"{number_text(100 * self.tolerance)} %"
        start = f"With {number_text(self.examples, 3)} examples"
        at_reference = f"the loss at B = {self.reference:g}"
        unknown = self._first_refused
        # The reference itself costs nothing, so it is no answer.
        if self.largest in (None, self.reference):
            if unknown is not None:
                at = f"from B = {unknown:g} on"
                return f"{start} the cost {at} is unknown: the curve is too short."
            return f"{start} every larger batch size costs more than {share} of {at_reference}."
        text = (
            f"{start} batch sizes up to {self.largest:g} cost less than {share} of {at_reference}"
        )
        if unknown is not None:
            text += f"; from B = {unknown:g} on the cost is unknown, because the curve is too short"
        return f"{text}."

    @property
    def _first_refused(self) -> float | None:
        """The refused batch size right above `largest`; None if the cost there is known."""
        for row in self.table.sort_values("batch_size").to_dict("records"):
            if row["batch_size"] < self.reference or row["cost"] <= self.tolerance:
                continue
            return float(row["batch_size"]) if row["known"] == "refused" else None
        return None


def fixed_data_losses(
    curve: pd.DataFrame,
    batch_size: float,
    critical: Interval,
    examples: float,
    batch_sizes: Sequence[float],
    tolerance: float = 0.01,
) -> FixedData:
    """Return what larger batches cost in loss when the number of examples is fixed.

    By the law K = c1 / B + c2, N examples at B reach the loss that N (1 + B0 / B_crit) / (1 + B /
    B_crit) examples reach at B0. B_crit counts as constant between these two points of the run. It
    grows along training, so use B_crit of a goal near the loss at the end.

    Args:
        curve: A row per validation of a run at B0, or per run at B0: examples, loss. The rate must
            not decay before the end, unless each row is the end of a separate run and schedule.
        batch_size: B0, the batch size of the curve.
        critical: The 95 % interval of B_crit in examples, such as `Law.b_crit_interval`.
        examples: The fixed number of examples, within the curve.
        batch_sizes: The batch sizes to answer for.
        tolerance: Largest share of the loss that a batch size may cost.

    Raises:
        ConfigError: for missing columns, numbers that are not positive, examples beyond the curve,
            and fewer than `MIN_POINTS` validations in the last seven eighths of the examples.
    """
    if not isinstance(critical, Interval):
        allowed = "an Interval, such as law.b_crit_interval"
        raise ConfigError("critical", type(critical).__name__, allowed)
    _check_columns(curve, ("examples", "loss"))
    _check_positive(examples=examples, batch_size=batch_size, tolerance=tolerance)
    n = numbers(curve["examples"])
    loss = numbers(curve["loss"])
    if examples > n.max():
        allowed = f"at most {number_text(n.max(), 4)}, where the curve ends"
        hint = "Train the run of the curve longer, or choose fewer examples"
        raise ConfigError("examples", examples, allowed, hint)
    inside = (n >= examples / WINDOW) & (n <= examples) & np.isfinite(loss)
    x = np.log(n[inside] / examples)
    if inside.sum() < MIN_POINTS or np.linalg.matrix_rank(_design(x)) < COEFFICIENTS:
        allowed = (
            f"at least {MIN_POINTS} validations from {number_text(examples / WINDOW, 3)} to "
            f"{number_text(examples, 3)} examples, at {COEFFICIENTS} or more numbers of examples"
        )
        hint = "Validate more often, or choose another number of examples"
        raise ConfigError("curve", f"{int(inside.sum())} validations", allowed, hint)
    coefficients = _curve_draws(x, np.log(loss[inside]))
    b_crit = _critical_draws(critical)
    shortest = math.log(n[inside].min() / examples)
    rows = []
    for each in batch_sizes:
        share = (1 + batch_size / b_crit) / (1 + each / b_crit)
        log_share = np.log(share)
        cost = np.exp(coefficients[:, 0] * log_share + coefficients[:, 1] * log_share**2) - 1
        row = {"batch_size": float(each), "steps": examples / each, "known": "law"}
        # A batch below B0 uses the data better, so its loss is beyond the end of the curve.
        if each < batch_size:
            row["known"] = "extrapolated"
        middle_share = np.median(log_share)
        if middle_share < shortest or middle_share > math.log(MAX_BEYOND):
            row |= {"cost": math.nan, "low": math.nan, "high": math.nan, "known": "refused"}
        else:
            middle = float(np.median(cost))
            limits = percentile_interval(cost, middle)
            row |= {"cost": middle, "low": limits.low, "high": limits.high}
        rows.append(row)
    columns = ["batch_size", "steps", "cost", "low", "high", "known"]
    table = pd.DataFrame(rows, columns=columns)
    return FixedData(examples, batch_size, tolerance, table)


def _check_positive(**values: float) -> None:
    """Raise ConfigError for a value that is not above 0 and finite; its key is the name."""
    for key, value in values.items():
        if not 0 < value < math.inf:
            raise ConfigError(key, value, "a finite number above 0")


def _curve_draws(x: np.ndarray, log_loss: np.ndarray) -> np.ndarray:
    """Return draws (DRAWS, 2) of slope and curvature of the log loss at x = 0, by least squares."""
    design = _design(x)
    coefficients, *_ = np.linalg.lstsq(design, log_loss, rcond=None)
    residuals = log_loss - design @ coefficients
    freedom = len(x) - design.shape[1]
    rng = resampling_rng("fixed data")
    error = np.sqrt((residuals**2).sum() / rng.chisquare(freedom, DRAWS))
    spread = np.linalg.cholesky(np.linalg.inv(design.T @ design))
    noise = rng.standard_normal((DRAWS, COEFFICIENTS)) @ spread.T
    return (coefficients + error[:, None] * noise)[:, 1:]


def _design(x: np.ndarray) -> np.ndarray:
    """Return the columns (n, 3) of the quadratic."""
    return np.stack([np.ones_like(x), x, x**2], axis=1)


def _critical_draws(critical: Interval) -> np.ndarray:
    """Return draws (DRAWS,) of B_crit, from a log-normal distribution with this interval."""
    if not 0 < critical.low <= critical.high < math.inf:
        allowed = "two limits, low and high, both above 0 and finite"
        raise ConfigError("critical", tuple(critical), allowed)
    middle = math.log(critical.low * critical.high) / 2
    deviation = math.log(critical.high / critical.low) / (2 * NORMAL_95)
    return np.exp(middle + deviation * resampling_rng("B_crit").standard_normal(DRAWS))


def _check_columns(table: pd.DataFrame, columns: Sequence[str]) -> None:
    """Raise ConfigError for columns that are missing, or not positive; a loss may be missing."""
    if any(column not in table for column in columns):
        raise ConfigError("columns", list(table.columns), f"a list with {', '.join(columns)}")
    for column in columns:
        for value in table[column].tolist():
            is_missing = value is None or value != value
            if column == "loss" and is_missing:
                continue
            if not isinstance(value, int | float) or not value > 0:
                raise ConfigError(column, value, "a number above 0 in every row")
