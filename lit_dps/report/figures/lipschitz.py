"""The local Lipschitz constant of the gradient along training (Lee et al. 2021, Figure 4)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import lit_dps.report.figures.style as look
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.summary import comparable
from lit_dps.analysis.tables import cell_columns, columns_of, frame, rows_of, significant
from lit_dps.core.racing import to_goal
from lit_dps.core.record import StudyRecord, setting
from lit_dps.core.trial import TrialResult

NAME, PAPER = "lipschitz", "4"
CAPTION = "local Lipschitz constant of the gradient along training (Figure 4)"
CLOSE = {"fontsize": 6, "title_fontsize": 6, "labelspacing": 0.2, "borderaxespad": 0.2}
SPAN = 1e4  # that the axis spans at most: where a network has died, its constant is as good as 0


def rows(study: Analysis) -> pd.DataFrame:
    """Every measurement up to the goal, by series, batch size, point, then step.

    Columns: sparsity and further axes, batch_size [examples], point, status, step, lipschitz
    (missing where it is not a number), and drawn: whether `mean_rows` takes it. It takes those of
    the points that all series share, or of all where they share none; of trials that compare
    (`summary.comparable`); above 0 and finite, others have no logarithm.
    """
    record, found = study.record, []
    for cell in record.cells:
        common = _common_points(record, cell.batch_size)
        for result in map(to_goal, record.results[cell]):
            point = result.trial.point
            names = {**columns_of(cell.series), "batch_size": cell.batch_size, "point": point}
            names["status"] = str(result.status)
            taken = _measured(result) and (not common or point in common)
            for step, value in zip(
                *(result.smoothness.get(key, ()) for key in ("step", "lipschitz")), strict=True
            ):
                found.append(
                    {**names, "step": step, "lipschitz": value, "drawn": taken and _positive(value)}
                )
    return frame(found)


def mean_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The lines of the figure: at each step the mean of the trials measured there, by series, batch
    size, then step.

    Columns: those of the series, batch_size [examples], step; mean (geometric), low and high
    (smallest and largest) of the trials, and their number; run_mean, the arithmetic mean over the
    run of each trial (as the theory takes it), of these the geometric mean over the trials.
    """
    cell, drawn = cell_columns(rows), rows[rows["drawn"]]
    at_step, of_run = (drawn.groupby([*cell, column])["lipschitz"] for column in ("step", "point"))
    lines = at_step.agg(mean=_geometric_mean, low="min", high="max", trials="count").reset_index()
    runs = of_run.agg(lambda run: np.mean(run.to_numpy())).groupby(cell).agg(_geometric_mean)
    return lines.join(runs.rename("run_mean"), on=cell)


def missing(study: Analysis) -> str | None:
    """Why there is no Lipschitz constant to draw, if so."""
    record = study.record
    results = (
        result for results in record.results.values() for result in results if _measured(result)
    )
    if any(_positive(value) for result in results for value in result.smoothness["lipschitz"]):
        return None
    interval = setting(record.config, "smoothness.interval")
    why = (
        "is not set"
        if interval is None
        else f"is {interval}: no trial ran as many steps without divergence"
    )
    return f"no Lipschitz measurements (smoothness.interval {why})"


def notes(study: Analysis) -> list[str]:
    """Batch sizes where the lines of the sparsities rest on different points of the search."""
    record = study.record
    apart = [
        f"{b}"
        for b in record.batch_sizes
        if not _common_points(record, b) and len(_points(record, b)) > 1
    ]
    where = f"B = {', '.join(apart)}. The lines there rest on different samples."
    return [f"No sample has Lipschitz measurements at every sparsity at {where}"] if apart else []


def tables(study: Analysis) -> dict[str, pd.DataFrame]:
    measured = rows(study)
    return {NAME: measured, "lipschitz-mean": mean_rows(measured)}


def figures(tables: Mapping[str, pd.DataFrame], study: Analysis) -> Iterator[tuple[str, Figure]]:
    yield NAME, draw(tables["lipschitz-mean"], study)


@matplotlib.rc_context(look.STYLE)
def draw(lines: pd.DataFrame, study: Analysis) -> Figure:
    """A panel per batch size, in it a line per series (`mean_rows`), with the range of its trials
    as a band."""
    sizes, every = sorted(lines["batch_size"].unique()), study.record.series
    count = math.ceil(len(sizes) / 4)
    columns = math.ceil(len(sizes) / count)
    lines_of_legend = 1.5 + math.ceil(len(every) / 2)
    more = 0.12 * max(
        0.0, lines_of_legend - 4
    )  # inches, of a panel's height, that long legends take
    figure = Figure(figsize=(max(1.8 * columns, 2.8) + 0.5, (1.8 + more) * count + 0.6))
    shared = None
    for i, batch_size in enumerate(sizes):
        shared = ax = figure.add_subplot(count, columns, i + 1, sharey=shared)
        ax.set_title(f"B = {batch_size}")
        for j, series in enumerate(every):
            line = rows_of(series, lines[lines["batch_size"] == batch_size])
            if not len(line):
                continue
            steps, mean, low, high = (
                line[key].to_numpy(float) for key in ("step", "mean", "low", "high")
            )
            style = look.curve_style(j) | {
                "markersize": 2.5,
                "markevery": math.ceil(len(steps) / 8),
            }
            ax.plot(steps, mean, label=significant(line["run_mean"].iloc[0]), linewidth=1, **style)
            ax.fill_between(steps, low, high, color=style["color"], alpha=0.15, linewidth=0)
        ax.set_xlim(left=0)
        look.few_ticks(ax.xaxis)
        ax.tick_params(labelleft=i % columns == 0)
        ax.legend(
            title="mean over the run",
            loc="upper right",
            ncols=2,
            handlelength=1.2,
            columnspacing=0.8,
            **CLOSE,
        )
        if i + columns >= len(sizes):
            ax.set_xlabel(look.STEPS)
    values = lines["mean"].clip(lower=lines["mean"].max() / SPAN)
    legend = (
        0.13 * lines_of_legend / (1.3 + more)
    )  # share of a panel's height that its legend takes
    above = 2 * (values.max() / values.min()) ** (legend / (1 - legend))
    look.log_values_axis(figure.axes[0], values, 2, above)
    figure.supylabel(
        "local Lipschitz constant\nof the gradient", fontsize=8, multialignment="center"
    )
    handles = look.series_handles((s, j) for j, s in enumerate(every) if len(rows_of(s, lines)))
    band = Patch(color=look.GREY, alpha=0.15, linewidth=0, label="all trials")
    look.legend_above(figure, [*handles, band])
    return figure


def _points(record: StudyRecord, batch_size: int) -> list[set[int]]:
    """The points measured in each series at a batch size, for those that have any."""
    cells = [record.results[cell] for cell in record.cells if cell.batch_size == batch_size]
    return list(
        filter(
            None, ({result.trial.point for result in cell if _measured(result)} for cell in cells)
        )
    )


def _common_points(record: StudyRecord, batch_size: int) -> set[int]:
    """The points measured in all of these: only they compare series."""
    points = _points(record, batch_size)
    return set.intersection(*points) if points else set()


def _measured(result: TrialResult) -> bool:
    return bool(result.smoothness.get("step")) and comparable(result)


def _positive(value: float) -> bool:
    return value > 0 and math.isfinite(value)


def _geometric_mean(values: pd.Series) -> float:
    return float(np.exp(np.mean(np.log(values.to_numpy()))))
