"""The paper's claims on K* against batch size, sparsity and update rules (Lee et al. 2021, Section 3.1).

The first three, on the regimes of Figure 1, are judged by the local exponent e of K* ~ B^e between two batch sizes,
which needs no fitted law: -1 is perfect scaling, 0 a plateau. K* is known to one check interval; the intervals allow
for that. Batch sizes whose K* is at the first check, an upper bound, are left out.

1. Linear scaling: e <= -0.8 over the first two doublings from the smallest batch size.
2. Diminishing returns: a run needs more than 1.1 times the examples B K* at the largest batch size that it needs at
   the smallest.
3. Plateau: K* falls by less than 10 % a doubling, e > log2(0.9), over the last two doublings. Not decidable where
   B_crit is not identifiable (`Scaling.identifiable`).

These are about small, larger and large enough batches. A study that does not get there cannot refute them, so they are
"not seen" only where it does: its smallest batch size is at most B_crit / 8 or the paper's 2 (for 1), its largest at
least the paper's 16,384 (for 2 and 3) or 8 B_crit (for 3). At 8 B_crit the law c1 / B + c2 itself falls by 10 % a
doubling; from B_crit / 8 on its exponent over two doublings is -0.8.

4. A 90 % sparse network needs 1.5 to 4.5 times the steps (Figure 12): judged by the geometric mean of the ratios of K*,
   0.9 over 0, over the batch sizes that have both; their range is told. Not decidable where fewer than half of the
   batch sizes with a dense K* have a sparse one. Batch sizes where one of the two is at the first check are left out.
5. The critical batch size at 90 % comes no earlier: B_crit(0.9) > B_crit(0) / 1.1.
6. With momentum it comes later: B_crit(0.9) > 1.1 B_crit(0).
7. Momentum (and Nesterov) has a larger critical batch size than SGD on the same data, network, schedule and goal
   (Figure 2): B_crit > 1.1 times, at every sparsity that both studies have.

B_crit has to be identifiable below the line; above it, where it may lie beyond the largest batch size, the lower limit
decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from lit_dps.analysis import Analysis, Scaling, cell_of, setting, three_digits
from lit_dps.record import StudyRecord
from lit_dps.replication.rules import (
    MARGIN,
    Estimate,
    Finding,
    Verdict,
    at_each,
    at_each_pair,
    curves,
    decide,
    estimated,
    fit_ratio,
    k_star_draws,
    log_ratio,
)
from lit_dps.trial import Series

LINEAR, FLAT = -0.8, math.log2(0.9)
SMALLEST, LARGEST = 2, 16384  # batch sizes of the paper
REACH = 8  # times B_crit
DOUBLINGS = 4  # two of them, as a factor
FEW_STEPS, MANY_STEPS = 1.5, 4.5
RULE, SGD, MOMENTUM = "model.init_args.optimizer", "sgd", "momentum"
RATES = ("learning_rate", "momentum")  # of the update rule


def linear_scaling(study: Analysis) -> Finding | None:
    """Claim 1; None for a study of one batch size."""

    def judge(series: Series, scaling: Scaling, sizes: list[int]) -> Finding:
        small = sizes[0]
        large = max([b for b in sizes if small < b <= DOUBLINGS * small], default=sizes[1])
        number = exponent(study, series, small, large)
        reached = small <= SMALLEST or (scaling.identifiable and REACH * small <= scaling.fit.critical_batch_size)
        verdict = _within(decide(number, to=LINEAR), reached)
        return Finding(verdict, f"K* goes as B^e from B={small} to B={large}, e = {number}")

    return _at_each_law(study, judge)


def diminishing_returns(study: Analysis) -> Finding | None:
    """Claim 2; None for a study of one batch size."""

    def judge(series: Series, scaling: Scaling, sizes: list[int]) -> Finding:
        small, large = sizes[0], sizes[-1]
        examples = exponent(study, series, small, large).map(lambda e: (large / small) ** (1 + e))
        verdict = _within(decide(examples, above=MARGIN), large >= LARGEST)
        return Finding(verdict, f"examples at B={large} over those at B={small}: x{examples}")

    return _at_each_law(study, judge)


def plateau(study: Analysis) -> Finding | None:
    """Claim 3; None for a study of one batch size."""

    def judge(series: Series, scaling: Scaling, sizes: list[int]) -> Finding:
        large = sizes[-1]
        small = min([b for b in sizes if large / DOUBLINGS <= b < large], default=sizes[-2])
        number = exponent(study, series, small, large)
        said = f"K* a doubling from B={small} to B={large}: x{number.map(lambda e: 2**e)}"
        if not scaling.identifiable:
            return Finding(Verdict.UNDECIDABLE, f"{said}; B_crit {scaling.describe().removeprefix('B_crit ')}")
        reached = large >= LARGEST or large >= REACH * scaling.fit.critical_batch_size
        said = f"{said}, up to {large / scaling.fit.critical_batch_size:.2g} B_crit"
        return Finding(_within(decide(number, above=FLAT), reached), said)

    return _at_each_law(study, judge)


def exponent(study: Analysis, series: Series, small: int, large: int) -> Estimate:
    """e of K* ~ B^e between two batch sizes that have a K* beyond the first check."""
    (law,), octaves = curves(study, series), math.log(large / small)
    k_star, cells = law.resolved, [cell_of(series, batch_size) for batch_size in (large, small)]
    low, high = log_ratio(*(k_star_draws(study, cell, law.of_medians) for cell in cells))
    return estimated(math.log(k_star[large] / k_star[small]) / octaves, low / octaves, high / octaves)


def _at_each_law(study: Analysis, judge: Callable[[Series, Scaling, list[int]], Finding]) -> Finding | None:
    """The findings on each series, from its law and the batch sizes that the law is fitted to, as one."""
    if len(study.record.batch_sizes) < 2:
        return None

    def judged(series: Series) -> Finding:
        (scaling,) = curves(study, series)
        sizes = list(scaling.resolved)
        if len(sizes) < 2:
            found = Finding(Verdict.UNDECIDABLE, f"K* at {len(sizes)} batch sizes")
        else:
            found = judge(series, scaling, sizes)
        found = found._replace(measured=found.measured + _of_medians(scaling))
        left = len(scaling.at_first_check)
        return found._replace(measured=f"{found.measured}; {left} at the first check left out") if left else found

    return at_each(study.record.series, judged)


def _within(verdict: Verdict, reached: bool) -> Verdict:
    return Verdict.UNDECIDABLE if verdict is Verdict.NOT_SEEN and not reached else verdict


def steps_of_sparse(study: Analysis) -> Finding | None:
    """Claim 4; None for a study without both sparsities."""

    def judge(sparse: Series, dense: Series) -> Finding:
        laws = curves(study, sparse, dense)
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
        pairs = [[cell_of(series, b) for series in (sparse, dense)] for b in both]
        limits = [log_ratio(*(k_star_draws(study, cell, laws[0].of_medians) for cell in pair)) for pair in pairs]
        low, high = (np.mean(side, axis=0) for side in zip(*limits, strict=True))
        mean = estimated(float(np.log(ratios).mean()), low, high).map(lambda x: float(np.exp(x)))
        words = f"K* x{min(ratios):.3g} to x{max(ratios):.3g} over B, mean x{mean}{_of_medians(laws[0])}"
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
    """Claim 7; None unless the second study is of SGD and the first of another rule on the same workload.

    None for a study of one batch size, too.
    """
    rules = [setting(s.record.config, RULE) for s in (study, sgd)]
    shared = [series for series in study.record.series if series in sgd.scalings]
    if rules[1] != SGD or rules[0] in (None, SGD) or not shared:
        return None
    if min(len(each.record.batch_sizes) for each in (study, sgd)) < 2:
        return None
    if not alike(study.record, sgd.record) or _goal(study.record) != _goal(sgd.record):
        return None

    def judge(series: Series) -> Finding:
        laws = [curves(each, series)[0] for each in (study, sgd)]
        if len({law.of_medians for law in laws}) > 1:  # a K* is luckier than a median
            laws = [each.scalings[series] for each in (study, sgd)]
        return _critical(*laws, str(rules[0]), SGD, MARGIN)

    return at_each(shared, judge)


def _critical_of_sparse(study: Analysis, least: float) -> Finding | None:
    return at_each_pair(study, lambda over, under: _critical(*curves(study, over, under), str(over), str(under), least))


def _goal(record: StudyRecord) -> tuple:
    return str(record.goal), record.goal.check_interval


def _critical(over: Scaling, under: Scaling, name: str, other: str, least: float) -> Finding:
    said = f"{_words(over)} at {name}, {_words(under)} at {other}{_of_medians(over)}"
    ratio = fit_ratio(over, under, lambda c1, c2: c1 / c2)
    if ratio is None or not under.identifiable:
        return Finding(Verdict.UNDECIDABLE, said)
    number = estimated(*ratio)
    return Finding(_within(decide(number, above=least), over.identifiable), f"{said}, x{number}")


def _of_medians(scaling: Scaling) -> str:
    return " (medians)" if scaling.of_medians else ""


def _words(scaling: Scaling) -> str:
    if scaling.fit is None:
        return f"no law ({scaling.describe()})"
    if scaling.identifiable:
        return scaling.describe().removesuffix(", below the smallest batch size")
    return f"B_crit > {three_digits(scaling.bound)}"


def trained(record: StudyRecord) -> dict[str, object]:
    """What was trained on what, how it was pruned, and by which schedule, but for the update rule and its goal.

    The values that a configuration gives, by key, and not those that were searched. Configurations of earlier versions
    lack keys, which are then at their defaults: compare what both have.
    """
    found = {key: setting(record.config, key) for key in ("data.class_path", "model.class_path")}
    for section in ("data.init_args", "model.init_args", "pruning", "optim", "local"):
        found |= _leaves(setting(record.config, section), section)
    found.setdefault("model.init_args.schedule", "constant")
    apart = {"batch_size", "root", "sparsity", "optimizer", *RATES, *(key.rsplit(".", 1)[-1] for key in record.space)}
    return {key: value for key, value in found.items() if key.rsplit(".", 1)[-1] not in apart}


def alike(record: StudyRecord, other: StudyRecord) -> bool:
    """Whether two studies trained the same (`trained`)."""
    ours, theirs = trained(record), trained(other)
    return all(ours[key] == theirs[key] for key in ours.keys() & theirs.keys())


def _leaves(node: object, name: str) -> dict[str, object]:
    if not isinstance(node, Mapping):
        return {name: node}
    return {key: leaf for part, value in node.items() for key, leaf in _leaves(value, f"{name}.{part}").items()}
