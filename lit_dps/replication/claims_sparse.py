"""The paper's claims on sparsity and update rules (Lee et al. 2021, Section 3.1, Figures 1, 2 and 12).

4. A 90 % sparse network needs 1.5 to 4.5 times the steps: judged by the geometric mean of the ratios of K*, 0.9 over 0,
   over the batch sizes that have both; their range is told. Not decidable where fewer than half of the batch sizes with
   a dense K* have a sparse one. Batch sizes where one of the two is at the first check are left out: a bound.
5. The critical batch size at 90 % comes no earlier: B_crit(0.9) > B_crit(0) / 1.1.
6. With momentum it comes later: B_crit(0.9) > 1.1 B_crit(0).
7. Momentum (and Nesterov) has a larger critical batch size than SGD on the same data, network, schedule and goal:
   B_crit > 1.1 times, at every sparsity that both studies have.

B_crit has to be identifiable below the line; above it, where it may lie beyond the largest batch size, the lower limit
decides.
"""

from __future__ import annotations

import numpy as np

from lit_dps.analysis import Analysis, Scaling, cell_of, setting, three_digits
from lit_dps.record import StudyRecord
from lit_dps.replication.rules import (
    MARGIN,
    Finding,
    Verdict,
    at_each,
    at_each_pair,
    decide,
    estimated,
    fit_ratio,
    k_star_draws,
    log_ratio,
)
from lit_dps.trial import Series

FEW_STEPS, MANY_STEPS = 1.5, 4.5
RULE, SGD, MOMENTUM = "model.init_args.optimizer", "sgd", "momentum"


def steps_of_sparse(study: Analysis) -> Finding | None:
    """Claim 4; None for a study without both sparsities."""

    def judge(sparse: Series, dense: Series) -> Finding:
        laws = study.scalings[sparse], study.scalings[dense]
        over, under = (law.k_star for law in laws)
        both = [b for b in under if b in over]
        told = f"{len(both)} of the {len(under)} batch sizes with a dense K* have a sparse one"
        bounds = laws[0].at_first_check | laws[1].at_first_check
        if left := [b for b in both if b in bounds]:
            told += f", at {len(left)} of these one is at the first check"
            both = [b for b in both if b not in bounds]
        if not both or len(both) < len(under) / 2:
            return Finding(Verdict.UNDECIDABLE, told)
        ratios = [over[b] / under[b] for b in both]
        limits = [log_ratio(*(k_star_draws(study, cell_of(series, b)) for series in (sparse, dense))) for b in both]
        low, high = (np.mean(side, axis=0) for side in zip(*limits, strict=True))
        mean = estimated(float(np.log(ratios).mean()), low, high).map(lambda x: float(np.exp(x)))
        words = f"K* x{min(ratios):.3g} to x{max(ratios):.3g} over B, mean x{mean}"
        whole = words if len(both) == len(under) else f"{words}; {told}"
        return Finding(decide(mean, above=FEW_STEPS, to=MANY_STEPS), whole)

    return at_each_pair(study, judge)


def critical_no_earlier(study: Analysis) -> Finding | None:
    """Claim 5; None for a study without both sparsities."""
    return _critical_of_sparse(study, 1 / MARGIN)


def critical_later(study: Analysis) -> Finding | None:
    """Claim 6; None for a study without both sparsities or with another update rule."""
    return _critical_of_sparse(study, MARGIN) if setting(study.record.config, RULE) == MOMENTUM else None


def critical_of_momentum(study: Analysis, sgd: Analysis) -> Finding | None:
    """Claim 7; None unless the second study is of SGD and the first of another rule on the same workload."""
    rules = [setting(s.record.config, RULE) for s in (study, sgd)]
    shared = [series for series in study.record.series if series in sgd.scalings]
    if rules[1] != SGD or rules[0] in (None, SGD) or not shared or str(study.record.goal) != str(sgd.record.goal):
        return None
    if trained(study.record) != trained(sgd.record):
        return None
    return at_each(shared, lambda s: _critical(study.scalings[s], sgd.scalings[s], str(rules[0]), SGD, MARGIN))


def _critical_of_sparse(study: Analysis, least: float) -> Finding | None:
    laws = study.scalings
    return at_each_pair(study, lambda over, under: _critical(laws[over], laws[under], str(over), str(under), least))


def _critical(over: Scaling, under: Scaling, name: str, other: str, least: float) -> Finding:
    said = f"{_words(over)} at {name}, {_words(under)} at {other}"
    ratio = fit_ratio(over, under, lambda c1, c2: c1 / c2)
    if ratio is None or not under.identifiable:
        return Finding(Verdict.UNDECIDABLE, said)
    number = estimated(*ratio)
    verdict = decide(number, above=least)
    if verdict is Verdict.NOT_SEEN and not over.identifiable:
        verdict = Verdict.UNDECIDABLE
    return Finding(verdict, f"{said}, x{number}")


def _words(scaling: Scaling) -> str:
    if scaling.fit is None:
        return f"no law ({scaling.describe()})"
    if scaling.identifiable:
        return scaling.describe().removesuffix(", below the smallest batch size")
    return f"B_crit > {three_digits(scaling.bound)}"


def trained(record: StudyRecord) -> list[object]:
    """What was trained on what, and by which schedule, but for the update rule."""
    data = dict(setting(record.config, "data.init_args") or {})
    data.pop("batch_size", None)
    schedule = setting(record.config, "model.init_args.schedule") or "constant"
    network = setting(record.config, "model.init_args.network")
    return [setting(record.config, "data.class_path"), data, network, schedule]
