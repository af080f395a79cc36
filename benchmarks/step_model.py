"""How well the model of step times predicts those of public machines: held-out local batches and
numbers of devices.

`python -m benchmarks.step_model` prints its table of docs/advice-tables.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lit_dps.advice.step_time import MANY_NODES, StepTime, Timed, fit_step_time

TITLE = "The model of step times on public machines"
DATA = Path(__file__).parents[1] / "tests" / "data" / "step_times.csv"


def timed(rows: pd.DataFrame) -> list[Timed]:
    """Rows of the file."""
    columns = ["local_batch", "step_time", "gpus", "nodes", "accumulation"]
    return [Timed(*row) for row in rows[columns].itertuples(index=False)]


def predicted(model: StepTime, rows: pd.DataFrame) -> np.ndarray:
    """(n, 3), seconds with their limits, nan where the model has none."""
    found = []
    table: Any = rows.itertuples()
    for row in table:
        step = model.at(row.local_batch * row.gpus, row.gpus, row.nodes)
        found.append(step or (np.nan,) * 4)
    return np.array([f[:3] for f in found], float)


def judge(rows: pd.DataFrame) -> pd.DataFrame:
    """A row a held-out point: workload, hardware, what (what was held out), error (log), within
    (the 95 % interval)."""
    found = []

    def tell(what, model, held):
        for (value, low, high), t in zip(predicted(model, held), held["step_time"], strict=True):
            if not np.isnan(value):
                found.append(
                    {"what": what, "error": np.log(value / t), "within": bool(low <= t <= high)}
                )

    not_accumulated: Any = rows[rows["accumulation"] == 1]
    for _, group in not_accumulated.groupby(["set", "workload", "hardware"]):
        alone = (
            group[group["gpus"] == 1].groupby("local_batch", as_index=False).first().assign(gpus=1)
        )
        sizes = sorted(alone["local_batch"])
        for m in sizes[1:-1]:
            at = alone["local_batch"] == m
            tell("one device, a local batch within", fit_step_time(timed(alone[~at])), alone[at])
        lower = sizes[: max(3, round(0.6 * len(sizes)))]
        tell(
            "one device, larger local batches",
            fit_step_time(timed(alone[alone["local_batch"].isin(lower)])),
            alone[~alone["local_batch"].isin(lower)],
        )
        several = group[group["gpus"] > 1]
        for n in sorted(several["gpus"].unique()):
            others = several[several["gpus"] != n]
            if len(others):
                held = several[several["gpus"] == n]
                more = (
                    "more devices than timed"
                    if n > others["gpus"].max()
                    else "another number of devices"
                )
                tell(more, fit_step_time(timed(pd.concat([alone, others]))), held)
        if len(several):
            few = several[several["gpus"] <= 4]
            model = fit_step_time(timed(pd.concat([alone, few])))
            more = several[(several["gpus"] > 4) & (several["gpus"] <= 16)]
            timed_nodes = set(few["nodes"].clip(upper=MANY_NODES))
            is_timed = more["nodes"].clip(upper=MANY_NODES).isin(timed_nodes)
            tell("from up to 4 devices to 6 to 16", model, more[is_timed])
            tell("the same, on other numbers of nodes", model, more[~is_timed])
    return pd.DataFrame(found)


@dataclass(frozen=True)
class Found:
    """The rows of `judge`."""

    points: list[dict]


def measure(options: object = None) -> Found:
    """Nothing in it depends on the machine, or on options."""
    return Found(judge(pd.read_csv(DATA)).to_dict("records"))


def show(found: Found) -> str:
    """All of it, as markdown."""
    lines = [
        "| held out | points | median error | 9 of 10 below | within 95 % "
        "|\n|---|---:|---:|---:|---:|"
    ]
    points: Any = pd.DataFrame(found.points)
    for what, part in points.groupby("what", sort=False):
        size, within = np.expm1(part["error"].abs()), part["within"].astype(bool).mean()
        lines.append(
            f"| {what} | {len(part)} | {size.median():.1%} | {size.quantile(0.9):.0%} | "
            f"{within:.0%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(show(measure()))
