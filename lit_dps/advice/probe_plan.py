"""Which batch size to probe next, for how long."""

from __future__ import annotations

import math
import time
from functools import partial

from lit_dps.advice.next_probe import contenders, next_probe, probes
from lit_dps.advice.noise import expected_critical
from lit_dps.advice.options import time_text
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
from lit_dps.analysis.law import Law, law_of
from lit_dps.core.noise_scale import NoiseScale
from lit_dps.parallel.process import StopRequest

FIRST = 3  # probes that share what is left alike, since nothing tells yet what they take
APART = 8  # factor between the first two


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
        law = law_with(known, case.noise)
        open_ = [
            b for b in fitting if b not in done and b not in {int(o.batch_size) for o in known}
        ]
        check = check_seconds(record, case.times.check) / setup.goal_of_trials.check_interval
        size = _next(law, known, [b for b in open_ if b not in refused], own, check, case, clock)
        share = 1 if len(done) >= FIRST else 1 / (FIRST - len(done))
        if size is None:  # what was left unfinished before goes on
            size, share = next(iter(set(unfinished(record)) - gone), None), 1
        if size is None or clock.left <= 0:
            break
        seconds = clock.left * share
        say(
            f"probe {number + 1}: B = {size}, {setup.study.trials} trials, {time_text(seconds)} "
            "at most"
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


def _next(
    law: Law, known, open_, own: int, check: float, case: Question, clock: Clock
) -> int | None:
    """The batch size to probe; `check` are the seconds of checks that come on each step."""
    if not open_:
        return None
    if not known:
        return own if own in open_ else open_[len(open_) // 2]
    first = int(known[0].batch_size)
    if len(known) == 1:
        far = (
            [b for b in open_ if b >= APART * first]
            or [b for b in open_ if b <= first / APART]
            or [open_[-1]]
        )
        return min(far, key=lambda b: abs(math.log(b / first)))
    if law.fit is None:  # bounds alone: the other end
        return open_[-1] if max(o.batch_size for o in known) < open_[-1] else open_[0]

    ranks = case.setup.ranks

    def seconds(batch_size: float, devices: int = ranks) -> float:
        step = case.model.at(batch_size, devices) or (
            case.model.at(batch_size) if devices == ranks else None
        )
        return math.inf if step is None else step.value + check

    asked = set()  # on any number of devices
    for n in case.options.devices:
        some = [b for b in case.sizes if seconds(b, n) < math.inf]
        asked |= set(contenders(law, some, partial(seconds, devices=n)) if some else ())
    table = probes(
        law, open_, sorted(asked) or case.sizes, seconds, trials=max(2, case.options.trials // 2)
    )
    found = next_probe(table, clock.left)
    if found is None and law.refused is not None and clock.left > 0:
        cheap = table[table["cost"] <= clock.left]
        return int(cheap.iloc[0]["batch_size"]) if len(cheap) else None
    return None if found is None else int(found.batch_size)


def _told(found) -> str:
    if found is None:
        return "no trial told anything"
    sign = {0: "=", 1: ">", -1: "<="}.get(found.bound, "~")
    return f"K* {sign} {found.steps:g}"


def law_with(found: list, noise: NoiseScale | None) -> Law:
    """The law of some observations, with the noise scale as what else is known of B_crit."""
    return law_of(found, None if noise is None else expected_critical(noise))
