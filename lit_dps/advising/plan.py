"""Which batch size to probe next, for how long."""

from __future__ import annotations

import math
import time

from lit_dps.advice import StepTime, expected_critical, next_probe, probes
from lit_dps.advising.clock import Clock, say
from lit_dps.advising.options import Options, time_text
from lit_dps.advising.probes import Probes, check_seconds, observations, unfinished
from lit_dps.advising.steps import SPENT, StepTimes
from lit_dps.advising.workload import own_batch_size
from lit_dps.analysis import Law, law_of
from lit_dps.errors import UserError
from lit_dps.noise import NoiseScale
from lit_dps.runtime import StopRequest
from lit_dps.study.failures import AllFail
from lit_dps.study.setup import StudySetup

FIRST = 3  # probes that share what is left alike, since nothing tells yet what they take
APART = 8  # factor between the first two


def probe_all(work: Probes, model, times, noise, clock: Clock, stop: StopRequest, options: Options) -> None:
    """Probes until the time is over, nothing is worth it, or all sizes are done."""
    setup = work.setup
    every = candidates(times, options.devices, setup.workload.accumulated)
    refused: set[int] = set()  # that were probed in this run, or cannot be
    gone: set[int] = set()  # that cannot be
    own = min(every, key=lambda b: abs(math.log(b / own_batch_size(setup.workload))))
    for number in range(2 * len(every)):
        record = work.record()
        known = observations(record)
        done = {int(o.batch_size) for o in known if o.bound == 0} | refused
        law = law_with(known, noise)
        open_ = [b for b in every if b not in done and b not in {int(o.batch_size) for o in known}]
        check = check_seconds(record, times.check) / setup.goal_of_trials.check_interval
        size = _next(law, known, every, [b for b in open_ if b not in refused], own, model, check, clock, options)
        share = 1 if len(done) >= FIRST else 1 / (FIRST - len(done))
        if size is None:  # what was left unfinished before goes on
            size, share = next(iter(set(unfinished(record)) - gone), None), 1
        if size is None or clock.left <= 0:
            break
        seconds = clock.left * share
        say(f"probe {number + 1}: B = {size}, {setup.study.trials} trials, {time_text(seconds)} at most")
        try:
            whole = work.run(size, time.monotonic() + seconds, stop, clock)
        except UserError as error:
            if isinstance(error, AllFail):
                raise
            say(f"  B = {size} is left out: {error}")
            refused.add(size)
            gone.add(size)
            continue
        clock.keep()
        found = {int(o.batch_size): o for o in observations(work.record())}
        say(f"  {_told(found.get(size))}{'' if whole else ', its time is over'}")
        refused.add(size)
        if whole:
            gone.add(size)


def _next(
    law: Law, known, every, open_, own: int, model: StepTime, check: float, clock: Clock, options: Options
) -> int | None:
    """The batch size to probe; `check` are the seconds of checks that come on each step."""
    if not open_:
        return None
    if not known:
        return own if own in open_ else open_[len(open_) // 2]
    first = int(known[0].batch_size)
    if len(known) == 1:
        far = [b for b in open_ if b >= APART * first] or [b for b in open_ if b <= first / APART] or [open_[-1]]
        return min(far, key=lambda b: abs(math.log(b / first)))
    if law.fit is None:  # bounds alone: the other end
        return open_[-1] if max(o.batch_size for o in known) < open_[-1] else open_[0]

    def seconds(batch_size: float) -> float:
        return model.at(batch_size).value + check

    table = probes(law, open_, every, seconds, trials=max(2, options.trials // 2))
    found = next_probe(table, clock.left)
    if found is None and law.refused is not None and clock.left > 0:
        cheap = table[table["cost"] <= clock.left]
        return int(cheap.iloc[0]["batch_size"]) if len(cheap) else None
    return None if found is None else int(found.batch_size)


def training_seconds(setup: StudySetup, model: StepTime, times: StepTimes) -> float | None:
    """Of one training at the own batch size that spends its budget of steps, on one device."""
    goal, step = setup.goal_of_trials, model.at(own_batch_size(setup.workload))
    return None if step is None else goal.max_steps * (step.value + times.check / goal.check_interval)


def _told(found) -> str:
    if found is None:
        return "no trial told anything"
    sign = {0: "=", 1: ">", -1: "<="}.get(found.bound, "~")
    return f"K* {sign} {found.steps:g}"


def law_with(found: list, noise: NoiseScale | None) -> Law:
    """The law of some observations, with the noise scale as what else is known of B_crit."""
    return law_of(found, None if noise is None else expected_critical(noise))


def candidates(times: StepTimes, devices: tuple[int, ...], accumulated: int) -> list[int]:
    """Batch sizes to answer for: powers of 2 up to the largest of one device times the most devices."""
    split = not times.memory and times.why != SPENT  # several devices have no more examples
    most = times.largest * (1 if split else max(devices)) * accumulated
    return [accumulated * 2**i for i in range(int(math.log2(most / accumulated)) + 1)]
