"""Tables of readings (`study.readings`): columns of trials and cells, and curves by step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.racing import to_goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import short_names
from lit_dps.core.trial import DENSITY_STEP, DENSITY_SUM, LIPSCHITZ, Status, TrialResult

# Columns of studies whose masks change during training.
AVERAGE_DENSITY = "average_density"
FINAL_DENSITY = "final_density"

# Columns of the tables of every study: of cells, of trials and of curves.
TABLE_COLUMNS = frozenset(
    {
        *("batch_size", "sparsity", "k_star", "communications", "floor", "pending", "boundary"),
        *("point", "status", "steps", "steps_run", "engine", "engine_reason"),
        *("repeat", "step", "train_loss", "exact"),
        *("examples", "seconds", "unit", AVERAGE_DENSITY, FINAL_DENSITY),
        *map(str, Status),
    }
)


def reserved_columns(space: Iterable[str], axes: Iterable[str], curve: Iterable[str]) -> set[str]:
    """Return the columns of a study's tables, which no reading can have.

    Args:
        space: Keys of the metaparameters.
        axes: Keys of the further axes.
        curve: Names of the metrics.
    """
    names = {*short_names(list(space)).values(), *short_names(list(axes)).values()}
    return {*TABLE_COLUMNS, *names, *curve}


def metric_column(name: str) -> str:
    """Return the column of a metric: its name, or "NAME (metric)" if a table has this column."""
    return f"{name} (metric)" if name in TABLE_COLUMNS else name


def reading_columns(record: StudyRecord) -> list[str]:
    """Return the columns of all readings of a study: along the runs, then at the end.

    If masks changed during training, the densities of the masks follow.
    """
    along: dict[str, dict[str, None]] = {}
    at_end: dict[str, None] = {}
    for results in record.results.values():
        for result in results:
            for name, read in _shown(result).items():
                along.setdefault(name, {}).update(dict.fromkeys(read))
            at_end |= dict.fromkeys(result.end_readings)
    columns = []
    for read in (*along.values(), at_end):
        columns += [name for name in read if name != "step"]
    if has_moving_masks(record):
        columns += [AVERAGE_DENSITY, FINAL_DENSITY]
    return columns


def has_moving_masks(record: StudyRecord) -> bool:
    """Return True if the mask of a trial changed during training."""
    for results in record.results.values():
        if any(DENSITY_SUM in result.flags for result in results):
            return True
    return False


def densities(result: TrialResult) -> dict[str, float]:
    """Return the mean share of kept weights over the steps of a trial, and the share at its end.

    The columns are "average_density" and "final_density", of the weights that the mask covers. The
    end is the goal for a complete trial. Empty if the mask changed after it, as in a trial that was
    trained past its goal.
    """
    end = result.steps or result.steps_run
    last_change = result.flags.get(DENSITY_STEP, 0)
    if not end or end < last_change:
        return {}
    density = 1.0
    if result.kept:
        kept = sum(each for each, _ in result.kept.values())
        density = kept / sum(total for _, total in result.kept.values())
    density_sum = result.flags.get(DENSITY_SUM, 0.0) + (end - last_change) * density
    return {AVERAGE_DENSITY: density_sum / end, FINAL_DENSITY: density}


def _shown(result: TrialResult) -> dict[str, Mapping[str, list[float]]]:
    """Return the readings along a run without the one that has tables of its own."""
    return {name: read for name, read in result.readings.items() if name != LIPSCHITZ}


def reading_values(result: TrialResult) -> dict[str, float]:
    """Return the value of each reading of a trial by column.

    The value of a reading along the run is the last one: up to the goal for a complete trial, which
    has no readings at the end if it ran past the goal. The densities of its masks follow
    (`densities`).
    """
    values = {}
    at_goal = to_goal(result)
    for columns in _shown(at_goal).values():
        for name, read in columns.items():
            if name != "step" and read:
                values[name] = read[-1]
    return {**values, **at_goal.end_readings, **densities(result)}


def curve_rows(record: StudyRecord) -> pd.DataFrame:
    """Return one row a trial and step that was checked or read, by series, batch size, point, step.

    Columns: sparsity and further axes, batch_size [examples], point, repeat (0 for the search; only
    in a study with repeats, which follow the search of their cell), step; the metric and the
    training loss of checks, further metrics, and the columns of readings. Values are missing where
    a step was not checked, or not read. `exact` is 0 where the metric is a bound.
    """
    has_repeats = any(record.repeats.values())
    rows = []
    names: dict[str, None] = {}
    for cell in record.cells:
        for result in (*record.results[cell], *record.repeats.get(cell, ())):
            place = {
                **columns_of(cell.series),
                "batch_size": cell.batch_size,
                "point": result.trial.point,
            }
            if has_repeats:
                place["repeat"] = result.trial.repeat
            for step, values in sorted(_values_by_step(result, record.metrics).items()):
                names |= dict.fromkeys(values)
                rows.append({**place, "step": step, **values})
    columns = [*columns_of(record.series[0]), "batch_size", "point"]
    if has_repeats:
        columns.append("repeat")
    columns += ["step", *names]
    return frame(({name: row.get(name) for name in columns} for row in rows), columns)


def _values_by_step(result: TrialResult, metrics: Sequence[str]) -> dict[int, dict[str, float]]:
    """Return the values of a trial's curve and readings by step, then column."""
    by_step: dict[int, dict[str, float]] = {}
    curve = {}
    for name, values in result.curve.items():
        curve[metric_column(name) if name in metrics else name] = values
    for columns in (curve, *result.readings.values()):
        for i, step in enumerate(columns.get("step", ())):
            row = by_step.setdefault(int(step), {})
            for name, values in columns.items():
                if name != "step":
                    row[name] = values[i]
    return by_step
