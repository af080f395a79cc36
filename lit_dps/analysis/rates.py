"""The learning rate that goes with a batch size: a power law of the best rates that were
measured.

The best learning rate against the batch size, beside the rules of linear and of square-root
scaling.

Shallue et al. (2019) draw the effective learning rate eta / (1 - m) of the best trial, with lines
of both rules from the smallest batch size: heavy-ball and Nesterov momentum sum 1 / (1 - m)
gradients, where their direction lasts. Adam averages its gradients, so there it is eta itself;
beta2 and the weight decay, which rules for Adam move as well, are as the search drew them. A rate
that decays is taken at its start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lit_dps.analysis.law_bootstrap import REPLICATES
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.batch_scaling import scaled_beta2, scaled_decay
from lit_dps.core.format import number_text
from lit_dps.core.record import StudyRecord, setting
from lit_dps.core.search_space import RATE_NAMES
from lit_dps.core.trial import Series, TrialResult, Value


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


# trials that need at most so many times K* are as good as the best: their rates are told beside its
# own
NEAR = 1.25


RULES = {"linear": 1.0, "square_root": 0.5}  # the power of the batch size


RULE_NAMES = {"linear": "linear scaling", "square_root": "square-root scaling"}


EFFECTIVE, PLAIN = "effective_rate", "learning_rate"  # kinds of rate


HEAVY_BALL, AVERAGING, WITHOUT = (
    ("momentum", "nesterov"),
    ("adam", "adamw"),
    ("sgd",),
)  # update rules, by name


@dataclass(frozen=True)
class RateOf:
    """Where the trials of a series have their rate from.

    Attributes:
        rate: The metaparameter that is the learning rate.
        momentum: The metaparameter that is the momentum, or its value; 0 where there is none to
            count.
        optimizer: Name or class path of the update rule; None where it is not known.
    """

    rate: str
    momentum: str | float
    optimizer: str | None

    def eta(self, result: TrialResult) -> float:
        """The learning rate of a trial, at its start."""
        return float(result.trial.params[self.rate])

    def of_momentum(self, result: TrialResult) -> float:
        """The momentum of a trial; 0 where none is counted."""
        return float(
            result.trial.params[self.momentum] if isinstance(self.momentum, str) else self.momentum
        )

    def effective(self, result: TrialResult) -> float:
        """eta / (1 - m)."""
        return self.eta(result) / (1 - self.of_momentum(result))

    @property
    def kinds(self) -> dict[str, Callable[[TrialResult], float]]:
        """The rates that are scaled: the effective one, and the plain one where momentum is
        searched too."""
        return {EFFECTIVE: self.effective} | (
            {PLAIN: self.eta} if isinstance(self.momentum, str) else {}
        )

    @property
    def assumed(self) -> bool:
        """Whether it is not known how the update rule takes its momentum."""
        return self.momentum != 0 and self.optimizer not in HEAVY_BALL


def rate_of(record: StudyRecord, series: Series) -> RateOf | None:
    """Where the trials of a series have their learning rate and momentum from; None where no rate
    is searched."""
    rates = [key for key in record.space if key.rpartition(".")[2] in RATE_NAMES]
    if len(rates) != 1 or any(
        key.rpartition(".")[2] == "optimizer" for key in record.space
    ):  # none to compare
        return None
    optimizer = _setting(record, series, "model.optimizer")
    optimizer = optimizer if isinstance(optimizer, str) else None
    if optimizer in (*AVERAGING, *WITHOUT):
        return RateOf(rates[0], 0.0, optimizer)
    for key in record.space:
        if key.rpartition(".")[2] == "momentum":
            return RateOf(rates[0], key, optimizer)
    momentum = _setting(record, series, "model.momentum")
    if not isinstance(momentum, int | float) or not 0 <= momentum < 1:
        momentum = 0.9 if optimizer in HEAVY_BALL else 0.0  # the default of `ImageClassifier`
    return RateOf(rates[0], float(momentum), optimizer)


def _setting(record: StudyRecord, series: Series, key: str) -> object:
    """A value that the trials of a series share: of the grid, or of the configuration."""
    section, _, name = key.partition(".")
    found = dict(series.axes).get(key, setting(record.config, f"{section}.init_args.{name}"))
    return setting(record.config, key) if found is None else found


def spacing_of(rates: Sequence[float]) -> float:
    """Return the mean distance between neighbours among the logarithms of some rates; 0 for a
    single one."""
    logs = sorted({math.log(rate) for rate in rates if rate > 0})
    if len(logs) < 2:
        return 0.0
    return (logs[-1] - logs[0]) / (len(logs) - 1)


@dataclass(frozen=True)
class RateCurve:
    """The best rates of one series.

    Attributes:
        series: The series.
        source: Where the rates come from.
        cells: Its cells that have a K*, by batch size.
        replicates: Resamples that intervals rest on.
    """

    series: Series
    source: RateOf
    cells: Mapping[int, CellSummary]
    replicates: int = REPLICATES

    @property
    def first(self) -> int | None:
        """The smallest batch size with a K* beyond the first check, from which the rules go on;
        None without one."""
        return min((b for b, cell in self.cells.items() if not cell.at_first_check), default=None)

    def best(self, batch_size: int) -> float:
        """The effective rate of the K* trial."""
        return self.source.effective(self.cells[batch_size].best)

    def near(self, batch_size: int) -> list[TrialResult]:
        """The trials that need at most `NEAR` times K*."""
        cell = self.cells[batch_size]
        return [r for r in cell.trials if r.steps is not None and r.steps <= NEAR * cell.k_star]

    def rule(self, name: str, batch_size: int) -> float | None:
        """The effective rate that a rule has for a batch size, from the best one at the smallest
        batch size."""
        return (
            None
            if self.first is None
            else self.best(self.first) * (batch_size / self.first) ** RULES[name]
        )

    @property
    def law(self) -> RateLaw | None:
        """The power law of the best rates, effective ones where momentum is searched; None of fewer
        than two.

        Left out are cells with K* at the first check, and those whose best rate lies on an end of
        its range: the best one lies beyond it.
        """
        source, name = self.source, self.source.rate.rpartition(".")[2]
        rate = source.effective if isinstance(source.momentum, str) else source.eta
        if isinstance(source.momentum, str):
            name = f"{name} / (1 - {source.momentum.rpartition('.')[2]})"
        known = {
            b: c
            for b, c in self.cells.items()
            if not c.at_first_check and source.rate not in c.boundary
        }
        best = [rate(cell.best) for cell in known.values()]
        tried = [rate(result) for cell in known.values() for result in cell.trials]
        return rate_law(list(known), best, name, spacing_of(tried))

    def at(self, batch_size: float, params: Mapping[str, Value]) -> float | None:
        """The learning rate of the law at a batch size, beside other metaparameters; None beyond
        what was measured."""
        law, momentum = self.law, self.source.momentum
        rate = None if law is None else law.at(batch_size)
        return (
            rate
            if rate is None or not isinstance(momentum, str)
            else rate * (1 - float(params[momentum]))
        )


def rate_curves(
    record: StudyRecord, cells: Sequence[CellSummary], replicates: int = REPLICATES
) -> list[RateCurve]:
    """The best rates of each series that has a K* and a learning rate in its search space."""
    found = []
    for series in record.series:
        own = {
            s.cell.batch_size: s for s in cells if s.cell.series == series and s.best is not None
        }
        if own and (source := rate_of(record, series)) is not None:
            found.append(RateCurve(series, source, own, replicates))
    return found


def rate_laws(record: StudyRecord, curves: Sequence[RateCurve]) -> dict[Series, RateLaw | None]:
    """The law of the best rates of each series; None where there is none."""
    found = {curve.series: curve.law for curve in curves}
    return {series: found.get(series) for series in record.series}


def rate_rows(record: StudyRecord, curves: Sequence[RateCurve]) -> pd.DataFrame:
    """One row a cell that has a K*, by series, then batch size.

    Columns: sparsity and further axes, batch_size [examples], k_star [steps], floor (1 where it is
    at the first check and says little of the rate, else 0), point of the K* trial, its
    learning_rate, momentum (0 where none is counted) and effective_rate; near, the number of trials
    within `NEAR` times K*, and of both rates the lowest and the highest among them (racing may have
    stopped more: `study.slack`); boundary, the end of its range on which the learning rate lies, or
    empty; linear and square_root, the effective rates of the rules, from that of the batch size
    `scaled_from`.
    """
    rows = []
    for curve in curves:
        for batch_size, cell in curve.cells.items():
            near, source = curve.near(batch_size), curve.source
            eta, effective = sorted(map(source.eta, near)), sorted(map(source.effective, near))
            rows.append(
                {
                    **columns_of(curve.series),
                    "batch_size": batch_size,
                    "k_star": cell.k_star,
                    "floor": int(cell.at_first_check),
                    "point": cell.best.trial.point,
                    "learning_rate": source.eta(cell.best),
                    "momentum": source.of_momentum(cell.best),
                    "effective_rate": curve.best(batch_size),
                    "near": len(near),
                    "learning_rate_low": eta[0],
                    "learning_rate_high": eta[-1],
                    "effective_rate_low": effective[0],
                    "effective_rate_high": effective[-1],
                    "boundary": cell.boundary.get(source.rate, ""),
                    "scaled_from": curve.first,
                    **{name: curve.rule(name, batch_size) for name in RULES},
                }
            )
    columns = [
        "batch_size",
        "k_star",
        "floor",
        "point",
        "learning_rate",
        "momentum",
        "effective_rate",
        "near",
    ]
    columns += [f"{kind}_{end}" for kind in (PLAIN, EFFECTIVE) for end in ("low", "high")]
    columns += ["boundary", "scaled_from", *RULES]
    return frame(rows, [*columns_of(record.series[0]), *columns])
