"""How well the law predicts K on public runs of which it has seen a part of the batch sizes.

`python -m benchmarks.law` prints the tables of docs/advice-law.md; `--data FILE` judges the law on
other runs, a CSV with the columns of tests/data/steps_to_goal.csv.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.text import table
from lit_dps.analysis.law import MAX_EXTRAPOLATION, Law, fit_law
from lit_dps.analysis.law_fit import MIN_BATCH_SIZES, Fit, fit_scaling
from lit_dps.analysis.law_verdict import Refusal
from lit_dps.analysis.observations import Observation, exact, medians

DATA = Path(__file__).parents[1] / "tests" / "data" / "steps_to_goal.csv"
TITLE = "The law on public runs"
# Held-out batch sizes by their distance from those seen, as a factor.
DISTANCES = ((0.0, 1.0), (1.0, 2.0), (2.0, 4.0), (4.0, MAX_EXTRAPOLATION))
# Whose device is half busy at the smallest, the middle and the largest batch size.
KNEES = (0.0, 0.5, 1.0)
# A scale of residuals so large that the fit is plain least squares of log K.
LEAST_SQUARES = 1e3


@dataclass(frozen=True)
class Found:
    """What was found.

    Attributes:
        laws: A row a workload: curve, batch_sizes, law.
        points: A row a held-out batch size: curve, seen (which part), distance, known (as of
            `Law.predict`), error (log of predicted over measured K), within_80 and within_95.
        losses: A row a part and device: curve, seen, described (whether the law of all batch sizes
            describes K), and the share of the time that is lost at the batch size of the least
            expected time, by the law and by plain least squares.
    """

    laws: list[dict]
    points: list[dict]
    losses: list[dict]


def curves(runs: pd.DataFrame) -> Iterator[tuple[str, list[Observation]]]:
    """Yield the medians of each workload."""
    groups: Any = runs.groupby(["set", "workload"])
    for (source, workload), group in groups:
        yield f"{source}: {workload}", medians(group)


def parts(known: list[Observation]) -> Iterator[tuple[str, list[Observation], list[Observation]]]:
    """Yield what is seen of a workload and what is held out: a name, and the two lists."""
    points = exact(known)
    count = len(points)
    if count <= MIN_BATCH_SIZES:
        return
    for point in points[1:-1]:
        yield "all others", [o for o in known if o is not point], [point]
    half = max(MIN_BATCH_SIZES, math.ceil(count / 2))
    for name, size in (("lowest 3", MIN_BATCH_SIZES), ("lower half", half)):
        largest = points[size - 1].batch_size
        yield name, [o for o in known if o.batch_size <= largest], points[size:]
    spread = [points[0], points[count // 2], points[-1]]
    yield "spread of 3", spread, [point for point in points if point not in spread]


def judge(runs: pd.DataFrame) -> Found:
    """Return the judgement of the law on some runs."""
    found = Found([], [], [])
    for name, known in curves(runs):
        law = fit_law(known)
        found.laws.append({"curve": name, "batch_sizes": len(exact(known)), "law": law.line()})
        for seen, lower, held_out in parts(known):
            part = fit_law(lower)
            columns: dict[str, object] = {"curve": name, "seen": seen}
            for point in held_out:
                found.points.append(columns | _judge_point(part, point))
            if seen != "all others":
                columns["described"] = law.verdict.refusal < Refusal.EXTRAPOLATION
                for knee in KNEES:
                    found.losses.append(columns | _time_lost(part, exact(known), knee))
    return found


def _judge_point(law: Law, point: Observation) -> dict[str, object]:
    """Return how well a law predicts a held-out K."""
    low, high = law.range
    row = law.predict([point.batch_size]).iloc[0]
    distance = max(point.batch_size / high, low / point.batch_size)
    columns = {"distance": distance, "known": row["known"]}
    if row["known"] == "refused":
        return columns | {"error": math.nan, "within_80": False, "within_95": False}
    samples = law.samples([point.batch_size])
    columns["error"] = math.log(row["steps"] / point.steps)
    for share in (80, 95):
        ends = np.percentile(samples, (50 - share / 2, 50 + share / 2))
        columns[f"within_{share}"] = bool(ends[0] <= point.steps <= ends[1])
    return columns


def _time_lost(law: Law, points: list[Observation], knee: float) -> dict[str, float]:
    """Return the share of the time that is lost by following a law, and plain least squares.

    Args:
        law: The law of a part of the batch sizes.
        points: All of them.
        knee: Where a step takes twice the time of the smallest one: 0 at the smallest batch size,
            1 at the largest, between them in the logarithm.
    """
    batch = np.array([point.batch_size for point in points])
    step_seconds = 1 + batch / (batch[0] ** (1 - knee) * batch[-1] ** knee)
    times = np.array([point.steps for point in points]) * step_seconds
    expected = law.predict(batch)["steps"].to_numpy(copy=True)
    low, high = law.reach
    reached = (low <= batch) & (batch <= high)
    if reached.any():
        expected[reached] = law.samples(batch[reached]).mean(axis=0)
    low, high = law.range
    near = (low / MAX_EXTRAPOLATION <= batch) & (batch <= high * MAX_EXTRAPOLATION)
    plain = np.where(near, _least_squares(law).steps(batch), np.nan)
    least = times.min()
    return {
        "law": times[np.nanargmin(expected * step_seconds)] / least - 1,
        "least_squares": times[np.nanargmin(plain * step_seconds)] / least - 1,
    }


def _least_squares(law: Law) -> Fit:
    """Return the plain least-squares fit to the K of a law."""
    points = exact(law.observations)
    batch = [point.batch_size for point in points]
    steps = [point.steps for point in points]
    return fit_scaling(batch, steps, loss_scale=LEAST_SQUARES)


def _table_of_points(found: Found) -> str:
    """Return errors and coverage by distance, as markdown."""
    points = pd.DataFrame(found.points)
    refused = points["known"] == "refused"
    rows = []
    for low, high in (*DISTANCES, (0.0, math.inf)):
        part: Any = points[~refused & (points["distance"] > low) & (points["distance"] <= high)]
        name = f"{low:g} to {high:g} times beyond"
        if high == 1:
            name = "within the range"
        elif math.isinf(high):
            name = "all"
        sizes = part["error"].abs()
        row = [name, len(part), f"{sizes.median():.3f}", f"{sizes.quantile(0.9):.3f}"]
        rows.append([*row, f"{part['within_80'].mean():.0%}", f"{part['within_95'].mean():.0%}"])
    head = ["held out", "points", "median abs. log error", "9 of 10 below", "in 80 %", "in 95 %"]
    return f"{table(head, rows)}\n\n{refused.sum()} of {len(points)} points are refused."


def _table_of_losses(found: Found) -> str:
    """Return the mean share of the time that is lost, as markdown."""
    losses = pd.DataFrame(found.losses)
    rows = []
    described = losses[losses["described"]]
    for name, kept in (("all runs", losses), ("runs that the law describes", described)):
        for seen, part in kept.groupby("seen", sort=False):
            shares = [f"{part[column].mean():.1%}" for column in ("law", "least_squares")]
            rows.append([f"{name}, {seen}", *shares])
    return table(["seen", "time lost by the law", "by plain least squares"], rows)


def measure(options: object = None, file: Path = DATA) -> Found:
    """Return the judgement; nothing in it depends on the machine, or on options."""
    return judge(pd.read_csv(file))


def show(found: Found) -> str:
    """Return all tables, as markdown."""
    laws = table(["runs", "batch sizes", "law"], [list(row.values()) for row in found.laws])
    return "\n\n".join([laws, _table_of_points(found), _table_of_losses(found)])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="CSV of runs")
    print(show(measure(file=parser.parse_args().data)))


if __name__ == "__main__":
    main()
