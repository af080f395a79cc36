"""What repeats of a cell's best points on fresh seeds say: the median K over seeds, its spread, and
the luck in K*.

K* is the least of many trials, so it is lucky in its seed as well as good in its metaparameters:
run again on other seeds, its point usually needs more steps. K* over the median of its own point
tells how much.

The law of the median over seeds: fitted to the median K of each cell's best point, beside that
of K* itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from lit_dps.analysis.best_of_n import draws_text
from lit_dps.analysis.law_bootstrap import Scaling, estimate, medians_outside
from lit_dps.analysis.summary import CellSummary, at_first_check
from lit_dps.analysis.tables import (
    aligned,
    columns_of,
    frame,
    listed_numbers,
    short_columns,
    three_digits,
    times,
)
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Cell, Series, Status, TrialResult


@dataclass(frozen=True)
class RepeatSummary:
    """The repeats of one point of a cell.

    Attributes:
        cell: The cell.
        point, steps: The point, and its steps to result in the search, which it was chosen by.
        rank: 1 for the point of K*, 2 for the next best one.
        results: Its finished repeats but for failed ones, the search's own trial not among them.
        asked: How many of them there will be. Those that are there of a point that is best at this
            goal alone: the best points at the study's own goal are repeated.
        check_interval: Steps between two checks.
    """

    cell: Cell
    point: int
    steps: int
    rank: int
    results: Sequence[TrialResult]
    asked: int
    check_interval: int

    @cached_property
    def known(self) -> list[float]:
        """Steps to result, ascending; infinite for a repeat that did not meet the goal in its time:
        censored."""
        return sorted(math.inf if result.steps is None else result.steps for result in self.results)

    @property
    def bounded(self) -> list[float]:
        """The same with a lower bound for those that missed: the most steps that any of them was
        run."""
        most = max((result.steps_run for result in self.results), default=0)
        return [min(k, float(most)) for k in self.known]

    @property
    def missed(self) -> int:
        """Repeats that did not meet the goal: stopped at their limit, out of budget, or not
        finite."""
        return sum(map(math.isinf, self.known))

    def quantile(self, q: float) -> float | None:
        """A quantile of the steps to result, linear between them; infinite where it falls on missed
        ones.

        None without repeats.
        """
        return quantile(self.known, q) if self.known else None

    @property
    def median(self) -> float | None:
        return self.quantile(0.5)

    @property
    def bias(self) -> float | None:
        """Steps in the search over the median: below 1 the search was lucky. None where either is
        only a bound."""
        bound = at_first_check(self.steps, self.check_interval)
        if (
            self.median is None
            or not math.isfinite(self.median)
            or bound
            or self.median <= self.check_interval
        ):
            return None
        return self.steps / self.median


def quantile(ascending: Sequence[float], q: float) -> float:
    """A quantile of some values, linear between neighbours, of which the last ones may be
    infinite."""
    at = q * (len(ascending) - 1)
    low, share = ascending[math.floor(at)], at - math.floor(at)
    return (
        low
        if share == 0
        else low + share * (ascending[math.floor(at) + 1] - low)
        if low < math.inf
        else low
    )


def summarize_repeats(
    record: StudyRecord, cells: Iterable[CellSummary], whole: StudyRecord | None = None
) -> list[RepeatSummary]:
    """The repeats of each cell's best points as they are now, by series, batch size, then rank.

    Args:
        record, cells: The study, perhaps at another goal than its own.
        whole: At its own, whose best points are repeated; by default the same.
    """
    found = []
    for summary in cells:
        best = _best(record, summary.cell)
        planned = best if whole is None else _best(whole, summary.cell)
        for rank, (point, steps) in enumerate(best.items(), 1):
            repeats = [r for r in record.repeats.get(summary.cell, ()) if r.trial.point == point]
            ended = [r for r in repeats if r.status is not Status.FAILED]
            asked = max(record.plan.count if point in planned else 0, len(ended))
            interval = record.goal.check_interval
            found.append(RepeatSummary(summary.cell, point, steps, rank, ended, asked, interval))
    return found


def _best(record: StudyRecord, cell: Cell) -> dict[int, int]:
    """Steps to result of a cell's best points, which are repeated, the best first."""
    steps = {r.trial.point: r.steps for r in record.resolved_results(cell) if r.steps is not None}
    if record.plan.count == 0:
        return {}
    best = record.plan.best_points((k, point) for point, k in steps.items())
    return {point: steps[point] for point in best}


def repeat_rows(record: StudyRecord, repeats: Iterable[RepeatSummary]) -> pd.DataFrame:
    """One row a repeated point, by series, batch size, then rank.

    Columns: sparsity and further axes, batch_size [examples], rank (1: the point of K*), point,
    steps (its steps to result in the search), repeats, missed; least, lower, median, upper and most
    (the quartiles) [steps] over seeds, inf where that is a missed one; floor (1 where the median is
    at the first check, an upper bound); bias, steps / median.
    """
    quantiles = {"least": 0.0, "lower": 0.25, "median": 0.5, "upper": 0.75, "most": 1.0}
    columns = [
        "batch_size",
        "rank",
        "point",
        "steps",
        "repeats",
        "missed",
        *quantiles,
        "floor",
        "bias",
    ]
    return frame(
        (
            {
                **columns_of(each.cell.series),
                "batch_size": each.cell.batch_size,
                "rank": each.rank,
                "point": each.point,
                "steps": each.steps,
                "repeats": len(each.results),
                "missed": each.missed,
                **{name: each.quantile(q) for name, q in quantiles.items()},
                "floor": int(each.median is not None and each.median <= each.check_interval),
                "bias": each.bias,
            }
            for each in repeats
        ),
        [*columns_of(record.series[0]), *columns],
    )


def repeats_text(record: StudyRecord, repeats: Sequence[RepeatSummary]) -> str:
    """The section of a report on repeats; empty where nothing is repeated."""
    if not repeats:
        return ""
    plan, interval = record.plan, record.goal.check_interval
    which = "the point of K*" if plan.points == 1 else f"the {plan.points} best points"
    until = "the step budget" if plan.slack is None else f"{plan.slack:g} x K*"
    seeds = (
        f"{plan.count} fresh seed{'s' * (plan.count > 1)} (initial weights, mask and order of "
        "examples)"
    )
    lines = [f"repeats: {which} on {seeds}, to {until} at most"]

    def steps(x: float | None) -> str:
        if x is None:
            return "-"
        return "missed" if math.isinf(x) else f"<= {interval}" if x <= interval else three_digits(x)

    lines += aligned(
        {
            "B": str(each.cell.batch_size),
            **short_columns(each.cell.series),
            **({"point": str(each.point)} if plan.points > 1 else {}),
            "K in the search" if plan.points > 1 else "K*": steps(each.steps),
            "median": steps(each.median),
            "quartiles": f"{steps(each.quantile(0.25))} to {steps(each.quantile(0.75))}"
            if each.known
            else "-",
            "all": f"{steps(each.quantile(0))} to {steps(each.quantile(1))}" if each.known else "-",
            "repeats": str(len(each.results)),
            "missed": str(each.missed),
            "K / median": "-" if each.bias is None else f"{each.bias:.2f}",
        }
        for each in repeats
    )
    known = [each.bias for each in repeats if each.rank == 1 and each.bias is not None]
    if known:
        mean = math.exp(sum(map(math.log, known)) / len(known))
        lines.append(
            f"  K* is x{mean:.2f} the median of its own point over seeds, in the geometric mean "
            f"of {len(known)} cells: "
            "the luck of the least of many trials"
        )
    return "\n".join(lines) + "\n"


def repeat_notes(
    record: StudyRecord, repeats: Sequence[RepeatSummary], whole: StudyRecord | None = None
) -> list[str]:
    """What a reader should know of the repeats, a line each; arguments as of
    `summarize_repeats`."""
    if not record.plan.count:
        return []
    lines, every = [], [result for results in record.repeats.values() for result in results]
    own = record.goal if whole is None else whole.goal
    if record.goal.value != own.value and not own.is_easier(record.goal.value):
        return [f"no repeats here: they end at {own}, the study's own"]
    if others := sum(not each.asked for each in repeats):
        why = f"repeated are those of {own}, the study's own"
        lines.append(f"{others} of the {len(repeats)} best points here have no repeats: {why}")
    missing = sum(each.asked - len(each.results) for each in repeats)
    if missing:
        lines.append(
            f"{missing} of {sum(each.asked for each in repeats)} repeats of the best points have "
            "not finished"
        )
    old = {(each.cell, each.point) for each in repeats}
    if left_over := sum((r.trial.cell, r.trial.point) not in old for r in every):
        when = "any more" if own.value == record.goal.value else "at this goal"
        lines.append(
            f"{left_over} repeats of points that are not the best {when} are kept and not counted"
        )
    if failed := [r for r in every if r.status is Status.FAILED]:
        lines.append(
            f"{len(failed)} repeats failed, the first with {failed[0].failure}: the next run "
            "repeats them"
        )
    told = [each for each in repeats if each.results]
    if same := sum(_same_runs(record, each) for each in told):
        lines.append(
            f"at {same} of the {len(told)} repeated points all runs are the same, that of the "
            "search too: the module or"
            " the data seed themselves, or draw nothing, so that the spread over seeds is not known"
        )
    data = record.config.get("data", {})
    order = (
        data.get("init_args", {}).get("order", "authors") if isinstance(data, dict) else "authors"
    )
    if str(order) not in ("authors", "per_trial"):
        lines.append(
            f"data.order {order} is a file: all repeats take their examples in that one order"
        )
    return lines


def _same_runs(record: StudyRecord, repeated: RepeatSummary) -> bool:
    """Whether all repeats of a point ran as its trial of the search did, by their losses: errors
    may be bounds."""
    runs = [r for r in record.results[repeated.cell] if r.trial.point == repeated.point]
    curves = [
        (r.curve.get("step"), r.curve.get("train_loss") or r.curve)
        for r in (*runs, *repeated.results)
    ]
    return bool(runs) and all(curve == curves[0] and curve[0] for curve in curves)


def seeds_of(repeats: Sequence[RepeatSummary]) -> dict[Series, dict[int, list[float]]]:
    """Steps to result over seeds of each K* point, by series and batch size; infinite for those
    that missed the goal.

    Without cells most of whose repeats missed the goal: their median is not known.
    """
    found: dict[Series, dict[int, list[float]]] = {}
    for each in repeats:
        if each.rank == 1 and each.median is not None and np.isfinite(each.median):
            found.setdefault(each.cell.series, {})[each.cell.batch_size] = each.known
    return found


def outside_text(outside: Mapping[int, float]) -> str:
    """Where medians leave the law in words: above at B = 8, 16, below at B = 2."""
    parts = []
    for side, is_above in (("above", True), ("below", False)):
        sizes = [batch_size for batch_size, ratio in outside.items() if (ratio > 1) == is_above]
        if sizes:
            parts.append(f"{side} at B = {listed_numbers(sizes)}")
    return ", ".join(parts)


def median_notes(
    laws: Mapping[Series, Scaling], medians: Mapping[Series, Scaling], check_interval: int
) -> list[str]:
    """A note on the series and batch sizes at which medians over seeds leave the law of K*; empty
    without any."""
    parts, ratios = [], []
    for series, of_medians in sorted(medians.items()):
        outside = medians_outside(laws[series], of_medians, check_interval)
        if outside:
            parts.append(f"{series} {outside_text(outside)}")
            ratios += outside.values()
    if not parts:
        return []
    most = max(ratios, key=lambda ratio: abs(math.log(ratio)))
    return [
        f"medians over seeds lie outside the 95 % band of the law of K*: {'; '.join(parts)}; up "
        f"to {times(most)} the "
        "law. One run at the best point needs the median, not the law"
    ]


def law_lines(scalings: Mapping[Series, Scaling]) -> list[str]:
    """A line a series: the constants of its law and what else is to say of it."""
    lines = []
    for series, scaling in sorted(scalings.items()):
        parts = [scaling.describe()]
        if scaling.fit is not None:
            c1, c2 = estimate(scaling.fit.c1, scaling.c1), estimate(scaling.fit.c2, scaling.c2)
            parts = [f"c1 = {c1}", f"c2 = {c2}", *parts]
        lines.append(f"  {series}  " + "  ".join(parts))
    return lines


def intervals_of(scalings: Mapping[Series, Scaling]) -> str:
    """What the intervals of the laws of K* are, in words."""
    over = {scaling.over for scaling in scalings.values()}
    if over == {"seeds"}:
        return "intervals over seeds"
    words = "bootstrap intervals over trials, which lean upward"
    return (
        f"intervals over seeds, or where a cell lacks repeats or one missed the goal {words}"
        if "seeds" in over
        else words
    )


def luck_text(
    record: StudyRecord,
    cells: Sequence[CellSummary],
    repeats: Sequence[RepeatSummary],
    scalings: Mapping[Series, Scaling],
) -> str:
    """The section of a report on repeats and what they say; empty where nothing is repeated."""
    if not repeats:
        return ""
    return repeats_text(record, repeats) + draws_text(record, cells) + median_law_text(scalings)


def median_law_text(scalings: Mapping[Series, Scaling]) -> str:
    """A line a series; empty where there are no repeats."""
    if not scalings:
        return ""
    lines = ["median K over seeds = c1 / B + c2, 95 % intervals over seeds", *law_lines(scalings)]
    return "\n".join(lines) + "\n"
