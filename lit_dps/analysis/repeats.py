"""Repeats of a cell's best points on fresh seeds: the median K over seeds, its spread and the bias.

K* is the least of many trials, so it is lucky in its seed as well as good in its metaparameters:
run again on other seeds, its point usually needs more steps. K* over the median of its own point
measures this winner's curse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from lit_dps.analysis.summary import CellSummary, at_first_check
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Cell, Series, Status, TrialResult

QUANTILES = {"least": 0.0, "lower": 0.25, "median": 0.5, "upper": 0.75, "most": 1.0}


@dataclass(frozen=True)
class RepeatSummary:
    """The repeats of one point of a cell.

    Attributes:
        cell: The cell.
        point, steps: The point, and its steps to result in the search, which it was chosen by.
        rank: 1 for the point of K*, 2 for the next best one.
        results: Its finished repeats but for failed ones, without the search's own trial.
        asked: How many of them there will be. The best points at the study's own goal are repeated;
            a point that is best only at another goal has the repeats that exist.
        check_interval: Steps between two checks.
    """

    cell: Cell
    point: int
    steps: int
    rank: int
    results: Sequence[TrialResult]
    asked: int
    check_interval: int

    @cached_property
    def steps_over_seeds(self) -> list[float]:
        """Steps to result, ascending; infinite for a repeat that missed the goal (censored)."""
        return sorted(math.inf if result.steps is None else result.steps for result in self.results)

    @property
    def steps_or_limit(self) -> list[float]:
        """Steps to result, ascending; a lower bound, the longest run, for those that missed."""
        longest = max((result.steps_run for result in self.results), default=0)
        return [min(k, float(longest)) for k in self.steps_over_seeds]

    @property
    def missed(self) -> int:
        """The number of repeats that did not meet the goal: stopped, out of budget, or diverged."""
        return sum(map(math.isinf, self.steps_over_seeds))

    def quantile(self, q: float) -> float | None:
        """Return a quantile of the steps to result, infinite where it falls on missed ones.

        Linear between neighbours. None without repeats.
        """
        if not self.results:
            return None
        return quantile(self.steps_over_seeds, q)

    @property
    def median(self) -> float | None:
        """The median of the steps to result."""
        return self.quantile(0.5)

    @property
    def bias(self) -> float | None:
        """Steps in the search over the median; None if one of the two is only a bound.

        Below 1 the search was lucky.
        """
        median = self.median
        if median is None or math.isinf(median):
            return None
        if at_first_check(self.steps, self.check_interval) or median <= self.check_interval:
            return None
        return self.steps / median


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
    record: StudyRecord, cells: Iterable[CellSummary], own_goal: StudyRecord | None = None
) -> list[RepeatSummary]:
    """Return the repeats of each cell's best points, by series, batch size, then rank.

    Args:
        record, cells: The study, perhaps at another goal than its own.
        own_goal: The study at its own goal, whose best points are repeated; by default the same.
    """
    summaries = []
    for summary in cells:
        best = _best(record, summary.cell)
        planned = best
        if own_goal is not None:
            planned = _best(own_goal, summary.cell)
        repeats = record.repeats.get(summary.cell, ())
        for rank, (point, steps) in enumerate(best.items(), 1):
            results = []
            for result in repeats:
                if result.trial.point == point and result.status is not Status.FAILED:
                    results.append(result)
            count = record.plan.count if point in planned else 0
            summaries.append(
                RepeatSummary(
                    cell=summary.cell,
                    point=point,
                    steps=steps,
                    rank=rank,
                    results=results,
                    asked=max(count, len(results)),
                    check_interval=record.goal.check_interval,
                )
            )
    return summaries


def _best(record: StudyRecord, cell: Cell) -> dict[int, int]:
    """Return the steps to result of a cell's best points, which are repeated, the best first."""
    if not record.plan.count:
        return {}
    results = record.resolved_results(cell)
    steps = {r.trial.point: r.steps for r in results if r.steps is not None}
    best = record.plan.best_points((k, point) for point, k in steps.items())
    return {point: steps[point] for point in best}


def repeat_rows(record: StudyRecord, repeats: Iterable[RepeatSummary]) -> pd.DataFrame:
    """Return one row a repeated point, by series, batch size, then rank.

    Columns: sparsity and further axes, batch_size [examples], rank (1: the point of K*), point,
    steps (its steps to result in the search), repeats, missed; least, lower, median, upper and most
    (the quartiles) [steps] over seeds, inf where that is a missed one; floor (1 where the median is
    at the first check, an upper bound); bias, steps / median.
    """
    rows = []
    for each in repeats:
        row = {
            **columns_of(each.cell.series),
            "batch_size": each.cell.batch_size,
            "rank": each.rank,
            "point": each.point,
            "steps": each.steps,
            "repeats": len(each.results),
            "missed": each.missed,
        }
        row |= {name: each.quantile(q) for name, q in QUANTILES.items()}
        row["floor"] = int(each.median is not None and each.median <= each.check_interval)
        row["bias"] = each.bias
        rows.append(row)
    columns = [*columns_of(record.series[0]), "batch_size", "rank", "point", "steps", "repeats"]
    return frame(rows, [*columns, "missed", *QUANTILES, "floor", "bias"])


def seeds_of(repeats: Sequence[RepeatSummary]) -> dict[Series, dict[int, list[float]]]:
    """Return the steps over seeds of each K* point, by series and batch size.

    They are infinite for a repeat that missed the goal. Cells most of whose repeats missed the goal
    are left out, since their median is not known.
    """
    seeds: dict[Series, dict[int, list[float]]] = {}
    for each in repeats:
        if each.rank == 1 and each.median is not None and math.isfinite(each.median):
            by_batch_size = seeds.setdefault(each.cell.series, {})
            by_batch_size[each.cell.batch_size] = each.steps_over_seeds
    return seeds


def all_runs_are_equal(record: StudyRecord, repeated: RepeatSummary) -> bool:
    """Return True if all repeats of a point ran as its trial of the search did, by their losses.

    Errors may be bounds, so losses are compared where there are any.
    """
    runs = [r for r in record.results[repeated.cell] if r.trial.point == repeated.point]
    if not runs:
        return False
    curves = []
    for result in (*runs, *repeated.results):
        values = result.curve.get("train_loss") or result.curve
        curves.append((result.curve.get("step"), values))
    return all(curve == curves[0] and curve[0] for curve in curves)
