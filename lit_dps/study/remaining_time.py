"""Estimates the remaining time of a study from its finished and its running trials.

The remaining time is the number of remaining optimizer steps over the steps a second of all workers
together. Running trials count: in a stack, hundreds of trials run for minutes before the first one
ends. `SteadyEstimate` is what is shown of it: steady between results, and rounded.

The mean of the trials that have ended would be too low: in a stack, the shortest trials end first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lit_dps.core.trial import Cell, Trial, TrialKey
from lit_dps.study.progress_event import ProgressEvent

# A time that may be wrong by a larger factor is given as a lower bound.
MAX_UNCERTAINTY = 2.0
# Up to this race factor, a trial of the cell that met the goal limits all others closely enough.
MAX_CLOSE_RACE_FACTOR = 2.0
# Otherwise this share of a cell's trials that have begun must have ended.
MIN_ENDED_SHARE = 0.25
# The steps of a running trial are known up to its last event. A trial that has come so close to an
# observed end has probably passed it.
AT_RISK_SHARE = 0.8
SECONDS_OF_ESTIMATE = 5.0  # after which the remaining time is estimated again
# Units that a remaining time is rounded up to, each below a limit, in seconds.
UNITS_BELOW = ((5, 300), (60, 3600), (300, math.inf))

RateKey = tuple[int, tuple]  # batch size and further axes: what the seconds of a step depend on


class TimeRemaining(NamedTuple):
    """Seconds that a study still needs.

    Attributes:
        seconds: The estimate.
        is_lower_bound: True if it leaves out cells whose time is unknown.
    """

    seconds: float
    is_lower_bound: bool


class StepRates:
    """Measures the optimizer steps a second of all workers together, since this run began.

    Seconds count for the cells whose trials train at that time. Building, pruning and storing are
    therefore part of the rate.

    Args:
        now: Returns the time in seconds.

    Attributes:
        running: The last event of each running trial.
    """

    def __init__(self, now: Callable[[], float]):
        self.running: dict[TrialKey, ProgressEvent] = {}
        self._now = now
        self._last_time: float | None = None  # None before the first event
        self._speeds: dict[TrialKey, float] = {}  # of running trials, in steps a second
        self._times: dict[TrialKey, float] = {}  # of the last event of running trials
        self._steps: dict[RateKey, float] = defaultdict(float)
        self._seconds: dict[RateKey, float] = defaultdict(float)

    def on_event(self, event: ProgressEvent) -> None:
        """Count the steps of a running trial, or remove the trials of a killed worker."""
        if event.trial is None:
            for key, running in list(self.running.items()):
                if running.worker == event.worker:
                    self._remove(key)
            return
        self._pass_time(event.trial.cell)
        self._count_steps(event.trial, event.step, event.first_step)
        key = event.trial.key
        now = self._now()
        last = self.running.get(key)
        if last is not None and event.step > last.step and now > self._times[key]:
            steps = event.step - max(last.step, event.first_step)
            self._speeds[key] = steps / (now - self._times[key])
        self.running[key] = event
        self._times[key] = now

    def on_end(self, trial: Trial, steps: int) -> None:
        """Count the last steps of a trial that has ended or pauses, after `steps` steps."""
        self._pass_time(trial.cell)
        self._count_steps(trial, steps, 0)
        self._remove(trial.key)

    def speed(self, cell: Cell, point: int) -> float | None:
        """Return the latest steps a second of one running trial; None if it is unknown."""
        return self._speeds.get((cell, point, 0))

    def steps_now(self, cell: Cell) -> dict[int, float]:
        """Return the steps of each running trial of a cell by its point, projected to now.

        Events are seconds apart.
        """
        now = self._now()
        steps: dict[int, float] = {}
        for key, event in self.running.items():
            if key[0] == cell and not key[2]:
                speed = self._speeds.get(key, 0.0)
                steps[key[1]] = event.step + speed * (now - self._times[key])
        return steps

    def _remove(self, key: TrialKey) -> None:
        for by_trial in (self.running, self._speeds, self._times):
            by_trial.pop(key, None)

    def rate(self, cell: Cell) -> float | None:
        """Return the steps a second of trials like those of a cell; None if none was trained."""
        key = rate_key(cell)
        if not self._steps.get(key) or not self._seconds.get(key):
            return None
        return self._steps[key] / self._seconds[key]

    def _count_steps(self, trial: Trial, step: int, first_step: int) -> None:
        last = self.running.get(trial.key)
        if last is not None:
            first_step = max(first_step, last.first_step, last.step)
        self._steps[rate_key(trial.cell)] += max(step - first_step, 0)

    def _pass_time(self, cell: Cell) -> None:
        """Divide the seconds since the last event among the trials that train, or to a cell."""
        now = self._now()
        if self._last_time is None:
            self._last_time = now
        seconds = now - self._last_time
        self._last_time = now
        # A stack claims a trial of the next cell early. That trial waits, and has no step.
        training = [event for event in self.running.values() if event.step > event.first_step]
        cells = []
        for event in training or self.running.values():
            assert event.trial is not None
            cells.append(event.trial.cell)
        for each in cells or [cell]:
            self._seconds[rate_key(each)] += seconds / max(len(cells), 1)


def rate_key(cell: Cell) -> RateKey:
    """Return what the seconds of a step of a cell depend on."""
    return cell.batch_size, cell.stack_axes


@dataclass
class CellSteps:
    """What is known of the steps of a cell's trials.

    Attributes:
        limit: Steps at which a trial ends at the latest, by the race or by its budget.
        is_raced: Whether a trial has met the goal, so that the race limits the others.
        ended: The steps of each trial that has ended and did not fail.
        judged: The steps of those among them that did not diverge.
        running: The steps so far of each trial that runs, by its point.
        paused: The steps so far of each trial that must continue later.
        waiting: The number of trials that have not begun.
        repeats: The number of repeats that remain.
    """

    limit: float
    is_raced: bool = False
    ended: list[float] = field(default_factory=list)
    judged: list[float] = field(default_factory=list)
    running: dict[int, float] = field(default_factory=dict)
    paused: list[float] = field(default_factory=list)
    waiting: int = 0
    repeats: int = 0

    @property
    def has_basis(self) -> bool:
        """Whether enough trials have ended to expect how long the others run."""
        if self.is_raced:
            return True
        begun = len(self.ended) + len(self.running) + len(self.paused)
        return bool(self.judged) and len(self.judged) >= MIN_ENDED_SHARE * begun

    @property
    def meets_goal(self) -> bool:
        """Whether a trial met the goal. Otherwise all trials that ended spent their budget."""
        return self.is_raced or any(0 < end < self.limit for end in self.judged)

    @property
    def trials(self) -> int:
        """The number of trials and repeats that remain."""
        return len(self.running) + len(self.paused) + self.waiting + self.repeats

    def mean_steps(self) -> float:
        """Return the expected steps of a trial that has not begun."""
        return self._expected_ends([0.0])[0]

    def remaining_steps(self) -> float:
        """Return the expected steps of all trials and repeats that remain.

        A paused trial counts from its first step, since it may not have been saved.
        """
        steps = sum(self.remaining_of_running().values())
        steps += sum(self._expected_ends(self.paused))
        return steps + (self.waiting + self.repeats) * self.mean_steps()

    def remaining_steps_at(self, trial_steps: float) -> float:
        """Return the remaining steps of all trials and repeats if a trial has so many steps.

        A running trial that has gone further is expected to need a quarter more.
        """
        steps = (self.trials - len(self.running)) * trial_steps
        for step in self.running.values():
            steps += max(trial_steps - step, step / 4)
        return steps

    def remaining_of_running(self) -> dict[int, float]:
        """Return the expected remaining steps of each running trial, by its point."""
        ends = self._expected_ends(list(self.running.values()))
        remaining = {}
        for (point, step), end in zip(self.running.items(), ends, strict=True):
            remaining[point] = end - step
        return remaining

    def _expected_ends(self, starts: Sequence[float]) -> list[float]:
        censored = [*self.running.values(), *self.paused]
        return expected_ends(self.ended, self.judged, censored, self.limit, starts)


def expected_ends(
    ended: Sequence[float],
    judged: Sequence[float],
    censored: Sequence[float],
    limit: float,
    starts: Sequence[float],
) -> list[float]:
    """Return the expected end of trials that have reached a step: restricted mean survival.

    The survival function is the estimate of Kaplan and Meier (1958). Beyond the last observed end
    it decays exponentially down to the limit (`_mean_residual_steps`).

    Args:
        ended: Steps of the trials that have ended.
        judged: Steps of those among them that did not diverge.
        censored: Steps so far of the trials that have not ended.
        limit: Steps at which every trial ends. It must be finite.
        starts: The steps that each of the trials in question has reached.
    """
    edges = [0.0]
    survival = [1.0]
    for time in sorted({min(end, limit) for end in ended}):
        at_risk = sum(end >= time for end in ended)
        at_risk += sum(step >= AT_RISK_SHARE * time for step in censored)
        ends_here = sum(min(end, limit) == time for end in ended)
        edges.append(time)
        survival.append(survival[-1] * (1 - ends_here / at_risk))
    # The area below the survival function up to each edge.
    areas = np.concatenate([[0.0], np.cumsum(np.diff(edges) * survival[:-1])])
    residual = _mean_residual_steps(judged, censored)
    last = edges[-1]
    tail = survival[-1] * _limited_mean(residual, limit - last)
    ends = []
    for start in starts:
        if start >= last:
            ends.append(start + _limited_mean(residual, limit - start))
            continue
        alive = survival[int(np.searchsorted(edges, start, side="right")) - 1]
        area = float(areas[-1] - np.interp(start, edges, areas)) + tail
        ends.append(start + area / alive)
    return ends


def _mean_residual_steps(judged: Sequence[float], censored: Sequence[float]) -> float:
    """Return the mean remaining steps of a trial beyond all ends: steps since the first over ends.

    The first end counts with half of its steps, because K scatters by about as much.

    Returns:
        Infinity before the first end.
    """
    if not judged:
        return math.inf
    first = min(judged)
    steps = first / 2
    for end in (*judged, *censored):
        steps += max(end - first, 0.0)
    return steps / len(judged)


def _limited_mean(mean: float, limit: float) -> float:
    """Return the mean of an exponential distribution that is cut at a limit."""
    if limit <= 0 or mean == 0:
        return 0.0
    if mean == math.inf:
        return limit
    return mean * -math.expm1(-limit / mean)


def time_remaining(cells: Mapping[Cell, CellSteps], rates: StepRates) -> TimeRemaining | None:
    """Estimate the remaining time of a study.

    A cell without a basis takes the steps of a trial from other batch sizes of its series, and the
    seconds of a step if none of its trials was trained (`_extrapolate`).

    Args:
        cells: What is known of each cell.
        rates: The measured steps a second.

    Returns:
        The time; None if it is unknown.
    """
    least = 0.0
    expected = 0.0
    most = 0.0
    longest = 0.0  # of one running trial: the last trials of a run have no others beside them
    has_unknown = False
    bases = _expected_trials(cells, rates)
    for cell, steps in cells.items():
        if not steps.trials:
            continue
        trial = bases.get(cell) or _extrapolate(cell, bases, rates)
        if trial is None:
            has_unknown = True
            continue
        if cell in bases:
            remaining = steps.remaining_steps()
            longest = max(longest, _longest_seconds(cell, steps, rates))
        else:
            remaining = steps.remaining_steps_at(trial.steps)
        seconds = remaining * trial.step_seconds
        least += seconds / trial.uncertainty
        expected += seconds
        most += seconds * trial.uncertainty
    if has_unknown and not expected:
        return None
    if has_unknown or most > MAX_UNCERTAINTY * expected or expected > MAX_UNCERTAINTY * least:
        return TimeRemaining(max(least, longest), True)
    return TimeRemaining(max(expected, longest), False)


def _longest_seconds(cell: Cell, steps: CellSteps, rates: StepRates) -> float:
    """Return the largest expected remaining time of the running trials of a cell."""
    longest = 0.0
    for point, remaining in steps.remaining_of_running().items():
        speed = rates.speed(cell, point)
        if speed:
            longest = max(longest, remaining / speed)
    return longest


class _ExpectedTrial(NamedTuple):
    """What is expected of a trial of a cell.

    Attributes:
        steps: Its steps.
        step_seconds: Seconds of a step, divided by the number of trials at a time.
        meets_goal: Whether trials of the cell met the goal, so that their steps scale like K*.
        uncertainty: The factor by which the product of both may be wrong.
    """

    steps: float
    step_seconds: float
    meets_goal: bool
    uncertainty: float = 1.0


def _expected_trials(
    cells: Mapping[Cell, CellSteps], rates: StepRates
) -> dict[Cell, _ExpectedTrial]:
    """Return what is expected of the trials of each cell that has a basis."""
    trials = {}
    for cell, steps in cells.items():
        rate = rates.rate(cell)
        if steps.has_basis and rate is not None:
            trials[cell] = _ExpectedTrial(steps.mean_steps(), 1 / rate, steps.meets_goal)
    return trials


def _extrapolate(
    cell: Cell, bases: Mapping[Cell, _ExpectedTrial], rates: StepRates
) -> _ExpectedTrial | None:
    """Return what is expected of a trial at a batch size, by other batch sizes of its series.

    K* falls with a slope between -1 and 0 in log-log scale, and the slope rises to 0. The seconds
    of a step rise with a slope between 0 and 1, and the slope rises to 1. So each slope is taken
    halfway between the last known slope and its end.

    Returns:
        None if no cell of the series with trials that met the goal has a basis.
    """
    by_size: dict[float, _ExpectedTrial] = {}
    for other, trial in bases.items():
        if other.series == cell.series and trial.meets_goal:
            by_size[math.log(other.batch_size)] = trial
    if not by_size:
        return None
    size = math.log(cell.batch_size)
    sizes = sorted(by_size, key=lambda other: abs(other - size))
    nearest = by_size[sizes[0]]
    last_slope_of_steps = -1.0
    last_slope_of_seconds = 0.0
    if len(sizes) > 1:
        second = by_size[sizes[1]]
        distance = sizes[0] - sizes[1]
        slope = math.log(nearest.steps / second.steps) / distance
        last_slope_of_steps = min(max(slope, -1.0), 0.0)
        slope = math.log(nearest.step_seconds / second.step_seconds) / distance
        last_slope_of_seconds = min(max(slope, 0.0), 1.0)
    distance_to_cell = size - sizes[0]
    steps = nearest.steps * math.exp(distance_to_cell * last_slope_of_steps / 2)
    uncertainty = math.exp(abs(distance_to_cell) / 2)  # either slope may be wrong by 1/2
    rate = rates.rate(cell)
    if rate is not None:
        return _ExpectedTrial(steps, 1 / rate, False, uncertainty)
    step_seconds = nearest.step_seconds * math.exp(
        distance_to_cell * (1 + last_slope_of_seconds) / 2
    )
    return _ExpectedTrial(steps, step_seconds, False, uncertainty)


class SteadyEstimate:
    """The remaining time as it is shown. It grows only when a trial has ended.

    The estimate grows a little with each look while a trial runs longer than expected. So the end
    that is shown becomes later only if a trial ended, or if the end that was shown has passed.

    Args:
        estimate: Estimates the remaining time; None if it is unknown.
        now: Returns the time in seconds.
    """

    def __init__(self, estimate: Callable[[], TimeRemaining | None], now: Callable[[], float]):
        self._estimate = estimate
        self._now = now
        self._last: TimeRemaining | None = None  # the last estimate; None if a trial ended since
        self._shown: TimeRemaining | None = None
        self._end = 0.0  # time at which the study ends by the shown estimate
        self._estimated_at = -math.inf

    def expire(self) -> None:
        """Let the next estimate be longer than the last one, because a trial has ended."""
        self._last = None
        self._shown = None
        self._estimated_at = -math.inf

    def remaining(self) -> TimeRemaining | None:
        """Return the remaining time to show; None if it is unknown."""
        now = self._now()
        if now - self._estimated_at >= SECONDS_OF_ESTIMATE:
            self._estimated_at = now
            self._update(self._estimate(), now)
        if self._shown is None:
            return None
        return self._shown._replace(seconds=max(self._end - now, 0.0))

    def _update(self, estimate: TimeRemaining | None, now: float) -> None:
        """Take a new estimate, but keep an earlier end of the same kind that has not passed.

        The kept end is shown as a lower bound if it is visibly earlier than the new one.
        """
        last = self._last
        self._last = estimate
        self._shown = estimate
        if estimate is None:
            return
        end = now + estimate.seconds
        is_same_kind = last is not None and last.is_lower_bound is estimate.is_lower_bound
        if is_same_kind and now < self._end < end:
            end = self._end
            if rounded_seconds(end - now) < rounded_seconds(estimate.seconds):
                self._shown = estimate._replace(is_lower_bound=True)
        self._end = end


def rounded_seconds(seconds: float) -> float:
    """Return a remaining time rounded up, since the estimate is not exact."""
    for unit, limit in UNITS_BELOW:
        if seconds < limit:
            return unit * math.ceil(seconds / unit)
    return seconds


def clock(seconds: float) -> str:
    """Return hours, minutes and seconds: 0:01:40."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
