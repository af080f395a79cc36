"""The method pilot: the user's run to its goal, then few and short runs at larger batch sizes.

The pilot is a training that the user wanted anyway, and its checkpoint is kept. Along it the noise
scale is read. Each later run is at the batch size that promises most (`probe_value`), at two to
five rates around the rule's (`pilot_plan`). A run ends when it needs more steps than the pilot, or
than a better run at its batch size. All runs together take at most `MAX_TRAININGS` times the pilot.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from lit_dps.advice.next_probe import law_with_prior
from lit_dps.advice.options import Clock, print_line
from lit_dps.advice.pilot_evidence import (
    PilotRun,
    best_metric,
    bounds_of,
    observations_of_runs,
    results_at,
    seconds_of_runs,
)
from lit_dps.advice.pilot_plan import (
    DIVERGED,
    MET,
    MISSED,
    Outcome,
    PilotPlan,
    next_factor,
    pilot_setup,
)
from lit_dps.advice.probe_study import CannotRun, ChosenPoints
from lit_dps.advice.probe_value import Worth, best_run, worth_of_runs
from lit_dps.advice.question import LIKELY_RUNS, Question
from lit_dps.analysis.law import Law
from lit_dps.core.record import StudyRecord
from lit_dps.core.text import format_duration, number_text
from lit_dps.core.trial import Status, TrialResult
from lit_dps.parallel.process import StopRequest
from lit_dps.study.failures import AllFail
from lit_dps.study.setup import StudySetup

# What all runs may take together, in pilots: where a device is not full at B0, and where it is.
MAX_TRAININGS = 3.0
MAX_TRAININGS_FULL = 5.0
# A device is full at B0 if a step at 4 B0 takes this many times as long.
FULL_RATIO = 3.0
# A K takes about this many runs of its length: most end when they cannot be the best any more.
RUNS_PER_K = 2.5
# Of these the time has to suffice for this many: two rates, the second of which ends early.
FEWEST_RUNS_PER_K = 1.5
# A rule of rates is trusted up to this many times the largest batch size that was run.
MAX_STRIDE = 8
# A recommendation at more than this times the largest batch size that was run is verified.
FAR = 2
# A run without the goal ends at the steps that K exceeds with this probability: more often its rate
# is wrong.
LATE = 0.1
LAST_LOSSES = 4  # whose mean tells which of two runs without the goal is better


def max_trainings(question: Question, batch_size: int) -> float:
    """Return what all runs may take together, in trainings of the pilot's length.

    Args:
        question: The question, with its step times.
        batch_size: B0.
    """
    step = question.step_time.at(batch_size)
    larger = question.step_time.at(4 * batch_size)
    if step is None or larger is None or larger.value < FULL_RATIO * step.value:
        return MAX_TRAININGS
    return MAX_TRAININGS_FULL


def pilot_checkpoint(setup: StudySetup) -> Path:
    """Return the file of the checkpoint of the user's run."""
    return setup.storage.checkpoints(setup.study.name) / "pilot.ckpt"


def step_seconds_by_devices(question: Question) -> dict[int, Callable[[float], float]]:
    """Return the seconds of a step by batch size, for each number of devices that is asked for.

    They include the step's share of validation, and are infinite where they are unknown.
    """
    seconds = {}
    for devices in question.options.devices:
        seconds[devices] = partial(_step_seconds, question, devices)
    return seconds


def _step_seconds(question: Question, devices: int, batch_size: float) -> float:
    step = question.step_time.at(batch_size, devices)
    if step is None:
        return math.inf
    interval = question.setup.goal_of_trials.check_interval
    return step.value + question.check_seconds / interval


def ask_by_pilot(question: Question, plan: PilotPlan, clock: Clock, stop: StopRequest) -> None:
    """Train the pilot, then runs at larger batch sizes as long as one is worth its time.

    Raises:
        Interrupted: if the user asked to stop.
        UserError: with the cause of a run that failed.
    """
    course = _Course(question, plan, clock, stop)
    pilot = course.train_pilot()
    if pilot is None:
        return
    course.announce_rest(pilot)
    course.continue_interrupted(pilot)
    closed: set[int] = set()
    while clock.remaining > 0:
        batch_size = course.choose(pilot, closed)
        if batch_size is None:
            return
        closed.add(batch_size)
        course.run_at(batch_size, pilot)


@dataclass(frozen=True)
class _Course:
    """The runs of one question.

    Attributes:
        question: The question.
        plan: The user's run.
        clock: The clock of the budget.
        stop: The request to stop.
    """

    question: Question
    plan: PilotPlan
    clock: Clock
    stop: StopRequest

    @property
    def record(self) -> StudyRecord | None:
        """All runs so far."""
        return self.question.probes.record()

    def train_pilot(self) -> PilotRun | None:
        """Train the user's run to its goal, and return it; None if it has not met the goal."""
        question, plan = self.question, self.plan
        run = PilotRun.of_stored(question.store.read())
        if run is None:
            run = self._run_pilot()
        if run is None:
            return None
        if run.steps is None:
            metric = question.setup.goal_of_trials.metric
            best = "" if run.best is None else f", its best {metric} was {number_text(run.best)}"
            print_line(
                f"  the run did not meet the goal in {run.steps_run} steps "
                f"({run.status}){best}. Choose an easier goal, a larger goal.max_steps, or "
                "another learning rate."
            )
            self._keep_bound(plan.batch_size, run.steps_run)
            return None
        print_line(
            f"  the run met the goal after {run.steps} steps, {format_duration(run.seconds, 2)}"
        )
        interval = question.setup.goal_of_trials.check_interval
        if run.steps <= interval:
            print_line(
                "  that is its first validation, so it may have met the goal earlier. Set "
                f"goal.check_interval below {interval} and another study.name."
            )
            return None
        if run.noise is not None:
            print_line(f"  gradient noise scale of its second half: {run.noise}")
        file = pilot_checkpoint(question.setup)
        if file.exists():
            print_line(f"  checkpoint: {file}")
        return run

    def _run_pilot(self) -> PilotRun | None:
        """Run the pilot and store what it shows; return None if its time is over."""
        question, plan = self.question, self.plan
        run = PilotRun.of_record(self.record, plan)
        if run is None and self.clock.remaining > 0:
            print_line(
                f"your run: B = {plan.batch_size}, {plan.rate_key} = {number_text(plan.rate)}, at "
                f"most {question.setup.goal_of_trials.max_steps} steps"
            )
            file = pilot_checkpoint(question.setup)
            change = partial(pilot_setup, reads_noise=question.reads_noise, file=file)
            points = plan.points(plan.batch_size, (1.0,))
            self._run(plan.batch_size, ChosenPoints(points, change=change))
            run = PilotRun.of_record(self.record, plan)
        if run is not None:
            question.store.keep(pilot=run.to_dict())
            # The pilot measures validations better than the first table.
            vars(question).pop("check_seconds", None)
        return run

    def choose(self, pilot: PilotRun, closed: set[int]) -> int | None:
        """Return the batch size that is worth a run most; None if none is worth it.

        Args:
            pilot: The user's run.
            closed: Batch sizes that were run now, or cannot be.
        """
        question, record = self.question, self.record
        seconds = self._remaining(pilot)
        if seconds <= 0:
            return None
        bounds = bounds_of(question.store.read())
        observed = observations_of_runs(record, bounds)
        was_run = {int(o.batch_size) for o in observed}
        most = min(question.largest, MAX_STRIDE * max(was_run, default=self.plan.batch_size))
        candidates = []
        for batch_size in question.batch_sizes:
            is_known = batch_size in was_run or batch_size in closed
            if self.plan.batch_size < batch_size <= most and not is_known:
                candidates.append(batch_size)
        worths = worth_of_runs(
            self._law(pilot),
            candidates,
            question.batch_sizes,
            step_seconds_by_devices(question),
            partial(_step_seconds, question, question.setup.ranks),
            RUNS_PER_K,
        )
        # Further rates are run only as long as the time lasts.
        seconds *= RUNS_PER_K / FEWEST_RUNS_PER_K
        chosen = best_run(worths, seconds)
        why = "it is far from all runs, and is the recommendation so far"
        if chosen is None:
            chosen = self._far_recommendation(pilot, worths, seconds)
        else:
            why = f"it should save {chosen.value:.0%} of the time of a training"
        if chosen is None:
            return None
        print_line(
            f"run at B = {chosen.batch_size}: about {chosen.steps:.0f} steps, "
            f"{format_duration(chosen.cost, 2)}; {why}"
        )
        return chosen.batch_size

    def announce_rest(self, pilot: PilotRun) -> None:
        """Print the most time that the runs after the pilot take."""
        clock = self.clock
        training = max(self._remaining(pilot), 0.0)
        clock.announced = clock.spent + training + self.question.other_seconds(LIKELY_RUNS)
        print_line(
            f"  runs at larger batch sizes take at most {format_duration(training, 2)}; the "
            f"command takes at most about {clock.announced_text} in all"
        )

    def _remaining(self, pilot: PilotRun) -> float:
        """Return the seconds that remain for runs.

        Trainings count by the model of the step time: seconds of single runs depend on other
        programs.
        """
        step_seconds = partial(_step_seconds, self.question, self.question.setup.ranks)
        spent = seconds_of_runs(self.record, self.plan, step_seconds)
        return min(self.clock.remaining, self._seconds_for_runs(pilot) - spent)

    def _seconds_for_runs(self, pilot: PilotRun) -> float:
        """Return the seconds that all runs after the pilot may take together."""
        question = self.question
        of_pilot = pilot.steps_run * _step_seconds(
            question, question.setup.ranks, self.plan.batch_size
        )
        return (max_trainings(question, self.plan.batch_size) - 1) * of_pilot

    def _far_recommendation(
        self, pilot: PilotRun, worths: Sequence[Worth], seconds: float
    ) -> Worth | None:
        """Return the run that verifies a recommendation far above all runs; None if none does.

        Such a run may not change which batch size is the best one. But its steps and its rate rest
        on public runs and a rule alone.

        Args:
            pilot: The user's run.
            worths: The runs that can be made.
            seconds: The time for runs.
        """
        question = self.question
        law = self._law(pilot)
        low, high = law.reach
        sizes = [b for b in question.batch_sizes if low <= b <= min(high, question.largest)]
        if not sizes:
            return None
        of_step = [_step_seconds(question, question.setup.ranks, b) for b in sizes]
        times = law.samples(sizes).mean(axis=0) * np.array(of_step)
        best = sizes[int(times.argmin())]
        _, largest = law.range
        if best <= FAR * largest:
            return None
        above = [each for each in worths if largest < each.batch_size <= best]
        affordable = [each for each in above if each.cost <= seconds]
        return max(affordable, key=lambda each: each.batch_size, default=None)

    def _law(self, pilot: PilotRun, without: int | None = None) -> Law:
        """Return the law of all runs so far, or of those at other batch sizes than one."""
        observed = observations_of_runs(self.record, bounds_of(self.question.store.read()))
        observed = [each for each in observed if each.batch_size != without]
        return law_with_prior(observed, pilot.noise, self.plan.is_adaptive)

    def continue_interrupted(self, pilot: PilotRun) -> None:
        """Continue the batch sizes that an earlier run of the command has begun."""
        stored = self.question.store.read()
        ended = {*stored.get("raced", []), *bounds_of(stored), self.plan.batch_size}
        record = self.record
        for cell in [] if record is None else sorted(record.results):
            results = results_at(record, cell.batch_size)
            is_begun = cell.batch_size in {size for size, *_ in stored.get("tried", [])}
            is_begun |= any(result.status is not Status.FAILED for result in results)
            if is_begun and cell.batch_size not in ended and self.clock.remaining > 0:
                print_line(f"run at B = {cell.batch_size}, continued")
                self.run_at(cell.batch_size, pilot)

    def run_at(self, batch_size: int, pilot: PilotRun) -> None:
        """Run rates at a batch size, each until it cannot matter any more.

        Args:
            batch_size: The batch size, in examples.
            pilot: The user's run.
        """
        limit = self._step_limit(batch_size, pilot)
        tried = self._tried(batch_size)
        if limit == 0:
            print_line("  the budget is too small for one validation")
            return
        while (factor := next_factor(tried, self.plan.first_factors)) is not None:
            if tried and not self._can_end(batch_size, tried, limit, pilot):
                break
            if not self._try(batch_size, [*tried, factor], limit):
                return
            tried = self._tried(batch_size)
        best = min(tried, key=lambda each: tried[each])
        steps = tried[best].steps
        if steps is None and len(tried) == 1:
            # K is the best over rates, so one rate is no bound.
            rate = number_text(best * self.plan.rate_by_rule(batch_size))
            print_line(
                f"  K > {limit} at {self.plan.rate_key} = {rate}; no budget for another rate"
            )
        elif steps is None:
            self._keep_bound(batch_size, limit)
            print_line(f"  K > {limit}: no learning rate met the goal within these steps")
        else:
            rate = number_text(best * self.plan.rate_by_rule(batch_size))
            print_line(f"  K = {steps} at {self.plan.rate_key} = {rate}")
            self._rerun_user_size(self.plan.factor_at_user_size(batch_size, best), pilot)
        self.question.store.append("raced", batch_size)

    def _can_end(
        self, batch_size: int, tried: Mapping[float, Outcome], limit: int, pilot: PilotRun
    ) -> bool:
        """Return whether a run at one more rate ends within the time for runs.

        The race ends it at the fewest steps of the rates so far.
        """
        steps = min(tried.values()).steps or limit
        seconds = steps * _step_seconds(self.question, self.question.setup.ranks, batch_size)
        return seconds <= self._remaining(pilot)

    def _step_limit(self, batch_size: int, pilot: PilotRun) -> int:
        """Return the steps after which a run without the goal ends.

        They are what K exceeds with a probability of `LATE`, at most those of the pilot, and at
        most those that all runs may take. They are a multiple of the check interval; 0 if the time
        ends before a check.
        """
        # The same limit if the runs at this batch size are continued.
        law = self._law(pilot, without=batch_size)
        steps = float(np.quantile(law.samples([batch_size]), 1 - LATE))
        interval = self.question.setup.goal_of_trials.check_interval
        checks = min(math.ceil(steps / interval), math.ceil(pilot.steps_run / interval))
        affordable = self._affordable_steps(batch_size, pilot)
        return min(checks, math.floor(affordable / interval)) * interval

    def _affordable_steps(self, batch_size: int, pilot: PilotRun) -> float:
        """Return the steps at a batch size that all runs may take, without its earlier runs."""
        step_seconds = partial(_step_seconds, self.question, self.question.setup.ranks)
        seconds = self._seconds_for_runs(pilot)
        seconds -= seconds_of_runs(self.record, self.plan, step_seconds, without=batch_size)
        return max(seconds, 0.0) / step_seconds(batch_size)

    def _rerun_user_size(self, factor: float | None, pilot: PilotRun) -> None:
        """Run B0 at another rate than the user's, until it needs more steps than the pilot.

        Args:
            factor: The rate over the user's; None if his rate is not far off.
            pilot: The user's run.
        """
        size = self.plan.batch_size
        if factor is None or len(self._tried(size)) > 0:
            return
        interval = self.question.setup.goal_of_trials.check_interval
        affordable = self._affordable_steps(size, pilot)
        limit = min(math.floor(affordable / interval) * interval, pilot.steps_run)
        rate = f"{self.plan.rate_key} = {number_text(factor * self.plan.rate)}"
        adjective = "small" if factor > 1 else "large"
        if 2 * limit < pilot.steps_run:
            print_line(f"  your learning rate may be too {adjective}; no budget to run {rate}")
            return
        print_line(f"your learning rate may be too {adjective}: run at B = {size} with {rate}")
        self._try(size, [1.0, factor], limit)
        outcome = self._tried(size).get(_rounded(factor))
        if outcome is None or outcome.steps is None:
            print_line(f"  the run did not meet the goal in {limit} steps")
        else:
            print_line(
                f"  the run met the goal after {outcome.steps} steps instead of {pilot.steps_run}"
            )

    def _try(self, batch_size: int, factors: Sequence[float], limit: float) -> bool:
        """Run the last of some rates at a batch size, store its outcome, and return if it ended.

        Args:
            batch_size: The batch size, in examples.
            factors: The rates over the rate by the rule; the earlier ones were run.
            limit: Steps after which the run ends without the goal.
        """
        outcomes = []
        points = self.plan.points(batch_size, factors)

        def take(result: TrialResult) -> None:
            if result.trial.point == len(factors) - 1:
                outcomes.append(self._outcome(result))

        try:
            if not self._run(batch_size, ChosenPoints(points, limit, on_result=take)):
                return False
        except AllFail as error:
            # The user's code may refuse values that are not finite.
            print_line(f"  the run failed: {error}")
        for result in results_at(self.record, batch_size):
            # A run of this command may have been killed after the result was stored.
            if not outcomes and result.trial.point == len(factors) - 1:
                outcomes.append(self._outcome(result))
        rank, value = outcomes[-1] if outcomes else Outcome(MISSED, math.inf)
        stored = [batch_size, _rounded(factors[-1]), rank, value if math.isfinite(value) else None]
        self.question.store.append("tried", stored)
        return True

    def _outcome(self, result: TrialResult) -> Outcome:
        """Return how a run ended."""
        goal = self.question.setup.goal_of_trials
        if result.steps is not None:
            return Outcome(MET, result.steps)
        if result.status in (Status.INFEASIBLE, Status.FAILED, Status.STOPPED):
            return Outcome(DIVERGED, math.inf)
        best = best_metric(result, goal)
        if best is None:
            return Outcome(DIVERGED, math.inf)
        if 0 in result.curve.get("exact", []):
            # Validations that stopped early have bounds, which are equal. Losses tell more.
            losses = [loss for loss in result.curve["train_loss"] if math.isfinite(loss)]
            return Outcome(MISSED, float(np.mean(losses[-LAST_LOSSES:])) if losses else math.inf)
        return Outcome(MISSED, -best if goal.at_least else best)

    def _tried(self, batch_size: int) -> dict[float, Outcome]:
        """Return the outcome of each rate that was run at a batch size, in the order of the runs.

        The pilot is not among them.
        """
        tried = {}
        for size, factor, rank, value in self.question.store.read().get("tried", []):
            if size == batch_size:
                tried[factor] = Outcome(rank, math.inf if value is None else value)
        return tried

    def _run(self, batch_size: int, chosen: ChosenPoints) -> bool:
        """Run the chosen trials at a batch size; return whether all have ended."""
        end = time.monotonic() + self.clock.remaining
        try:
            if self.question.probes.run(batch_size, end, self.stop, self.clock, chosen):
                return True
            print_line("  the budget ended during the run; a larger --budget continues it")
            return False
        except CannotRun as error:
            print_line(f"  B = {batch_size} cannot be run: {error}")
            return False
        finally:
            self.clock.save()

    def _keep_bound(self, batch_size: int, steps: int) -> None:
        """Store that no run at a batch size met the goal in some steps."""
        bounds = bounds_of(self.question.store.read()) | {batch_size: float(steps)}
        self.question.store.keep(bounds=[list(pair) for pair in bounds.items()])


def _rounded(factor: float) -> float:
    """Return a factor as it is stored, by which it is found again."""
    return float(f"{factor:.9g}")
