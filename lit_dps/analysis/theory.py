"""What convergence theory says of c1 and c2, from terms measured along the trials (Lee et al. 2021,
Section 4).

SGD at a constant rate eta on batches of B, with an L-smooth f and gradient noise of variance beta /
B, has (Bottou, Curtis and Nocedal 2018, Theorem 4.8)

    mean over K steps of ||grad f||^2  <=  Delta / (eta mu K) + eta L beta / (mu B),    Delta = 2
    (f(w1) - f_inf).

With the left side as epsilon, K = Delta / (eta mu (epsilon - eta L beta / (mu B))); to first order
in 1 / B that is

    K* = c1 / B + c2,    c1 = Delta L beta / (mu^2 epsilon^2),    c2 = Delta / (eta mu epsilon).

With rates eta_k (Lee et al. 2021, Eqs. 7 to 10; Bottou et al., Theorem 4.10), A = sum eta_k and H =
sum eta_k^2 over K steps, the mean of ||grad f||^2 weighted by eta_k is at most (Delta + L beta H /
B) / (mu A). With A = K etabar,

    c1 = L beta H / (mu etabar epsilon),    c2 = Delta / (mu etabar epsilon).

At a constant rate the two differ by more than notation. H = K eta^2 is then as large as K itself:
the first form solves for K before it takes H to be known, the second holds H at what the run had.
The equations follow Bottou et al.; they are not quoted from the paper.

The bounds are for plain SGD: they know no momentum, and a rate here is the optimizer's own, not
rate / (1 - momentum). They are upper bounds, so that ratios between sparsities, where a common
factor drops out, say more than sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from lit_dps.analysis.law import Law
from lit_dps.analysis.law_fit import Fit
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.racing import to_goal
from lit_dps.core.trial import Series, TrialResult

MU = 1.0  # the paper's: batch gradients are unbiased
# Sums of squares of rates that are all equal differ from the square of their sum by rounding alone.
_EQUAL_RATES = 1e-9


@dataclass(frozen=True)
class Terms:
    """The terms of the theory, measured along one trial. In units of the loss ("nats"), weights w
    and steps.

    `steps` are those that the rates are of: all that the run made, also where it counts only up to
    a goal that it met before (`lit_dps.analysis.other_goals.at_goal`) or to where it was outraced.
    """

    delta: float  # Delta = 2 (f(w1) - f_inf) of the training loss after pruning, in nats
    lipschitz: (
        float  # L, mean over the run of the local Lipschitz constant of the gradient, in nats / w^2
    )
    # trace of the covariance of the per-example gradient before the first step, in (nats / w)^2
    # examples
    beta: float
    # mean over the run's steps of the squared norm of the training gradient, in (nats / w)^2
    epsilon: float
    rate: float  # etabar, mean learning rate, in w^2 / nats a step
    rate_squares: float  # H, sum over the steps of the squared learning rate, in (w^2 / nats)^2
    steps: int

    @property
    def c1(self) -> float:
        """c1 at a constant rate, in examples."""
        return self.delta * self.lipschitz * self.beta / (MU * self.epsilon) ** 2

    @property
    def c2(self) -> float:
        """c2 in steps; the same in both forms."""
        return self.delta / (MU * self.rate * self.epsilon)

    @property
    def decays(self) -> bool:
        """Whether the rate changed along the run: then K H > A^2 (Cauchy and Schwarz)."""
        return self.rate_squares > self.steps * self.rate**2 * (1 + _EQUAL_RATES)

    @property
    def law(self) -> Fit:
        """The predicted K* = c1 / B + c2, in the form that the run's rates ask for."""
        decaying = self.lipschitz * self.beta * self.rate_squares / (MU * self.rate * self.epsilon)
        return Fit(decaying if self.decays else self.c1, self.c2)

    def law_of(self, k_star: int) -> Fit | None:
        """`law` of a run that met its goal at a step; None where its rates changed beyond: those to
        there are lost."""
        return None if self.decays and self.steps != k_star else self.law


class Start(NamedTuple):
    """The terms of a trial that are those before its first step: no later measurement is needed for
    them.

    Attributes:
        delta: As in `Terms`.
        beta: As in `Terms`.
    """

    delta: float
    beta: float


def start_of(result: TrialResult) -> Start | None:
    """The terms of a trial before its first step; None where they were not measured or are not
    positive and finite."""
    if not (measured := result.theory):
        return None
    start = Start(2 * (measured["loss"] - measured["floor"]), measured["gradient_variance"])
    return start if all(math.isfinite(x) and x > 0 for x in start) else None


def terms_of(result: TrialResult) -> Terms | None:
    """The terms of a trial, means taken over the finite measurements up to its goal, of epsilon
    over steps.

    None where a term was not measured (a run may end before its first measurement of L) or is not
    positive and finite.
    """
    measured, curve = result.theory, to_goal(result).smoothness
    start, lipschitz = start_of(result), finite(curve.get("lipschitz", ()))
    if start is None or not lipschitz or not measured["steps"]:
        return None
    squared: Any = zip(
        (1, *curve["step"]), (measured["squared_gradient"], *curve["squared_gradient"]), strict=True
    )
    terms = Terms(
        delta=start.delta,
        lipschitz=sum(lipschitz) / len(lipschitz),
        beta=start.beta,
        epsilon=_mean_over_steps(squared),
        rate=measured["rate_sum"] / measured["steps"],
        rate_squares=measured["rate_square_sum"],
        steps=int(measured["steps"]),
    )
    return terms if all(math.isfinite(x) and x > 0 for x in vars(terms).values()) else None


def _mean_over_steps(readings: Iterable[tuple[int, float]]) -> float:
    """The mean over the steps up to the last reading, (step, value) each; a reading stands for
    those since the last.

    The gradient before the first step may be a thousand times any later one: a plain mean of one
    reading in a hundred steps would say how many readings there are, and nothing of the run. Those
    that are not finite are left out; nan without any.
    """
    total, last = 0.0, 0
    for step, value in readings:
        if math.isfinite(value):
            total, last = total + (step - last) * value, step
    return total / last if last else math.nan


def finite(values: Sequence[float]) -> list[float]:
    """The finite ones of some measurements."""
    return [x for x in values if math.isfinite(x)]


def theory_rows(cells: Iterable[CellSummary], laws: Mapping[Series, Law]) -> pd.DataFrame:
    """What the theory predicts from the K* trial of each cell, by series, then batch size; missing
    where unknown.

    With rates that change, nothing is predicted from a run that went on beyond the goal: its rates
    up to there are not known.

    Columns: batch_size [examples], sparsity and further axes, point; delta, lipschitz, beta,
    epsilon, rate as in `Terms`; predicted_c1 [examples], predicted_c2 [steps] and predicted_k_star
    = predicted_c1 / batch_size + predicted_c2 [steps]; measured k_star [steps], and floor, 1 where
    it is an upper bound (`CellSummary.is_upper_bound`), else 0; c1 [examples] and c2 [steps],
    fitted to the K* of this series.
    """

    def row(summary: CellSummary) -> dict[str, object]:
        cell, best, fit = summary.cell, summary.best, laws[summary.cell.series].fit
        terms: Any = None if best is None else terms_of(best)
        law = None if terms is None else terms.law_of(summary.k_star)
        return {
            "batch_size": cell.batch_size,
            **columns_of(cell.series),
            "point": None if best is None else best.trial.point,
            **{
                name: getattr(terms, name, None)
                for name in ("delta", "lipschitz", "beta", "epsilon")
            },
            "rate": None if terms is None or law is None else terms.rate,
            "predicted_c1": getattr(law, "c1", None),
            "predicted_c2": getattr(law, "c2", None),
            "predicted_k_star": None if law is None else law.steps(cell.batch_size),
            "k_star": summary.k_star,
            "floor": int(summary.is_upper_bound),
            "c1": getattr(fit, "c1", None),
            "c2": getattr(fit, "c2", None),
        }

    return frame(map(row, cells))
