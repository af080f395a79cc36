"""The remaining work of a study: trials and repeats, their steps and validations, and pruning.

Expected steps rest on finished trials of the study, else on probes of advice, and on laws.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.law import Law
from lit_dps.core.record import StudyRecord
from lit_dps.core.repeats import RepeatPlan, missing_repeats
from lit_dps.core.text import counted
from lit_dps.core.trial import Cell, Series, Status, TrialResult
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.storage.read import list_studies, read_study
from lit_dps.storage.schema import PROBES_SUFFIX
from lit_dps.storage.urls import sqlite_file
from lit_dps.study.setup import StudySetup

# The ratio of a quantity of a cell to the same quantity at another batch size.
StepRatio = Callable[[Cell, int], float]
# Parts of an identity that two studies with the same K* share.
_SHARED_BY_PROBES = ("model", "data", "goal", "pruning", "optim", "local", "batch")


def stored_record(setup: StudySetup) -> StudyRecord | None:
    """Return what is stored of a study; None without anything."""
    return _read(setup.storage.optuna_url, setup.study.name)


def nearest_record(setup: StudySetup, record: StudyRecord | None) -> StudyRecord | None:
    """Return the record whose trials an expectation rests on.

    The record of the study if it has a finished trial, else the record of its probes of advice.
    These must have the same module, data and goal, and the same race, so that trials end equally
    soon.

    Args:
        setup: The study.
        record: What is stored of it.

    Returns:
        `record` without such probes.
    """
    if record is not None and _has_result(record):
        return record
    url = setup.storage.optuna_url
    probes = _read(url, f"{setup.study.name}{PROBES_SUFFIX}")
    if probes is None or probes.race_factor != setup.study.race_factor:
        return record
    if probes.statistic.name != setup.study.statistic:
        return record
    stored: Mapping = AdviceStore(url, setup.study.name).read().get("configuration", {})
    identity = setup.identity(None)
    is_same = all(stored.get(key) == identity.get(key) for key in _SHARED_BY_PROBES)
    if is_same and _has_result(probes):
        return probes
    return record


def forecast_basis(
    setup: StudySetup, record: StudyRecord | None, laws: Mapping[Series, Law]
) -> str:
    """Return which trials an expectation rests on, in words.

    Args:
        setup: The study.
        record: The record of these trials (`nearest_record`).
        laws: The laws that their steps are scaled by.
    """
    count = 0
    if record is not None:
        count = sum(len(record.results_without_failed(cell)) for cell in record.trained_cells)
    trials = counted(count, "finished trial")
    if record is not None and record.name != setup.study.name:
        trials = f"{counted(count, 'finished probe')} of lit-dps advise"
        if any(setup.study.sparsities):
            trials += " on the dense network"
    text = f"the mean steps at the nearest batch size, of {trials}"
    if laws:
        text += ", scaled by the law of K*"
    return text


def laws_of(record: StudyRecord | None) -> dict[Series, Law]:
    """Return the law of each series that has K* at enough batch sizes."""
    if record is None:
        return {}
    laws = {}
    for series, law in Analysis(record).laws.items():
        if law.fit is not None and not math.isnan(law.reach[0]):
            laws[series] = law
    return laws


def ratio_by_laws(laws: Mapping[Series, Law]) -> StepRatio:
    """Return the ratio of steps at two batch sizes of a series, by a law.

    A series without a law has the ratio of the first one with a law. The ratio is 1 if no law
    reaches both batch sizes. Trials take steps in proportion to K*: in a race they run to a
    multiple of it.
    """

    def ratio(cell: Cell, batch_size: int) -> float:
        candidates = list(laws.values())
        if cell.series in laws:
            candidates.insert(0, laws[cell.series])
        for law in candidates:
            low, high = law.reach
            if low <= min(cell.batch_size, batch_size) and max(cell.batch_size, batch_size) <= high:
                return float(law.steps(cell.batch_size) / law.steps(batch_size))
        return 1.0

    return ratio


def _has_result(record: StudyRecord) -> bool:
    """Return True if a trial has finished that did not fail."""
    return any(record.results_without_failed(cell) for cell in record.cells)


def _read(url: str, name: str) -> StudyRecord | None:
    """Return a stored study; None if it is not stored."""
    file = sqlite_file(url)
    if file is not None and not file.exists():
        return None
    if name not in list_studies(url):
        return None
    return read_study(url, name)


Points = Mapping[Cell, Collection[int]]  # the points of each cell that are still to run


@dataclass(frozen=True)
class Work:
    """Trials, their optimizer steps and their validations; expected ones are no integers."""

    trials: int = 0
    steps: float = 0
    checks: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.trials + other.trials, self.steps + other.steps, self.checks + other.checks
        )


def ratio_one(cell: Cell, batch_size: int) -> float:
    """Return 1: a cell is assumed to need what the other batch size needs."""
    return 1.0


def mean_of_nearest_batch_size(
    values: Mapping[Cell, Iterable[float]], cells: Iterable[Cell], ratio: StepRatio = ratio_one
) -> dict[Cell, float] | None:
    """Return for each cell the mean of the values at the nearest batch size.

    Of two equally near batch sizes, the smaller one counts.

    Args:
        values: Values of some cells.
        cells: The cells to estimate.
        ratio: The expected ratio of a cell's value to the value at another batch size.

    Returns:
        None if there are no values.
    """
    by_size: dict[int, list[float]] = {}
    for cell, of_cell in values.items():
        by_size.setdefault(cell.batch_size, []).extend(of_cell)
    means = {size: sum(each) / len(each) for size, each in by_size.items() if each}
    if not means:
        return None
    result = {}
    for cell in cells:
        distances = [(abs(size - cell.batch_size), size) for size in means]
        nearest = min(distances)[1]
        result[cell] = means[nearest] * ratio(cell, nearest)
    return result


def total_work(works: Iterable[Work]) -> Work:
    """Return the sum of some work."""
    return sum(works, Work())


def max_work(
    points: Points, most_steps: Mapping[Cell, float], check_interval: int
) -> dict[Cell, Work]:
    """Return the work of each cell if every trial runs to its most steps."""
    return _work(_counts(points), most_steps, check_interval)


def expected_work(
    points: Points,
    results: Mapping[Cell, Sequence[TrialResult]],
    check_interval: int,
    ratio: StepRatio = ratio_one,
) -> dict[Cell, Work] | None:
    """Return the work of each cell at the mean steps of finished trials; None without any.

    The trials of the nearest batch size count, however they ended, except for failed ones.

    Args:
        points: What is still to run.
        results: What has finished.
        check_interval: Steps between two validations.
        ratio: Of the steps of a cell and of its series at the nearest batch size
            (`ratio_by_laws`).
    """
    mean = mean_of_nearest_batch_size(_steps_run(results), points, ratio)
    if mean is None:
        return None
    return _work(_counts(points), mean, check_interval)


def limited(expected: Mapping[Cell, Work], most: Mapping[Cell, Work]) -> dict[Cell, Work]:
    """Return the expected work of each cell, limited to the largest possible one."""
    works = {}
    for cell, work in expected.items():
        if work.steps > most[cell].steps:
            work = Work(work.trials, most[cell].steps, most[cell].checks)
        works[cell] = work
    return works


def max_repeat_work(
    plan: RepeatPlan,
    points: Points,
    record: StudyRecord | None,
    most_steps: Mapping[Cell, float],
    check_interval: int,
) -> dict[Cell, Work]:
    """Return the work of each cell's repeats if none of them meets the goal.

    If trials of a cell are still to run, other points may become the best, so the entire plan
    counts. Without a K* so far, repeats run to their most steps. A finished cell without a K* has
    nothing to repeat.

    Args:
        plan: What is repeated.
        points: The trials that are still to run, of every cell.
        record: What is stored of the study; None without anything.
        most_steps: Steps at which the budgets of a trial are spent, by cell.
        check_interval: Steps between two validations.
    """
    trials = {}
    steps = {}
    for cell, remaining in points.items():
        trials[cell] = _remaining_repeats(plan, cell, record)
        if remaining:
            trials[cell] = plan.count * plan.points
        k_star = None
        if record is not None:
            k_star = record.k_star_steps(cell)
        steps[cell] = most_steps[cell]
        if k_star is not None:
            steps[cell] = min(plan.limit(k_star), most_steps[cell])
    return _work(trials, steps, check_interval)


def expected_repeat_work(
    plan: RepeatPlan,
    points: Points,
    record: StudyRecord | None,
    check_interval: int,
    ratio: StepRatio = ratio_one,
) -> dict[Cell, Work] | None:
    """Return the work of each cell's repeats, if its best points stay the best.

    The steps are the mean of finished repeats of the nearest batch size; without any the mean K*
    there; without a K* the mean of finished trials. None without any of these. Arguments as of
    `max_repeat_work` and `expected_work`.
    """
    if record is None:
        return None
    k_stars = {}
    for cell in record.results:
        k_star = record.k_star_steps(cell)
        if k_star is not None:
            k_stars[cell] = [k_star]
    mean = None
    for steps in (_steps_run(record.repeats), k_stars, _steps_run(record.results)):
        if mean is None:
            mean = mean_of_nearest_batch_size(steps, points, ratio)
    if mean is None:
        return None
    trials = {}
    for cell, remaining in points.items():
        if remaining and cell not in k_stars:
            trials[cell] = plan.count * plan.points
        else:
            trials[cell] = _remaining_repeats(plan, cell, record)
    return _work(trials, mean, check_interval)


def pruning_passes(points: Points, workers: int, reuses_scores: bool) -> dict[int, int]:
    """Return the largest number of pruning passes by batch size: one for each sparse trial.

    If scores are reused, each worker computes the scores of a point once. Such passes have no batch
    size and count for the smallest one.
    """
    passes: Counter[int] = Counter()
    sparse_points = set()
    for cell, remaining in points.items():
        if cell.sparsity > 0 and remaining:
            passes[cell.batch_size] += len(remaining)
            sparse_points.update(remaining)
    if reuses_scores and passes:
        return {min(passes): min(workers * len(sparse_points), passes.total())}
    return dict(passes)


def repeat_pruning_passes(repeats: Mapping[Cell, Work]) -> dict[int, int]:
    """Return pruning passes by batch size: one for each sparse repeat, as each has its network."""
    passes: Counter[int] = Counter()
    for cell, work in repeats.items():
        if cell.sparsity > 0 and work.trials:
            passes[cell.batch_size] += work.trials
    return dict(passes)


def _work(
    trials: Mapping[Cell, int], steps: Mapping[Cell, float], check_interval: int
) -> dict[Cell, Work]:
    """Return the work of some trials of each cell, at some steps per trial."""
    works = {}
    for cell, count in trials.items():
        total_steps = count * steps[cell]
        works[cell] = Work(count, total_steps, total_steps / check_interval)
    return works


def _counts(points: Points) -> dict[Cell, int]:
    return {cell: len(remaining) for cell, remaining in points.items()}


def _steps_run(results: Mapping[Cell, Sequence[TrialResult]]) -> dict[Cell, list[float]]:
    """Return how many steps each finished trial ran, without failed ones, by cell."""
    steps: dict[Cell, list[float]] = {}
    for cell, of_cell in results.items():
        steps[cell] = []
        for result in of_cell:
            if result.status is not Status.FAILED:
                steps[cell].append(result.steps_run)
    return steps


def _remaining_repeats(plan: RepeatPlan, cell: Cell, record: StudyRecord | None) -> int:
    """Return how many repeats of a cell's best points so far must still run."""
    if record is None:
        return 0
    results = record.results.get(cell, ())
    return len(missing_repeats(plan, results, record.repeats.get(cell, ()), record.statistic))
