"""The best learning rate against the batch size: a power law, beside two rules of scaling.

Shallue et al. (2019) draw the effective learning rate eta / (1 - m) of the best trial, with lines
of linear and of square-root scaling from the smallest batch size: heavy-ball and Nesterov momentum
sum 1 / (1 - m) gradients, where their direction lasts. Adam averages its gradients, so there it is
eta itself; beta2 and the weight decay, which rules for Adam move as well, are as the search drew
them. A rate that decays is taken at its start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from lit_dps.analysis.intervals import REPLICATES
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import columns_of, frame, numbers, where
from lit_dps.core.batch_scaling import scaled_beta2, scaled_decay
from lit_dps.core.record import StudyRecord, setting
from lit_dps.core.search_space import RATE_NAMES
from lit_dps.core.text import number_text
from lit_dps.core.trial import Series, TrialResult, Value

# Trials that need at most this many times K* are as good as the best; the table has their rates.
NEAR = 1.25
RULES = {"linear": 1.0, "square_root": 0.5}  # the power of the batch size
RULE_NAMES = {"linear": "linear scaling", "square_root": "square-root scaling"}
# Kinds of rate.
EFFECTIVE = "effective_rate"
PLAIN = "learning_rate"

# Update rules, by name.
HEAVY_BALL = ("momentum", "nesterov")
AVERAGING = ("adam", "adamw")
WITHOUT = ("sgd",)
DEFAULT_MOMENTUM = 0.9  # of `ImageClassifier`


@dataclass(frozen=True)
class RateLaw:
    """rate = scale B^exponent, fitted to the logarithms of the best rates.

    Attributes:
        scale, exponent: Of the law; sqrt(B) is an exponent of 0.5.
        error: Standard error of the exponent; nan with two batch sizes and no known spacing of the
            rates.
        scatter: Standard deviation of the log of the best rates about the law, at least their
            spacing; likewise.
        range: Smallest and largest batch size measured; the law holds between them.
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
        """Return the rate at a batch size; None beyond the measured batch sizes."""
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
    """Return the least-squares power law of rates; None of fewer than two batch sizes.

    Args:
        batch_sizes: (n,), in examples.
        rates: (n,), the best rate at each.
        name: What the rate is.
        spacing: Distance of neighbouring rates that were tried, in the logarithm. A best rate is
            not known better than that, however well the best of the grid lie on a line.

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
    free = len(x) - 2
    scatter = math.nan
    if free:
        scatter = math.sqrt(float((residuals**2).sum()) / free)
    if spacing > 0 and not scatter > spacing:
        scatter = spacing
    return RateLaw(
        scale=math.exp(offset - exponent * x.mean()),
        exponent=float(exponent),
        error=scatter / math.sqrt(float((centred**2).sum())),
        scatter=scatter,
        range=(float(batch.min()), float(batch.max())),
        name=name,
    )


def adaptive_advice(
    batch_size: float,
    other: float,
    beta2: float | None,
    weight_decay: float,
    rate_ratio: float = 1.0,
) -> str:
    """Return second moment and weight decay at another batch size, as `AdamScalingCallback` does.

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


@dataclass(frozen=True)
class RateOf:
    """How to read the learning rate of the trials of a series.

    Attributes:
        rate: The metaparameter that is the learning rate.
        momentum: The metaparameter that is the momentum, or its value; 0 where there is none to
            count.
        optimizer: Name or class path of the update rule; None where it is not known.
    """

    rate: str
    momentum: str | float
    optimizer: str | None

    @property
    def searches_momentum(self) -> bool:
        """Whether the momentum is a metaparameter too."""
        return isinstance(self.momentum, str)

    def eta(self, result: TrialResult) -> float:
        """Return the learning rate of a trial, at its start."""
        return float(result.trial.params[self.rate])

    def of_momentum(self, result: TrialResult) -> float:
        """Return the momentum of a trial; 0 where none is counted."""
        if isinstance(self.momentum, str):
            return float(result.trial.params[self.momentum])
        return float(self.momentum)

    def effective(self, result: TrialResult) -> float:
        """Return eta / (1 - m) of a trial."""
        return self.eta(result) / (1 - self.of_momentum(result))

    @property
    def kinds(self) -> dict[str, Callable[[TrialResult], float]]:
        """The rates to scale: the effective one, and the plain one if momentum is searched too."""
        kinds = {EFFECTIVE: self.effective}
        if self.searches_momentum:
            kinds[PLAIN] = self.eta
        return kinds

    @property
    def assumed(self) -> bool:
        """Whether it is not known how the update rule takes its momentum."""
        return self.momentum != 0 and self.optimizer not in HEAVY_BALL


def rate_of(record: StudyRecord, series: Series) -> RateOf | None:
    """Return how to read the rate of a series; None if no rate, or its optimizer, is searched."""
    keys_by_name: dict[str, list[str]] = {}
    for key in record.space:
        keys_by_name.setdefault(key.rpartition(".")[2], []).append(key)
    rates = [key for name, keys in keys_by_name.items() if name in RATE_NAMES for key in keys]
    # Rates of several optimizers cannot be compared.
    if len(rates) != 1 or "optimizer" in keys_by_name:
        return None
    optimizer = _setting(record, series, "model.optimizer")
    if not isinstance(optimizer, str):
        optimizer = None
    if optimizer in (*AVERAGING, *WITHOUT):
        return RateOf(rates[0], 0.0, optimizer)
    if "momentum" in keys_by_name:
        return RateOf(rates[0], keys_by_name["momentum"][0], optimizer)
    momentum = _setting(record, series, "model.momentum")
    if isinstance(momentum, int | float) and 0 <= momentum < 1:
        return RateOf(rates[0], float(momentum), optimizer)
    default = DEFAULT_MOMENTUM if optimizer in HEAVY_BALL else 0.0
    return RateOf(rates[0], default, optimizer)


def _setting(record: StudyRecord, series: Series, key: str) -> object:
    """Return a value that the trials of a series share: of the grid, or of the configuration."""
    section, _, name = key.partition(".")
    value = dict(series.axes).get(key, setting(record.config, f"{section}.init_args.{name}"))
    if value is None:
        return setting(record.config, key)
    return value


def spacing_of(rates: Sequence[float]) -> float:
    """Return the mean distance between neighbouring logarithms of rates; 0 for a single one."""
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
        cells: Its cells that have a K*, by batch size.
        replicates: Resamples that intervals rest on.
    """

    series: Series
    source: RateOf
    cells: Mapping[int, CellSummary]
    replicates: int = REPLICATES

    @property
    def first(self) -> int | None:
        """The smallest batch size with a K* beyond the first check; None without one.

        The rules scale its best rate.
        """
        sizes = [b for b, cell in self.cells.items() if not cell.is_upper_bound]
        return min(sizes, default=None)

    def best_trial(self, batch_size: int) -> TrialResult:
        """Return the K* trial of a batch size."""
        best = self.cells[batch_size].best
        assert best is not None
        return best

    def best(self, batch_size: int) -> float:
        """Return the effective rate of the K* trial."""
        return self.source.effective(self.best_trial(batch_size))

    def near(self, batch_size: int) -> list[TrialResult]:
        """Return the trials that need at most `NEAR` times K*."""
        cell = self.cells[batch_size]
        assert cell.k_star is not None
        limit = NEAR * cell.k_star
        return [r for r in cell.trials if r.steps is not None and r.steps <= limit]

    def rule(self, name: str, batch_size: int) -> float | None:
        """Return the effective rate of a rule, scaled from the best one at `first`."""
        if self.first is None:
            return None
        return self.best(self.first) * (batch_size / self.first) ** RULES[name]

    @property
    def law(self) -> RateLaw | None:
        """The power law of the best rates, effective ones if momentum is searched.

        Left out are cells with K* at the first check, and those whose best rate lies on an end of
        its range: the best one lies beyond it. None of fewer than two batch sizes.
        """
        source = self.source
        name = source.rate.rpartition(".")[2]
        rate = source.eta
        if isinstance(source.momentum, str):
            name = f"{name} / (1 - {source.momentum.rpartition('.')[2]})"
            rate = source.effective
        sizes, best, tried = [], [], []
        for batch_size, cell in self.cells.items():
            if cell.is_upper_bound or source.rate in cell.boundary:
                continue
            sizes.append(batch_size)
            best.append(rate(self.best_trial(batch_size)))
            tried += [rate(result) for result in cell.trials]
        return rate_law(sizes, best, name, spacing_of(tried))

    def at(self, batch_size: float, params: Mapping[str, Value]) -> float | None:
        """Return the learning rate of the law at a batch size; None beyond the measured ones.

        Args:
            batch_size: In examples.
            params: The other metaparameters, the momentum among them if it is searched.
        """
        law = self.law
        rate = None if law is None else law.at(batch_size)
        momentum = self.source.momentum
        if rate is None or not isinstance(momentum, str):
            return rate
        return rate * (1 - float(params[momentum]))


def rate_curves(
    record: StudyRecord, cells: Sequence[CellSummary], replicates: int = REPLICATES
) -> list[RateCurve]:
    """Return the best rates of each series that has a K* and searches a learning rate."""
    curves = []
    for series in record.series:
        answered = {}
        for summary in cells:
            if summary.cell.series == series and summary.best is not None:
                answered[summary.cell.batch_size] = summary
        source = rate_of(record, series)
        if answered and source is not None:
            curves.append(RateCurve(series, source, answered, replicates))
    return curves


def rate_laws(record: StudyRecord, curves: Sequence[RateCurve]) -> dict[Series, RateLaw | None]:
    """Return the law of the best rates of each series; None where there is none."""
    laws: dict[Series, RateLaw | None] = dict.fromkeys(record.series)
    for curve in curves:
        laws[curve.series] = curve.law
    return laws


def rate_rows(record: StudyRecord, curves: Sequence[RateCurve]) -> pd.DataFrame:
    """Return one row a cell that has a K*, by series, then batch size.

    Columns: sparsity and further axes, batch_size [examples], k_star [steps], floor (1 where it is
    at the first check and says little of the rate, else 0), point of the K* trial, its
    learning_rate, momentum (0 where none is counted) and effective_rate; near, the number of trials
    within `NEAR` times K*, and of both rates the lowest and the highest among them (racing may have
    stopped more: `study.race_factor`); boundary, the end of its range on which the learning rate
    lies, or empty; linear and square_root, the effective rates of the rules, from that of the batch
    size `scaled_from`.
    """
    columns = [*columns_of(record.series[0]), "batch_size", "k_star", "floor", "point"]
    columns += ["learning_rate", "momentum", "effective_rate", "near"]
    columns += ["learning_rate_low", "learning_rate_high"]
    columns += ["effective_rate_low", "effective_rate_high", "boundary", "scaled_from", *RULES]
    rows = []
    for curve in curves:
        source = curve.source
        for batch_size, cell in curve.cells.items():
            best = curve.best_trial(batch_size)
            near = curve.near(batch_size)
            plain_rates = [source.eta(result) for result in near]
            effective_rates = [source.effective(result) for result in near]
            row = {
                **columns_of(curve.series),
                "batch_size": batch_size,
                "k_star": cell.k_star,
                "floor": int(cell.is_upper_bound),
                "point": best.trial.point,
                "learning_rate": source.eta(best),
                "momentum": source.of_momentum(best),
                "effective_rate": curve.best(batch_size),
                "near": len(near),
                "learning_rate_low": min(plain_rates),
                "learning_rate_high": max(plain_rates),
                "effective_rate_low": min(effective_rates),
                "effective_rate_high": max(effective_rates),
                "boundary": cell.boundary.get(source.rate, ""),
                "scaled_from": curve.first,
            }
            row |= {name: curve.rule(name, batch_size) for name in RULES}
            rows.append(row)
    return frame(rows, columns)


def rule_line(rows: pd.DataFrame, kind: str, rule: str) -> pd.DataFrame:
    """Return the ends of the line of a scaling rule, at the batch size it starts from and the last.

    Columns: batch_size [examples], rate. No rows without a batch size to start from.

    Args:
        rows: Those of `rate_rows` of one series.
        kind: `EFFECTIVE` or `PLAIN`.
        rule: One of `RULES`.
    """
    resolved = where(rows, floor=0)
    if not len(resolved):
        return frame([], ["batch_size", "rate"])
    batch = numbers(resolved["batch_size"])
    first = batch.argmin()
    ends = np.array([batch[first], numbers(rows["batch_size"]).max()])
    rate = numbers(resolved[kind])[first]
    return pd.DataFrame({"batch_size": ends, "rate": rate * (ends / ends[0]) ** RULES[rule]})


class EqualRateLine(NamedTuple):
    """A line of equal effective rates eta / (1 - m) in a search space.

    Attributes:
        effective_rate: The rate along it.
        rates: Learning rates eta of its two ends.
        rests: 1 - m of its two ends.
    """

    effective_rate: float
    rates: tuple[float, float]
    rests: tuple[float, float]


def equal_rate_lines(
    rates: tuple[float, float], rests: tuple[float, float]
) -> Iterator[EqualRateLine]:
    """Yield lines of equal effective rates, one a decade (Shallue et al. 2019).

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
        # Up to rounding, a line through a corner has no length.
        if low < high and not math.isclose(low, high):
            ends = (low / effective_rate, high / effective_rate)
            yield EqualRateLine(effective_rate, (low, high), ends)
