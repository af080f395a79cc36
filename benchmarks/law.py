"""How well the law predicts K on public runs: held-out batch sizes, within and beyond those fitted,
and its intervals.

`python -m benchmarks.law` prints the tables of docs/advice-law.md; `--data FILE` judges it on runs
of yours, a CSV with the columns of tests/data/steps_to_goal.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from lit_dps.analysis.law import Law, law_of
from lit_dps.analysis.observations import Observation, exact, medians

DATA = Path(__file__).parents[1] / "tests" / "data" / "steps_to_goal.csv"
TITLE = "The law on public runs"
LOWER = 0.6  # share of the batch sizes, from below, that the others are predicted from
DISTANCES = ((1, 2), (2, 4), (4, 16))


def curves(runs: pd.DataFrame) -> Iterator[tuple[str, list[Observation]]]:
    """The medians of each workload."""
    for (source, workload), group in runs.groupby(["set", "workload"]):
        yield f"{source}: {workload}", medians(group)


def held_out(known: list[Observation]) -> Iterator[tuple[str, Law, Observation]]:
    """Each inner batch size with the law of all others; each upper one with the law of the lower
    ones."""
    points = exact(known)
    for point in points[1:-1]:
        yield "inside", law_of([o for o in known if o is not point]), point
    count = round(LOWER * len(points))
    if count >= 3:
        lower = law_of(points[:count])
        for point in points[count:]:
            yield "outside", lower, point


def judge(runs: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row a workload, and a row a held-out batch size.

    Columns of the latter: curve, side, distance (from the largest batch size fitted), refused
    (whether `predict` says so), error (log of predicted over median K), within (the 95 % interval),
    width (log of its ends' ratio). Where B_crit is out of sight these are what the law would have
    said, nan where there is none.
    """
    laws, points = [], []
    for name, known in curves(runs):
        law = law_of(known)
        laws.append(
            {
                "curve": name,
                "batch_sizes": len(exact(known)),
                "form": law.form,
                "law": law.describe(),
            }
        )
        for side, other, point in held_out(known):
            known = other.predict([point.batch_size]).iloc[0]["known"]
            if other.fit is None or other.refused and not other.refused.within:
                steps, low, high = (np.nan,) * 3  # nothing to judge: no law
            else:
                steps = float(other.steps(point.batch_size))
                low, high = np.percentile(other.samples([point.batch_size]), (2.5, 97.5))
            points.append(
                {
                    "curve": name,
                    "side": side,
                    "distance": point.batch_size / other.range[1],
                    "refused": known == "refused",
                    "error": np.log(steps / point.steps),
                    "within": bool(low <= point.steps <= high),
                    "width": np.log(high / low),
                }
            )
    return pd.DataFrame(laws), pd.DataFrame(points)


def table(points: pd.DataFrame) -> str:
    """Errors and coverage, as markdown."""
    lines = [
        "| held out | points | median error | 9 of 10 below | too small | within 95 % | interval |"
    ]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    groups = [("within the range", points[points["side"] == "inside"])]
    outside = points[points["side"] == "outside"]
    for low, high in DISTANCES:
        part = outside[(outside["distance"] > low) & (outside["distance"] <= high)]
        groups.append((f"{low} to {high} times beyond", part))
    for name, part in groups:
        for what, rows in (
            ("answered", part[~part["refused"]]),
            ("refused", part[part["refused"]]),
        ):
            known = rows[rows["error"].notna()]
            without = (
                f", {len(rows) - len(known)} more without a law" if len(rows) > len(known) else ""
            )
            if not len(known):
                lines.append(f"| {name}, {what} | {len(rows)} | - | - | - | - | - |")
                continue
            size, small = np.expm1(known["error"].abs()), (known["error"] < 0).mean()
            lines.append(
                f"| {name}, {what} | {len(known)}{without} | {size.median():.0%} | "
                f"{size.quantile(0.9):.0%} "
                f"| {small:.0%} | {known['within'].mean():.0%} | x/: "
                f"{np.exp(known['width'].median() / 2):.2f} |"
            )
    return "\n".join(lines)


@dataclass(frozen=True)
class Found:
    """The rows of `judge`."""

    laws: list[dict]
    points: list[dict]


def measure(options: object = None, file: Path = DATA) -> Found:
    """Nothing in it depends on the machine, or on options."""
    return Found(*(frame.to_dict("records") for frame in judge(pd.read_csv(file))))


def show(found: Found) -> str:
    """All of it, as markdown."""
    lines = ["| runs | batch sizes | law |\n|---|---:|---|"]
    lines += [f"| {row['curve']} | {row['batch_sizes']} | {row['law']} |" for row in found.laws]
    return "\n".join([*lines, "", table(pd.DataFrame(found.points))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="CSV of runs")
    print(show(measure(file=parser.parse_args().data)))


if __name__ == "__main__":
    main()
