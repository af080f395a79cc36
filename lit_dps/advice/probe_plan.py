"""Which batch size to probe next, for how long."""

from __future__ import annotations

import math
import time

from lit_dps.advice.next_probe import ProbeTerms, choose_next_batch_size, law_with_prior
from lit_dps.advice.probe_study import (
    CannotRun,
    check_seconds,
    failed_trials,
    observations,
    unfinished,
)
from lit_dps.advice.question import Question
from lit_dps.advice.stages import Clock, say
from lit_dps.advice.user_workload import own_batch_size
from lit_dps.core.format import format_duration
from lit_dps.parallel.process import StopRequest

FIRST = 3  # probes that share what is left alike, since nothing tells yet what they take


def probe_all(case: Question, clock: Clock, stop: StopRequest) -> None:
    """Probes until the time is over, nothing is worth it, or all sizes are done.

    No batch size is probed that was not seen to fit the memory of the devices that are here.
    """
    work, setup = case.work, case.work.setup
    fitting = [b for b in case.sizes if b <= case.largest]
    refused = set(work.without_room)  # that were probed in this run, or cannot be
    gone = set(work.without_room)  # that cannot be
    own = min(fitting, key=lambda b: abs(math.log(b / own_batch_size(setup.workload))))
    for number in range(2 * len(fitting)):
        record = work.record()
        known = observations(record)
        done = {int(o.batch_size) for o in known if o.bound == 0} | refused
        law = law_with_prior(known, case.noise)
        open_ = [
            b for b in fitting if b not in done and b not in {int(o.batch_size) for o in known}
        ]
        check = check_seconds(record, case.times.check) / setup.goal_of_trials.check_interval
        size = choose_next_batch_size(open_, known, law, own, _terms(case, clock, check))
        share = 1 if len(done) >= FIRST else 1 / (FIRST - len(done))
        if size is None:  # what was left unfinished before goes on
            size, share = next(iter(set(unfinished(record)) - gone), None), 1
        if size is None or clock.left <= 0:
            break
        seconds = clock.left * share
        say(
            f"probe {number + 1}: B = {size}, {setup.study.trials} trials, "
            f"{format_duration(seconds, 2)} at most"
        )
        try:
            whole = work.run(size, time.monotonic() + seconds, stop, clock)
        except CannotRun as error:
            say(f"  B = {size} is left out: {error}")
            refused.add(size)
            gone.add(size)
            continue
        clock.keep()
        record = work.record()
        found = {int(o.batch_size): o for o in observations(record)}
        say(f"  {_told(found.get(size))}{'' if whole else ', its time is over'}")
        if failed := failed_trials(record).get(size):
            say(f"  {len(failed)} of its trials failed, the last with {failed[-1].failure}")
        refused.add(size)
        if whole:
            gone.add(size)


def _terms(case: Question, clock: Clock, check: float) -> ProbeTerms:
    """Return what probes are for; `check` are the seconds of checks that come on each step."""

    def step_seconds(batch_size: float, devices: int) -> float:
        step = case.model.at(batch_size, devices)
        if step is None and devices == case.setup.ranks:
            step = case.model.at(batch_size)
        if step is None:
            return math.inf
        return step.value + check

    options = case.options
    return ProbeTerms(
        step_seconds, case.sizes, options.devices, case.setup.ranks, options.trials, clock.left
    )


def _told(found) -> str:
    if found is None:
        return "no trial told anything"
    sign = {0: "=", 1: ">", -1: "<="}.get(found.bound, "~")
    return f"K* {sign} {found.steps:g}"
