"""The result of each cell: K*, the trial that gave it, and how the other trials ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.racing import best_steps
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import Range, short_names
from lit_dps.core.trial import FINAL_STATUSES, Cell, Status, TrialResult


@dataclass(frozen=True)
class CellSummary:
    """One cell of the grid.

    Attributes:
        cell: The cell.
        trials: Finished trials, but for failed ones, whose end is not known.
        best: Complete, of the fewest steps to result, the lowest point among equals.
        counts: Finished trials by how they ended, failed ones among them.
        pending: Declared trials that have not finished, started or not.
        running: The pending trials that are started or queued.
        boundary: The end of its range, by metaparameter of `best` that lies on one.
        at_first_check: Whether K* is only an upper bound: it is at the first check
            (`at_first_check`), or `sooner`.
        undetermined_points: Trials that are left out, since their steps to result are not known
            (`StudyRecord.undetermined_points`): the first step at which each may have met the goal.
        sooner: Whether one of these may have met the goal before K*.
    """

    cell: Cell
    trials: Sequence[TrialResult]
    best: TrialResult | None
    counts: Counter[Status]
    pending: int
    running: int
    boundary: dict[str, Literal["low", "high"]]
    at_first_check: bool
    undetermined_points: Mapping[int, int]
    sooner: bool

    @property
    def k_star(self) -> int | None:
        """K*, in steps (`racing.best_steps`)."""
        return best_steps(self.steps)

    @property
    def steps(self) -> list[int | None]:
        """Steps to result of `trials`; None for one that is not complete."""
        return [result.steps for result in self.trials]


def at_first_check(k_star: float | None, check_interval: float) -> bool:
    """Return True if K*, in steps, is at the first check, and so only an upper bound.

    Any other K* is exact up to a check interval: the goal was met after the check before it.
    """
    return k_star is not None and k_star <= check_interval


def comparable(result: TrialResult) -> bool:
    """Return True if the means over a trial's run describe how the trials of its cell train.

    Infeasible trials are not comparable, nor trials that an error, their module or a callback
    ended: such a run is shorter than the protocol's by an arbitrary number of steps.
    """
    return result.status not in (Status.INFEASIBLE, Status.STOPPED, Status.FAILED)


def summarize(record: StudyRecord) -> list[CellSummary]:
    """Return a summary of each cell of the grid, by series, then batch size."""
    return [_summarize_cell(record, cell) for cell in record.cells]


def _summarize_cell(record: StudyRecord, cell: Cell) -> CellSummary:
    """Return the summary of one cell."""
    results = record.results[cell]
    trials = record.resolved_results(cell)
    k_star = best_steps(result.steps for result in trials)
    fastest = [result for result in trials if k_star is not None and result.steps == k_star]
    best = min(fastest, key=lambda result: result.trial.point, default=None)
    undetermined = record.undetermined_points.get(cell, {})
    sooner = k_star is not None and min(undetermined.values(), default=k_star) < k_star
    # A study may have been declared smaller than it once was: points beyond its trials do not
    # reduce those that are pending.
    finished = {*undetermined, *(result.trial.point for result in results)}
    return CellSummary(
        cell=cell,
        trials=trials,
        best=best,
        counts=Counter(result.status for result in results),
        pending=record.trials - sum(point < record.trials for point in finished),
        running=record.running[cell],
        boundary=_boundary(record, best),
        at_first_check=sooner or at_first_check(k_star, record.goal.check_interval),
        undetermined_points=undetermined,
        sooner=sooner,
    )


def _boundary(record: StudyRecord, best: TrialResult | None) -> dict[str, Literal["low", "high"]]:
    """Return the metaparameters of the best trial that lie on an end of their range, and which."""
    if best is None:
        return {}
    boundary = {}
    for key, box in record.space.items():
        if isinstance(box, Range) and key in best.trial.params:
            end = box.boundary(float(best.trial.params[key]))
            if end is not None:
                boundary[key] = end
    return boundary


def cell_rows(record: StudyRecord, cells: Iterable[CellSummary]) -> pd.DataFrame:
    """Return one row a cell, by series, then batch size.

    Columns: batch_size [examples], sparsity and further axes, k_star [steps], floor (1 where K* is
    an upper bound, as at the first check, else 0), complete, incomplete, infeasible, outraced,
    stopped, failed, pending, point and the metaparameters (short names) of the K* trial, boundary
    ("learning_rate high; momentum low" or empty).
    """
    names = short_names(list(record.space))
    rows = []
    for summary in cells:
        best = summary.best
        params = {} if best is None else best.trial.params
        row = {
            "batch_size": summary.cell.batch_size,
            **columns_of(summary.cell.series),
            "k_star": summary.k_star,
            "floor": int(summary.at_first_check),
        }
        row |= {str(status): summary.counts[status] for status in FINAL_STATUSES}
        row["pending"] = summary.pending
        row["point"] = None if best is None else best.trial.point
        row |= {name: params.get(key) for key, name in names.items()}
        ends = [f"{names[key]} {end}" for key, end in summary.boundary.items()]
        row["boundary"] = "; ".join(ends)
        rows.append(row)
    return frame(rows)


def trial_rows(record: StudyRecord, cells: Iterable[CellSummary]) -> pd.DataFrame:
    """Return one row a finished trial, by series, batch size, then point.

    Columns: sparsity and further axes, batch_size [examples], point, status, steps (missing unless
    complete), steps_run (the last checked step), k_star (whether it is the trial that gave K*),
    each metaparameter by its short name, engine (the loop that trained it) and engine_reason (why
    no faster loop did).
    """
    names = short_names(list(record.space))
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
            row |= {name: result.trial.params.get(key) for key, name in names.items()}
            row |= {"engine": result.engine, "engine_reason": result.engine_reason}
            rows.append(row)
    columns = [*columns_of(record.series[0]), "batch_size", "point", "status", "steps"]
    return frame(
        rows, [*columns, "steps_run", "k_star", *names.values(), "engine", "engine_reason"]
    )
