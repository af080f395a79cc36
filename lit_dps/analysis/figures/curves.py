"""A curve of K* against batch size: its rows, and how it is drawn with its law, its band and its upper bounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from lit_dps.analysis.figures.style import GREY, curve_style
from lit_dps.analysis.scaling import Scaling
from lit_dps.analysis.tables import numbers

PER_OCTAVE = 8  # points of a fitted curve in each doubling of the batch size
HOLLOW = {"markerfacecolor": "white", "markeredgewidth": 0.8}  # K* that are upper bounds
ARROW = 0.35  # length of their arrows, as a share of K*


def common_batch_size(scalings: Iterable[Scaling]) -> int | None:
    """The smallest batch size with a K* beyond the first check in every curve that has any; None without one."""
    measured = [set(scaling.resolved) for scaling in scalings if scaling.resolved]
    return min(set.intersection(*measured), default=None) if measured else None


def curve_rows(scaling: Scaling, batch_sizes: Sequence[int], common: int | None) -> pd.DataFrame:
    """K* and the fitted law of one curve, by batch size.

    The batch sizes of the grid are among the rows, those between them draw the curve. Columns, missing where unknown:
    batch_size [examples]; k_star [steps]; floor, 1 where it is at the first check and so an upper bound, else 0; fit,
    fit_low, fit_high [steps], the law and its 95 % limits; perfect [steps], K*(b) b / B from the smallest b with a K*;
    normalised_by, the batch size `common`; k_star, fit and perfect over the K* there as normalised_k_star, _fit and
    _perfect. Upper bounds are neither normalised nor is perfect drawn from one.
    """
    batch, resolved = _curve_points(batch_sizes), scaling.resolved
    unknown = np.full(len(batch), np.nan)
    fit = unknown if scaling.fit is None else scaling.fit.steps(batch)
    low, high = scaling.band(batch) or (unknown, unknown)
    first, unit = min(resolved, default=0), resolved.get(common, np.nan)
    return pd.DataFrame(
        {
            "batch_size": pd.Series([int(b) if b in batch_sizes else b for b in batch.tolist()], dtype=object),
            "k_star": pd.array([scaling.k_star.get(b) for b in batch], "Int64"),
            "floor": [int(b in scaling.at_first_check) for b in batch],
            "fit": fit,
            "fit_low": low,
            "fit_high": high,
            "perfect": resolved.get(first, np.nan) * first / batch,
            "normalised_by": pd.array([common] * len(batch), "Int64"),
            "normalised_k_star": np.array([resolved.get(b, np.nan) for b in batch]) / unit,
            "normalised_fit": fit / unit,
            "normalised_perfect": unknown if common is None or not scaling.k_star else common / batch,
        }
    )


def _curve_points(batch_sizes: Sequence[int]) -> np.ndarray:
    low, high = min(batch_sizes), max(batch_sizes)
    between = np.geomspace(low, high, 1 + round(PER_OCTAVE * float(np.log2(high / low))))
    # Points that rounding puts next to a measured batch size would double it.
    far = np.abs(np.log(between[:, None] / np.array(batch_sizes))).min(axis=1) > 1e-6
    return np.sort(np.concatenate([between[far], batch_sizes]))


def bound_notes(scalings: Iterable[Scaling]) -> list[str]:
    """How upper bounds are drawn, where there are any."""
    drawn = "drawn hollow, with an arrow, and left out where K* is normalised"
    return [f"K* at the first check are upper bounds: {drawn}"] if any(s.at_first_check for s in scalings) else []


def draw_curve(ax: Axes, rows: pd.DataFrame, i: int, prefix: str = "", label: str | None = None) -> None:
    """K* as markers and the law as a line, in the i-th look; upper bounds as hollow markers with an arrow down.

    Args:
        ax: Where.
        rows: With the columns of `curve_rows`.
        i: Number of the curve.
        prefix: Of the columns: "" or "normalised_".
        label: For the legend.
    """
    style = curve_style(i)
    ax.plot(*_known(rows, f"{prefix}fit"), color=style["color"])
    batch, k_star = _known(rows[rows["floor"] == 0], f"{prefix}k_star")
    ax.plot(batch, k_star, linestyle="none", markeredgecolor="white", markeredgewidth=0.4, **style)
    batch, k_star = _known(rows[rows["floor"] == 1], f"{prefix}k_star")
    if len(batch):
        arrows = {"yerr": ARROW * k_star, "uplims": True, "elinewidth": 0.8, "capsize": 2}
        ax.errorbar(batch, k_star, linestyle="none", **arrows, **style, **HOLLOW)
    if label is not None:
        ax.plot([], [], label=label, **style)


def draw_band(ax: Axes, rows: pd.DataFrame, i: int) -> None:
    """The 95 % band of the law, in the i-th look; nothing where there is none. Arguments as of `draw_curve`."""
    (batch, low), (_, high) = _known(rows, "fit_low"), _known(rows, "fit_high")
    ax.fill_between(batch, low, high, color=curve_style(i)["color"], alpha=0.2, linewidth=0)


def draw_perfect(ax: Axes, rows: pd.DataFrame, prefix: str = "", label: str | None = None) -> None:
    """The line that halves the steps with each doubling of the batch size. Arguments as of `draw_curve`."""
    ax.plot(*_known(rows, f"{prefix}perfect"), "--", color=GREY, linewidth=0.8, zorder=1, label=label)


def bound_handles(rows: pd.DataFrame) -> list[Line2D]:
    """The entry of a legend that explains upper bounds; none where the rows have none."""
    look = {"color": GREY, "marker": "o", "linestyle": "none", **HOLLOW}
    return [Line2D([], [], label="upper bound", **look)] if rows["floor"].any() else []


def normalised_label(rows: pd.DataFrame) -> str:
    """What an axis of normalised K* shows."""
    by = rows["normalised_by"].dropna()
    return f"K* / K*(B = {by.iloc[0] if len(by) else '?'})"


def grid_sizes(rows: pd.DataFrame) -> list[int]:
    """The batch sizes of the grid among those of the curves."""
    return sorted({b for b in rows["batch_size"] if isinstance(b, int)})


def _known(rows: pd.DataFrame, column: str) -> tuple[np.ndarray, np.ndarray]:
    known = rows.dropna(subset=[column])
    return numbers(known["batch_size"]), numbers(known[column])
