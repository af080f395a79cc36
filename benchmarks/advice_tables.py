"""The tables of `benchmarks.advice`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from benchmarks.advice import ONE_K, ONE_K_NOISE, SPLITS, Judged
from benchmarks.text import table

# Distances from the range that was seen, as a factor.
DISTANCES = (
    (0, 1, "within the range"),
    (1, 2, "1 to 2 times beyond"),
    (2, 4, "2 to 4 times beyond"),
    (4, 16, "4 to 16 times beyond"),
    (0, 1e9, "all"),
)
CLOSE = 0.15


def all_tables(judged: Judged) -> str:
    """Return all tables, as markdown."""
    parts = (losses(judged), errors(judged), points(judged), priors(judged), steps(judged))
    laws = table(["runs", "batch sizes", "law"], [list(row.values()) for row in judged.laws])
    return "\n\n".join((*parts, laws))


def losses(judged: Judged) -> str:
    """Return the mean share of the time that is lost by each rule."""
    rows: Any = pd.DataFrame(judged.losses)
    names = [*SPLITS, ONE_K, ONE_K_NOISE]
    lines = []
    for method, part in rows.groupby("method", sort=False):
        cells = []
        for split in names:
            lost = part.loc[part["split"] == split, "lost"]
            if len(lost):
                cells.append(f"{lost.mean():.1%} ({lost.quantile(0.9):.0%})")
            else:
                cells.append("-")
        lines.append([method, *cells])
    return table(["time lost, mean (9 of 10 below)", *names], lines)


def errors(judged: Judged) -> str:
    """Return the median absolute error of log K of each method."""
    rows: Any = pd.DataFrame(judged.points)
    names = [*SPLITS, ONE_K, ONE_K_NOISE]
    lines = []
    for method, part in rows.groupby("method", sort=False):
        cells = []
        for split in names:
            error = part.loc[part["split"] == split, "error"].dropna().abs()
            if len(error):
                cells.append(f"{error.median():.3f} ({len(error)})")
            else:
                cells.append("-")
        lines.append([method, *cells])
    return table(["median error of log K (points)", *names], lines)


def points(judged: Judged) -> str:
    """Return errors and coverage of the product by distance, for laws of three K or more."""
    rows: Any = pd.DataFrame(judged.points)
    rows = rows[(rows["method"] == "advice") & rows["split"].isin(SPLITS)]
    return _by_distance(rows)


def priors(judged: Judged) -> str:
    """Return the same for laws of one K."""
    rows: Any = pd.DataFrame(judged.points)
    parts = []
    for split in (ONE_K, ONE_K_NOISE):
        part = rows[(rows["method"] == "advice") & (rows["split"] == split)]
        if len(part):
            parts.append(f"{split}:\n\n{_by_distance(part)}")
    return "\n\n".join(parts)


def _by_distance(rows: Any) -> str:
    answered = rows[rows["known"] != "refused"]
    lines = []
    for low, high, name in DISTANCES:
        part = answered[(answered["distance"] > low) & (answered["distance"] <= high)]
        if not len(part):
            continue
        size = part["error"].abs()
        within = part["within_80"].astype(bool).mean()
        row = [name, len(part), f"{size.median():.3f}", f"{size.quantile(0.9):.3f}"]
        lines.append([*row, f"{part['error'].mean():+.3f}", f"{within:.0%}"])
    head = ["held out", "points", "median error of log K", "9 of 10 below", "mean", "in 80 %"]
    refused = (rows["known"] == "refused").sum()
    return f"{table(head, lines)}\n\n{refused} of {len(rows)} points are refused."


def steps(judged: Judged) -> str:
    """Return the errors of step times."""
    rows: Any = pd.DataFrame(judged.steps)
    lines = []
    for what, part in rows.groupby("what", sort=False):
        size = np.expm1(part["error"].abs())
        row = [what, len(part), f"{size.median():.1%}", f"{size.quantile(0.9):.0%}"]
        row.append(f"{(size <= CLOSE).mean():.0%}")
        lines.append([*row, f"{part['within'].astype(bool).mean():.0%}"])
    head = ["step times", "points", "median error", "9 of 10 below", f"within {CLOSE:.0%}"]
    return table([*head, "in 95 %"], lines)
