"""Advice on public workloads of which it has seen a part, beside simpler rules.

`python -m benchmarks advice` prints the tables of docs/advice-tables.md, and `python -m
benchmarks.advice --page docs/advice-tables.md` writes them. `python -m benchmarks.advice --traces
FOLDER` judges other workloads: kb_points.csv and step_time.csv there have the columns of
tests/data, or of the sources. pollux_validation.csv (noise scales along runs) is optional.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import least_squares

from benchmarks.step_model import DATA as TIMES
from benchmarks.step_model import judge as judge_step_model
from lit_dps.advice.answer import answer
from lit_dps.advice.next_probe import law_with_prior
from lit_dps.advice.step_time import StepTime, Timed, fit_step_time
from lit_dps.analysis.critical_prior import UNKNOWN_RATIO, CriticalPrior
from lit_dps.analysis.law import MAX_EXTRAPOLATION, Law, fit_law
from lit_dps.analysis.law_fit import MIN_BATCH_SIZES, fit_scaling
from lit_dps.analysis.observations import Observation, exact, medians

TITLE = "Advice on public workloads"
DATA = Path(__file__).parents[1] / "tests" / "data" / "steps_to_goal.csv"
NOISE_SCALES = DATA.with_name("noise_scales.csv")
PERCENTILES_80 = (10, 90)
# The device is half busy at the smallest batch size (0), the largest (1), or between them.
KNEES = (0.0, 0.5, 1.0)
# Of nanochat: the best batch size grows with this power of the examples of a run.
NANOCHAT_EXPONENT = 0.383
# A scale of residuals so large that the fit is plain least squares of log K.
LEAST_SQUARES = 1e3
SPLITS = ("lowest 3", "lower half", "spread of 3")
ONE_K = "one K"
ONE_K_NOISE = "one K + noise scale"


@dataclass(frozen=True)
class Judged:
    """What was found.

    Attributes:
        laws: A row per workload: curve, batch_sizes, law.
        points: A row per held-out batch size: curve, split, method, distance (over the range that
            was seen; at most 1 within it), known, error (log of predicted over measured K; missing
            without a prediction), and for the product within_80.
        losses: A row per recommendation: curve, split, method, knee, lost (share of the time).
        steps: A row per predicted step (`step_model.judge`).
        left_out: A row per workload with a noise scale (`judge_noise_prior`).
    """

    laws: list[dict]
    points: list[dict]
    losses: list[dict]
    steps: list[dict]
    left_out: list[dict] = field(default_factory=list)


@dataclass(frozen=True)
class Workload:
    """A workload.

    Attributes:
        source, name: Where it is from, and its name.
        known: Its K.
        noise: The noise scale of the second half of the run at the smallest batch size.
    """

    source: str
    name: str
    known: list[Observation]
    noise: float | None = None
    points: list[Observation] = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "points", exact(self.known))

    @property
    def batch_sizes(self) -> np.ndarray:
        """(n,): batch sizes with a K, ascending."""
        return np.array([point.batch_size for point in self.points])

    @property
    def steps(self) -> np.ndarray:
        """(n,): K."""
        return np.array([point.k for point in self.points])

    def step_seconds(self, knee: float) -> np.ndarray:
        """(n,): seconds of a step; twice those of an empty step at the batch size of the knee."""
        return 1 + self.batch_sizes / self.knee_batch_size(knee)

    def knee_batch_size(self, knee: float) -> float:
        """The batch size at which the device is half busy."""
        sizes = self.batch_sizes
        return float(sizes[0] ** (1 - knee) * sizes[-1] ** knee)

    def splits(self) -> Iterator[tuple[str, list[Observation]]]:
        """Yield what is seen of the workload: a name and observations."""
        count = len(self.points)
        if count <= MIN_BATCH_SIZES:
            return
        half = max(MIN_BATCH_SIZES, math.ceil(count / 2))
        for name, size in ((SPLITS[0], MIN_BATCH_SIZES), (SPLITS[1], half)):
            largest = self.points[size - 1].batch_size
            yield name, [o for o in self.known if o.batch_size <= largest]
        yield SPLITS[2], [self.points[0], self.points[count // 2], self.points[-1]]
        # The smallest batch size of a sweep is smaller than most people train at.
        yield ONE_K, [self.points[(half - 1) // 2]]
        if self.noise is not None:
            yield ONE_K_NOISE, [self.points[0]]


def workloads(runs: pd.DataFrame, noise: pd.DataFrame) -> list[Workload]:
    """Return the workloads of a table of runs, with their noise scales."""
    scales = {}
    for row in noise.to_dict("records"):
        scales[row["set"], row["workload"]] = row["noise_scale"]
    keys = [key for key in ("set", "workload", "goal") if key in runs]
    groups: Any = runs.groupby(keys, dropna=False)
    found = []
    for names, group in groups:
        scale = scales.get(names[:2])
        found.append(Workload(names[0], str(names[1]), medians(group), scale))
    return found


def judge(runs: pd.DataFrame, noise: pd.DataFrame, times: pd.DataFrame) -> Judged:
    """Return the judgement of the law, of what it recommends, and of the step times."""
    all_workloads = workloads(runs, noise)
    steps = judge_step_model(times).to_dict("records")
    judged = Judged([], [], [], steps, judge_noise_prior(all_workloads))
    for workload in all_workloads:
        curve = f"{workload.source}: {workload.name}"
        law = fit_law(workload.known)
        row = {"curve": curve, "batch_sizes": len(workload.points), "law": law.line()}
        judged.laws.append(row)
        scale = nanochat_scale(all_workloads, workload.source)
        for split, seen in workload.splits():
            columns = {"curve": curve, "source": workload.source, "split": split}
            part = product_law(workload, split, seen)
            for row in _judge_points(workload, part, seen):
                judged.points.append(columns | row)
            for row in _judge_losses(workload, part, seen, scale):
                judged.losses.append(columns | row)
    return judged


def product_law(workload: Workload, split: str, seen: list[Observation]) -> Law:
    """Return the law that advice uses."""
    if split != ONE_K_NOISE:
        return law_with_prior(seen)
    assert workload.noise is not None
    value = workload.noise * math.exp(UNKNOWN_RATIO.log_median)
    return fit_law(seen, CriticalPrior(value, UNKNOWN_RATIO.deviation, "the noise scale"))


def judge_noise_prior(all_workloads: Sequence[Workload]) -> list[dict]:
    """Return the prior by the noise scale that other workloads give, and how it does on each one.

    The prior has the median and the standard deviation of log(B_crit / noise scale) of the others.
    B_crit is of the law of all batch sizes of a workload. It predicts all K from the smallest one.
    """
    ratios = {}
    for workload in all_workloads:
        if workload.noise is not None:
            draws = fit_law(workload.known).draws
            critical = float(np.median(draws[:, 0] / draws[:, 1]))
            ratios[workload.name] = math.log(critical / workload.noise)
    rows = []
    for workload in all_workloads:
        others = [ratio for name, ratio in ratios.items() if name != workload.name]
        if workload.noise is None or len(others) < 2:
            continue
        middle = float(np.median(others))
        deviation = float(np.std(others, ddof=1))
        prior = CriticalPrior(workload.noise * math.exp(middle), deviation, "the noise scale")
        seen = workload.points[:1]
        law = fit_law(seen, prior)
        within = []
        for row in _judge_points(workload, law, seen):
            if row["method"] == "advice" and row["known"] != "refused":
                within.append(row["within_80"])
        curve = f"{workload.source}: {workload.name}"
        row = {"curve": curve, "ratio": ratios[workload.name], "median": middle}
        rows.append(row | {"deviation": deviation, "points": len(within), "within": sum(within)})
    return rows


def least_squares_curve(seen: list[Observation]) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the plain least-squares fit of c1 / B + c2 to log K; None for one K."""
    points = exact(seen)
    if len(points) < 2:
        return None
    batch = [point.batch_size for point in points]
    steps = [point.k for point in points]
    return fit_scaling(batch, steps, loss_scale=LEAST_SQUARES).steps


def power_curve(seen: list[Observation]) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the least-squares fit of a B^-p + c to log K; None with fewer than 3 K."""
    points = exact(seen)
    if len(points) < 3:
        return None
    batch = np.array([point.batch_size for point in points])
    log_steps = np.log([point.k for point in points])
    middle = float(np.exp(np.log(batch).mean()))

    def log_curve(x: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        return np.logaddexp(x[0] - x[2] * np.log(sizes / middle), x[1])

    best = None
    for exponent in (0.5, 1.0):
        for floor in (-6.0, -1.0):
            start = [log_steps.mean(), log_steps.min() + floor, exponent]
            limits = ([-np.inf, -50, 0], [np.inf, np.inf, 2])
            fit = least_squares(lambda x: log_curve(x, batch) - log_steps, start, bounds=limits)
            if best is None or fit.cost < best.cost:
                best = fit
    assert best is not None
    constants = best.x
    return lambda sizes: np.exp(log_curve(constants, np.asarray(sizes, float)))


RIVAL_CURVES = {"c1 / B + c2, least squares": least_squares_curve, "a B^-p + c": power_curve}


def _judge_points(workload: Workload, law: Law, seen: list[Observation]) -> Iterator[dict]:
    """Yield how well K is predicted at each batch size that was not seen."""
    seen_sizes = [o.batch_size for o in exact(seen)]
    curves = {name: make(seen) for name, make in RIVAL_CURVES.items()}
    for point in workload.points:
        if point.batch_size in seen_sizes:
            continue
        size = point.batch_size
        distance = max(size / max(seen_sizes), min(seen_sizes) / size)
        row = law.predict([size]).iloc[0]
        columns = {"method": "advice", "distance": distance, "known": row["known"]}
        if row["known"] == "refused":
            yield columns
        else:
            low, high = np.percentile(law.samples([size]), PERCENTILES_80)
            error = math.log(row["steps"] / point.k)
            yield columns | {"error": error, "within_80": bool(low <= point.k <= high)}
        for name, curve in curves.items():
            if curve is not None:
                error = math.log(float(curve(np.array([size]))[0]) / point.k)
                yield {"method": name, "distance": distance, "error": error}


def _judge_losses(
    workload: Workload, law: Law, seen: list[Observation], scale: float
) -> Iterator[dict]:
    """Yield the time that is lost by following each rule, for each knee of the step time.

    The curves are asked as far beyond the range as advice answers.
    """
    sizes = workload.batch_sizes
    is_seen = np.isin(sizes, [o.batch_size for o in exact(seen)])
    seen_sizes = sizes[is_seen]
    is_near = sizes <= MAX_EXTRAPOLATION * seen_sizes[-1]
    curves = {name: make(seen) for name, make in RIVAL_CURVES.items()}
    for knee in KNEES:
        seconds = workload.step_seconds(knee)
        times = workload.steps * seconds
        half_busy = workload.knee_batch_size(knee)
        model = fit_step_time([Timed(b, 1 + b / half_busy) for b in sizes])
        choices = {"advice": _recommended(law, model, sizes)}
        for name, curve in curves.items():
            if curve is not None:
                expected = np.where(is_near, curve(sizes) * seconds, np.inf)
                choices[name] = int(np.argmin(expected))
        choices["best measured"] = int(np.argmin(np.where(is_seen, times, np.inf)))
        choices["largest that fits"] = len(sizes) - 1
        examples = exact(seen)[0].k * exact(seen)[0].batch_size
        rule = scale * examples**NANOCHAT_EXPONENT
        choices["nanochat"] = int(np.argmin(np.abs(np.log(sizes / rule))))
        for method, choice in choices.items():
            yield {"method": method, "knee": knee, "lost": times[choice] / times.min() - 1}


def _recommended(law: Law, model: StepTime, sizes: np.ndarray) -> int:
    """Return the index of the batch size that advice recommends."""
    result = answer(law, model, [int(b) for b in sizes])
    assert result.best is not None  # a batch size that was seen has a K
    return int(np.flatnonzero(sizes.astype(int) == result.best["batch_size"])[0])


def nanochat_scale(all_workloads: list[Workload], source: str) -> float:
    """Return b of the rule B = b D^0.383, fitted to the best batch sizes of the other sources.

    D is the number of examples to the goal at the smallest batch size.
    """
    logs = []
    for workload in all_workloads:
        if workload.source == source or len(workload.points) < MIN_BATCH_SIZES:
            continue
        examples = workload.steps[0] * workload.batch_sizes[0]
        for knee in KNEES:
            best = np.argmin(workload.steps * workload.step_seconds(knee))
            size = workload.batch_sizes[best]
            logs.append(math.log(size) - NANOCHAT_EXPONENT * math.log(examples))
    if not logs:
        return 1.0
    return math.exp(float(np.median(logs)))


def read_runs(folder: Path | None) -> pd.DataFrame:
    """Return runs to a goal, with the steps between checks."""
    if folder is None:
        return pd.read_csv(DATA)
    runs = pd.read_csv(folder / "kb_points.csv")
    runs = runs[~runs["note"].fillna("").str.contains("suspect")]
    return runs.assign(check=runs["grid_examples"] / runs["batch_size"])


def read_noise(folder: Path | None, runs: pd.DataFrame) -> pd.DataFrame:
    """Return noise scales: columns set, workload, batch_size and noise_scale [examples]."""
    if folder is None:
        return pd.read_csv(NOISE_SCALES)
    file = folder / "pollux_validation.csv"
    if not file.exists():
        return pd.DataFrame(columns=["set", "workload", "batch_size", "noise_scale"])
    return noise_of_second_half(pd.read_csv(file), runs)


def noise_of_second_half(readings: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Return the noise scale of the second half of the run at the smallest batch size.

    Args:
        readings: Columns workload, batch_size, iteration, grad_sqr and grad_var (in units of the
            smallest batch size).
        runs: The runs of Pollux, whose steps end the run.
    """
    rows = []
    groups: Any = readings.groupby("workload")
    for workload, group in groups:
        size = group["batch_size"].min()
        is_workload = (runs["set"] == "pollux") & (runs["workload"] == workload)
        run: Any = runs[is_workload & (runs["batch_size"] == size)]
        if not len(run):
            continue
        end = float(run["steps"].iloc[0])
        at_size = group[group["batch_size"] == size]
        # The last reading is of the last step.
        half = at_size[at_size["iteration"].between(end / 2 + 1, end + 1)]
        scale = size * half["grad_var"].mean() / half["grad_sqr"].mean()
        row = {"set": "pollux", "workload": workload, "batch_size": size}
        rows.append(row | {"noise_scale": float(f"{scale:.5g}")})
    return pd.DataFrame(rows)


def read_times(folder: Path | None) -> pd.DataFrame:
    """Return timed steps."""
    if folder is None:
        return pd.read_csv(TIMES)
    return pd.read_csv(folder / "step_time.csv")


def measure(options: object = None, folder: Path | None = None) -> Judged:
    """Return the judgement; nothing in it depends on the machine, or on options."""
    runs = read_runs(folder)
    return judge(runs, read_noise(folder, runs), read_times(folder))


def show(judged: Judged) -> str:
    """Return all tables, as markdown."""
    from benchmarks.advice_tables import all_tables

    return all_tables(judged)


def main() -> None:
    """Print the tables, or write their page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--traces", type=Path, default=os.environ.get("LIT_DPS_TRACES"), help="folder of other runs"
    )
    parser.add_argument("--page", type=Path, help="Markdown file to write the tables to.")
    arguments = parser.parse_args()
    folder = arguments.traces
    if folder is not None and not (Path(folder) / "kb_points.csv").exists():
        print(f"skipped: no kb_points.csv in {folder}")
        return
    judged = measure(folder=None if folder is None else Path(folder))
    if arguments.page is None:
        print(show(judged))
    else:
        from benchmarks.advice_tables import page

        arguments.page.write_text(page(judged), encoding="utf-8")


if __name__ == "__main__":
    main()
