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

from lit_dps.analysis.scaling import FittedStudy, Scaling, three_digits
from lit_dps.analysis.summary import setting
from lit_dps.record import StudyRecord
from lit_dps.replication.rules import (
    DENSE,
    MARGIN,
    SPARSE,
    Finding,
    Verdict,
    at_each,
    decide,
    estimated,
    fit_ratio,
    k_star_draws,
    log_ratio,
)
from lit_dps.trial import Cell

FEW_STEPS, MANY_STEPS = 1.5, 4.5
RULE, SGD, MOMENTUM = "model.init_args.optimizer", "sgd", "momentum"


def steps_of_sparse(study: FittedStudy) -> Finding | None:
    """Claim 4; None for a study without both sparsities."""
    if not compares(study.record):
        return None
    dense, sparse = (study.scalings[s].k_star for s in (DENSE, SPARSE))
    both = [b for b in dense if b in sparse]
    told = f"{len(both)} of the {len(dense)} batch sizes with a dense K* have a sparse one"
    bounds = study.scalings[DENSE].at_first_check | study.scalings[SPARSE].at_first_check
    if left := [b for b in both if b in bounds]:
        told += f", at {len(left)} of these one is at the first check"
        both = [b for b in both if b not in bounds]
    if not both or len(both) < len(dense) / 2:
        return Finding(Verdict.UNDECIDABLE, told)
    ratios = [sparse[b] / dense[b] for b in both]
    limits = [log_ratio(*(k_star_draws(study, Cell(b, s)) for s in (SPARSE, DENSE))) for b in both]
    low, high = (np.stack(side) for side in zip(*limits, strict=True))
    mean = estimated(float(np.log(ratios).mean()), low.mean(axis=0), high.mean(axis=0)).map(lambda x: float(np.exp(x)))
    words = f"K* x{min(ratios):.3g} to x{max(ratios):.3g} over B, mean x{mean}"
    return Finding(
        decide(mean, above=FEW_STEPS, to=MANY_STEPS), words if len(both) == len(dense) else f"{words}; {told}"
    )


def critical_no_earlier(study: FittedStudy) -> Finding | None:
    """Claim 5; None for a study without both sparsities."""
    if not compares(study.record):
        return None
    return _critical(study.scalings[SPARSE], study.scalings[DENSE], "S=0.9", "S=0", 1 / MARGIN)


def critical_later(study: FittedStudy) -> Finding | None:
    """Claim 6; None for a study without both sparsities or with another update rule."""
    if not compares(study.record) or setting(study.record.config, RULE) != MOMENTUM:
        return None
    return _critical(study.scalings[SPARSE], study.scalings[DENSE], "S=0.9", "S=0", MARGIN)


def critical_of_momentum(study: FittedStudy, sgd: FittedStudy) -> Finding | None:
    """Claim 7; None unless the second study is of SGD and the first of another rule on the same workload."""
    rules = [setting(s.record.config, RULE) for s in (study, sgd)]
    shared = sorted({*study.record.sparsities} & {*sgd.record.sparsities})
    if rules[1] != SGD or rules[0] in (None, SGD) or not shared or study.record.goal.error != sgd.record.goal.error:
        return None
    if trained(study.record) != trained(sgd.record):
        return None
    return at_each(shared, lambda s: _critical(study.scalings[s], sgd.scalings[s], str(rules[0]), SGD, MARGIN))


def compares(record: StudyRecord) -> bool:
    """Whether a study has the two sparsities that the paper compares."""
    return {DENSE, SPARSE} <= {*record.sparsities}


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
