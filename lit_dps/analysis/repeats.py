"""Repeats of a cell's best points on fresh seeds: the median K over seeds, its spread and the bias.

K* is the minimum over many trials, so it profits from its seed and from its metaparameters. With
other seeds, its point usually needs more steps (the winner's curse). K* over the median of its
point measures this bias.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from lit_dps.analysis.readings import reading_columns, reading_values
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Cell, Status, TrialResult
from lit_dps.core.unit import Cost

QUANTILES = {"least": 0.0, "lower": 0.25, "median": 0.5, "upper": 0.75, "most": 1.0}


@dataclass(frozen=True)
class RepeatSummary:
    """The repeats of one point of a cell.

    Attributes:
        cell: The cell.
        point: The point of the search.
        searched: Its trial in the search.
        rank: 1 for the point of K*, 2 for the next best one.
        results: Its finished repeats without failed ones, and without the search's trial.
        planned: The number of its repeats when all have finished. The best points at the goal of
            the study are repeated; a point that is best only at another goal has the repeats that
            exist.
        goal: The goal of the runs.
    """

    cell: Cell
    point: int
    searched: TrialResult
    rank: int
    results: Sequence[TrialResult]
    planned: int
    goal: Goal

    @property
    def searched_cost(self) -> Cost:
        """The cost to result in the search, in the unit of K*."""
        return self.searched.cost or 0

    @cached_property
    def costs_over_seeds(self) -> list[float]:
        """Costs to result, ascending; infinite for a repeat that missed the goal (censored)."""
        costs = []
        for result in self.results:
            costs.append(math.inf if result.cost is None else result.cost)
        return sorted(costs)

    @property
    def costs_or_limits(self) -> list[float]:
        """Costs to result, in the order of `results`; a lower bound for those without the goal.

        The bound is what the repeat spent, because it may have met the goal next. A repeat that
        diverged never meets the goal, so its bound is infinite.
        """
        return [result.least_cost for result in self.results]

    @property
    def missed(self) -> int:
        """The number of repeats that did not meet the goal: stopped, out of budget, or diverged."""
        return self.costs_over_seeds.count(math.inf)

    def quantile(self, q: float) -> float | None:
        """Return a quantile of the costs to result, infinite where it falls on missed ones.

        It is linear between neighbours, None without repeats, and may be an upper bound
        (`is_upper_bound`).
        """
        if not self.results:
            return None
        return quantile(self.costs_over_seeds, q)

    def is_undetermined(self, q: float) -> bool:
        """Return True if a repeat that was stopped may have met the goal below a quantile.

        For example, repeats met the goal at 300, 420 and 500 steps, and a callback stopped two
        repeats at 350 steps. The median is then between 350 and 500 steps.
        """
        most = self.quantile(q)
        if most is None or math.isinf(most):
            return False
        return quantile(sorted(self.costs_or_limits), q) < most

    def is_upper_bound(self, q: float) -> bool:
        """Return True if a quantile is only an upper bound."""
        return self.is_undetermined(q) or self.is_at_first_check(self.quantile(q))

    @property
    def median(self) -> float | None:
        """The median of the costs to result; None if it is undetermined."""
        if self.is_undetermined(0.5):
            return None
        return self.quantile(0.5)

    @property
    def finite_median(self) -> float | None:
        """The median; None if it is undetermined, or infinite as most repeats missed the goal."""
        if self.median is None or math.isinf(self.median):
            return None
        return self.median

    def median_of(self, value: Callable[[TrialResult], float | None]) -> float:
        """Return the median of a value of each repeat; nan if it is unknown of a complete one.

        Repeats that missed the goal count as infinite.
        """
        values = []
        for result in self.results:
            of_run = math.inf if result.steps is None else value(result)
            values.append(math.nan if of_run is None else of_run)
        if not values or any(map(math.isnan, values)):
            return math.nan
        return quantile(sorted(values), 0.5)

    @property
    def bias(self) -> float | None:
        """Cost in the search over the median; None if one of them is only a bound.

        It is below 1 if the seed of the search needed fewer steps than most.
        """
        median = self.finite_median
        if median is None or self.is_search_at_first_check or self.is_at_first_check(median):
            return None
        return self.searched_cost / median

    @property
    def is_search_at_first_check(self) -> bool:
        """Whether the trial of the search met the goal at the first check that can meet it."""
        return self.goal.is_at_first_check(self.searched_cost, [self.searched])

    def is_at_first_check(self, cost: float | None) -> bool:
        """Return True if a quantile of the repeats is at the first check, an upper bound."""
        return self.goal.is_at_first_check(cost, self.results)

    @property
    def check_cost(self) -> float:
        """Cost between the check that met the goal and the check before, median; 0 if unknown."""
        costs = []
        for result in self.results:
            if result.steps is not None:
                interval = self.goal.check_interval
                costs.append(result.unit.last_interval(result.curve, result.steps, interval))
        return float(statistics.median(costs)) if costs else 0.0


def quantile(ascending: Sequence[float], q: float) -> float:
    """Return a quantile, linear between neighbours; the last values may be infinite."""
    position = q * (len(ascending) - 1)
    index = math.floor(position)
    share = position - index
    low = ascending[index]
    if share == 0 or math.isinf(low):
        return low
    return low + share * (ascending[index + 1] - low)


def summarize_repeats(
    record: StudyRecord, cells: Iterable[CellSummary], original: StudyRecord | None = None
) -> list[RepeatSummary]:
    """Return the repeats of each cell's best points, by series, batch size, then rank.

    Args:
        record: The study, perhaps at another goal than the one it was run with.
        cells: Its cells.
        original: The study at the goal it was run with, whose best points are repeated; by default
            the same.
    """
    if original is None:
        original = record
    summaries = []
    for summary in cells:
        cell = summary.cell
        planned_points = _best_points(original, cell)
        for rank, (point, searched) in enumerate(_best_points(record, cell).items(), 1):
            results = _repeats_of(record, cell, point)
            planned = len(results)
            if point in planned_points:
                planned = max(record.plan.count, planned)
            summaries.append(
                RepeatSummary(
                    cell=cell,
                    point=point,
                    searched=searched,
                    rank=rank,
                    results=results,
                    planned=planned,
                    goal=record.goal,
                )
            )
    return summaries


def _repeats_of(record: StudyRecord, cell: Cell, point: int) -> list[TrialResult]:
    """Return the finished repeats of a point without failed ones."""
    results = []
    for result in record.repeats.get(cell, ()):
        if result.trial.point == point and result.status is not Status.FAILED:
            results.append(result)
    return results


def _best_points(record: StudyRecord, cell: Cell) -> dict[int, TrialResult]:
    """Return the trials of a cell whose points are repeated, by point, the best first."""
    if not record.plan.count:
        return {}
    trials = {}
    complete = []
    for result in record.results_without_failed(cell):
        if result.cost is not None:
            trials[result.trial.point] = result
            complete.append((result.cost, result.trial.point))
    points = record.plan.best_points(complete, record.statistic)
    return {point: trials[point] for point in points}


def repeat_rows(record: StudyRecord, repeats: Iterable[RepeatSummary]) -> pd.DataFrame:
    """Return one row a repeated point, by series, batch size, then rank.

    Columns: sparsity and further axes, batch_size [examples], rank (1: the point of K*), point,
    steps (its steps to result in the search), repeats, missed; least, lower, median, upper and most
    (the quartiles) [steps] over seeds, inf for a repeat that missed the goal; floor (1 where the
    median is only an upper bound); bias, steps / median; NAME_median, the median of each reading
    over the repeats that have it.
    """
    rows = []
    read_columns = reading_columns(record)
    for each in repeats:
        row = {
            **columns_of(each.cell.series),
            "batch_size": each.cell.batch_size,
            "rank": each.rank,
            "point": each.point,
            "steps": each.searched_cost,
            "repeats": len(each.results),
            "missed": each.missed,
        }
        for name, q in QUANTILES.items():
            row[name] = each.quantile(q)
        row["floor"] = int(each.is_upper_bound(0.5))
        row["bias"] = each.bias
        read = pd.DataFrame(map(reading_values, each.results), columns=pd.Index(read_columns))
        row |= read.median().add_suffix("_median").to_dict()
        rows.append(row)
    columns = [*columns_of(record.series[0]), "batch_size", "rank", "point", "steps", "repeats"]
    columns += ["missed", *QUANTILES, "floor", "bias", *(f"{name}_median" for name in read_columns)]
    return frame(rows, columns)


def all_runs_are_equal(record: StudyRecord, repeated: RepeatSummary) -> bool:
    """Return True if all repeats of a point have the curve of its trial in the search.

    Losses are compared if they are recorded, because errors may be bounds.
    """
    curves = []
    for result in record.results[repeated.cell]:
        if result.trial.point == repeated.point:
            curves.append(_comparable_curve(result))
    if not curves:
        return False
    curves += map(_comparable_curve, repeated.results)
    return bool(curves[0][0]) and curves.count(curves[0]) == len(curves)


def _comparable_curve(result: TrialResult) -> tuple[Any, Any]:
    """Return the steps of a trial's checks, and its losses; without losses its entire curve."""
    return result.curve.get("step"), result.curve.get("train_loss") or result.curve
