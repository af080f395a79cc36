"""The best learning rate against the batch size: a power law, and two scaling rules.

Shallue et al. (2019) draw the effective learning rate eta / (1 - m) of the best trial, with lines
of linear and of square-root scaling from the smallest batch size. Heavy-ball and Nesterov momentum
sum 1 / (1 - m) gradients of a constant direction. RMSprop sums its updates in the same way. Adam
averages its gradients, and sign-based and spectral rules have updates of a fixed size. So their
effective rate is eta.

The rules here scale only the rate. `lit_dps.analysis.adam_rules` has the rules for Adam that also
change its betas. A rate that decays counts at its start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from lit_dps.analysis.intervals import REPLICATES
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import columns_of, frame, numbers
from lit_dps.core.optimizer_kind import OptimizerKind, kind_of_name
from lit_dps.core.record import StudyRecord, setting
from lit_dps.core.search_space import RATE_NAMES
from lit_dps.core.text import number_text
from lit_dps.core.trial import Series, TrialResult, Value

# Trials that need at most this multiple of K* are about as good as the best trial.
NEAR = 1.25
RULES = {"linear": 1.0, "square_root": 0.5}  # the power of the batch size
RULE_NAMES = {"linear": "linear scaling", "square_root": "square-root scaling"}
# Kinds of rate, and columns of `rate_rows`.
EFFECTIVE = "effective_rate"
PLAIN = "learning_rate"

# Update rules that sum gradients or updates.
HEAVY_BALL = ("momentum", "nesterov")
RMSPROP = "rmsprop"
# Schedule-free SGD sums no gradients: its momentum is the share of the average weights in the point
# where it takes the gradient.
WITHOUT_MOMENTUM = ("sgd", "schedule_free_sgd")
DEFAULT_MOMENTUM = 0.9  # default of `ImageClassifier`


# The assumption of an answer whose rates were searched.
RATE_IS_TUNED = ("The learning rate is tuned at each batch size, as it was to measure K.",)


@dataclass(frozen=True)
class RateLaw:
    """rate = scale B^exponent, fitted to the logarithms of the best rates.

    Attributes:
        scale: Rate at B = 1 by the law.
        exponent: 0.5 is square-root scaling.
        error: Standard error of the exponent; nan with two batch sizes and an unknown spacing.
        scatter: Standard deviation of the log of the best rates about the law. It is at least the
            spacing of the tried rates; nan if `error` is nan.
        range: Smallest and largest measured batch size; the law is valid between them.
        name: Name of the rate: "learning_rate" or "learning_rate / (1 - momentum)".
    """

    scale: float
    exponent: float
    error: float
    scatter: float
    range: tuple[float, float]
    name: str = "learning_rate"

    # Whether K is the minimum of a search over the rate.
    is_searched = True

    @property
    def assumed(self) -> tuple[str, ...]:
        """The assumptions of an answer about the rates, a line each."""
        return RATE_IS_TUNED

    def at(self, batch_size: float) -> float | None:
        """Return the rate at a batch size; None outside the measured range."""
        low, high = self.range
        if low <= batch_size <= high:
            return self.scale * batch_size**self.exponent
        return None

    def describe(self) -> str:
        """Return the law in a line."""
        low, high = self.range
        # Adding 0 turns -0.0 into 0.0.
        text = f"{self.name} ~ B^{round(self.exponent, 2) + 0.0:.2f}"
        if not math.isnan(self.error):
            text += f" +- {self.error:.2f} (standard error)"
        text += f" between B = {low:g} and {high:g}"
        if not math.isnan(self.scatter):
            factor = number_text(math.exp(self.scatter))
            text += f"; single best rates differ from it by x{factor}"
        return text


def rate_law(
    batch_sizes: Sequence[float],
    rates: Sequence[float],
    name: str = "learning_rate",
    spacing: float = 0.0,
) -> RateLaw | None:
    """Return the least-squares power law of rates; None for fewer than two batch sizes.

    Args:
        batch_sizes: (n,), in examples.
        rates: (n,), the best rate at each batch size.
        name: Name of the rate.
        spacing: Distance between the logarithms of neighbouring tried rates. The error of a best
            rate is at least this distance, even if the best rates are exactly on a line.

    Raises:
        ValueError: for numbers that are not positive and finite.
    """
    batch = np.asarray(batch_sizes, float)
    rate = np.asarray(rates, float)
    if not (np.isfinite(batch) & np.isfinite(rate) & (batch > 0) & (rate > 0)).all():
        raise ValueError("batch sizes and rates must be positive and finite")
    if np.unique(batch).size < 2:
        return None
    x = np.log(batch)
    y = np.log(rate)
    centred = x - x.mean()
    exponent, offset = np.polyfit(centred, y, 1)
    residuals = y - offset - exponent * centred
    degrees_of_freedom = len(x) - 2
    scatter = math.nan
    if degrees_of_freedom:
        scatter = math.sqrt(float((residuals**2).sum()) / degrees_of_freedom)
    if spacing > 0 and (math.isnan(scatter) or scatter < spacing):
        scatter = spacing
    return RateLaw(
        scale=math.exp(offset - exponent * x.mean()),
        exponent=float(exponent),
        error=scatter / math.sqrt(float((centred**2).sum())),
        scatter=scatter,
        range=(float(batch.min()), float(batch.max())),
        name=name,
    )


@dataclass(frozen=True)
class RateSource:
    """How to read the learning rate of the trials of a series.

    Attributes:
        rate_key: The metaparameter that is the learning rate.
        momentum_key: The metaparameter that is the momentum; None if momentum is not searched.
        fixed_momentum: The momentum if it is not searched; 0 if the update rule sums no gradients.
        optimizer: Name or class path of the update rule; None if it is unknown.
    """

    rate_key: str
    momentum_key: str | None
    fixed_momentum: float
    optimizer: str | None

    @property
    def has_momentum(self) -> bool:
        """Whether the effective rate differs from the learning rate."""
        return self.momentum_key is not None or self.fixed_momentum != 0

    @property
    def assumes_heavy_ball(self) -> bool:
        """Whether it is unknown how the update rule uses its momentum."""
        known = (*HEAVY_BALL, RMSPROP)
        return self.has_momentum and _short_name(self.optimizer) not in known

    @property
    def averages(self) -> bool:
        """Whether momentum leaves the size of the updates unchanged, as in Adam, Lion and Muon."""
        return _averages(self.optimizer)

    @property
    def kinds(self) -> list[str]:
        """The kinds of rate to scale: effective, and plain too if momentum is searched."""
        if self.momentum_key is None:
            return [EFFECTIVE]
        return [EFFECTIVE, PLAIN]

    def momentum(self, result: TrialResult) -> float:
        """Return the momentum m of a trial; 0 if its update rule sums no gradients."""
        if self.momentum_key is None:
            return self.fixed_momentum
        return float(result.trial.params[self.momentum_key])

    def rate(self, result: TrialResult, kind: str = EFFECTIVE) -> float:
        """Return the rate of a trial at its start: the learning rate, or that over 1 - m.

        Args:
            result: The trial.
            kind: `PLAIN` or `EFFECTIVE`.
        """
        learning_rate = float(result.trial.params[self.rate_key])
        if kind == PLAIN:
            return learning_rate
        return learning_rate / (1 - self.momentum(result))


def _short_name(optimizer: str | None) -> str | None:
    """Return the name of an update rule, without the path of a class."""
    if optimizer is None:
        return None
    return optimizer.rpartition(".")[2].lower()


def _averages(optimizer: str | None) -> bool:
    """Return True if momentum does not change the size of the updates of a rule."""
    kind = None if optimizer is None else kind_of_name(optimizer)
    if kind is None or kind is OptimizerKind.SGD_LIKE:
        return False
    return _short_name(optimizer) != RMSPROP


def rate_source(record: StudyRecord, series: Series) -> RateSource | None:
    """Return how to read the rate of a series.

    Returns:
        None unless exactly one rate is searched, and if the optimizer is searched.
    """
    rate_keys = []
    momentum_keys = []
    for key in record.space:
        name = key.rpartition(".")[2]
        if name == "optimizer":
            # Rates of several optimizers cannot be compared.
            return None
        if name in RATE_NAMES:
            rate_keys.append(key)
        elif name == "momentum":
            momentum_keys.append(key)
    if len(rate_keys) != 1:
        return None
    (rate_key,) = rate_keys
    optimizer = _model_setting(record, series, "optimizer")
    if not isinstance(optimizer, str):
        optimizer = None
    if _averages(optimizer) or optimizer in WITHOUT_MOMENTUM:
        return RateSource(rate_key, None, 0.0, optimizer)
    if momentum_keys:
        return RateSource(rate_key, momentum_keys[0], 0.0, optimizer)
    momentum = _model_setting(record, series, "momentum")
    if isinstance(momentum, int | float) and 0 <= momentum < 1:
        return RateSource(rate_key, None, float(momentum), optimizer)
    if optimizer in HEAVY_BALL:
        return RateSource(rate_key, None, DEFAULT_MOMENTUM, optimizer)
    return RateSource(rate_key, None, 0.0, optimizer)


def _model_setting(record: StudyRecord, series: Series, name: str) -> object:
    """Return an argument of the model that all trials of a series share; None without one."""
    key = f"model.{name}"
    for axis, value in series.axes:
        if axis.replace(".init_args.", ".") == key:
            return value
    value = setting(record.config, f"model.init_args.{name}")
    if value is None:
        return setting(record.config, key)
    return value


def spacing_of(rates: Iterable[float]) -> float:
    """Return the mean distance between neighbouring logarithms of rates; 0 for a single rate."""
    logs = sorted({math.log(rate) for rate in rates if rate > 0})
    if len(logs) < 2:
        return 0.0
    return (logs[-1] - logs[0]) / (len(logs) - 1)


@dataclass(frozen=True)
class RateCurve:
    """The best rates of one series.

    Attributes:
        series: The series.
        source: How to read the rates.
        cells: Its cells with a K*, by batch size.
        replicates: Number of resamples for intervals.
        has_constant_batch: Whether B is the batch size of every step. Otherwise no rule and no law
            of B scales the rate.
    """

    series: Series
    source: RateSource
    cells: Mapping[int, CellSummary]
    replicates: int = REPLICATES
    has_constant_batch: bool = True

    @property
    def first(self) -> int | None:
        """The smallest batch size with an exact K*; the scaling rules start from its best rate.

        None without an exact K*, and if the batch size changes along a trial.
        """
        if not self.has_constant_batch:
            return None
        sizes = [b for b, cell in self.cells.items() if not cell.is_upper_bound]
        return min(sizes, default=None)

    def best_trial(self, batch_size: int) -> TrialResult:
        """Return the K* trial of a batch size."""
        best = self.cells[batch_size].best
        assert best is not None
        return best

    def best(self, batch_size: int, kind: str = EFFECTIVE) -> float:
        """Return the rate of the K* trial."""
        return self.source.rate(self.best_trial(batch_size), kind)

    def near(self, batch_size: int) -> list[TrialResult]:
        """Return the trials that cost at most `NEAR` times K*, with the K* trial."""
        cell = self.cells[batch_size]
        assert cell.k_star is not None
        limit = NEAR * cell.k_star
        near = [r for r in cell.trials if r.cost is not None and r.cost <= limit]
        best = self.best_trial(batch_size)
        if not any(each is best for each in near):
            near.append(best)
        return near

    def rule_rate(self, rule: str, batch_size: int, kind: str = EFFECTIVE) -> float | None:
        """Return the rate of a rule, scaled from the best rate at `first`; None without `first`."""
        if self.first is None:
            return None
        return self.best(self.first, kind) * (batch_size / self.first) ** RULES[rule]

    @property
    def law(self) -> RateLaw | None:
        """The power law of the best rates; of the effective rates if momentum is searched.

        It omits cells whose K* is an upper bound, and cells whose best rate is at an end of its
        range, because a better rate may be outside. None for fewer than two batch sizes, and if the
        batch size changes along a trial.
        """
        if not self.has_constant_batch:
            return None
        name = self.source.rate_key.rpartition(".")[2]
        kind = PLAIN
        if self.source.momentum_key is not None:
            name = f"{name} / (1 - {self.source.momentum_key.rpartition('.')[2]})"
            kind = EFFECTIVE
        batch_sizes = []
        best_rates = []
        all_rates = []
        for batch_size, cell in self.cells.items():
            if cell.is_upper_bound or self.source.rate_key in cell.boundary:
                continue
            batch_sizes.append(batch_size)
            best_rates.append(self.best(batch_size, kind))
            all_rates += [self.source.rate(result, kind) for result in cell.trials]
        return rate_law(batch_sizes, best_rates, name, spacing_of(all_rates))

    def at(self, batch_size: float, params: Mapping[str, Value]) -> float | None:
        """Return the learning rate of the law at a batch size; None outside the measured range.

        Args:
            batch_size: In examples.
            params: The other metaparameters, including the momentum if it is searched.
        """
        if self.law is None:
            return None
        rate = self.law.at(batch_size)
        if rate is None or self.source.momentum_key is None:
            return rate
        return rate * (1 - float(params[self.source.momentum_key]))


def rate_curves(
    record: StudyRecord, cells: Iterable[CellSummary], replicates: int = REPLICATES
) -> list[RateCurve]:
    """Return the best rates of each series that has a K* and searches a learning rate."""
    by_series: dict[Series, dict[int, CellSummary]] = {}
    for summary in cells:
        if summary.best is not None:
            by_series.setdefault(summary.cell.series, {})[summary.cell.batch_size] = summary
    curves = []
    for series in record.series:
        source = rate_source(record, series)
        if series in by_series and source is not None:
            is_constant = record.batch_schedule(series).is_constant
            curves.append(RateCurve(series, source, by_series[series], replicates, is_constant))
    return curves


def rate_laws(record: StudyRecord, curves: Iterable[RateCurve]) -> dict[Series, RateLaw | None]:
    """Return the law of the best rates of each series; None for a series without one."""
    laws: dict[Series, RateLaw | None] = dict.fromkeys(record.series)
    for curve in curves:
        laws[curve.series] = curve.law
    return laws


def rate_rows(record: StudyRecord, curves: Iterable[RateCurve]) -> pd.DataFrame:
    """Return one row per cell with a K*, by series, then batch size.

    Columns: sparsity and further axes, batch_size [examples], k_star [steps], floor (1 if k_star is
    an upper bound, which is weak evidence about the rate, else 0). The next columns describe the K*
    trial: point, learning_rate, momentum (0 if its update rule sums no gradients), effective_rate.

    near is the number of trials of `RateCurve.near`. The limits of both rates (_low, _high) are
    over these trials. A race (`study.race_factor`) may have stopped more such trials. boundary is
    the end of its range that the best learning rate is at, or empty. linear and square_root are the
    effective rates of the scaling rules, from the best rate at batch size scaled_from.
    """
    columns = [*columns_of(record.series[0]), "batch_size", "k_star", "floor", "point"]
    columns += [PLAIN, "momentum", EFFECTIVE, "near", f"{PLAIN}_low", f"{PLAIN}_high"]
    columns += [f"{EFFECTIVE}_low", f"{EFFECTIVE}_high", "boundary", "scaled_from", *RULES]
    rows = []
    for curve in curves:
        for batch_size in curve.cells:
            rows.append(_rate_row(curve, batch_size))
    return frame(rows, columns)


def _rate_row(curve: RateCurve, batch_size: int) -> dict[str, object]:
    """Return the row of `rate_rows` of one cell."""
    cell = curve.cells[batch_size]
    best = curve.best_trial(batch_size)
    near = curve.near(batch_size)
    row: dict[str, object] = {
        **columns_of(curve.series),
        "batch_size": batch_size,
        "k_star": cell.k_star,
        "floor": int(cell.is_upper_bound),
        "point": best.trial.point,
        "momentum": curve.source.momentum(best),
        "near": len(near),
        "boundary": cell.boundary.get(curve.source.rate_key, ""),
        "scaled_from": curve.first,
    }
    for kind in (PLAIN, EFFECTIVE):
        rates = [curve.source.rate(result, kind) for result in near]
        row |= {
            kind: curve.source.rate(best, kind),
            f"{kind}_low": min(rates),
            f"{kind}_high": max(rates),
        }
    for rule in RULES:
        row[rule] = curve.rule_rate(rule, batch_size)
    return row


def rule_line(rows: pd.DataFrame, kind: str, rule: str) -> pd.DataFrame:
    """Return the line of a scaling rule, from its first batch size to the largest.

    Columns: batch_size [examples], rate; one row per end. No rows without a first batch size.

    Args:
        rows: The rows of `rate_rows` of one series.
        kind: `EFFECTIVE` or `PLAIN`.
        rule: One of `RULES`.
    """
    starts = rows[rows["batch_size"] == rows["scaled_from"]]
    if not len(starts):
        return frame([], ["batch_size", "rate"])
    ends = np.array([numbers(starts["batch_size"])[0], numbers(rows["batch_size"]).max()])
    rate = numbers(starts[kind])[0]
    return pd.DataFrame({"batch_size": ends, "rate": rate * (ends / ends[0]) ** RULES[rule]})


class EqualRateLine(NamedTuple):
    """A line of equal effective rates eta / (1 - m) in a search space.

    Attributes:
        effective_rate: The rate of all points of the line.
        rates: Learning rates eta at its two ends.
        rests: 1 - m at its two ends.
    """

    effective_rate: float
    rates: tuple[float, float]
    rests: tuple[float, float]


def equal_rate_lines(
    rates: tuple[float, float], rests: tuple[float, float]
) -> Iterator[EqualRateLine]:
    """Yield lines of equal effective rates, one per decade (Shallue et al. 2019).

    Args:
        rates: Smallest and largest learning rate of the search space.
        rests: Smallest and largest 1 - m.
    """
    first = math.ceil(math.log10(rates[0] / rests[1]))
    last = math.floor(math.log10(rates[1] / rests[0]))
    for power in range(first, last + 1):
        effective_rate = 10.0**power
        low = max(rates[0], effective_rate * rests[0])
        high = min(rates[1], effective_rate * rests[1])
        # A line through a corner has no length, up to rounding.
        if low < high and not math.isclose(low, high):
            ends = (low / effective_rate, high / effective_rate)
            yield EqualRateLine(effective_rate, (low, high), ends)
