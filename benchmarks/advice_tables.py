"""The tables of `benchmarks.advice`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from benchmarks.advice import CLOSE, Judged
from benchmarks.text import table

DISTANCES = (
    (0, 0, "within"),
    (1, 2, "up to 2 times beyond"),
    (2, 4, "2 to 4"),
    (4, 16, "4 to 16"),
    (16, 1e9, "farther"),
)


def tables(found: Judged) -> str:
    """All of it, as markdown."""
    return "\n\n".join(
        (_verdicts(found), _points(found), _regrets(found), _steps(found), *_workloads(found))
    )


def _verdicts(found: Judged) -> str:
    verdicts: Any = pd.DataFrame(found.verdicts)
    must = verdicts["must"] != ""
    refused = verdicts["said"].str.startswith("refused")
    lines = [
        f"- {must.sum()} of {len(verdicts)} workloads have to be refused; false confidence: "
        f"{_listed(verdicts[verdicts['false']])}",
        "- refused though a plain fit has nothing against them: "
        f"{_listed(verdicts[refused & ~must])}",
    ]
    for seen in ("lowest 3", "lower half"):
        if seen in verdicts:
            false = verdicts[must & (verdicts[seen] == True)]  # noqa: E712, missing where nothing is held out
            lines.append(
                f"- answered from the {seen} though all of it has to be refused: {_listed(false)}"
            )
    return "\n".join(lines)


def _listed(rows: pd.DataFrame) -> str:
    return ", ".join(rows["curve"]) or "none"


def _points(found: Judged) -> str:
    points: Any = pd.DataFrame(found.points)
    rows = []
    for seen in ("all others", "lower half", "lowest 3"):
        for low, high, name in DISTANCES:
            part = points[
                (points["seen"] == seen)
                & (points["distance"] <= high)
                & (points["distance"] >= low)
            ]
            part = part[(part["distance"] > low) | (high == 0)]
            for said, some in (
                ("answered", part[~part["refused"]]),
                ("refused", part[part["refused"]]),
            ):
                known = some[some["error"].notna()]
                if len(known):
                    size = known["error"].abs()
                    inside = known["within"].astype(bool).mean()
                    row = [
                        seen,
                        f"{name}, {said}",
                        len(known),
                        f"{size.median():.3f}",
                        f"{size.quantile(0.9):.3f}",
                    ]
                    rows.append([*row, f"{inside:.0%}"])
    return table(
        ["seen", "held out", "points", "median abs log error", "9 of 10 below", "within 80 %"], rows
    )


def _regrets(found: Judged) -> str:
    regrets: Any = pd.DataFrame(found.regrets)
    rows = []
    for (seen, knee), part in regrets.groupby(["seen", "knee"], sort=False):
        free = part[~part["narrow"].astype(bool)]
        row = [
            seen,
            knee,
            len(part),
            _share(part["time"]),
            _share(free["time"]),
            _share(part["examples"]),
        ]
        rows.append(row)
    head = [
        "seen",
        "device half busy at the",
        "answers",
        "time lost",
        "time, where more was not refused",
        "examples lost",
    ]
    return table(head, rows)


def _share(values: pd.Series) -> str:
    return f"{values.median():.0%}, at most {values.max():.0%}" if len(values) else "-"


def _steps(found: Judged) -> str:
    steps: Any = pd.DataFrame(found.steps)
    rows = []
    for what, part in steps.groupby("what", sort=False):
        size = np.expm1(part["error"].abs())
        near = f"{(size <= CLOSE).mean():.0%}"
        rows.append(
            [
                what,
                len(part),
                f"{size.median():.1%}",
                f"{size.quantile(0.9):.0%}",
                f"{size.max():.0%}",
                near,
            ]
        )
    return table(
        ["steps on", "points", "median error", "9 of 10 below", "largest", f"within {CLOSE:.0%}"],
        rows,
    )


def _workloads(found: Judged):
    points: Any = pd.DataFrame(found.points)
    rows = []
    for verdict in found.verdicts:
        part = points[(points["curve"] == verdict["curve"]) & points["error"].notna()]
        cells = []
        for seen in ("all others", "lower half", "lowest 3"):
            some = part[part["seen"] == seen]
            cells.append(f"{some['error'].abs().median():.2f} ({len(some)})" if len(some) else "-")
        rows.append([verdict["curve"], verdict["must"] or "-", *cells, verdict["said"]])
    yield table(
        ["workload", "has to be refused", "all others", "lower half", "lowest 3", "with all: said"],
        rows,
    )
