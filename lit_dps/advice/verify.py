"""Runs of what is recommended, on fresh seeds: what one run needs, where K is that of the best of
many."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from lit_dps.advice.one_run import runs_of_configuration
from lit_dps.advice.stages import Clock, say
from lit_dps.advice.step_probe import of_one_device, threads_of_fit
from lit_dps.core.attempt import Attempt
from lit_dps.core.format import format_duration
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.parallel.process import Interrupted, StopRequest
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.study.probe_run import engine_run
from lit_dps.study.setup import StudySetup

RUNS = 3
# times K after which a run that has not met the goal is left: it counts as one that needs more
PATIENCE = 3.0


def verify_recommendation(
    setup: StudySetup,
    size: int,
    params: Mapping[str, Any],
    k: float,
    store: AdviceStore,
    clock: Clock,
    stop: StopRequest,
) -> None:
    """Runs a recommended configuration on one device until the goal, and stores what each run
    needed.

    There are `RUNS`, or as many as fit into the time that is left.

    Args:
        setup: The study that probes.
        size: Batch size of an optimizer step.
        params: Metaparameters by configuration key.
        k: Steps that the law has there.

    Raises:
        Interrupted: if the user asked to leave.
    """
    made = runs_of_configuration(store.read().get("confirmed", []), size, params)
    goal, end = setup.goal_of_trials, time.monotonic() + clock.left
    most = (
        max(1, math.ceil(min(PATIENCE * k, goal.max_steps) / goal.check_interval))
        * goal.check_interval
    )

    def at_check() -> None:
        stop.check()
        if time.monotonic() > end:
            raise Interrupted("the budget")

    torch.set_num_threads(threads_of_fit(setup))
    one_device = of_one_device(setup)
    for number in range(len(made), RUNS):
        longest = max((each["seconds"] for each in made), default=0.0)
        if time.monotonic() + longest > end:
            break
        trial = Trial(Cell(size), 0, dict(params), setup.study.seed, repeat=number + 1)
        run = Attempt(
            trial, Goal(goal.value, goal.check_interval, most, goal.metric, goal.at_least)
        )
        try:
            result = engine_run(one_device, run, at_check)
        except Interrupted:
            stop.check()
            break
        if result.status is Status.FAILED:
            say(f"  it fails: {result.failure}")
            break
        found = {"batch_size": size, "params": dict(params), "steps": result.steps, "most": most}
        made.append(found | {"seconds": result.seconds, "timed": dict(result.timed)})
        store.append("confirmed", made[-1])
        clock.keep()
        took = (
            f"goal after {result.steps} steps"
            if result.steps
            else f"no goal in {result.steps_run} steps"
        )
        say(f"  run {number + 1} at B = {size}: {took}, {format_duration(result.seconds, 2)}")
