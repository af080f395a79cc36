"""Local SGD: what the steps to result come to in communications, and how K* depends on the length H
of a round.

Theory has K* flat in H up to some H_crit, then rising (Stich 2019; Lin et al. 2020). On a quadratic
with additive noise it is flat for any H, so that all dependence comes from curvature that varies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

import pandas as pd

from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import Row, columns_of, frame, k_star_text
from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Series, Trial

KEY, SECTION = "local.steps", "local."
# K* within this factor of that of the shortest rounds, or within a check interval of it, has not
# grown
FLAT = 1.25


def rounds_of(record: StudyRecord, trial: Trial) -> LocalSGDSchedule:
    """The rounds that a trial was trained in, of its point, its cell, and the configuration of its
    study."""
    given = {**dict(trial.cell.axes), **trial.params}
    own = {
        key.removeprefix(SECTION): value for key, value in given.items() if key.startswith(SECTION)
    }
    known = {field.name for field in fields(LocalSGDSchedule)}
    section = {
        key: value for key, value in (record.config.get("local") or {}).items() if key in known
    }
    return LocalSGDSchedule(**{**section, **own})


def is_local(record: StudyRecord) -> bool:
    """Whether any cell of a study was, or is to be, trained by local SGD."""
    middle = {key: box.at(0.5) for key, box in record.space.items() if key.startswith(SECTION)}
    return any(rounds_of(record, Trial(cell, 0, middle)).on for cell in record.cells)


def communications(record: StudyRecord, summary: CellSummary) -> int | None:
    """How often the workers of the K* trial talked to each other until it met its goal
    (`LocalSGDSchedule.communications`).

    None without a K*, and without workers.
    """
    if summary.best is None:
        return None
    rounds = rounds_of(record, summary.best.trial)
    return rounds.communications(summary.best.steps) if rounds.workers > 1 else None


def with_communications(
    record: StudyRecord, cells: Iterable[CellSummary], table: pd.DataFrame
) -> pd.DataFrame:
    """A table of a row a cell with the column communications beside k_star, where any cell is of
    local SGD."""
    if is_local(record):
        found = frame({"communications": communications(record, summary)} for summary in cells)
        table.insert(table.columns.get_loc("k_star") + 1, "communications", found["communications"])
    return table


def communications_text(row: Row) -> dict[str, str]:
    """The column of a table to read, from a row of `with_communications`; no column where that has
    none."""
    if "communications" not in row:
        return {}
    return {"communications": k_star_text({**row, "k_star": row["communications"]})}


@dataclass(frozen=True)
class Curve:
    """K* against H, at one batch size of a series without its H.

    Attributes:
        points: (H, K*, communications, whether K* is at the first check), by H; cells without a K*
            are left out.
        unmet: H without a complete trial.
    """

    series: Series
    batch_size: int
    points: tuple[tuple[int, int, int, bool], ...]
    unmet: tuple[int, ...]
    check_interval: int

    def grown(self, k_star: int) -> bool:
        """Whether a K* is above that of the shortest rounds, by more than chance and the grid of
        checks explain."""
        least = self.points[0][1]
        return k_star > max(FLAT * least, least + self.check_interval)

    @property
    def flat_to(self) -> int | None:
        """H_crit: the longest rounds up to which K* has not grown.

        None without a K* of the shortest, and where that is an upper bound: how far below it lies
        nobody can tell.
        """
        if not self.points or self.points[0][3] or any(h < self.points[0][0] for h in self.unmet):
            return None
        found = None
        ends = {h: k for h, k, _, _ in self.points}
        for h in sorted({*ends, *self.unmet}):
            if h in self.unmet or self.grown(ends[h]):
                break
            found = h
        return found


def curves(record: StudyRecord, cells: Iterable[CellSummary]) -> list[Curve]:
    """K* against H of each series and batch size; none where H is no axis of the grid."""
    found: dict[tuple[Series, int], list[CellSummary]] = {}
    for summary in cells:
        others = dict(summary.cell.axes)
        if others.pop(KEY, None) is not None:
            series = replace(summary.cell.series, axes=tuple(sorted(others.items())))
            found.setdefault((series, summary.cell.batch_size), []).append(summary)
    return [
        _curve(record, *key, own) for key, own in sorted(found.items(), key=lambda item: item[0])
    ]


def _curve(record: StudyRecord, series: Series, batch_size: int, cells: list[CellSummary]) -> Curve:
    points, unmet = [], []
    for summary in cells:
        length, talks = dict(summary.cell.axes)[KEY], communications(record, summary)
        if summary.k_star is None:
            unmet.append(length)
        elif talks is not None:
            points.append((length, summary.k_star, talks, summary.at_first_check))
    return Curve(
        series, batch_size, tuple(sorted(points)), tuple(sorted(unmet)), record.goal.check_interval
    )


def curve_rows(found: Iterable[Curve]) -> pd.DataFrame:
    """One row a cell with a K*.

    Columns: sparsity and further axes, batch_size [examples], local_steps, H, k_star [steps],
    communications, floor (1 where K* is at the first check, so that both are upper bounds), and
    times_k_star, K* over that of the least H.
    """
    return frame(
        {
            **columns_of(curve.series),
            "batch_size": curve.batch_size,
            "local_steps": length,
            "k_star": k_star,
            "communications": talks,
            "floor": int(floor),
            "times_k_star": k_star / curve.points[0][1],
        }
        for curve in found
        for length, k_star, talks, floor in curve.points
    )


def sentence(curve: Curve) -> str:
    """How far K* of a batch size is flat in H, and the fewest communications beside those of the
    least H."""
    if len(curve.points) < 2:
        return "too few cells with a K*"
    flat = (
        "how far K* is flat is not known"
        if curve.flat_to is None
        else f"K* flat to H = {curve.flat_to}"
    )
    if curve.points[0][3]:
        flat += f": at H = {curve.points[0][0]} it is an upper bound"
    elif curve.flat_to == max([*(h for h, *_ in curve.points), *curve.unmet]):
        flat += ", the longest"
    _, fewest = min((talks, i) for i, (_, _, talks, _) in enumerate(curve.points))
    compared = (
        f"{'<= ' * floor}{talks} at H = {length} (K* {'<=' if floor else '='} {k_star})"
        for length, k_star, talks, floor in (curve.points[fewest], curve.points[0])
    )
    return f"{flat}; fewest communications {', '.join(compared)}"


def local_text(every: Sequence[Curve]) -> str:
    """The section of a report on local SGD: a line a series and batch size; empty where H is no
    axis."""
    if not every:
        return ""
    lines = [
        f"local SGD: K* against H, flat while within x{FLAT:g} or a check of that of the least H"
    ]
    lines += [f"  {curve.series}  B={curve.batch_size}  {sentence(curve)}" for curve in every]
    return "\n".join(lines) + "\n"
