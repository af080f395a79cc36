"""Convergence theory of c1 and c2, from terms measured along trials (Lee et al. 2021, Section 4).

SGD at a constant rate eta on batches of B, with an L-smooth f and gradient noise of variance
beta / B, has (Bottou, Curtis and Nocedal 2018, Theorem 4.8)

    mean over K steps of ||grad f||^2  <=  Delta / (eta mu K) + eta L beta / (mu B),
    Delta = 2 (f(w1) - f_inf).

Let the left side be epsilon. Then K = Delta / (eta mu (epsilon - eta L beta / (mu B))). To first
order in 1 / B this is

    K* = c1 / B + c2,    c1 = Delta L beta / (mu^2 epsilon^2),    c2 = Delta / (eta mu epsilon).

At rates eta_k (Lee et al. 2021, Eqs. 7 to 10; Bottou et al., Theorem 4.10), with A = sum eta_k and
H = sum eta_k^2 over K steps, the mean of ||grad f||^2 weighted by eta_k is at most
(Delta + L beta H / B) / (mu A). With A = K etabar,

    c1 = L beta H / (mu etabar epsilon),    c2 = Delta / (mu etabar epsilon).

At a constant rate the two forms differ, because H = K eta^2 depends on K: the first form solves for
K, the second takes H from the run. The equations follow Bottou et al.; they are not quotations of
the paper.

The bounds hold for plain SGD, without momentum: a rate is the optimizer's learning rate, not
rate / (1 - momentum). They are upper bounds. So ratios between sparsities, in which a common factor
cancels, are more reliable than values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from lit_dps.analysis.law import Law
from lit_dps.analysis.law_fit import LawConstants
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.racing import to_goal
from lit_dps.core.trial import LIPSCHITZ, THEORY, Series, TrialResult

MU = 1.0  # the paper's value: batch gradients are unbiased
# Columns of `theory_rows`: terms of a trial, and what they predict.
PREDICTION_COLUMNS = (
    *("delta", "lipschitz", "beta", "epsilon", "rate"),
    *("predicted_c1", "predicted_c2", "predicted_k_star"),
)
# Relative difference of the two sides of the test for equal rates, which rounding can cause.
_EQUAL_RATES = 1e-9


@dataclass(frozen=True)
class Terms:
    """The terms of the theory, measured along one trial; w is the unit of weights.

    Attributes:
        delta: Delta = 2 (f(w1) - f_inf) of the training loss after pruning, in nats.
        lipschitz: L, mean of the local Lipschitz constants of the gradient, in nats / w^2.
        beta: E ||g - grad f||^2 of one example before the first step, in (nats / w)^2 examples.
        epsilon: Mean of ||grad f||^2 over the steps, in (nats / w)^2.
        rate: etabar, mean learning rate, in w^2 / nats per step.
        rate_squares: H, sum over the steps of the squared learning rate, in (w^2 / nats)^2.
        steps: Number of steps of the rates. These are all steps of the run, even if the other terms
            end at a goal that it met before, or where it was stopped early.
    """

    delta: float
    lipschitz: float
    beta: float
    epsilon: float
    rate: float
    rate_squares: float
    steps: int

    @property
    def c1(self) -> float:
        """c1 at a constant rate, in examples."""
        return self.delta * self.lipschitz * self.beta / (MU * self.epsilon) ** 2

    @property
    def c2(self) -> float:
        """c2 in steps, the same in both forms."""
        return self.delta / (MU * self.rate * self.epsilon)

    @property
    def has_varying_rates(self) -> bool:
        """Whether the rate changed along the run: then K H > A^2 (Cauchy and Schwarz)."""
        return self.rate_squares > self.steps * self.rate**2 * (1 + _EQUAL_RATES)

    @property
    def law(self) -> LawConstants:
        """The predicted K* = c1 / B + c2, in the form for the rates of the run."""
        c1 = self.c1
        if self.has_varying_rates:
            noise = self.lipschitz * self.beta * self.rate_squares
            c1 = noise / (MU * self.rate * self.epsilon)
        return LawConstants(c1, self.c2)

    def law_to(self, k_star: int) -> LawConstants | None:
        """Return `law` of a run that met its goal at step `k_star`.

        None if the rates vary and the run continued after that step: then the sums of the rates up
        to that step are unknown.
        """
        if self.has_varying_rates and self.steps != k_star:
            return None
        return self.law


class Start(NamedTuple):
    """The terms of a trial before its first step.

    Attributes:
        delta: As in `Terms`.
        beta: As in `Terms`.
    """

    delta: float
    beta: float


def start_of(result: TrialResult) -> Start | None:
    """Return the terms of a trial before its first step.

    None if they were not measured or are not positive and finite.
    """
    measured = _measured(result)
    if not measured:
        return None
    start = Start(2 * (measured["loss"] - measured["floor"]), measured["gradient_variance"])
    return start if _are_positive(start) else None


def terms_of(result: TrialResult) -> Terms | None:
    """Return the terms of a trial, from its finite measurements up to its goal.

    None if a term was not measured or is not positive and finite. A run may end before its first
    measurement of L.
    """
    measured = _measured(result)
    start = start_of(result)
    curve = to_goal(result).readings.get(LIPSCHITZ, {})
    lipschitz = finite(curve.get("lipschitz", ()))
    if start is None or not lipschitz or not measured["steps"]:
        return None
    terms = Terms(
        delta=start.delta,
        lipschitz=sum(lipschitz) / len(lipschitz),
        beta=start.beta,
        epsilon=_mean_over_steps(
            (1, *curve["step"]), (measured["squared_gradient"], *curve["squared_gradient"])
        ),
        rate=measured["rate_sum"] / measured["steps"],
        rate_squares=measured["rate_square_sum"],
        steps=int(measured["steps"]),
    )
    return terms if _are_positive(vars(terms).values()) else None


def _measured(result: TrialResult) -> dict[str, float]:
    """Return the terms of a trial as they were measured, by name (`THEORY`)."""
    terms = {}
    for name, value in result.flags.items():
        if name.startswith(THEORY):
            terms[name.removeprefix(THEORY)] = value
    return terms


def _are_positive(values: Iterable[float]) -> bool:
    """Return True if all values are positive and finite."""
    return all(math.isfinite(value) and value > 0 for value in values)


def _mean_over_steps(steps: Iterable[float], values: Iterable[float]) -> float:
    """Return the mean of a quantity over the steps up to its last measurement.

    Each measurement counts for the steps since the one before. The gradient before the first step
    may be a thousand times any later one, so a plain mean would depend on the number of
    measurements. Only finite values count; nan without any.
    """
    total = 0.0
    last_step = 0.0
    for step, value in zip(steps, values, strict=True):
        if math.isfinite(value):
            total += (step - last_step) * value
            last_step = step
    if not last_step:
        return math.nan
    return total / last_step


def finite(values: Sequence[float]) -> list[float]:
    """Return the finite ones of some values."""
    return [value for value in values if math.isfinite(value)]


def theory_rows(cells: Iterable[CellSummary], laws: Mapping[Series, Law]) -> pd.DataFrame:
    """Return the prediction of the theory for the K* trial of each cell, by series, batch size.

    Columns: batch_size [examples], sparsity and further axes, point; delta, lipschitz, beta,
    epsilon, rate as in `Terms`; predicted_c1 [examples], predicted_c2 [steps] and predicted_k_star
    = predicted_c1 / batch_size + predicted_c2 [steps]; measured k_star [steps]; floor (1 if that is
    an upper bound, else 0); c1 [examples] and c2 [steps], fitted to the K* of this series if they
    follow the law. Unknown values are missing. Nothing is predicted from a run with varying rates
    that continued after its goal (`Terms.law_to`).
    """
    rows = []
    for summary in cells:
        series = summary.cell.series
        row: dict[str, object] = {"batch_size": summary.cell.batch_size, **columns_of(series)}
        row |= _prediction_columns(summary)
        row["k_star"] = summary.k_star_steps
        row["floor"] = int(summary.is_upper_bound)
        row |= dict.fromkeys(("c1", "c2"))
        law = laws[series]
        if law.fit is not None and law.describes_k:
            row |= {"c1": law.fit.c1, "c2": law.fit.c2}
        rows.append(row)
    return frame(rows)


def _prediction_columns(summary: CellSummary) -> dict[str, object]:
    """Return the columns point to predicted_k_star of `theory_rows`."""
    columns: dict[str, Any] = dict.fromkeys(("point", *PREDICTION_COLUMNS))
    if summary.best is None or summary.best.steps is None:
        return columns
    columns["point"] = summary.best.trial.point
    terms = terms_of(summary.best)
    if terms is None:
        return columns
    for name in ("delta", "lipschitz", "beta", "epsilon"):
        columns[name] = getattr(terms, name)
    law = terms.law_to(summary.best.steps)
    if law is not None:
        columns["rate"] = terms.rate
        columns["predicted_c1"] = law.c1
        columns["predicted_c2"] = law.c2
        columns["predicted_k_star"] = law.steps(summary.cell.batch_size)
    return columns
