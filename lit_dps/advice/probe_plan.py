"""Probes batch sizes, one after the other, as long as the time allows and a probe is worth it."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from lit_dps.advice.next_probe import ProbeTerms, choose_next_batch_size, law_with_prior
from lit_dps.advice.options import Clock, print_line
from lit_dps.advice.probe_study import (
    CannotRun,
    check_seconds,
    failed_trials,
    observations,
    unfinished,
)
from lit_dps.advice.question import Question
from lit_dps.advice.user_workload import user_batch_size
from lit_dps.analysis.observations import AT_LEAST, AT_MOST, Observation
from lit_dps.core.record import StudyRecord
from lit_dps.core.text import format_duration
from lit_dps.parallel.process import StopRequest

# The first probes share the time equally, because it is unknown how long a probe takes.
FIRST_PROBES = 3


class _Choice(NamedTuple):
    """The batch size to probe, and the share of the remaining time that it may take."""

    batch_size: int
    share: float


def probe_all(question: Question, clock: Clock, stop: StopRequest) -> None:
    """Probe batch sizes until the time has passed, no probe is worth it, or all were probed.

    Only batch sizes that are known to fit on the devices that are here are probed.

    Raises:
        Interrupted: if the user asked to stop.
        UserError: with the cause of a probe that failed.
    """
    probes = question.probes
    fitting = [b for b in question.batch_sizes if b <= question.largest]
    tried = set(probes.without_room)  # in this run
    closed = set(probes.without_room)  # they have ended, or cannot run
    # A batch size is begun and continued once at most.
    for number in range(1, 2 * len(fitting) + 1):
        choice = _choose(question, fitting, tried, closed, clock)
        if choice is None or clock.remaining <= 0:
            return
        size = choice.batch_size
        seconds = clock.remaining * choice.share
        print_line(
            f"probe {number}: B = {size}, {probes.setup.study.trials} trials, at most "
            f"{format_duration(seconds, 2)}"
        )
        tried.add(size)
        try:
            all_ended = probes.run(size, time.monotonic() + seconds, stop, clock)
        except CannotRun as error:
            print_line(f"  B = {size} is not probed: {error}")
            closed.add(size)
            continue
        if all_ended:
            closed.add(size)
        clock.save()
        _report(question, size, all_ended)


def _choose(
    question: Question, fitting: list[int], tried: set[int], closed: set[int], clock: Clock
) -> _Choice | None:
    """Return what to probe next; None if nothing remains.

    Args:
        question: The question.
        fitting: Batch sizes that fit on the devices.
        tried: Batch sizes that were probed in this run, or cannot be.
        closed: Batch sizes whose trials have ended, or that cannot be probed.
        clock: The clock of the budget.
    """
    record = question.probes.record()
    observed = observations(record)
    excluded = set(tried)
    exact = set(tried)
    for observation in observed:
        excluded.add(int(observation.batch_size))
        if observation.bound == 0:
            exact.add(int(observation.batch_size))
    batch_size = choose_next_batch_size(
        [b for b in fitting if b not in excluded],
        observed,
        law_with_prior(observed),
        _nearest(fitting, user_batch_size(question.probes.setup.workload)),
        _terms(question, record, clock),
    )
    if batch_size is not None:
        return _Choice(batch_size, 1 / max(1, FIRST_PROBES - len(exact)))
    # Otherwise continue a probe that an earlier run of the command did not finish.
    for batch_size in unfinished(record):
        if batch_size not in closed:
            return _Choice(batch_size, 1.0)
    return None


def _nearest(batch_sizes: list[int], preferred: int) -> int:
    return min(batch_sizes, key=lambda b: abs(math.log(b / preferred)))


def _terms(question: Question, record: StudyRecord | None, clock: Clock) -> ProbeTerms:
    """Return what probes are for, and what they cost."""
    setup = question.setup
    step_time = question.step_time
    interval = question.probes.setup.goal_of_trials.check_interval
    check = check_seconds(record, question.times.check)

    def step_seconds(batch_size: float, devices: int) -> float:
        step = step_time.at(batch_size, devices)
        if step is None and devices == setup.ranks:
            step = step_time.at(batch_size)
        if step is None:
            return math.inf
        return step.value + check / interval

    return ProbeTerms(
        step_seconds=step_seconds,
        batch_sizes=question.batch_sizes,
        devices=question.options.devices,
        ranks=setup.ranks,
        trials=question.options.trials,
        seconds=clock.remaining,
    )


def _report(question: Question, batch_size: int, all_ended: bool) -> None:
    """Print the result of a probe."""
    record = question.probes.record()
    result = "no K yet"
    for observation in observations(record):
        if int(observation.batch_size) == batch_size:
            result = _describe(observation)
    if not all_ended:
        result += "; its time is over"
    print_line(f"  {result}")
    failed = failed_trials(record).get(batch_size)
    if failed:
        print_line(f"  {len(failed)} of its trials failed, the last with {failed[-1].failure}")


def _describe(observation: Observation) -> str:
    """Return an observation as text, such as K* = 120."""
    sign = {AT_LEAST: ">", AT_MOST: "<="}.get(observation.bound, "=")
    return f"K* {sign} {observation.steps:g}"
