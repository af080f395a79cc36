"""Runs of what is recommended, on fresh seeds: what one run needs, where K is that of the best of
many."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from lit_dps.advice.one_run import OneRun, of_runs, of_trials
from lit_dps.advice.options import time_text
from lit_dps.advice.stages import Clock, say
from lit_dps.advice.step_probe import of_one_device, threads_of_fit
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.rates import RateLaw
from lit_dps.core.attempt import Attempt
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord
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
    made = of_configuration(store.read().get("confirmed", []), size, params)
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
        say(f"  run {number + 1} at B = {size}: {took}, {time_text(result.seconds)}")


def of_configuration(
    stored: list[dict[str, Any]], size: int, params: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The runs of this configuration among those that are stored."""
    return [
        each for each in stored if each["batch_size"] == size and each["params"] == dict(params)
    ]


def one_run(
    stored: list[dict[str, Any]],
    k_of: Mapping[int, float],
    record: StudyRecord | None,
    rate: RateLaw | None,
    key: str,
) -> OneRun | None:
    """What one run needs beside K: by the last configuration that was run, or else by the trials of
    the probes.

    Args:
        stored: What was run.
        k_of: K by batch size.
        record: The probes.
        rate, key: The recommended rate, and the metaparameter that it is; the only one that was
            searched, else the
            trials near it are not near it in others.
    """
    if stored and (size := stored[-1]["batch_size"]) in k_of:
        runs = of_configuration(stored, size, stored[-1]["params"])
        return of_runs(size, k_of[size], [each["steps"] or math.inf for each in runs])
    if record is None or rate is None or list(record.space) != [key]:
        return None
    cells = [cell for cell in Analysis(record).cells if not cell.at_first_check]
    trials = {
        cell.cell.batch_size: [
            (r.trial.params[key], math.inf if r.steps is None else r.steps) for r in cell.trials
        ]
        for cell in cells
    }
    rates = {b: at for b in trials if (at := rate.at(b)) is not None}
    return of_trials(trials, rates)
