"""The method pilot: the user's run to its goal, then few and short runs at larger batch sizes.

Each later run is at the batch size with the most expected value (`probe_value`), at two to five
rates around the rate by the rule (`pilot_plan`). A run ends when it needs more steps than the
pilot, or than a better run at its batch size. All runs together take at most `MAX_TRAININGS` times
the pilot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lit_dps.advice.measured_runs import MeasuredRuns
from lit_dps.advice.next_probe import law_with_prior
from lit_dps.advice.options import Clock, print_line
from lit_dps.advice.pilot_evidence import (
    PilotRun,
    bounds_of,
    observations_of_runs,
    outcome_of,
    pilot_result,
    results_at,
    seconds_of_runs,
    tried_rates,
)
from lit_dps.advice.pilot_plan import (
    MISSED,
    Outcome,
    PilotPlan,
    next_factor,
)
from lit_dps.advice.pilot_run import run_trials, store_bound, train_pilot
from lit_dps.advice.probe_study import ChosenPoints
from lit_dps.advice.probe_value import Worth, best_run, worth_of_runs
from lit_dps.advice.question import LIKELY_RUNS, Question
from lit_dps.analysis.law import Law
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.text import format_duration, number_text
from lit_dps.core.trial import Status, TrialResult
from lit_dps.parallel.process import StopRequest
from lit_dps.study.failures import AllFail

# The most time of all runs together, in pilots: if a device is not full at B0, and if it is.
MAX_TRAININGS = 3.0
MAX_TRAININGS_FULL = 5.0
# A device is full at B0 if a step at 4 B0 takes this many times as long.
FULL_RATIO = 3.0
# A K takes about this many runs of its length: most end early, because they cannot be the best.
RUNS_PER_K = 2.5
# The remaining time has to suffice for this many: two rates, the second of which ends early.
FEWEST_RUNS_PER_K = 1.5
# A rule of rates is trusted up to this many times the largest batch size that was run.
MAX_STRIDE = 8
# A recommendation at more than this times the largest batch size that was run is verified.
FAR = 2
# A run without the goal ends at the steps that K exceeds with this probability. Beyond them, a
# wrong rate is the more likely reason.
LATE = 0.1
# Reading the noise scale along a run of an MLP on MNIST took a fifth of its training.
NOISE_READING_SHARE = 0.2


def max_trainings(question: Question, batch_size: int) -> float:
    """Return the most time of all runs together, in trainings of the pilot's length.

    Args:
        question: The question, with its step times.
        batch_size: B0.
    """
    step = question.step_time.at(batch_size, question.ranks)
    larger = question.step_time.at(4 * batch_size, question.ranks)
    if step is None or larger is None or larger.value < FULL_RATIO * step.value:
        return MAX_TRAININGS
    return MAX_TRAININGS_FULL


def ask_by_pilot(question: Question, plan: PilotPlan, clock: Clock, stop: StopRequest) -> None:
    """Train the pilot, then runs at larger batch sizes as long as one is worth its time.

    Raises:
        Interrupted: if the user asked to stop.
        UserError: with the cause of a run that failed.
    """
    pilot = train_pilot(question, plan, clock, stop)
    if pilot is None:
        return
    course = Course(question, plan, clock, stop, pilot)
    course.announce()
    course.resume()
    closed: set[int] = set()
    while clock.remaining > 0:
        batch_size = course.choose(closed)
        if batch_size is None:
            return
        closed.add(batch_size)
        course.run_at(batch_size)


@dataclass(frozen=True)
class Course:
    """The runs at larger batch sizes.

    Attributes:
        question: The question.
        plan: The plan of the user's run and of the rates.
        clock: The clock of the budget.
        stop: The request to stop.
        pilot: The user's run.
    """

    question: Question
    plan: PilotPlan
    clock: Clock
    stop: StopRequest
    pilot: PilotRun

    @property
    def record(self) -> StudyRecord | None:
        """The runs so far, truncated at the fewest steps to the goal at their batch size."""
        return self.question.probes.record()

    @property
    def all_runs(self) -> StudyRecord | None:
        """The runs so far as they ended, also those that their step limit stopped."""
        return self.question.probes.all_runs()

    @property
    def goal(self) -> Goal:
        """The goal of all runs."""
        return self.question.setup.built_goal

    def announce(self) -> None:
        """Print the most time that the runs take."""
        training = max(self.remaining_seconds(), 0.0)
        clock = self.clock
        clock.announce(clock.spent + training + self.question.other_seconds(LIKELY_RUNS))
        total = ""
        if not clock.was_announced:
            total = f"; the command takes at most about {clock.announced_text} in all"
        duration = format_duration(training, 2)
        print_line(f"  runs at larger batch sizes take at most {duration}{total}")

    # ---- The time for runs ----

    def remaining_seconds(self) -> float:
        """Return the seconds that remain for runs."""
        return min(self.clock.remaining, self._unused_seconds())

    def _unused_seconds(self) -> float:
        """Return the seconds that all runs together leave, without the clock of the budget."""
        return self._seconds_of_all_runs() - self._seconds_of_runs()

    def affordable_steps(self, batch_size: int) -> float:
        """Return the steps at a batch size that all its runs may take together."""
        seconds = self._seconds_of_all_runs() - self._seconds_of_runs(without=batch_size)
        forecast = self._slowdown * self.question.step_seconds_here(batch_size)
        return max(seconds, 0.0) / forecast

    def _seconds_of_all_runs(self) -> float:
        """Return the seconds that all runs after the pilot may take together."""
        batch_size = self.plan.batch_size
        step = self._pilot_step_seconds
        if step is None:
            step = self.question.step_seconds_here(batch_size)
        training = self.pilot.steps_run * step
        # The start and the readings of the pilot count, at most as much as was announced.
        other = min(self._measured.other_seconds(self._pilot), NOISE_READING_SHARE * training)
        return (max_trainings(self.question, batch_size) - 1) * training - other

    def _seconds_of_runs(self, without: int | None = None) -> float:
        """Return the seconds of the runs after the pilot, as measured or else by the model.

        Args:
            without: A batch size whose runs do not count.
        """

        def step_seconds(run: TrialResult) -> float:
            measured = self._measured.step_seconds(run)
            if measured is None:
                return self.question.step_seconds_here(run.trial.cell.batch_size)
            return measured

        return seconds_of_runs(self.all_runs, self.plan, step_seconds, without)

    @property
    def _measured(self) -> MeasuredRuns:
        return MeasuredRuns.of(self.question)

    @property
    def _pilot_step_seconds(self) -> float | None:
        """Seconds of a step of the pilot with its share of full validations; None if unknown."""
        if self.pilot.check_seconds is None:
            return None
        return self._measured.step_seconds(self._pilot)

    @property
    def _pilot(self) -> TrialResult | None:
        """The stored result of the pilot; None without one."""
        return pilot_result(self.all_runs, self.plan)

    @property
    def _slowdown(self) -> float:
        """The step time of the pilot over that by the model, at least 1.

        A forecast by the model is multiplied by it. Where the pilot is faster than the model, runs
        at larger batch sizes may not be.
        """
        step = self._pilot_step_seconds
        if step is None:
            return 1.0
        return max(step / self.question.step_seconds_here(self.plan.batch_size), 1.0)

    # ---- The next batch size ----

    def law(self, without: int | None = None) -> Law:
        """Return the law of all runs so far, or of the runs at other batch sizes than one."""
        observed = observations_of_runs(self.record, bounds_of(self.question.store.read()))
        observed = [each for each in observed if each.batch_size != without]
        return law_with_prior(observed, self.pilot.noise, self.plan.is_adaptive)

    def choose(self, closed: set[int]) -> int | None:
        """Return the batch size with the most valuable run; None if no run is worth its time.

        Args:
            closed: Batch sizes that this command has run, or that cannot be run.
        """
        question = self.question
        seconds = self.remaining_seconds()
        if seconds <= 0:
            return None
        law = self.law()
        sizes = question.sizes_within_budget(law)
        worths = worth_of_runs(
            law,
            self._candidates(sizes, closed),
            sizes,
            question.step_seconds_by_devices,
            question.step_seconds_here,
            RUNS_PER_K,
        )
        # Further rates are run only as long as the time lasts.
        seconds *= RUNS_PER_K / FEWEST_RUNS_PER_K / self._slowdown
        chosen = best_run(worths, seconds)
        if chosen is not None:
            why = f"it should save {chosen.value:.0%} of the time of a training"
        else:
            chosen = self._far_recommendation(worths, seconds)
            why = "it is far from all runs, and is the recommendation so far"
        if chosen is None:
            return None
        print_line(
            f"run at B = {chosen.batch_size}: about {chosen.steps:.0f} steps, "
            f"{format_duration(chosen.cost, 2)}; {why}"
        )
        return chosen.batch_size

    def _candidates(self, sizes: Sequence[int], closed: set[int]) -> list[int]:
        """Return which of some batch sizes above B0 can be run next."""
        question = self.question
        observed = observations_of_runs(self.record, bounds_of(question.store.read()))
        was_run = {int(each.batch_size) for each in observed}
        largest = max(was_run, default=self.plan.batch_size)
        most = min(question.largest, MAX_STRIDE * largest)
        unknown = [b for b in sizes if b not in was_run and b not in closed]
        return [b for b in unknown if self.plan.batch_size < b <= most]

    def _far_recommendation(self, worths: Sequence[Worth], seconds: float) -> Worth | None:
        """Return the run that verifies a recommendation far above all runs; None without one.

        This run may not change the recommendation. But steps and rate of the recommendation rest on
        public runs and a rule alone.

        Args:
            worths: The possible runs.
            seconds: The time for runs.
        """
        question = self.question
        law = self.law()
        low, high = law.reach
        within = question.sizes_within_budget(law)
        sizes = [b for b in within if low <= b <= min(high, question.largest)]
        if not sizes:
            return None
        of_step = np.array(list(map(question.step_seconds_here, sizes)))
        times = law.samples(sizes).mean(axis=0) * of_step
        best = sizes[int(times.argmin())]
        _, largest = law.range
        if best <= FAR * largest:
            return None
        above = [each for each in worths if largest < each.batch_size <= best]
        affordable = [each for each in above if each.cost <= seconds]
        return max(affordable, key=lambda each: each.batch_size, default=None)

    # ---- Runs at a batch size ----

    def resume(self) -> None:
        """Continue the batch sizes that an earlier run of the command has begun."""
        stored = self.question.store.read()
        ended = {*stored.get("raced", []), self.plan.batch_size}
        begun = {size for size, *_ in stored.get("tried", [])}
        record = self.all_runs
        results = {} if record is None else record.results
        for cell, of_cell in results.items():
            if any(result.status is not Status.FAILED for result in of_cell):
                begun.add(cell.batch_size)
        for batch_size in sorted(begun - ended):
            if self.clock.remaining > 0:
                print_line(f"run at B = {batch_size}, continued")
                self.run_at(batch_size)

    def run_at(self, batch_size: int) -> None:
        """Run rates at a batch size; each run ends when it cannot matter any more.

        The batch size is stored as ended, unless a larger --budget would continue its runs.
        """
        limit = self.step_limit(batch_size)
        if limit == 0:
            print_line("  the budget is too small for one validation")
            return
        tried = self._tried(batch_size)
        factor = next_factor(tried, self.plan.first_factors)
        while factor is not None and (not tried or self.can_end(batch_size, tried, limit)):
            if not self._try(batch_size, [*tried, factor], limit):
                return
            tried = self._tried(batch_size)
            factor = next_factor(tried, self.plan.first_factors)
        best = min(tried, key=lambda each: tried[each])
        steps = tried[best].steps
        rate = number_text(best * self.plan.rate_by_rule(batch_size))
        if steps is not None:
            print_line(f"  K = {steps} at {self.plan.rate_key} = {rate}")
            if not self._rerun_user_size(self.plan.factor_at_user_size(batch_size, best)):
                return
        elif len(tried) == 1:
            # K is the best over rates, so one rate is no bound.
            missed = self._missed_steps(batch_size, tried, limit)
            print_line(
                f"  K > {missed} at {self.plan.rate_key} = {rate}; no budget for another rate"
            )
        else:
            missed = self._missed_steps(batch_size, tried, limit)
            store_bound(self.question.store, batch_size, missed)
            print_line(f"  K > {missed}: no learning rate met the goal within these steps")
        if factor is not None and self._waits_for_budget(batch_size, tried, limit):
            print_line("  a larger --budget runs another learning rate")
            return
        self.question.store.append("raced", batch_size)

    def can_end(self, batch_size: int, tried: Mapping[float, Outcome], limit: int) -> bool:
        """Return True if a run at one more rate ends within the time for runs."""
        return self._seconds_of_rate(batch_size, tried, limit) <= self.remaining_seconds()

    def _missed_steps(self, batch_size: int, tried: Mapping[float, Outcome], limit: int) -> int:
        """Return the steps in which no rate met the goal: the fewest steps of the rates so far.

        Rates that an earlier command ran may have had a lower limit. Rates that diverged do not
        count, because they do not meet the goal later.

        Args:
            batch_size: The batch size.
            tried: The rates so far, none of which met the goal.
            limit: The limit of this command. It is the result if all rates diverged.
        """
        outcomes = list(tried.values())
        steps = []
        for result in results_at(self.all_runs, batch_size):
            point = result.trial.point
            if point < len(outcomes) and outcomes[point].rank == MISSED:
                steps.append(self.goal.last_step_within(result.curve))
        return min(steps, default=limit)

    def _waits_for_budget(
        self, batch_size: int, tried: Mapping[float, Outcome], limit: int
    ) -> bool:
        """Return True if only the clock of the budget prevents a run at one more rate."""
        seconds = self._seconds_of_rate(batch_size, tried, limit)
        return self.clock.remaining < seconds <= self._unused_seconds()

    def _seconds_of_rate(
        self, batch_size: int, tried: Mapping[float, Outcome], limit: int
    ) -> float:
        """Return the most seconds of a run at one more rate.

        The race ends it at the fewest steps of the rates so far.
        """
        steps = min(tried.values()).steps or limit
        step = self._measured.step_seconds_at(self.all_runs, batch_size)
        if step is None:
            step = self._slowdown * self.question.step_seconds_here(batch_size)
        return steps * step

    def step_limit(self, batch_size: int) -> int:
        """Return the steps after which a run without the goal ends.

        K exceeds them with a probability of `LATE`. They are at most the steps of the pilot, and at
        most the steps that all runs may take. They are a multiple of the check interval; 0 if the
        time ends before a check.
        """
        # The runs at this batch size do not change the limit. Runs at other ones may change it.
        law = self.law(without=batch_size)
        steps = float(np.quantile(law.samples([batch_size]), 1 - LATE))
        interval = self.goal.check_interval
        checks = math.ceil(min(steps, self.pilot.steps_run) / interval)
        affordable_checks = math.floor(self.affordable_steps(batch_size) / interval)
        return min(checks, affordable_checks) * interval

    def _rerun_user_size(self, factor: float | None) -> bool:
        """Run B0 at another rate than the user's, until it needs more steps than the pilot.

        Args:
            factor: The rate over the user's; None if the user's rate is not far off.

        Returns:
            False if the budget ended during the run. A larger budget then continues it.
        """
        size = self.plan.batch_size
        if factor is None or self._tried(size):
            return True
        interval = self.goal.check_interval
        affordable = math.floor(self.affordable_steps(size) / interval) * interval
        limit = min(affordable, self.pilot.steps_run)
        rate = f"{self.plan.rate_key} = {number_text(factor * self.plan.rate)}"
        adjective = "small" if factor > 1 else "large"
        if 2 * limit < self.pilot.steps_run:
            print_line(f"  your learning rate may be too {adjective}; no budget to run {rate}")
            self.question.store.keep(untested_rate=[adjective, rate])
            return True
        print_line(f"your learning rate may be too {adjective}: run at B = {size} with {rate}")
        self.question.store.keep(untested_rate=[adjective, rate])
        if not self._try(size, [1.0, factor], limit):
            return False
        self.question.store.keep(untested_rate=[])
        steps = self._tried(size)[_rounded(factor)].steps
        if steps is None:
            print_line(f"  the run did not meet the goal in {limit} steps")
        else:
            print_line(
                f"  the run met the goal after {steps} steps instead of {self.pilot.steps_run}"
            )
        return True

    def _try(self, batch_size: int, factors: Sequence[float], limit: float) -> bool:
        """Run the last of some rates at a batch size, store its outcome, and return if it ended.

        The outcome of an earlier rate that missed a lower limit is stored again.

        Args:
            batch_size: The batch size, in examples.
            factors: The rates over the rate by the rule; the earlier ones were run.
            limit: Steps after which the run ends without the goal.
        """
        chosen = ChosenPoints(self.plan.points(batch_size, factors), limit)
        try:
            if not run_trials(self.question, batch_size, chosen, self.clock, self.stop):
                return False
        except AllFail as error:
            # The user's code may refuse values that are not finite.
            print_line(f"  the run failed: {error}")
        outcomes = {len(factors) - 1: Outcome(MISSED, math.inf)}
        tried = list(self._tried(batch_size).values())
        for result in results_at(self.all_runs, batch_size):
            point = result.trial.point
            # Earlier runs that missed a lower limit were continued to this one.
            if point in outcomes or (point < len(tried) and tried[point].rank == MISSED):
                outcomes[point] = outcome_of(result, self.goal)
        for point, outcome in sorted(outcomes.items()):
            if point == len(factors) - 1 or outcome != tried[point]:
                value = outcome.value if math.isfinite(outcome.value) else None
                stored = [batch_size, _rounded(factors[point]), outcome.rank, value]
                self.question.store.append("tried", stored)
        return True

    def _tried(self, batch_size: int) -> dict[float, Outcome]:
        """Return the outcome of each rate at a batch size, in the order of the runs.

        The pilot is not among them.
        """
        return tried_rates(self.question.store.read(), batch_size)


def _rounded(factor: float) -> float:
    """Return a factor as it is stored."""
    return float(f"{factor:.9g}")
