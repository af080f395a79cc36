"""The paper's claims on critical batch sizes (Lee et al. 2021, Section 3.1), as c1 / c2 of the
fitted laws.

6. The critical batch size at 90 % comes no earlier: B_crit(0.9) > B_crit(0) / 1.1.
7. With momentum it comes later: B_crit(0.9) > 1.1 B_crit(0).
8. Momentum (and Nesterov) has a larger critical batch size than SGD on the same data, network,
   schedule and goal (Figure 2): B_crit > 1.1 times, at every sparsity that both studies have.

B_crit has to be identifiable below the line; above it, where it may lie beyond the largest batch
size, the lower limit decides. A law that misses what it is fitted to tells no B_crit
(`rules.misfits`).
"""

from __future__ import annotations

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.law_bootstrap import Scaling
from lit_dps.analysis.tables import three_digits
from lit_dps.core.record import setting
from lit_dps.core.trial import Series
from lit_dps.replication.claims_scaling import medians_note
from lit_dps.replication.compared import RULE, alike, goal_of
from lit_dps.replication.rules import (
    MARGIN,
    Finding,
    Verdict,
    at_each,
    at_each_pair,
    curves,
    decide,
    estimated,
    fit_ratio,
    if_reached,
    misfits,
)

SGD, MOMENTUM = "sgd", "momentum"


def critical_no_earlier(study: Analysis) -> Finding | None:
    """Claim 6; None for a study without both sparsities."""
    return _critical_of_sparse(study, 1 / MARGIN)


def critical_later(study: Analysis) -> Finding | None:
    """Claim 7; None for a study without both sparsities or with another update rule."""
    return (
        _critical_of_sparse(study, MARGIN)
        if setting(study.record.config, RULE) == MOMENTUM
        else None
    )


def critical_of_momentum(study: Analysis, sgd: Analysis) -> Finding | None:
    """Claim 8; None unless the second study is of SGD and the first of another rule on the same
    workload.

    None for a study of one batch size, too.
    """
    rules = [setting(s.record.config, RULE) for s in (study, sgd)]
    shared = [series for series in study.record.series if series in sgd.scalings]
    if rules[1] != SGD or rules[0] in (None, SGD) or not shared:
        return None
    if min(len(each.record.batch_sizes) for each in (study, sgd)) < 2:
        return None
    if not alike(study.record, sgd.record) or goal_of(study.record) != goal_of(sgd.record):
        return None

    def judge(series: Series) -> Finding:
        laws = [curves(each, series)[0] for each in (study, sgd)]
        if len({law.of_medians for law in laws}) > 1:  # a K* is luckier than a median
            laws = [each.scalings[series] for each in (study, sgd)]
        return _critical(*laws, str(rules[0]), SGD, MARGIN)

    return at_each(shared, judge)


def _critical_of_sparse(study: Analysis, least: float) -> Finding | None:
    return at_each_pair(
        study,
        lambda over, under: _critical(*curves(study, over, under), str(over), str(under), least),
    )


def _critical(over: Scaling, under: Scaling, name: str, other: str, least: float) -> Finding:
    said = f"{_words(over)} at {name}, {_words(under)} at {other}{medians_note(over)}"
    ratio = fit_ratio(over, under, lambda c1, c2: c1 / c2)
    if ratio is None or not under.identifiable:
        return Finding(Verdict.UNDECIDABLE, said)
    number = estimated(*ratio)
    if off := misfits({name: over, other: under}):
        return Finding(Verdict.UNDECIDABLE, f"{said}, x{number}; {off}")
    return Finding(if_reached(decide(number, above=least), over.identifiable), f"{said}, x{number}")


def _words(scaling: Scaling) -> str:
    if scaling.fit is None:
        return f"no law ({scaling.describe()})"
    if scaling.identifiable:
        return scaling.describe().removesuffix(", below the smallest batch size")
    return f"B_crit > {three_digits(scaling.bound)}"
