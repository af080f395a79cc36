"""The remaining work of a study: trials and repeats, and their steps.

Expected steps rest on finished trials of the study, else on probes of advice, and on laws.
"""

from __future__ import annotations

import math
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
    """Return what is stored of a study; None without anything.

    Trials and repeats end at the factors of this run, if these are larger than the stored ones.
    """
    study = setup.study
    return _read(setup.storage.optuna_url, study.name, study.race_factor, study.repeat_slack)


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
        text += ", scaled in proportion to K*"
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
            here, there = law.predict([cell.batch_size, batch_size])["steps"]
            if not math.isnan(here / there):
                return float(here / there)
        return 1.0

    return ratio


def _has_result(record: StudyRecord) -> bool:
    """Return True if a trial has finished that did not fail."""
    return any(record.results_without_failed(cell) for cell in record.cells)


def _read(
    url: str, name: str, min_race_factor: float | None = 0.0, min_repeat_slack: float | None = 0.0
) -> StudyRecord | None:
    """Return a stored study (`read_study`); None if it is not stored."""
    file = sqlite_file(url)
    if file is not None and not file.exists():
        return None
    if name not in list_studies(url):
        return None
    return read_study(url, name, min_race_factor=min_race_factor, min_repeat_slack=min_repeat_slack)


Points = Mapping[Cell, Collection[int]]  # the points of each cell that are still to run


@dataclass(frozen=True)
class Runs:
    """The trials, or the repeats, that remain in a cell.

    Attributes:
        count: Their number.
        most_steps: The optimizer steps that each of them takes at most.
        expected_steps: The steps that each of them is expected to take; None if it is unknown.
        starts: How often each of them starts at most: once, and again after each rung.
    """

    count: int
    most_steps: float
    expected_steps: float | None = None
    starts: int = 1


def remaining_trials(
    points: Points,
    most_steps: Mapping[Cell, float],
    record: StudyRecord | None,
    ratio: StepRatio,
) -> dict[Cell, Runs]:
    """Return the trials that remain in each cell.

    They are expected to take the mean steps of the finished trials of the nearest batch size,
    however these ended, except for failed ones.

    Args:
        points: The points that are still to run, of every cell.
        most_steps: Steps of a trial at most, by cell.
        record: The record of finished trials (`nearest_record`); None without any.
        ratio: Of the steps of a cell to the steps of its series at another batch size.
    """
    mean = None
    if record is not None:
        mean = mean_of_nearest_batch_size(_steps_run(record, record.results), points, ratio)
    counts = {cell: len(remaining) for cell, remaining in points.items()}
    return _runs(counts, most_steps, mean)


def remaining_repeats(
    plan: RepeatPlan,
    points: Points,
    most_steps: Mapping[Cell, float],
    record: StudyRecord | None,
    basis: StudyRecord | None,
    ratio: StepRatio,
) -> dict[Cell, Runs]:
    """Return the repeats that remain in each cell.

    If trials of a cell are still to run, other points may become the best, so the entire plan
    counts. Without a K* so far, repeats run to their most steps. A finished cell without a K* has
    nothing to repeat. Repeats are expected to take the mean steps of finished repeats of the
    nearest batch size; without any the mean K* there; without a K* the mean of finished trials.

    Args:
        plan: What is repeated.
        points, most_steps, ratio: As of `remaining_trials`.
        record: What is stored of the study; None without anything.
        basis: The record of finished trials (`nearest_record`).
    """
    counts = {}
    limits = {}
    for cell, remaining in points.items():
        counts[cell] = _missing_repeats(plan, cell, record)
        if remaining:
            counts[cell] = plan.count * plan.points
        limits[cell] = most_steps[cell]
        if record is not None:
            limit = min(plan.limit(record.k_star_steps(cell)), most_steps[cell])
            # A repeat stops at the first validation at or after its limit.
            interval = record.goal.check_interval
            limits[cell] = min(math.ceil(limit / interval) * interval, most_steps[cell])
    mean = None
    if basis is not None:
        repeats = _steps_run(basis, basis.repeats)
        for steps in (repeats, _k_stars(basis), _steps_run(basis, basis.results)):
            if mean is None:
                mean = mean_of_nearest_batch_size(steps, points, ratio)
    return _runs(counts, limits, mean)


def mean_of_nearest_batch_size(
    values: Mapping[Cell, Iterable[float]], cells: Iterable[Cell], ratio: StepRatio
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


def _runs(
    counts: Mapping[Cell, int],
    most_steps: Mapping[Cell, float],
    expected_steps: Mapping[Cell, float] | None,
) -> dict[Cell, Runs]:
    """Return the runs of each cell; expected steps are limited to the most steps."""
    runs = {}
    for cell, count in counts.items():
        expected = None
        if expected_steps is not None:
            expected = min(expected_steps[cell], most_steps[cell])
        runs[cell] = Runs(count, most_steps[cell], expected)
    return runs


def _steps_run(
    record: StudyRecord, results: Mapping[Cell, Sequence[TrialResult]]
) -> dict[Cell, list[float]]:
    """Return how many steps each finished trial ran, without failed ones, by trained cell."""
    steps: dict[Cell, list[float]] = {}
    for cell in record.trained_cells:
        steps[cell] = []
        for result in results.get(cell, ()):
            if result.status is not Status.FAILED:
                steps[cell].append(result.steps_run)
    return steps


def _k_stars(record: StudyRecord) -> dict[Cell, list[float]]:
    """Return K* of each cell that has one, in steps, as a list of one value."""
    k_stars: dict[Cell, list[float]] = {}
    for cell in record.trained_cells:
        k_star = record.k_star_steps(cell)
        if k_star is not None:
            k_stars[cell] = [k_star]
    return k_stars


def _missing_repeats(plan: RepeatPlan, cell: Cell, record: StudyRecord | None) -> int:
    """Return how many repeats of a cell's best points so far must still run."""
    if record is None:
        return 0
    results = record.results.get(cell, ())
    return len(missing_repeats(plan, results, record.repeats.get(cell, ()), record.statistic))
