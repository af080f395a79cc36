"""What convergence theory says of c1 and c2, from terms measured along the trials (Lee et al. 2021, Section 4).

SGD at a constant rate eta on batches of B, with an L-smooth f and gradient noise of variance beta / B, has (Bottou,
Curtis and Nocedal 2018, Theorem 4.8)

    mean over K steps of ||grad f||^2  <=  Delta / (eta mu K) + eta L beta / (mu B),    Delta = 2 (f(w1) - f_inf).

With the left side as epsilon, K = Delta / (eta mu (epsilon - eta L beta / (mu B))); to first order in 1 / B that is

    K* = c1 / B + c2,    c1 = Delta L beta / (mu^2 epsilon^2),    c2 = Delta / (eta mu epsilon).

With rates eta_k (Lee et al. 2021, Eqs. 7 to 10; Bottou et al., Theorem 4.10), A = sum eta_k and H = sum eta_k^2 over K
steps, the mean of ||grad f||^2 weighted by eta_k is at most (Delta + L beta H / B) / (mu A). With A = K etabar,

    c1 = L beta H / (mu etabar epsilon),    c2 = Delta / (mu etabar epsilon).

At a constant rate the two differ by more than notation. H = K eta^2 is then as large as K itself: the first form solves
for K before it takes H to be known, the second holds H at what the run had. The equations follow Bottou et al.; they
are not quoted from the paper.

The bounds are for plain SGD: they know no momentum, and a rate here is the optimizer's own, not rate / (1 - momentum).
They are upper bounds, so that ratios between sparsities, where a common factor drops out, say more than sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from lit_dps.analysis.fit import Fit
from lit_dps.analysis.scaling import Scaling
from lit_dps.analysis.summary import CellSummary, comparable
from lit_dps.analysis.tables import base_of, columns_of, frame
from lit_dps.racing import to_goal
from lit_dps.record import StudyRecord
from lit_dps.trial import Series, TrialResult

MU = 1.0  # the paper's: batch gradients are unbiased
RATIOS = ("delta", "beta", "lipschitz", "epsilon")
# Sums of squares of rates that are all equal differ from the square of their sum by rounding alone.
_EQUAL_RATES = 1e-9


@dataclass(frozen=True)
class Terms:
    """The terms of the theory, measured along one trial. In units of the loss ("nats"), weights w and steps.

    `steps` are those that the rates are of: all that the run made, also where it counts only up to a goal that it met
    before (`lit_dps.analysis.at_goal`) or to where it was outraced.
    """

    delta: float  # Delta = 2 (f(w1) - f_inf) of the training loss after pruning, in nats
    lipschitz: float  # L, mean over the run of the local Lipschitz constant of the gradient, in nats / w^2
    beta: float  # trace of the covariance of the per-example gradient before the first step, in (nats / w)^2 examples
    epsilon: float  # mean of the squared norm of the training gradient over the measurements, in (nats / w)^2
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
        """`law` of a run that met its goal at a step; None where its rates changed beyond: those to there are lost."""
        return None if self.decays and self.steps != k_star else self.law


def terms_of(result: TrialResult) -> Terms | None:
    """The terms of a trial, means taken over the finite measurements up to its goal.

    None where a term was not measured (a run may end before its first measurement of L) or is not positive and finite.
    """
    measured, curve = result.theory, to_goal(result).smoothness
    lipschitz = _finite(curve.get("lipschitz", ()))
    if not measured or not lipschitz or not measured["steps"]:
        return None
    squared = _finite([measured["squared_gradient"], *curve["squared_gradient"]])
    terms = Terms(
        delta=2 * (measured["loss"] - measured["floor"]),
        lipschitz=sum(lipschitz) / len(lipschitz),
        beta=measured["gradient_variance"],
        epsilon=sum(squared) / len(squared) if squared else math.nan,
        rate=measured["rate_sum"] / measured["steps"],
        rate_squares=measured["rate_square_sum"],
        steps=int(measured["steps"]),
    )
    return terms if all(math.isfinite(x) and x > 0 for x in vars(terms).values()) else None


def _finite(values: Sequence[float]) -> list[float]:
    return [x for x in values if math.isfinite(x)]


def theory_rows(cells: Iterable[CellSummary], scalings: Mapping[Series, Scaling]) -> pd.DataFrame:
    """What the theory predicts from the K* trial of each cell, by series, then batch size; missing where unknown.

    With rates that change, nothing is predicted from a run that went on beyond the goal: its rates up to there are not
    known.

    Columns: batch_size [examples], sparsity and further axes, point; delta, lipschitz, beta, epsilon, rate as in
    `Terms`; predicted_c1 [examples], predicted_c2 [steps] and predicted_k_star = predicted_c1 / batch_size +
    predicted_c2 [steps]; measured k_star [steps], and floor, 1 where it is an upper bound (`summary.at_first_check`),
    else 0; c1 [examples] and c2 [steps], fitted to the K* of this series.
    """

    def row(summary: CellSummary) -> dict[str, object]:
        cell, best, fit = summary.cell, summary.best, scalings[summary.cell.series].fit
        terms = None if best is None else terms_of(best)
        law = None if terms is None else terms.law_of(summary.k_star)
        return {
            "batch_size": cell.batch_size,
            **columns_of(cell.series),
            "point": None if best is None else best.trial.point,
            **{name: getattr(terms, name, None) for name in ("delta", "lipschitz", "beta", "epsilon")},
            "rate": None if law is None else terms.rate,
            "predicted_c1": getattr(law, "c1", None),
            "predicted_c2": getattr(law, "c2", None),
            "predicted_k_star": None if law is None else law.steps(cell.batch_size),
            "k_star": summary.k_star,
            "floor": int(summary.at_first_check),
            "c1": getattr(fit, "c1", None),
            "c2": getattr(fit, "c2", None),
        }

    return frame(map(row, cells))


class Pair(NamedTuple):
    """One point at one batch size, dense and sparse: the same initial weights, in a search the same metaparameters.

    In a study of best points (study.best_of) a point is a seed, and each sparsity is at its own metaparameters.
    """

    batch_size: int
    point: int
    base: Terms
    sparse: Terms

    @property
    def log_ratios(self) -> dict[str, float]:
        """Natural logarithms of sparse over base, of each of `RATIOS`."""
        return {name: math.log(getattr(self.sparse, name) / getattr(self.base, name)) for name in RATIOS}


def measured_terms(record: StudyRecord, series: Series) -> dict[tuple[int, int], Terms]:
    """The terms of the trials of a series whose means compare (`summary.comparable`), by (batch size, point)."""
    found = ((key, terms_of(result)) for key, result in _comparable(record, series).items())
    return {key: terms for key, terms in found if terms is not None}


def _comparable(record: StudyRecord, series: Series) -> dict[tuple[int, int], TrialResult]:
    return {
        (cell.batch_size, result.trial.point): result
        for cell, results in record.results.items()
        for result in results
        if cell.series == series and comparable(result)
    }


def paired_terms(record: StudyRecord, base: Series, series: Series) -> list[Pair]:
    """The points measured in two series, where both trials compare, by batch size, then point."""
    dense, sparse = (measured_terms(record, s) for s in (base, series))
    return [Pair(*key, dense[key], sparse[key]) for key in sorted(dense.keys() & sparse.keys())]


def lipschitz_at_the_same_steps(record: StudyRecord, base: Series, series: Series) -> list[tuple[int, float]]:
    """(point, natural logarithm of L over L) of each pair of trials, by batch size, then point.

    As in `paired_terms`, but L is the mean over the steps that both trials measured it at: where the constant changes
    along the run, the means over runs of different lengths differ for that alone.
    """
    found = []
    dense, sparse = (_comparable(record, s) for s in (base, series))
    for key in sorted(dense.keys() & sparse.keys()):
        curves = [to_goal(results[key]).smoothness for results in (dense, sparse)]
        under, over = (dict(zip(curve.get("step", ()), curve.get("lipschitz", ()), strict=True)) for curve in curves)
        shared = [step for step in under if step in over and len(_finite([over[step], under[step]])) == 2]
        sums = [sum(values[step] for step in shared) for values in (over, under)]
        if shared and min(sums) > 0:
            found.append((key[1], math.log(sums[0] / sums[1])))
    return found


def term_ratio_rows(record: StudyRecord, scalings: Mapping[Series, Scaling]) -> pd.DataFrame:
    """How the terms change from the smallest sparsity to each higher one, by series, then batch size, then over all.

    The two agree on all further axes of the grid. Ratios of the terms are geometric means over pairs of trials
    (`paired_terms`), in the row of all batch sizes over all pairs. Columns: sparsity and further axes; base;
    batch_size [examples], missing in the row of all; pairs; delta, beta, lipschitz, epsilon, the ratios; predicted_c1,
    the ratio of c1 at equal epsilon as in the paper (Delta x beta x L: 1.00 x 0.54 x 3.09 = 1.67 for 90 % of Simple-CNN
    on MNIST); predicted_c1_measured_epsilon, that over the squared ratio of epsilon; c1, the ratio of the fitted c1;
    k_star, the ratio of K*, in the row of all the geometric mean over the batch sizes with both, k_star_low and
    k_star_high the least and the greatest, without K* that are upper bounds. Missing where unknown.
    """
    rows = []
    for series in record.series:
        if (base := base_of(series, record.series)) == series:
            continue
        pairs, dense, sparse = paired_terms(record, base, series), scalings[base], scalings[series]
        c1 = None if dense.fit is None or sparse.fit is None else sparse.fit.c1 / dense.fit.c1
        steps = {b: sparse.resolved[b] / k for b, k in dense.resolved.items() if b in sparse.resolved}
        for batch_size in (*record.batch_sizes, None):
            here = [pair for pair in pairs if batch_size in (None, pair.batch_size)]
            k_star = [ratio for b, ratio in steps.items() if batch_size in (None, b)]
            names = {**columns_of(series), "base": base.sparsity, "batch_size": batch_size, "pairs": len(here)}
            ranged = {"k_star_low": min(k_star, default=None), "k_star_high": max(k_star, default=None)}
            mean = float(np.exp(np.mean(np.log(k_star)))) if k_star else None
            rows.append({**names, **_term_ratios(here), "c1": c1, "k_star": mean, **ranged})
    return frame(rows, None if rows else ["base", "batch_size", "pairs"])


def _term_ratios(pairs: Sequence[Pair]) -> dict[str, float | None]:
    if not pairs:
        return dict.fromkeys((*RATIOS, "predicted_c1", "predicted_c1_measured_epsilon"))
    logs = np.mean([list(pair.log_ratios.values()) for pair in pairs], axis=0)
    means = dict(zip(RATIOS, np.exp(logs).tolist(), strict=True))
    predicted = means["delta"] * means["beta"] * means["lipschitz"]
    measured = predicted / means["epsilon"] ** 2
    return {**means, "predicted_c1": predicted, "predicted_c1_measured_epsilon": measured}
