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
RESAMPLES = 4000


PAGE = """# How well advice predicts: the tables

<!-- made by python -m benchmarks.advice --page docs/advice-tables.md -->

[Advice](advice.md#how-well-the-law-predicts) explains and summarizes these tables. The runs are
medians over seeds of 20 public workloads of four sources
([tests/data](../tests/data/README.md)).

```bash
python -m benchmarks.advice --page docs/advice-tables.md    # writes this page, in a minute
```

{tables}
"""


def page(judged: Judged) -> str:
    """Return docs/advice-tables.md."""
    return PAGE.format(tables=all_tables(judged).replace("### ", "## "))


def all_tables(judged: Judged) -> str:
    """Return all tables with their headings, as markdown."""
    sections = (
        ("Time that the recommendation loses", losses),
        ("Error of K", errors),
        ("Error of K by distance, with three K or more", points),
        ("Share of K in the 80 % interval", coverage),
        ("Error of K by distance, with one K", priors),
        ("The prior by the noise scale, without one workload", left_out),
        ("Error of step times", steps),
        ("The law of each workload, from all its batch sizes", laws),
    )
    parts = [f"### {heading}\n\n{section(judged)}" for heading, section in sections]
    return "\n\n".join(parts)


def laws(judged: Judged) -> str:
    """Return the law of each workload."""
    return table(["runs", "batch sizes", "law"], [list(row.values()) for row in judged.laws])


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


def coverage(judged: Judged) -> str:
    """Return the share of K in their 80 % interval, with its 95 % interval over workloads.

    The errors of a workload are alike, so that workloads are resampled, not points.
    """
    rows: Any = pd.DataFrame(judged.points)
    rows = rows[(rows["method"] == "advice") & (rows["known"] != "refused")]
    lines = []
    for split in (*SPLITS, ONE_K, ONE_K_NOISE):
        part = rows[rows["split"] == split]
        groups = [each.to_numpy(float) for _, each in part.groupby("curve")["within_80"]]
        if not groups:
            continue
        rng = np.random.default_rng(0)
        shares = []
        for _ in range(RESAMPLES):
            chosen = rng.integers(0, len(groups), len(groups))
            shares.append(np.concatenate([groups[i] for i in chosen]).mean())
        low, high = np.percentile(shares, (2.5, 97.5))
        missed = sorted((int((1 - group).sum()) for group in groups), reverse=True)
        within = part["within_80"].astype(bool).mean()
        of_workloads = np.mean([group.mean() for group in groups])
        row = [split, len(groups), len(part), f"{within:.0%}", f"{low:.0%} to {high:.0%}"]
        lines.append([*row, f"{of_workloads:.0%}", f"{sum(missed[:2])} of {sum(missed)}"])
    head = ["in 80 %", "workloads", "points", "share", "95 % over workloads", "mean of workloads"]
    return table([*head, "misses of the worst two workloads"], lines)


def left_out(judged: Judged) -> str:
    """Return how the prior by the noise scale of other workloads does on each workload."""
    lines = []
    for row in judged.left_out:
        prior = f"{row['median']:+.2f}, {row['deviation']:.2f}"
        within = f"{row['within']} of {row['points']}"
        lines.append([row["curve"], f"{row['ratio']:+.2f}", prior, within])
    head = ["left out", "log(B_crit / noise scale)", "median and deviation of the others"]
    return table([*head, "K in 80 %"], lines)


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
