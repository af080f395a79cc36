"""The paper's claims on the terms of its theory (Lee et al. 2021, Section 4), 90 % sparse over dense.

Ratios are geometric means over pairs of trials, of the same point and batch size (`theory.paired_terms`), resampled
over points: the trials of a point at several batch sizes share their initial weights. Four points are needed.

10. L rises with sparsity: L(0.9) > 1.1 L(0). Paper, Simple-CNN on MNIST: 0.57, 0.72, 0.81, 1.76 at 0, 50, 70, 90 %.
11. The gradient variance falls: beta(0.9) <= beta(0) / 1.1. Paper: x0.54.
12. The loss to go stays: Delta within a factor of 1.1. Paper: x1.00.
13. The theory tells the steps of small batches: the ratio of the fitted c1 is that of Delta beta L, within a factor of
    1.5. Paper: x1.67. The terms may come from a study of their own, of the same workload and update rule.

The claims 10 to 12 are on the direction; the sizes are those of one workload, and told beside the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lit_dps.analysis.scaling import REPLICATES, FittedStudy
from lit_dps.analysis.summary import setting
from lit_dps.analysis.text import significant
from lit_dps.analysis.theory import RATIOS, Pair, measured_terms, paired_terms
from lit_dps.record import StudyRecord
from lit_dps.replication.claims_sparse import RULE, compares, trained
from lit_dps.replication.rules import (
    DENSE,
    FEWEST,
    MARGIN,
    SEED,
    SPARSE,
    Finding,
    Verdict,
    decide,
    estimated,
    fit_ratio,
)

AGREES = 1.5  # factor within which a predicted ratio tells the measured one


def lipschitz_rises(study: FittedStudy) -> Finding | None:
    """Claim 10; None without measurements at both sparsities."""
    finding = _term(study, "lipschitz", "L", above=MARGIN)
    if finding is None:
        return None
    known = {s: terms for s in study.record.sparsities if (terms := measured_terms(study.record, s))}
    common = set.intersection(*(set(terms) for terms in known.values()))
    if not common:
        return finding
    means = [math.exp(float(np.mean([math.log(terms[key].lipschitz) for key in common]))) for terms in known.values()]
    levels = f"{' / '.join(map(significant, means))} at S={' / '.join(f'{s:g}' for s in known)}"
    return finding._replace(measured=f"{finding.measured}; L = {levels}")


def variance_falls(study: FittedStudy) -> Finding | None:
    """Claim 11; None without measurements at both sparsities."""
    return _term(study, "beta", "beta", to=1 / MARGIN)


def loss_stays(study: FittedStudy) -> Finding | None:
    """Claim 12; None without measurements at both sparsities."""
    return _term(study, "delta", "Delta", above=1 / MARGIN, to=MARGIN)


def theory_tells(study: FittedStudy, other: FittedStudy) -> Finding | None:
    """Claim 13, of terms measured in one study and laws fitted in another, or in the same.

    None without measurements at both sparsities, without laws in another study, or where the two do not train the same
    by the same rule.
    """
    pairs, rules = _pairs(study.record), [setting(s.record.config, RULE) for s in (study, other)]
    if (
        not pairs
        or not compares(other.record)
        or rules[0] != rules[1]
        or trained(study.record) != trained(other.record)
    ):
        return None
    if other is not study and None in (other.scalings[DENSE].fit, other.scalings[SPARSE].fit):
        return None
    value, drawn = _log_ratio(pairs, "delta", "beta", "lipschitz")
    predicted = estimated(value, drawn).map(math.exp)
    fitted = fit_ratio(other.scalings[SPARSE], other.scalings[DENSE], lambda c1, c2: c1)
    if fitted is None:
        return Finding(Verdict.UNDECIDABLE, f"Delta beta L x{predicted}, no fitted c1 at both sparsities")
    count = min(len(drawn), len(fitted[1]))
    quotient = estimated(fitted[0] / math.exp(value), fitted[1][:count] / np.exp(drawn[:count]))
    words = f"Delta beta L x{predicted}, fitted c1 x{estimated(*fitted)}: x{quotient} of the predicted"
    return Finding(decide(quotient, above=1 / AGREES, to=AGREES), words)


def _pairs(record: StudyRecord) -> list[Pair]:
    return paired_terms(record, DENSE, SPARSE) if compares(record) else []


def _term(study: FittedStudy, name: str, symbol: str, above: float = 0.0, to: float = math.inf) -> Finding | None:
    pairs = _pairs(study.record)
    if not pairs:
        return None
    ratio = estimated(*_log_ratio(pairs, name)).map(math.exp)
    return Finding(decide(ratio, above, to), f"{symbol} x{ratio} over {len(pairs)} pairs of trials")


def _log_ratio(pairs: Sequence[Pair], *names: str) -> tuple[float, np.ndarray]:
    """Log of the mean ratio of a product of terms, and its (R,) resamples over points."""
    places = [RATIOS.index(name) for name in names]
    logs = np.array([sum(pair.log_ratios[place] for place in places) for pair in pairs])
    points, index = np.unique([pair.point for pair in pairs], return_inverse=True)
    if len(points) < FEWEST:
        return float(logs.mean()), np.full(REPLICATES, np.nan)
    sums, counts = np.bincount(index, logs), np.bincount(index)
    drawn = np.random.default_rng(SEED).integers(len(points), size=(REPLICATES, len(points)))
    return float(logs.mean()), sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
