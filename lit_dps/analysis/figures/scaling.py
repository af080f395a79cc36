"""K* and the fitted law against batch size (Lee et al. 2021, Figures 1 and 7 to 11), as rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from lit_dps.analysis.figures.entry import Entry
from lit_dps.analysis.figures.style import (
    BATCH_SIZE,
    GREY,
    K_STAR,
    STYLE,
    batch_size_axis,
    curve_style,
    log_values_axis,
)
from lit_dps.analysis.scaling import FittedStudy, Scaling
from lit_dps.analysis.text import Row
from lit_dps.record import StudyRecord

PER_OCTAVE = 8  # points of a fitted curve in each doubling of the batch size


def scaling_rows(record: StudyRecord, scalings: Mapping[float, Scaling]) -> list[Row]:
    """The rows of `curve_rows` for each sparsity of a study, with their sparsity first.

    They are normalised at the smallest batch size that has a K* at every sparsity that has any (`common_batch_size`).
    """
    common = common_batch_size(list(scalings.values()))
    return [
        {"sparsity": sparsity, **row}
        for sparsity in record.sparsities
        for row in curve_rows(scalings[sparsity], record.batch_sizes, common)
    ]


def common_batch_size(scalings: Sequence[Scaling]) -> int | None:
    """The smallest batch size with a K* beyond the first check in every curve that has any; None without one."""
    measured = [set(scaling.resolved) for scaling in scalings if scaling.resolved]
    return min(set.intersection(*measured), default=None) if measured else None


def curve_rows(scaling: Scaling, batch_sizes: Sequence[int], common: int | None) -> list[Row]:
    """K* and the fitted law of one curve, by batch size.

    The batch sizes of the grid are among the rows, those between them draw the curve. Columns, None where unknown:
    batch_size [examples]; k_star [steps]; floor, 1 where it is at the first check and so an upper bound, else 0; fit,
    fit_low, fit_high [steps], the law and its 95 % limits; perfect [steps], K*(b) b / B from the smallest b with a K*;
    normalised_by, the batch size `common`; k_star, fit and perfect over the K* there as normalised_k_star, _fit and
    _perfect. Upper bounds are neither normalised nor is perfect drawn from one.
    """
    batch = _curve_points(batch_sizes)
    k_star, resolved, fit, band = scaling.k_star, scaling.resolved, scaling.fit, scaling.band(batch)
    first, unit = min(resolved, default=None), resolved.get(common)
    unknown = [None] * len(batch)
    law = unknown if fit is None else fit.steps(batch).tolist()
    low, high = (unknown, unknown) if band is None else (limit.tolist() for limit in band)
    rows: list[Row] = []
    for b, fitted, b_low, b_high in zip(batch.tolist(), law, low, high, strict=True):
        known = resolved.get(b)
        rows.append(
            {
                "batch_size": int(b) if b in batch_sizes else b,
                "k_star": k_star.get(b),
                "floor": int(b in scaling.at_first_check),
                "fit": fitted,
                "fit_low": b_low,
                "fit_high": b_high,
                "perfect": None if first is None else resolved[first] * first / b,
                "normalised_by": common,
                "normalised_k_star": None if unit is None or known is None else known / unit,
                "normalised_fit": None if unit is None or fitted is None else fitted / unit,
                "normalised_perfect": None if common is None or not k_star else common / b,
            }
        )
    return rows


def _curve_points(batch_sizes: Sequence[int]) -> np.ndarray:
    low, high = min(batch_sizes), max(batch_sizes)
    between = np.geomspace(low, high, 1 + round(PER_OCTAVE * float(np.log2(high / low))))
    # Points that rounding puts next to a measured batch size would double it.
    far = np.abs(np.log(between[:, None] / np.array(batch_sizes))).min(axis=1) > 1e-6
    return np.sort(np.concatenate([between[far], batch_sizes]))


def scaling_missing(study: FittedStudy) -> str | None:
    """Why there is no scaling curve to draw, if so."""
    sizes = set().union(*(scaling.k_star for scaling in study.scalings.values()))
    if not sizes:
        return "no complete trial yet"
    if len(study.record.batch_sizes) == 1:
        return "one batch size only"
    return "complete trials at one batch size only" if len(sizes) == 1 else None


def scaling_notes(study: FittedStudy) -> list[str]:
    """Sparsities that have no curve, and how upper bounds are drawn."""
    bare = [f"{sparsity:g}" for sparsity, scaling in sorted(study.scalings.items()) if not scaling.k_star]
    notes = [f"no complete trial at S = {', '.join(bare)}: no curve there"] if bare else []
    return notes + bound_notes(study.scalings.values())


def bound_notes(scalings: Iterable[Scaling]) -> list[str]:
    """How upper bounds are drawn, where there are any."""
    drawn = "drawn hollow, with an arrow, and left out where K* is normalised"
    return [f"K* at the first check are upper bounds: {drawn}"] if any(s.at_first_check for s in scalings) else []


HOLLOW = {"markerfacecolor": "white", "markeredgewidth": 0.8}  # K* that are upper bounds
ARROW = 0.35  # length of their arrows, as a share of K*


@matplotlib.rc_context(STYLE)
def draw_scaling(rows: Sequence[Row], scalings: Mapping[float, Scaling]) -> Figure:
    """Each sparsity with fit, band and perfect scaling; where there are several, all of them, and all normalised.

    Args:
        rows: From `figure_data.scaling_rows`.
        scalings: The scaling law of each sparsity, for the words in its panel. Those without any K* are left out.
    """
    parts = [(i, s, [row for row in rows if row["sparsity"] == s]) for i, s in enumerate(sorted(scalings))]
    parts = [(i, s, part) for i, s, part in parts if scalings[s].k_star]
    count = len(parts) + (2 if len(parts) > 1 else 0)
    columns = count if count <= 3 else min(3, math.ceil(count / 2))
    lines = math.ceil(count / columns)
    figure = Figure(figsize=(max(2.5 * columns, 3.3), 2.2 * lines + (0.3 if count == 1 else 0)))
    axes = [figure.add_subplot(lines, columns, i + 1) for i in range(count)]
    sizes = sorted({row["batch_size"] for row in rows if isinstance(row["batch_size"], int)})
    for i, ax in enumerate(axes):
        batch_size_axis(ax, sizes)
        if i % columns == 0:
            ax.set_ylabel(K_STAR)
        if i + columns >= count:
            ax.set_xlabel(BATCH_SIZE)
    for ax, (i, sparsity, part) in zip(axes, parts, strict=False):
        _draw_words(ax, scalings[sparsity])
        draw_band(ax, part, i)
        draw_curve(ax, part, i)
        draw_perfect(ax, part)
        if bounds := bound_handles(part):
            ax.legend(handles=bounds, loc="upper right", handlelength=1.5)
        ax.set_title(f"sparsity {sparsity:g}")
        log_values_axis(ax, values_of(rows, "k_star"))
    if len(parts) > 1:
        _draw_together(*axes[-2:], rows, parts)
    return figure


def _draw_together(together: Axes, normalised: Axes, rows: Sequence[Row], parts: Sequence[tuple]) -> None:
    for i, sparsity, part in parts:
        draw_curve(together, part, i, "", f"S = {sparsity:g}")
        draw_curve(normalised, part, i, "normalised_")
    draw_perfect(normalised, parts[0][2], "normalised_", "perfect scaling")  # one line for all, as they are normalised
    together.set_title("all sparsities")
    together.legend(
        handles=[*together.get_legend_handles_labels()[0], *bound_handles(rows)], loc="upper right", handlelength=1.5
    )
    normalised.set_title("all, normalised")
    normalised.legend(loc="upper right", handlelength=2)
    normalised.set_ylabel(f"K* / K*(B = {rows[0]['normalised_by'] or '?'})")
    log_values_axis(together, values_of(rows, "k_star"))
    log_values_axis(normalised, values_of(rows, "normalised_k_star"))


def _draw_words(ax: Axes, scaling: Scaling) -> None:
    """B_crit in words and, where the data show it, as a line."""
    words = scaling.describe().replace(": ", ":\n").replace("; ", ";\n").replace(", below", ",\nbelow")
    back = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
    ax.text(0.04, 0.04, words, transform=ax.transAxes, fontsize=7, va="bottom", zorder=4, bbox=back)
    if scaling.identifiable:
        ax.axvline(scaling.fit.critical_batch_size, color=GREY, linestyle=":", linewidth=0.8, zorder=1)


def draw_perfect(ax: Axes, rows: Sequence[Row], prefix: str = "", label: str | None = None) -> None:
    """The line that halves the steps with each doubling of the batch size. Arguments as of `draw_curve`."""
    ax.plot(*_known(rows, f"{prefix}perfect"), "--", color=GREY, linewidth=0.8, zorder=1, label=label)


def draw_curve(ax: Axes, rows: Sequence[Row], i: int, prefix: str = "", label: str | None = None) -> None:
    """K* as markers and the law as a line, in the i-th look; upper bounds as hollow markers with an arrow down.

    Args:
        ax: Where.
        rows: With the columns of `figure_data.scaling.curve_rows`.
        i: Number of the curve.
        prefix: Of the columns: "" or "normalised_".
        label: For the legend.
    """
    style = curve_style(i)
    ax.plot(*_known(rows, f"{prefix}fit"), color=style["color"])
    measured = [row for row in rows if not row["floor"]]
    ax.plot(
        *_known(measured, f"{prefix}k_star"), linestyle="none", markeredgecolor="white", markeredgewidth=0.4, **style
    )
    batch, k_star = _known([row for row in rows if row["floor"]], f"{prefix}k_star")
    if batch:
        below = [ARROW * k for k in k_star]
        ax.errorbar(batch, k_star, below, uplims=True, linestyle="none", elinewidth=0.8, capsize=2, **style, **HOLLOW)
    if label is not None:
        ax.plot([], [], label=label, **style)


def bound_handles(rows: Sequence[Row]) -> list[Line2D]:
    """The entry of a legend that explains upper bounds; none where the rows have none."""
    if not any(row["floor"] for row in rows):
        return []
    look_of_bounds = {"color": GREY, "marker": "o", "linestyle": "none", **HOLLOW}
    return [Line2D([], [], label="upper bound", **look_of_bounds)]


def draw_band(ax: Axes, rows: Sequence[Row], i: int) -> None:
    """The 95 % band of the law, in the i-th look; nothing where there is none. Arguments as of `draw_curve`."""
    (batch, low), (_, high) = _known(rows, "fit_low"), _known(rows, "fit_high")
    ax.fill_between(batch, low, high, color=curve_style(i)["color"], alpha=0.2, linewidth=0)


def values_of(rows: Sequence[Row], column: str) -> list:
    """What is known of a column."""
    return [row[column] for row in rows if row[column] is not None]


def _known(rows: Sequence[Row], column: str) -> tuple[list, list]:
    known = [row for row in rows if row[column] is not None]
    return [row["batch_size"] for row in known], [row[column] for row in known]


SCALING = Entry(
    name="scaling",
    paper="1, 7-11",
    tables=lambda study: {"scaling": scaling_rows(*study)},
    draw=lambda study, tables: [("scaling", draw_scaling(tables["scaling"], study.scalings))],
    missing=scaling_missing,
    notes=scaling_notes,
)
