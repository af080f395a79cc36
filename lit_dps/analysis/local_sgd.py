"""Local SGD: communications to the goal, and how K* depends on the length H of a round.

Theory has K* flat in H up to some H_crit, then rising (Stich 2019; Lin et al. 2020). On a quadratic
with additive noise it is flat for any H, so all dependence comes from curvature that varies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import pandas as pd

from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import Row, columns_of, frame, k_star_text
from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Series, Trial

KEY = "local.steps"
SECTION = "local."
# K* within this factor of that of the shortest rounds, or within a check interval of it, has not
# grown.
FLAT = 1.25


def rounds_of(record: StudyRecord, trial: Trial) -> LocalSGDSchedule:
    """Return the rounds that a trial was trained in.

    They come from its point, its cell, and the configuration of its study, in this order.
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


def is_local(record: StudyRecord) -> bool:
    """Return True if any cell of a study was, or is to be, trained by local SGD."""
    middle: dict[str, Any] = {}
    for key, box in record.space.items():
        if key.startswith(SECTION):
            middle[key] = box.at(0.5)
    return any(rounds_of(record, Trial(cell, 0, middle)).on for cell in record.cells)


def communications(record: StudyRecord, summary: CellSummary) -> int | None:
    """Return how often the workers of the K* trial communicated until it met its goal.

    See `LocalSGDSchedule.communications`. None without a K*, and without workers.
    """
    if summary.best is None or summary.best.steps is None:
        return None
    rounds = rounds_of(record, summary.best.trial)
    if rounds.workers <= 1:
        return None
    return rounds.communications(summary.best.steps)


def with_communications(
    record: StudyRecord, cells: Iterable[CellSummary], table: pd.DataFrame
) -> pd.DataFrame:
    """Return a table of cells with the column communications, if any cell is of local SGD."""
    if is_local(record):
        column = frame({"communications": communications(record, cell)} for cell in cells)
        position = table.columns.get_loc("k_star")
        assert isinstance(position, int)
        table.insert(position + 1, "communications", column["communications"])
    return table


def communications_text(row: Row) -> dict[str, str]:
    """Return the column communications of a row as text; empty if the table has none."""
    if "communications" not in row:
        return {}
    return {"communications": k_star_text({**row, "k_star": row["communications"]})}


class Point(NamedTuple):
    """K* of one length of rounds.

    Attributes:
        length: H, local steps of a round.
        k_star: K*, in steps.
        communications: Until the goal.
        is_bound: Whether K* is at the first check, and so an upper bound.
    """

    length: int
    k_star: int
    communications: int
    is_bound: bool


@dataclass(frozen=True)
class Curve:
    """K* against H, at one batch size of a series without its H.

    Attributes:
        series: Without its H.
        batch_size: In examples.
        points: By H; cells without a K* are left out.
        unmet: H without a complete trial.
        check_interval: Steps between two checks.
    """

    series: Series
    batch_size: int
    points: tuple[Point, ...]
    unmet: tuple[int, ...]
    check_interval: int

    def grown(self, k_star: int) -> bool:
        """Return True if K* is above that of the shortest rounds, beyond chance and rounding."""
        least = self.points[0].k_star
        return k_star > max(FLAT * least, least + self.check_interval)

    @property
    def flat_to(self) -> int | None:
        """H_crit: the longest rounds up to which K* has not grown.

        None without a K* of the shortest rounds, and where that is an upper bound.
        """
        if not self.points or self.points[0].is_bound:
            return None
        if any(length < self.points[0].length for length in self.unmet):
            return None
        k_star = {point.length: point.k_star for point in self.points}
        flat_to = None
        for length in sorted({*k_star, *self.unmet}):
            if length in self.unmet or self.grown(k_star[length]):
                break
            flat_to = length
        return flat_to

    @property
    def longest(self) -> int:
        """The longest rounds that were tried."""
        return max([*(point.length for point in self.points), *self.unmet])


def curves(record: StudyRecord, cells: Iterable[CellSummary]) -> list[Curve]:
    """Return K* against H of each series and batch size; none where H is no axis of the grid."""
    by_curve: dict[tuple[Series, int], list[CellSummary]] = {}
    for summary in cells:
        axes = dict(summary.cell.axes)
        if axes.pop(KEY, None) is not None:
            series = replace(summary.cell.series, axes=tuple(sorted(axes.items())))
            by_curve.setdefault((series, summary.cell.batch_size), []).append(summary)
    found = []
    for (series, batch_size), of_curve in sorted(by_curve.items(), key=lambda item: item[0]):
        found.append(_curve(record, series, batch_size, of_curve))
    return found


def _curve(
    record: StudyRecord, series: Series, batch_size: int, cells: Sequence[CellSummary]
) -> Curve:
    """Return the curve of some cells that differ in H alone."""
    points, unmet = [], []
    for summary in cells:
        length: Any = dict(summary.cell.axes)[KEY]
        count = communications(record, summary)
        if summary.k_star is None:
            unmet.append(length)
        elif count is not None:
            points.append(Point(length, summary.k_star, count, summary.is_upper_bound))
    return Curve(
        series, batch_size, tuple(sorted(points)), tuple(sorted(unmet)), record.goal.check_interval
    )


def curve_rows(found: Iterable[Curve]) -> pd.DataFrame:
    """Return one row a cell with a K*.

    Columns: sparsity and further axes, batch_size [examples], local_steps, H, k_star [steps],
    communications, floor (1 where K* is at the first check, so that both are upper bounds), and
    times_k_star, K* over that of the least H.
    """
    rows = []
    for curve in found:
        for point in curve.points:
            rows.append(
                {
                    **columns_of(curve.series),
                    "batch_size": curve.batch_size,
                    "local_steps": point.length,
                    "k_star": point.k_star,
                    "communications": point.communications,
                    "floor": int(point.is_bound),
                    "times_k_star": point.k_star / curve.points[0].k_star,
                }
            )
    return frame(rows)


def sentence(curve: Curve) -> str:
    """Return how far K* is flat in H, and the fewest communications, in words."""
    if len(curve.points) < 2:
        return "too few cells with a K*"
    first = curve.points[0]
    flat = "how far K* is flat is not known"
    if curve.flat_to is not None:
        flat = f"K* flat to H = {curve.flat_to}"
    if first.is_bound:
        flat += f": at H = {first.length} it is an upper bound"
    elif curve.flat_to == curve.longest:
        flat += ", the longest"
    fewest = min(curve.points, key=lambda point: point.communications)
    return f"{flat}; fewest communications {_point_text(fewest)}, {_point_text(first)}"


def _point_text(point: Point) -> str:
    """Return the communications and K* of a point in words."""
    bound, relation = ("<= ", "<=") if point.is_bound else ("", "=")
    k_star = f"(K* {relation} {point.k_star})"
    return f"{bound}{point.communications} at H = {point.length} {k_star}"


def local_text(every: Sequence[Curve]) -> str:
    """Return the section of a report on local SGD: a line a curve; empty where H is no axis."""
    if not every:
        return ""
    lines = [
        f"local SGD: K* against H, flat while within x{FLAT:g} or a check of that of the least H"
    ]
    lines += [f"  {curve.series}  B={curve.batch_size}  {sentence(curve)}" for curve in every]
    return "\n".join(lines) + "\n"
