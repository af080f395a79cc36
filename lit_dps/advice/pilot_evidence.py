"""What the runs show: K or bounds of K, the noise scale along the pilot, and the best rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lit_dps.advice.next_probe import SEED_SPREAD
from lit_dps.advice.pilot_plan import DIVERGED, MET, MISSED, Outcome, PilotPlan, next_factor
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.observations import AT_LEAST, AT_MOST, Observation
from lit_dps.core.goal import Goal
from lit_dps.core.noise_scale import NoiseScale, noise_scale
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import NOISE_SCALE, Status, TrialResult
from lit_dps.report.no_result import best_validation, spent_budgets

# The first half of a run does not count: at the begin the noise scale is far below B_crit.
NOISE_FROM = 0.5
LAST_LOSSES = 4  # their mean decides which of two runs without the goal is better
# Expected log K of a further run less log K, which is the least of 1, 2, ... rates. A search ends
# after two rates only where the second is little better, which is no luck. Simulated with
# `next_factor`, the noise `SEED_SPREAD`, and 22 % more steps at twice or half the best rate
# (tests/unit/advice/test_pilot_evidence.py).
LUCK_OF_RATES = (0.0, 0.0, 0.13, 0.15, 0.25)
# Runs with these ends might have had the fewest steps.
COMPETING = (Status.COMPLETE, Status.INCOMPLETE, Status.OUTRACED)


def observations_of_runs(
    record: StudyRecord | None, bounds: Mapping[int, float]
) -> list[Observation]:
    """Return K or a bound of K for each batch size that was run.

    The noise of K is the usual spread between seeds, because a few runs do not show the noise. K is
    the least of all rates at a batch size, with the `Observation.luck` of such a search.

    Args:
        record: The study of the runs; None before the first run.
        bounds: The steps in which no run met the goal, by batch size (`bounds_of`).
    """
    observations = []
    known = set()
    for cell in _cells_with_k(record):
        known.add(cell.cell.batch_size)
        size = float(cell.cell.batch_size)
        steps = float(cell.k_star)
        if cell.is_at_first_check:
            observations.append(Observation(size, steps, bound=AT_MOST))
        else:
            resolution = float(cell.check_cost)
            rates = {run.trial.point for run in cell.trials if run.status in COMPETING}
            luck = LUCK_OF_RATES[min(len(rates), len(LUCK_OF_RATES)) - 1]
            observations.append(Observation(size, steps, SEED_SPREAD, resolution, luck=luck))
    for size, steps in bounds.items():
        if size not in known:
            observations.append(Observation(float(size), steps, bound=AT_LEAST))
    return observations


def _cells_with_k(record: StudyRecord | None) -> list[Any]:
    """Return the analyzed cells that have a K; [] before the first run."""
    if record is None:
        return []
    return [cell for cell in Analysis(record).cells if cell.k_star is not None]


@dataclass(frozen=True)
class PilotRun:
    """The user's run, once it has ended.

    It is stored beside the study, because the study truncates a run where another rate is better.

    Attributes:
        steps: Steps to the goal; None if the run missed the goal.
        steps_run: The step of its last validation within all budgets; 0 without one.
        seconds: Its wall time.
        status: How it ended.
        noise: The noise scale of its second half; None if it was not read.
        best: The best value of the goal's metric; None without an exact, finite one.
        check_seconds: Mean seconds of a full validation; None if validations stopped early.
        spent: The configuration keys of the budgets that it spent, if it missed the goal.
    """

    steps: int | None
    steps_run: int
    seconds: float
    status: str
    noise: NoiseScale | None
    best: float | None = None
    check_seconds: float | None = None
    spent: Sequence[str] = ("goal.max_steps",)

    def advice(self) -> str:
        """Return what to change after a run that missed the goal, by how it ended."""
        if self.status == Status.INFEASIBLE:
            return "It diverged. Choose a lower learning rate."
        if self.status == Status.STOPPED:
            return "The module or a callback ended it. Let it train longer, or choose another goal."
        larger = " and ".join(self.spent)
        if not self.steps_run:
            return f"No validation is within {larger}. Choose a smaller goal.check_interval."
        return f"Choose an easier goal, a larger {larger}, or another learning rate."

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON."""
        stored = asdict(self)
        if self.noise is not None:
            stored["noise"] = self.noise.to_dict()
        return stored

    @classmethod
    def of_stored(cls, stored: Mapping[str, Any]) -> PilotRun | None:
        """Return the pilot of stored advice; None before it has ended."""
        if "pilot" not in stored:
            return None
        fields = dict(stored["pilot"])
        if fields["noise"]:
            fields["noise"] = NoiseScale.from_dict(fields["noise"])
        return cls(**fields)

    @classmethod
    def of_record(cls, record: StudyRecord | None, plan: PilotPlan) -> PilotRun | None:
        """Return the pilot of a study without other runs; None before it has ended."""
        if record is None:
            return None
        for run in results_at(record, plan.batch_size):
            if run.trial.point == 0 and run.status is not Status.FAILED:
                return cls(
                    steps=run.steps,
                    steps_run=record.goal.last_step_within(run.curve),
                    seconds=run.seconds,
                    status=str(run.status),
                    noise=_late_noise_scale(run, plan.batch_size),
                    best=_best_metric(run, record.goal),
                    check_seconds=_check_seconds(run),
                    spent=list(spent_budgets(record.goal, [run])),
                )
        return None


def _best_metric(run: TrialResult, goal: Goal) -> float | None:
    """Return the best value of the goal's metric along a run; None if no finite one is exact."""
    best = best_validation(goal, [run])
    if best is None or not best.exact:
        return None
    return best.value


def _check_seconds(run: TrialResult) -> float | None:
    """Return the mean seconds of a validation of a run; None if some stopped early."""
    checks = run.timed.get("checks")
    if not checks or 0 in run.curve.get("exact", []):
        return None
    return run.timed["checking"] / checks


def _late_noise_scale(run: TrialResult, batch_size: int) -> NoiseScale | None:
    """Return the noise scale of the second half of a run; None if it was not read."""
    columns = run.readings.get(NOISE_SCALE)
    if columns is None or run.steps is None:
        return None
    late: dict[str, list[float]] = {"squared_gradient": [], "variance": []}
    for i, step in enumerate(columns["step"]):
        if NOISE_FROM * run.steps <= step <= run.steps:
            for name, values in late.items():
                values.append(columns[f"{NOISE_SCALE}_{name}"][i])
    return noise_scale(late, batch_size)


def results_at(record: StudyRecord | None, batch_size: int) -> Sequence[TrialResult]:
    """Return the stored results of the runs at a batch size."""
    if record is None:
        return ()
    for cell, results in record.results.items():
        if cell.batch_size == batch_size:
            return results
    return ()


def best_rates_of_runs(record: StudyRecord | None, plan: PilotPlan) -> dict[int, float]:
    """Return the rate of the run of K by batch size."""
    best = {}
    for cell in _cells_with_k(record):
        best[cell.cell.batch_size] = float(cell.best.trial.params[plan.rate_key])
    return best


def pilot_result(record: StudyRecord | None, plan: PilotPlan) -> TrialResult | None:
    """Return the stored result of the pilot; None without one."""
    for run in results_at(record, plan.batch_size):
        if run.trial.point == 0:
            return run
    return None


def seconds_of_runs(
    record: StudyRecord | None,
    plan: PilotPlan,
    step_seconds: Callable[[TrialResult], float],
    without: int | None = None,
) -> float:
    """Return the seconds of all runs but the pilot.

    Args:
        record: The study of the runs; None before the first run.
        plan: The user's run.
        step_seconds: Returns the seconds of a step of a run, with its share of validation.
        without: A batch size whose runs do not count.
    """
    if record is None:
        return 0.0
    seconds = 0.0
    for cell, results in record.results.items():
        if cell.batch_size == without:
            continue
        for result in results:
            is_pilot = cell.batch_size == plan.batch_size and result.trial.point == 0
            if not is_pilot:
                # The race cuts the curve of a stored run where a later run was better.
                steps = max(result.steps_run, result.timed.get("steps", 0))
                seconds += steps * step_seconds(result)
    return seconds


def outcome_of(result: TrialResult, goal: Goal) -> Outcome:
    """Return how a run ended."""
    if result.steps is not None:
        return Outcome(MET, result.steps)
    best = best_validation(goal, [result])
    has_failed = result.status in (Status.INFEASIBLE, Status.FAILED, Status.STOPPED)
    if has_failed or best is None:
        return Outcome(DIVERGED, math.inf)
    if 0 in result.curve.get("exact", []):
        # Validations that stopped early have equal bounds, so the losses decide.
        losses = [loss for loss in result.curve["train_loss"] if math.isfinite(loss)]
        return Outcome(MISSED, float(np.mean(losses[-LAST_LOSSES:])) if losses else math.inf)
    return Outcome(MISSED, -best.value if goal.at_least else best.value)


def tried_rates(stored: Mapping[str, Any], batch_size: int) -> dict[float, Outcome]:
    """Return how the runs after the pilot ended at a batch size, by rate, in their order.

    Rates are over the rate by the rule.
    """
    tried = {}
    for size, factor, rank, value in stored.get("tried", []):
        if size == batch_size:
            tried[factor] = Outcome(rank, math.inf if value is None else value)
    return tried


def unfinished_searches(stored: Mapping[str, Any], plan: PilotPlan) -> dict[int, int]:
    """Return the number of rates by batch size, where the time ended a search that has a K."""
    unfinished = {}
    for size in sorted({size for size, *_ in stored.get("tried", [])} - {plan.batch_size}):
        tried = tried_rates(stored, size)
        has_k = min(tried.values()).steps is not None
        if has_k and next_factor(tried, plan.first_factors) is not None:
            unfinished[size] = len(tried)
    return unfinished


def bounds_of(stored: Mapping[str, Any]) -> dict[int, float]:
    """Return the stored bounds: by batch size, the steps after which no run had met the goal."""
    return {int(size): float(steps) for size, steps in stored.get("bounds", [])}
