"""The result of each cell: K*, the trial that gave it, and how the other trials ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from lit_dps.analysis.readings import reading_columns, reading_values
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.racing import best_trial
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import Range, expand_range
from lit_dps.core.trial import FINAL_STATUSES, Cell, Series, Status, TrialResult
from lit_dps.core.unit import EXAMPLES, STEPS, Cost


@dataclass(frozen=True)
class CellSummary:
    """One cell of the grid.

    Attributes:
        cell: The cell.
        trials: Finished trials without failed ones, which will run again.
        k_star: K*, by default the fewest steps to result of any complete trial (Lee et al. 2021,
            Section 2; `StudyRecord.statistic`), or another cost (`goal.unit`); None if too few
            trials are complete.
        k_star_steps: K* in steps (`StudyRecord.k_star_steps`).
        best: The trial of K* (`lit_dps.core.statistic.Statistic.ranking`); None without a K*.
        counts: Finished trials by how they ended, with failed ones.
        pending: Declared trials that have not finished, started or not.
        running: The pending trials that are started or queued.
        boundary: Metaparameters of `best` on an end of their range, and which end.
        is_upper_bound: Whether K* is only an upper bound: it is at the first check, or
            `may_be_lower`, or `has_few_trials`.
        undetermined_points: Trials that are skipped, since their costs are unknown
            (`StudyRecord.undetermined_points`): the lowest cost that each may have.
        may_be_lower: Whether K* may be lower, because of undetermined trials.
        may_have_k_star: Whether there is no K*, and undetermined trials may give the cell one.
        is_at_first_check: Whether K* is at the first check that can meet the goal.
        has_few_trials: Whether K* is of less than half of the declared trials. A search proceeds to
            better rates, so K* of few trials is too high. Failed trials have no result, since they
            run again.
        check_cost: Cost of `best` between the check that met the goal and the check before.
    """

    cell: Cell
    trials: Sequence[TrialResult]
    k_star: Cost | None
    k_star_steps: Cost | None
    best: TrialResult | None
    counts: Counter[Status]
    pending: int
    running: int
    boundary: dict[str, Literal["low", "high"]]
    is_upper_bound: bool
    undetermined_points: Mapping[int, Cost]
    may_be_lower: bool
    may_have_k_star: bool
    is_at_first_check: bool
    has_few_trials: bool
    check_cost: Cost

    @property
    def costs(self) -> list[Cost | None]:
        """The costs of `trials`; None for a trial that is not complete."""
        return [result.cost for result in self.trials]

    @property
    def has_exact_k_star(self) -> bool:
        """Whether there is a K* that is no upper bound."""
        return self.k_star is not None and not self.is_upper_bound


def by_series(cells: Iterable[CellSummary]) -> dict[Series, list[CellSummary]]:
    """Return cells by series, in their order."""
    groups: dict[Series, list[CellSummary]] = {}
    for summary in cells:
        groups.setdefault(summary.cell.series, []).append(summary)
    return groups


def is_comparable(result: TrialResult) -> bool:
    """Return True if means over a trial's run describe how the trials of its cell train.

    Infeasible trials do not compare. Trials that an error, their module or a callback ended do not
    either, since such a run is shorter than the protocol's by an arbitrary number of steps.
    """
    return result.status not in (Status.INFEASIBLE, Status.STOPPED, Status.FAILED)


def summarize(record: StudyRecord) -> list[CellSummary]:
    """Return a summary of each cell of the grid, by series, then batch size."""
    return [_summarize_cell(record, cell) for cell in record.cells]


def _summarize_cell(record: StudyRecord, cell: Cell) -> CellSummary:
    """Return the summary of one cell."""
    results = record.results[cell]
    trials = record.results_without_failed(cell)
    costs = [result.cost for result in trials]
    k_star = record.statistic.k_star(costs)
    best = best_trial(trials, record.statistic)
    undetermined = record.undetermined_points.get(cell, {})
    lowest = record.statistic.k_star([*costs, *undetermined.values()])
    may_be_lower = False
    check_cost: Cost = 0
    if k_star is not None and best is not None and best.steps is not None:
        may_be_lower = lowest is not None and lowest < k_star
        check_cost = best.unit.last_interval(best.curve, best.steps, record.goal.check_interval)
    is_first = record.goal.is_at_first_check(k_star, trials)
    counts = Counter()
    finished = set(undetermined)
    for result in results:
        counts[result.status] += 1
        finished.add(result.trial.point)
    # Not the number of trials less the finished points: a study may have been declared smaller
    # than before, and some of its points are then beyond its trials.
    pending = len(set(range(record.trials)) - finished)
    has_few_trials = k_star is not None and 2 * len(trials) < record.trials
    return CellSummary(
        cell=cell,
        trials=trials,
        k_star=k_star,
        k_star_steps=record.k_star_steps(cell),
        best=best,
        counts=counts,
        pending=pending,
        running=record.running[cell],
        boundary=_boundary(record, best),
        is_upper_bound=may_be_lower or is_first or has_few_trials,
        undetermined_points=undetermined,
        may_be_lower=may_be_lower,
        may_have_k_star=k_star is None and lowest is not None,
        is_at_first_check=is_first,
        has_few_trials=has_few_trials,
        check_cost=check_cost,
    )


def _boundary(record: StudyRecord, best: TrialResult | None) -> dict[str, Literal["low", "high"]]:
    """Return the metaparameters of a trial on an end of their range, and which end."""
    if best is None:
        return {}
    boundary = {}
    for key, box in record.space.items():
        if isinstance(box, Range) and key in best.trial.params:
            end = box.boundary(float(best.trial.params[key]))
            if end is not None:
                boundary[key] = end
    return boundary


def boundary_texts(record: StudyRecord, best: TrialResult | None) -> list[str]:
    """Return the metaparameters of a trial on an end of their range: ["learning_rate low"]."""
    names = record.short_names
    return [f"{names[key]} {end}" for key, end in _boundary(record, best).items()]


def movable_ends(record: StudyRecord, best: TrialResult | None) -> list[str]:
    """Return the metaparameters of a trial on a movable end of their range: ["momentum high"]."""
    texts = []
    for key, end in _boundary(record, best).items():
        if can_move(record, key, end):
            texts.append(f"{record.short_names[key]} {end}")
    return texts


def can_move(record: StudyRecord, key: str, end: str) -> bool:
    """Return True if an end of the range of a metaparameter can be moved outward."""
    box = record.space[key]
    assert isinstance(box, Range)  # choices have no ends
    return expand_range(box, [end]) != box


def cell_rows(record: StudyRecord, cells: Iterable[CellSummary]) -> pd.DataFrame:
    """Return one row a cell, by series, then batch size.

    Columns: batch_size [examples], sparsity and further axes, k_star [steps] (in another unit with
    the column unit), floor (1 where K* is an upper bound, as at the first check, else 0), complete,
    incomplete, infeasible, outraced, stopped, failed, pending, point and the metaparameters (short
    names) of the K* trial, boundary
    ("learning_rate high; momentum low" or empty), and the readings of the K* trial at its goal.
    """
    names = record.short_names
    read_columns = reading_columns(record)
    rows = []
    for summary in cells:
        best = summary.best
        point, params, read = None, {}, {}
        if best is not None:
            point, params = best.trial.point, best.trial.params
            read = reading_values(best)
        row = {
            "batch_size": summary.cell.batch_size,
            **columns_of(summary.cell.series),
            "k_star": summary.k_star,
            **unit_column(record),
            "floor": int(summary.is_upper_bound),
        }
        for status in FINAL_STATUSES:
            row[str(status)] = summary.counts[status]
        row["pending"] = summary.pending
        row["point"] = point
        for key, name in names.items():
            row[name] = params.get(key)
        row["boundary"] = "; ".join(boundary_texts(record, best))
        for name in read_columns:
            row[name] = read.get(name)
        rows.append(row)
    return frame(rows)


def unit_column(record: StudyRecord) -> dict[str, str]:
    """Return the column of a table that names the unit of K*; none if it is steps."""
    unit = record.goal.cost_unit
    return {} if unit is STEPS else {"unit": unit.name}


def trial_rows(record: StudyRecord, cells: Iterable[CellSummary]) -> pd.DataFrame:
    """Return one row a finished trial, by series, batch size, then point.

    Columns: sparsity and further axes, batch_size [examples], point, status, steps (missing unless
    complete), steps_run (the last checked step), k_star (whether it is the trial that gave K*),
    each metaparameter by its short name, engine (the loop that trained it) and engine_reason (why
    no faster loop did), and each reading: its last value, up to the goal for a complete trial, or
    at steps_run if it is a reading at the end.
    Where trials count them, also the examples or seconds of training up to the goal (missing unless
    complete): under a budget or a K* in this unit, and the examples of a batch that changes along a
    trial.
    """
    names = record.short_names
    read_columns = reading_columns(record)

    def is_constant(series: Series) -> bool:
        return record.batch_schedule(series).is_constant

    units = list(record.goal.counted)
    if EXAMPLES.column not in units and not all(map(is_constant, record.series)):
        units.append(EXAMPLES.column)
    rows = []
    for summary in cells:
        for result in record.results[summary.cell]:
            row = {
                **columns_of(summary.cell.series),
                "batch_size": summary.cell.batch_size,
                "point": result.trial.point,
                "status": str(result.status),
                "steps": result.steps,
                "steps_run": result.steps_run,
                "k_star": result is summary.best,
            }
            for unit in units:
                row[unit] = _spent_to_goal(record, summary.cell, result, unit)
            for key, name in names.items():
                row[name] = result.trial.params.get(key)
            row["engine"] = result.engine
            row["engine_reason"] = result.engine_reason
            read = {**reading_values(result), **result.end_readings}
            for name in read_columns:
                row[name] = read.get(name)
            rows.append(row)
    columns = [*columns_of(record.series[0]), "batch_size", "point", "status", "steps"]
    columns += ["steps_run", "k_star", *units, *names.values(), "engine", "engine_reason"]
    columns += read_columns
    return frame(rows, columns)


def _spent_to_goal(record: StudyRecord, cell: Cell, result: TrialResult, unit: str) -> float | None:
    """Return the examples or seconds of training of a trial up to its goal; None if unknown."""
    if result.steps is None:
        return None
    if unit == EXAMPLES.column:
        return record.examples_of(cell, result.steps, result)
    return record.spent_at(result, unit, result.steps)
