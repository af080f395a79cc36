"""Local SGD: communications to the goal, and how K* depends on the local steps H of a round.

In theory, K* is constant up to some H_crit and then rises (Stich 2019; Lin et al. 2020). On a
quadratic with additive noise, K* is constant for all H. So only varying curvature makes K* depend
on H.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import pandas as pd

from lit_dps.analysis.observations import has_missed
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Series, Trial

KEY = "local.steps"
SECTION = "local."
# K* is flat if it exceeds K* at the least H by at most this factor, or by at most a check interval.
FLAT = 1.25


def schedule_of(record: StudyRecord, trial: Trial) -> LocalSGDSchedule:
    """Return the schedule that a trial was trained with.

    Metaparameters of the trial override its cell, which overrides the configuration of the study.
    """
    names = {field.name for field in fields(LocalSGDSchedule)}
    arguments: dict[str, Any] = {}
    for name, value in (record.config.get("local") or {}).items():
        if name in names:
            arguments[name] = value
    for key, value in {**dict(trial.cell.axes), **trial.params}.items():
        if key.startswith(SECTION):
            arguments[key.removeprefix(SECTION)] = value
    return LocalSGDSchedule(**arguments)


def uses_local_sgd(record: StudyRecord) -> bool:
    """Return True if any cell of a study is trained by local SGD."""
    params: dict[str, Any] = {}
    for key, box in record.space.items():
        if key.startswith(SECTION):
            params[key] = box.at(0.5)
    return any(schedule_of(record, Trial(cell, 0, params)).on for cell in record.cells)


def communications(record: StudyRecord, summary: CellSummary) -> int | None:
    """Return how often the workers of the K* trial communicate in K* steps.

    See `LocalSGDSchedule.communications`. None without a K*, and for a single worker.
    """
    if summary.best is None or summary.k_star_steps is None:
        return None
    schedule = schedule_of(record, summary.best.trial)
    if schedule.workers <= 1:
        return None
    return schedule.communications(int(summary.k_star_steps))


def with_communications(
    record: StudyRecord, cells: Iterable[CellSummary], table: pd.DataFrame
) -> pd.DataFrame:
    """Return a table of cells, with the column communications if the study uses local SGD."""
    if uses_local_sgd(record):
        column = frame({"communications": communications(record, cell)} for cell in cells)
        position = table.columns.get_loc("k_star")
        assert isinstance(position, int)
        table.insert(position + 1, "communications", column["communications"])
    return table


class Point(NamedTuple):
    """K* at one number of local steps.

    Attributes:
        local_steps: H.
        k_star: K*, in steps.
        communications: Number of communications until the goal.
        is_bound: Whether K* is an upper bound (`CellSummary.is_upper_bound`).
    """

    local_steps: int
    k_star: int
    communications: int
    is_bound: bool

    def __str__(self) -> str:
        bound = ""
        relation = "="
        if self.is_bound:
            bound = "<= "
            relation = "<="
        communications = f"{bound}{self.communications} at H = {self.local_steps}"
        return f"{communications} (K* {relation} {self.k_star})"


@dataclass(frozen=True)
class LocalCurve:
    """K* against H at one batch size.

    Attributes:
        series: The series, without its H.
        batch_size: In examples.
        points: Cells with a K*, by H, ascending.
        missed: H of the cells that missed the goal (`has_missed`), ascending.
        unfinished: H of the other cells without a K*, ascending.
        check_interval: Steps between two checks.
    """

    series: Series
    batch_size: int
    points: tuple[Point, ...]
    missed: tuple[int, ...]
    unfinished: tuple[int, ...]
    check_interval: int

    @property
    def without_k_star(self) -> list[int]:
        """H of all cells without a K*, ascending."""
        return sorted((*self.missed, *self.unfinished))

    def is_flat(self, k_star: int) -> bool:
        """Return True if K* equals K* at the least H, up to chance and the check interval."""
        least = self.points[0].k_star
        return k_star <= max(FLAT * least, least + self.check_interval)

    @property
    def flat_to(self) -> int | None:
        """H_crit, the largest H up to which K* is flat; None if `least_k_star` is unknown.

        A lower bound of H_crit if the next H is undecided (`undecided_after_flat`).
        """
        if self.least_k_star is None:
            return None
        first_without = min(self.without_k_star, default=math.inf)
        flat_to = None
        for point in self.points:
            if point.local_steps > first_without or not self.is_flat(point.k_star):
                break
            flat_to = point.local_steps
        return flat_to

    @property
    def least_k_star(self) -> int | None:
        """K* at the least H; None if it is unknown or an upper bound."""
        if not self.points or self.points[0].is_bound:
            return None
        if min(self.without_k_star, default=math.inf) < self.points[0].local_steps:
            return None
        return self.points[0].k_star

    @property
    def largest(self) -> int:
        """The largest H that was tried."""
        return self.local_steps[-1]

    @property
    def local_steps(self) -> list[int]:
        """All H that were tried, ascending."""
        return sorted([*(point.local_steps for point in self.points), *self.without_k_star])

    @property
    def undecided_after_flat(self) -> int | None:
        """The H after `flat_to` if it is unfinished, or its K* an upper bound; else None."""
        if self.flat_to is None:
            return None
        larger = [steps for steps in self.local_steps if steps > self.flat_to]
        bounds = [point.local_steps for point in self.points if point.is_bound]
        if not larger or larger[0] not in (*self.unfinished, *bounds):
            return None
        return larger[0]

    def describe(self) -> str:
        """Return up to which H K* is flat, and the fewest communications, in words."""
        if len(self.points) < 2:
            return "K* is known at fewer than two H"
        first = self.points[0]
        if first.is_bound:
            flat = f"K* at H = {first.local_steps} is an upper bound, so H_crit is unknown"
        elif self.flat_to is None:
            flat = "K* at the least H is unknown, so H_crit is unknown"
        elif self.undecided_after_flat is not None:
            undecided = f"H = {self.undecided_after_flat} is unfinished"
            if self.undecided_after_flat not in self.unfinished:
                undecided = f"K* at H = {self.undecided_after_flat} is an upper bound"
            flat = f"K* is flat at least up to H = {self.flat_to}; {undecided}"
        elif self.flat_to == self.largest:
            flat = f"K* is flat up to H = {self.flat_to}, the largest H"
        else:
            flat = f"K* is flat up to H = {self.flat_to}"
        fewest = min(self.points, key=lambda point: point.communications)
        text = f"{flat}; fewest communications: {fewest}"
        if fewest != first:
            text += f", compared with {first}"
        return text


def local_curves(record: StudyRecord, cells: Iterable[CellSummary]) -> list[LocalCurve]:
    """Return K* against H of each series and batch size; empty if H is no axis."""
    by_curve: dict[tuple[Series, int], list[CellSummary]] = {}
    for summary in cells:
        series = summary.cell.series
        if KEY in dict(series.axes):
            curve = (series.without(KEY), summary.cell.batch_size)
            by_curve.setdefault(curve, []).append(summary)
    curves = []
    for (series, batch_size), summaries in sorted(by_curve.items(), key=lambda item: item[0]):
        points = []
        missed = []
        unfinished = []
        for summary in summaries:
            local_steps: Any = dict(summary.cell.axes)[KEY]
            exchanges = communications(record, summary)
            k_star = summary.k_star_steps
            if k_star is None and has_missed(summary):
                missed.append(local_steps)
            elif k_star is None:
                unfinished.append(local_steps)
            elif exchanges is not None:
                point = Point(local_steps, int(k_star), exchanges, summary.is_upper_bound)
                points.append(point)
        curves.append(
            LocalCurve(
                series,
                batch_size,
                tuple(sorted(points)),
                tuple(sorted(missed)),
                tuple(sorted(unfinished)),
                record.goal.check_interval,
            )
        )
    return curves


def local_rows(curves: Iterable[LocalCurve]) -> pd.DataFrame:
    """Return one row per cell with a K*.

    Columns: sparsity and further axes, batch_size [examples], local_steps (H), k_star [steps],
    communications, floor (1 if K* is an upper bound, so that both are) and
    times_k_star (K* over K* at the least H; missing if the latter is unknown or an upper bound).
    """
    rows = []
    for curve in curves:
        least = curve.least_k_star
        for point in curve.points:
            times_k_star = None
            if least is not None:
                times_k_star = point.k_star / least
            rows.append(
                {
                    **columns_of(curve.series),
                    "batch_size": curve.batch_size,
                    "local_steps": point.local_steps,
                    "k_star": point.k_star,
                    "communications": point.communications,
                    "floor": int(point.is_bound),
                    "times_k_star": times_k_star,
                }
            )
    return frame(rows)
