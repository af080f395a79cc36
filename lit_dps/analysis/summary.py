"""What a study has found in each cell: K*, the trial that gave it, and how the others ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd

from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.racing import best_steps
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import short_names
from lit_dps.core.trial import FINAL_STATUSES, Cell, Status, TrialResult


@dataclass(frozen=True)
class CellSummary:
    """One cell of the grid."""

    cell: Cell
    trials: Sequence[
        TrialResult
    ]  # finished, but for failed ones: how those would have ended is not known
    best: TrialResult | None  # complete, of least steps to result, the lowest point among equals
    counts: Counter[Status]  # finished trials by how they ended, failed ones among them
    pending: int  # declared trials that have not finished, started or not
    running: int  # those of them that are started or queued
    boundary: dict[
        str, Literal["low", "high"]
    ]  # the end of its range that a metaparameter of `best` lies on
    at_first_check: bool  # whether K* is only an upper bound: it is (`at_first_check`), or `sooner`
    undetermined_points: Mapping[
        int, int
    ]  # trials that are left out, of which nobody can tell (`record.untold`)
    sooner: bool  # whether one of these may have met the goal before K*

    @property
    def k_star(self) -> int | None:
        """K*, in steps (`racing.best_steps`)."""
        return best_steps(self.steps)

    @property
    def steps(self) -> list[int | None]:
        """Steps to result of `trials`; None for one that is not complete."""
        return [result.steps for result in self.trials]


def at_first_check(k_star: float | None, check_interval: int) -> bool:
    """Whether K*, in steps, is that of the first check, so that nothing says how much sooner the
    goal was met.

    Any other K* is known to a check interval: the goal was met after the check before it.
    """
    return k_star is not None and k_star <= check_interval


def comparable(result: TrialResult) -> bool:
    """Whether the means over a trial's run say how the trials of its cell train.

    Not of an infeasible trial; nor of one that an error, its module or a callback ended where the
    study would have gone on: its run is shorter than the protocol's, unlike an outraced one's by as
    much as it happened to be.
    """
    return result.status not in (Status.INFEASIBLE, Status.STOPPED, Status.FAILED)


def summarize(record: StudyRecord) -> list[CellSummary]:
    """A summary of each cell of the grid, by series, then batch size."""
    found = []
    for cell in record.cells:
        results, trials = record.results[cell], record.resolved_results(cell)
        complete = [result for result in trials if result.steps is not None]
        best = min(complete, key=lambda result: (result.steps, result.trial.point), default=None)
        params = {} if best is None else best.trial.params
        ends = {
            key: box.boundary(params[key]) for key, box in record.space.items() if key in params
        }
        k_star, undetermined_points = (
            best_steps(result.steps for result in trials),
            record.undetermined_points.get(cell, {}),
        )
        sooner = k_star is not None and min(undetermined_points.values(), default=k_star) < k_star
        known = {*undetermined_points, *(result.trial.point for result in results)}
        summary = CellSummary(
            cell=cell,
            trials=trials,
            best=best,
            counts=Counter(result.status for result in results),
            # A study may have been declared smaller than it once was: points beyond its trials are
            # no less finished.
            pending=record.trials - sum(point < record.trials for point in known),
            running=record.running[cell],
            boundary={key: end for key, end in ends.items() if end is not None},
            at_first_check=sooner or at_first_check(k_star, record.goal.check_interval),
            undetermined_points=undetermined_points,
            sooner=sooner,
        )
        found.append(summary)
    return found


def cell_rows(record: StudyRecord, cells: Iterable[CellSummary]) -> pd.DataFrame:
    """One row a cell, by series, then batch size.

    Columns: batch_size [examples], sparsity and further axes, k_star [steps], floor (1 where K* is
    an upper bound, as at the first check, else 0), complete, incomplete, infeasible, outraced,
    stopped, failed, pending, point and the metaparameters (short names) of the K* trial, boundary
    ("learning_rate high; momentum low" or empty).
    """
    names = short_names(list(record.space))

    def row(summary: CellSummary) -> dict[str, object]:
        cell, best = summary.cell, summary.best
        params = {} if best is None else best.trial.params
        return {
            "batch_size": cell.batch_size,
            **columns_of(cell.series),
            "k_star": summary.k_star,
            "floor": int(summary.at_first_check),
            **{str(status): summary.counts[status] for status in FINAL_STATUSES},
            "pending": summary.pending,
            "point": None if best is None else best.trial.point,
            **{name: params.get(key) for key, name in names.items()},
            "boundary": "; ".join(f"{names[key]} {end}" for key, end in summary.boundary.items()),
        }

    return frame(map(row, cells))


def trial_rows(record: StudyRecord, cells: Iterable[CellSummary]) -> pd.DataFrame:
    """Every finished trial, by series, batch size, then point.

    Columns: sparsity and further axes, batch_size [examples], point, status, steps (missing unless
    complete), steps_run (the last checked step), k_star (whether it is the trial that gave K*), and
    each metaparameter by its short name.
    """
    names = short_names(list(record.space))
    columns = ["batch_size", "point", "status", "steps", "steps_run", "k_star", *names.values()]
    return frame(
        (
            {
                **columns_of(summary.cell.series),
                "batch_size": summary.cell.batch_size,
                "point": result.trial.point,
                "status": str(result.status),
                "steps": result.steps,
                "steps_run": result.steps_run,
                "k_star": result is summary.best,
                **{name: result.trial.params.get(key) for key, name in names.items()},
            }
            for summary in cells
            for result in record.results[summary.cell]
        ),
        [*columns_of(record.series[0]), *columns],
    )
