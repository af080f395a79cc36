"""Quantities of the metaparameter search (Lee et al. 2021, Section 3.2, Figure 3).

Both are Spearman's rank correlations with the batch size, over at least `MIN_SAMPLES` batch sizes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lit_dps import Series, Status, StudyRecord, TrialResult
from lit_dps.analysis import RATE_NAMES, REPLICATES, Analysis, Interval, cell_of, significant
from lit_dps.core.paper_protocol import protocol_of
from lit_dps.replication.estimates import MIN_SAMPLES, Estimate, estimate_of
from lit_dps.replication.rules import Measurement, Measurements

_SEED = 0
_NORMAL_975 = 1.959964  # quantile of the normal distribution
MOMENTUM = "momentum"
# The flag of a trial whose rate changes by a schedule.
_SCHEDULE_FLAG = "schedule_steps"
# Arguments of `ImageClassifier` that make its schedule, and their defaults.
_SCHEDULE_DEFAULTS = {"schedule": "constant", "decay_steps": 40_000, "end_factor": 0.01}


def rate_trend(study: Analysis) -> Measurements | None:
    """Return the rank correlation of the best learning rate with B, in each series.

    The rate is the learning rate of the K* trial. If momentum is searched too, it is the effective
    rate, rate / (1 - momentum). The best point is known even if trials stop at K*. The interval
    follows from the scatter of the best rates around the trend, which includes the noise of the
    search (`correlation_interval`). Batch sizes whose K* is only an upper bound are omitted,
    because the best of their trials is unknown.

    A rate that decays counts twice: at its start, as in the paper, and by its mean over the K*
    steps. The mean is a larger share of the start where K* is smaller. The interval covers both, so
    the claim is decided only if both agree. The trend is unknown if the values of the schedule are
    unknown.

    Returns:
        None unless exactly one learning rate is searched, and for a study of one batch size.
    """
    rates = searched_keys(study.record, *RATE_NAMES)
    if len(rates) != 1 or len(study.record.batch_sizes) < 2:
        return None
    name = "best learning rate"
    momentum_key = None
    momenta = searched_keys(study.record, MOMENTUM)
    if momenta:
        name = "best effective learning rate"
        momentum_key = momenta[0]
    measurements = {}
    for series in study.record.series:
        best_rates = _best_rates(study, series, rates[0], momentum_key)
        shares = _mean_shares(study, series, list(best_rates))
        measurements[str(series)] = _rate_trend(
            name, best_rates, shares, len(study.record.batch_sizes)
        )
    return measurements


def _best_rates(
    study: Analysis, series: Series, rate_key: str, momentum_key: str | None
) -> dict[int, float]:
    """Return the known (effective) learning rates of the K* trials, by batch size."""
    rates = {}
    for batch_size in study.record.batch_sizes:
        summary = study.by_cell[cell_of(series, batch_size)]
        if summary.best is None or summary.is_upper_bound:
            continue
        params = summary.best.trial.params
        momentum = 0.0
        if momentum_key is not None:
            momentum = float(params[momentum_key])
        rates[batch_size] = float(params[rate_key]) / (1 - momentum)
    return rates


def _mean_shares(
    study: Analysis, series: Series, batch_sizes: Sequence[int]
) -> dict[int, float] | None:
    """Return the mean learning rate of the K* trials over its start, by batch size.

    Returns:
        1 for constant rates; None if an unknown schedule changes the rate of a trial.
    """
    shares = {}
    for batch_size in batch_sizes:
        best = study.by_cell[cell_of(series, batch_size)].best
        assert best is not None and best.steps is not None
        settings = {}
        for name, default in _SCHEDULE_DEFAULTS.items():
            settings[name] = _model_value(study.record, series, best, name, default)
        warmup = _model_value(study.record, series, best, "warmup_steps", 0)
        if settings["schedule"] == "linear" and not warmup:
            shares[batch_size] = mean_share_of_linear(
                best.steps, float(settings["decay_steps"]), float(settings["end_factor"])
            )
        elif _SCHEDULE_FLAG in best.flags:
            return None
        else:
            shares[batch_size] = 1.0
    return shares


def _model_value(
    record: StudyRecord, series: Series, result: TrialResult, name: str, default: Any
) -> Any:
    """Return an argument of the model of a trial; the default if it is not set."""
    for values in (result.trial.params, dict(series.axes)):
        for key, value in values.items():
            if key in (f"model.{name}", f"model.init_args.{name}"):
                return value
    value = record.setting(f"model.init_args.{name}")
    return default if value is None else value


def mean_share_of_linear(steps: int, decay_steps: float, end_factor: float) -> float:
    """Return the mean rate of the first steps of a linear decay, over the rate at its start.

    Args:
        steps: The number of steps.
        decay_steps, end_factor: As in `lit_dps.optim.schedule.factor`.
    """
    progress = np.minimum(np.arange(steps), decay_steps) / decay_steps
    return float(1 - (1 - end_factor) * progress.mean())


def _rate_trend(
    name: str, rates: Mapping[int, float], shares: Mapping[int, float] | None, batch_sizes: int
) -> Measurement:
    """Return the rank correlation of the best rates of a series with B."""
    if len(rates) < MIN_SAMPLES:
        known = f"{len(rates)} of {batch_sizes} batch sizes"
        return Measurement(f"the {name} is known at {known}; {MIN_SAMPLES} are needed")
    if shares is None:
        return Measurement(
            f"the {name} is unknown, because a custom schedule changes it along trials"
        )
    notes = ()
    if len(rates) < batch_sizes:
        notes = (f"unknown at {batch_sizes - len(rates)} of {batch_sizes} batch sizes",)
    # Batch sizes with one best point have one rate by construction, so they count once.
    points = len(set(rates.values()))
    if points < MIN_SAMPLES:
        best = "1 point is the best one" if points == 1 else f"{points} points are the best ones"
        return Measurement(f"{best} at all {len(rates)} batch sizes; {MIN_SAMPLES} are needed")
    at_start = _trend(list(rates.values()), points)
    first, last = min(rates), max(rates)
    ends_at_start = f"{significant(rates[first])}, {significant(rates[last])}"
    if min(shares.values()) >= 1:
        sentence = (
            f"rank correlation of the {name} with B, and the rates at B={first} and B={last}: "
            f"{at_start}, {ends_at_start}"
        )
        return Measurement(sentence, at_start, notes=notes)
    mean_rates = {}
    for batch_size, rate in rates.items():
        mean_rates[batch_size] = rate * shares[batch_size]
    of_mean = _trend(list(mean_rates.values()), points)
    both = Interval(
        min(at_start.interval.low, of_mean.interval.low),
        max(at_start.interval.high, of_mean.interval.high),
    )
    sentence = (
        f"the {name} decays along trials; its rank correlation with B, and the rates at B={first} "
        f"and B={last}: {at_start}, {ends_at_start} at its start, and {of_mean}, "
        f"{significant(mean_rates[first])}, {significant(mean_rates[last])} on average up to K*"
    )
    return Measurement(sentence, Estimate(at_start.value, both), notes=notes)


def _trend(rates: Sequence[float], count: int) -> Estimate:
    """Return the rank correlation of rates with their order, where `count` are independent."""
    rho = float(rank_correlation(np.array([rates]))[0])
    return Estimate(rho, correlation_interval(rho, count))


def correlation_interval(rho: float, count: int) -> Interval:
    """Return the 95 % interval of Spearman's rank correlation of at least 4 pairs.

    Fisher's z has the variance (1 + rho^2 / 2) / (n - 3) (Bonett and Wright 2000, Eq. 4). In
    perfect order z would be infinite. There rho is replaced by the mean of 1 and the next lower
    possible correlation.
    """
    largest = 1 - 6 / (count**3 - count)
    z = math.atanh(min(max(rho, -largest), largest))
    half_width = _NORMAL_975 * math.sqrt((1 + rho**2 / 2) / (count - 3))
    low = math.tanh(z - half_width)
    high = math.tanh(z + half_width)
    return Interval(min(rho, low), max(rho, high))


def success_trend(study: Analysis) -> Measurements | None:
    """Return the rank correlation of the share of complete trials with B, in each series.

    A trial is complete if it met the goal within the step budget, which is the same in all cells.
    The share is over the points that have finished in all cells. The correlation is unknown if all
    trials or no trials are complete. With a small budget, the share grows merely because K* falls
    with B. So the budget is reported beside the paper's. The interval resamples the trials of each
    cell, without failed trials.

    Returns:
        None for a study of one batch size, and for a raced study (study.race_factor), whose trials
        end before the budget.
    """
    if len(study.record.batch_sizes) < 2 or study.record.race_factor is not None:
        return None
    measurements = {}
    for series in study.record.series:
        measurements[str(series)] = _success_trend(study, series)
    return measurements


def _success_trend(study: Analysis, series: Series) -> Measurement:
    trials = _trials_of_shared_points(study, series)
    complete = {}
    shares = []
    drawn_shares = []
    for batch_size, results in trials.items():
        is_complete = [result.status is Status.COMPLETE for result in results]
        complete[batch_size] = np.array(is_complete, bool)
        shares.append(np.mean(is_complete))
        drawn_shares.append(_resampled_shares(complete[batch_size], batch_size))
    by_budget = budget_text(study.record)
    if max(shares) == 0:
        return Measurement(f"no trials are {by_budget}")
    if min(shares) == 1:
        return Measurement(f"all trials are {by_budget}")
    points = len(next(iter(trials.values())))
    if min(points, len(trials)) < MIN_SAMPLES:
        finished = f"{points} points have finished at all {len(trials)} batch sizes"
        return Measurement(f"{finished}; {MIN_SAMPLES} points and batch sizes are needed")
    rho = float(rank_correlation(np.array([shares]))[0])
    draws = rank_correlation(np.stack(drawn_shares, axis=1))
    number = estimate_of(rho, draws).map(lambda x: min(max(x, -1.0), 1.0))
    sentence = (
        f"rank correlation of the share of trials {by_budget} with B: {number}, {_ends(complete)}"
    )
    notes = ()
    relative = _complete_by_twice_k_star(study, series, trials)
    if len(relative) > 1:
        notes = (f"share complete by 2 K* of each batch size, {_ends(relative)}",)
    return Measurement(sentence, number, notes=notes)


def _trials_of_shared_points(study: Analysis, series: Series) -> dict[int, list[TrialResult]]:
    """Return the trials of a series by batch size, for points that finished at every batch size."""
    by_point: dict[int, dict[int, TrialResult]] = {}
    for batch_size in study.record.batch_sizes:
        for result in study.by_cell[cell_of(series, batch_size)].trials:
            by_point.setdefault(result.trial.point, {})[batch_size] = result
    trials: dict[int, list[TrialResult]] = {}
    for batch_size in study.record.batch_sizes:
        trials[batch_size] = []
    for results in by_point.values():
        if len(results) == len(trials):
            for batch_size, result in results.items():
                trials[batch_size].append(result)
    return trials


def budget_text(record: StudyRecord) -> str:
    """Return by which step trials count as complete, with the paper's budget if it differs."""
    text = f"complete by step {record.goal.max_steps:,}"
    paper = protocol_of(record.config)
    if paper is not None and paper.max_steps != record.goal.max_steps:
        text += f" (the paper's budget is {paper.max_steps:,})"
    return text


def _complete_by_twice_k_star(
    study: Analysis, series: Series, trials: Mapping[int, Sequence[TrialResult]]
) -> dict[int, np.ndarray]:
    """Return which trials are complete by twice the K* of their cell, by batch size.

    A limit that is proportional to K* causes no trend. Batch sizes with a limit beyond the budget
    of the study are omitted, because the trials are unknown there.
    """
    complete = {}
    for batch_size, results in trials.items():
        k_star = study.by_cell[cell_of(series, batch_size)].k_star_steps
        if not k_star or 2 * k_star > study.record.goal.max_steps:
            continue
        is_complete = []
        for result in results:
            is_complete.append(result.steps is not None and result.steps <= 2 * k_star)
        complete[batch_size] = np.array(is_complete, bool)
    return complete


def _resampled_shares(complete: np.ndarray, batch_size: int) -> np.ndarray:
    """Return the shares (R,) of complete trials in resamples of some trials (n,)."""
    count = len(complete)
    random = np.random.default_rng((_SEED, batch_size))
    chosen = random.integers(count, size=(REPLICATES, count))
    return complete[chosen].mean(axis=1)


def _ends(complete: Mapping[int, np.ndarray]) -> str:
    """Return the shares of complete trials at the smallest and the largest batch size, as text."""
    first, last = min(complete), max(complete)
    first_share = significant(float(complete[first].mean()))
    last_share = significant(float(complete[last].mean()))
    return f"from {first_share} at B={first} to {last_share} at B={last}"


def rank_correlation(values: np.ndarray) -> np.ndarray:
    """Return Spearman's rank correlation of each row of values (R, n) with the column numbers.

    Missing values are nan.

    Returns:
        (R,) in [-1, 1]; 0 if all values are equal, since there is no trend; nan for rows with fewer
        than `MIN_SAMPLES` values.
    """
    is_known = np.isfinite(values)
    order = np.where(is_known, np.arange(values.shape[1]), np.nan)
    x = _centered_ranks(values)
    y = _centered_ranks(order)
    scale = np.sqrt((x**2).sum(axis=1) * (y**2).sum(axis=1))
    rho = np.divide((x * y).sum(axis=1), scale, out=np.zeros(len(values)), where=scale > 0)
    return np.where(is_known.sum(axis=1) >= MIN_SAMPLES, rho, np.nan)


def _centered_ranks(values: np.ndarray) -> np.ndarray:
    """Return the ranks in each row (R, n) minus their mean; ties have their mean rank."""
    ranks = pd.DataFrame(values).where(np.isfinite(values)).rank(axis=1)
    return ranks.sub(ranks.mean(axis=1), axis=0).fillna(0).to_numpy()


def searched_keys(record: StudyRecord, *names: str) -> list[str]:
    """Return the keys of the search space that end in one of some names."""
    return [key for key in record.space if key.rpartition(".")[2] in names]
