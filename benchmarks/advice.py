"""What advice would have said of public workloads of which it had seen a part, beside what they
did.

`python -m benchmarks.advice` prints the tables of docs/advice-law.md; `--traces FOLDER` judges it
on other workloads: kb_points.csv and step_time.csv there have the columns of tests/data, or those
of the sources.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.law import DATA
from benchmarks.step_model import DATA as TIMES
from benchmarks.step_model import predicted, timed
from lit_dps.advice.answer import answer
from lit_dps.advice.step_time import Timed, fit_step_time
from lit_dps.analysis.law import Law, fit_law
from lit_dps.analysis.law_fit import fit_scaling
from lit_dps.analysis.observations import Observation, exact, medians

TITLE = "Advice on public workloads"
FEW = 3  # batch sizes: the least that a law is fitted to
WITHIN, ALL = 0.8, (10, 90)  # the interval whose coverage is judged, and its percentiles
MEASURED, CLOSE = 5, 0.15  # steps that are timed; how near the others have to be
# Of a device that is half busy at one of the batch sizes: the smallest, the middle one, the largest
KNEES = ("smallest", "middle", "largest")


@dataclass(frozen=True)
class Judged:
    """What was found.

    Attributes:
        verdicts: A row a workload: curve, must (why it has to be refused, or empty), said, false
            (confidence).
        points: A row a held-out batch size: curve, seen, distance (over the largest seen; 0
            within), refused, error (log of predicted over measured K), within (the 80 % interval).
        regrets: A row a recommendation: curve, seen, knee, time and examples (share lost against
            the best batch size).
        steps: A row a predicted step: curve, what, error (log).
    """

    verdicts: list[dict]
    points: list[dict]
    regrets: list[dict]
    steps: list[dict]


def runs_of(folder: Path | None) -> pd.DataFrame:
    """Runs to a goal, with the spacing of checks in steps; the copy in tests/data without a
    folder."""
    if folder is None:
        return pd.read_csv(DATA)
    runs = pd.read_csv(folder / "kb_points.csv")
    runs = runs[~runs["note"].fillna("").str.contains("suspect")]
    return runs.assign(check=runs["grid_examples"] / runs["batch_size"])


def times_of(folder: Path | None) -> pd.DataFrame:
    """Timed steps; the copy in tests/data without a folder."""
    return pd.read_csv(TIMES if folder is None else folder / "step_time.csv")


def must_refuse(known: list[Observation]) -> str:
    """Why nothing beyond its batch sizes may be said of a workload, by all its data and a plain
    fit; else empty.

    This is no rule of `fit_law`: it looks at all batch sizes, and at no interval.
    """
    points = exact(known)
    if len(points) < FEW:
        return "too few batch sizes"
    batch, steps = (
        np.array([getattr(p, name) for p in points]) for name in ("batch_size", "steps")
    )
    if batch.max() <= 1.2 * batch.min():
        return "batch sizes alike"
    fit = fit_scaling(batch, steps)
    rms = math.sqrt(float((np.log(fit.steps(batch) / steps) ** 2).mean()))
    if rms > 0.2:
        return f"the law is off by {rms:.0%}"
    if steps.max() < 1.1 * steps.min():
        return "flat"
    return "linear: below half of B_crit" if batch.max() < 0.5 * fit.critical_batch_size else ""


def curves(runs: pd.DataFrame) -> Iterator[tuple[str, list[Observation]]]:
    """The medians of each workload and goal."""
    by = [key for key in ("set", "workload", "goal") if key in runs]
    groups: Any = runs.groupby(by, dropna=False)
    for names, group in groups:
        yield f"{names[0]}: {names[1]}", medians(group)


def parts(known: list[Observation]) -> Iterator[tuple[str, list[Observation], list[Observation]]]:
    """What is seen of a workload, and what is held out."""
    points = exact(known)
    for i in range(1, len(points) - 1):
        yield "all others", [o for o in known if o is not points[i]], [points[i]]
    sizes = {FEW: "lowest 3"}
    sizes.setdefault(max(FEW, math.ceil(len(points) / 2)), "lower half")
    for count, name in sizes.items():
        if len(points) > count:
            seen = [o for o in known if o.batch_size <= points[count - 1].batch_size]
            yield name, seen, points[count:]
            if (
                name == "lowest 3" and math.ceil(len(points) / 2) <= FEW
            ):  # which is the lower half too
                yield "lower half", seen, points[count:]


def judge(runs: pd.DataFrame, times: pd.DataFrame) -> Judged:
    """Judges the law, what it recommends, and the model of step times."""
    found = Judged([], [], [], [])
    for curve, known in curves(runs):
        must, law = must_refuse(known), fit_law(known)
        said = law.line() if law.is_b_crit_known else f"refused: {law.verdict}"
        verdict = {"must": must, "said": said, "false": bool(must and law.is_b_crit_known)}
        found.verdicts.append({"curve": curve, "batch_sizes": len(exact(known)), **verdict})
        for seen, lower, held in parts(known):
            part = fit_law(lower)
            found.points.extend(
                {"curve": curve, "seen": seen, **row} for row in _points(part, held)
            )
            if seen != "all others":
                found.verdicts[-1] |= {seen: part.is_b_crit_known}
                found.regrets.extend(
                    {"curve": curve, "seen": seen, **row} for row in _regrets(part, exact(known))
                )
    found.steps.extend(judge_steps(times))
    return found


def _points(law: Law, held: list[Observation]) -> Iterator[dict]:
    """A row each; without an error where there is no law at all."""
    for point in held:
        row = {
            "distance": max(0.0, point.batch_size / law.range[1])
            if point.batch_size > law.range[1]
            else 0.0
        }
        row |= {
            "refused": law.predict([point.batch_size]).iloc[0]["known"] == "refused",
            "error": math.nan,
        }
        if not row["refused"]:
            low, high = np.percentile(law.samples([point.batch_size]), ALL)
            error = math.log(float(law.predict([point.batch_size])["steps"].iloc[0]) / point.steps)
            row |= {"error": error, "within": bool(low <= point.steps <= high)}
        yield row


def _regrets(law: Law, points: list[Observation]) -> Iterator[dict]:
    """What following the advice costs, of all batch sizes that were run and that it says something
    of."""
    sizes = [int(p.batch_size) for p in points]
    steps = {int(p.batch_size): p.steps for p in points}
    for knee, half in zip(
        KNEES, (sizes[0], math.sqrt(sizes[0] * sizes[-1]), sizes[-1]), strict=True
    ):
        model = fit_step_time([Timed(b, 1 + b / half) for b in sizes])
        said = answer(law, model, sizes)
        if said.best is None:
            continue
        time = {b: k * (1 + b / half) for b, k in steps.items()}
        examples = {b: k * b for b, k in steps.items()}
        best, cheapest = (
            said.best["batch_size"],
            min(said.table.to_dict("records"), key=lambda row: row["examples"]),
        )
        yield {
            "knee": knee,
            "time": time[best] / min(time.values()) - 1,
            "examples": examples[cheapest["batch_size"]] / min(examples.values()) - 1,
            "narrow": bool(best == max(said.table["batch_size"]) and len(said.table) < len(sizes)),
        }


def judge_steps(times: pd.DataFrame) -> Iterator[dict]:
    """Steps of local batches between those timed: of 5 on one device; of 3 there and 2 on
    several."""
    rows: Any = times[times["accumulation"] == 1]
    for names, group in rows.groupby(["set", "workload", "hardware"], dropna=False):
        curve = " ".join(map(str, names[:2]))
        alone = (
            group[group["gpus"] == 1].groupby("local_batch", as_index=False).first().assign(gpus=1)
        )
        sizes = sorted(alone["local_batch"])
        if len(sizes) > MEASURED:
            at = alone["local_batch"].isin(_spread(sizes, MEASURED))
            yield from _errors(curve, "one device", alone[at], alone[~at])
        if len(sizes) < 3:
            continue
        base = alone[alone["local_batch"].isin(_spread(sizes, MEASURED - 2))]
        for _, several in group[group["gpus"] > 1].groupby(["gpus", "nodes"], dropna=False):
            several = several.groupby("local_batch", as_index=False).median(numeric_only=True)
            inside = several[several["local_batch"].between(sizes[0], sizes[-1])]
            if len(inside) > 2:
                ends = inside["local_batch"].isin(
                    [inside["local_batch"].min(), inside["local_batch"].max()]
                )
                yield from _errors(
                    curve, "several devices", pd.concat([base, inside[ends]]), inside[~ends]
                )


def _spread(sizes: list[float], count: int) -> list[float]:
    """So many of some sizes, evenly in their logarithm, both ends among them."""
    left, chosen = list(sizes), []
    for target in np.geomspace(sizes[0], sizes[-1], count):
        chosen.append(min(left, key=lambda m: abs(math.log(m / target))))
        left.remove(chosen[-1])
    return chosen


def _errors(curve: str, what: str, seen: pd.DataFrame, held: pd.DataFrame) -> Iterator[dict]:
    for value, took in zip(
        predicted(fit_step_time(timed(seen)), held)[:, 0], held["step_time"], strict=True
    ):
        yield {"curve": curve, "what": what, "error": math.log(value / took)}


def measure(options: object = None, folder: Path | None = None) -> Judged:
    """Nothing in it depends on the machine, or on options."""
    return judge(runs_of(folder), times_of(folder))


def show(found: Judged) -> str:
    """All of it, as markdown."""
    from benchmarks.advice_tables import tables

    return tables(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--traces", type=Path, default=os.environ.get("LIT_DPS_TRACES"), help="folder of other runs"
    )
    folder = parser.parse_args().traces
    if folder is not None and not (Path(folder) / "kb_points.csv").exists():
        print(f"skipped: no kb_points.csv in {folder}")
        return
    print(show(measure(folder=None if folder is None else Path(folder))))


if __name__ == "__main__":
    main()
