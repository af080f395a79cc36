"""The method branch: critical batch sizes along one run, without a goal and without full runs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lit_dps.advice.branch_law import Branched, Critical
from lit_dps.advice.options import Clock, print_line
from lit_dps.advice.step_probe import of_one_device
from lit_dps.advice.user_workload import user_batch_size
from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import UserError
from lit_dps.core.text import number_text
from lit_dps.core.trial import Cell, Trial
from lit_dps.parallel.process import Interrupted, StopRequest
from lit_dps.readings import BranchCallback
from lit_dps.readings.branching import Fork
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.study.probe_run import probe_run
from lit_dps.study.setup import StudySetup

FORKS = 6  # at a 64th of the step budget, a 32nd, ... and a half of it
FACTORS = (2, 4, 8, 16, 32)  # of the branches' batch sizes
MIN_BRANCHES = 2
# Draws of examples, and stretches, over which a fork trains its branches (`BranchCallback`).
REPETITIONS = 3
STRETCHES = 4


def run_branches(
    setup: StudySetup, step_seconds: float, store: AdviceStore, clock: Clock, stop: StopRequest
) -> None:
    """Train one run at the user's batch size and rate, fork it, and store each fork.

    Args:
        setup: The study that probes.
        step_seconds: Seconds of a step at the user's batch size. They decide how many branches each
            fork has, so that all forks fit into the time.
        store: Where forks are stored.
        clock: The clock of the budget.
        stop: Whether the user asked to stop.

    Raises:
        UserError: if the module cannot be forked, or if the run fails.
        Interrupted: if the user asked to stop.
    """
    stored = store.read()
    forks = stored_forks(stored)
    goal = setup.goal_of_trials
    fork_steps = sorted({max(1, goal.max_steps >> (FORKS - i)) for i in range(FORKS)})
    if clock.remaining <= 0 or _all_forked(fork_steps, forks):
        return
    factors = _affordable_factors(step_seconds, clock.remaining / (len(fork_steps) + 1))
    callback = BranchCallback(fork_steps, (1, *factors), STRETCHES, REPETITIONS)
    callback.forks = forks
    callback.seconds = clock.remaining
    all_scaled = not forks or stored["branch_scaled"]

    def on_fork(fork: Fork) -> None:
        # A later run of the command may find all forks and train none, so this is stored here.
        is_scaled = callback.scaling is not None and all_scaled
        store.keep(branch_adaptive=callback.adaptive, branch_scaled=is_scaled)
        store.append("branches", fork.to_dict())
        print_line(f"  {describe_fork(fork)}")

    callback.on_fork = on_fork
    batch_size = user_batch_size(setup.workload)
    # The step at which the run meets its goal is an estimate of K.
    trial = Trial(Cell(batch_size), 0, setup.middle, setup.study.seed)
    attempt = Attempt(trial, goal, train_past_goal=True)
    print_line(f"forking a run at B = {batch_size}, at steps {', '.join(map(str, fork_steps))}")
    _train_forked_run(of_one_device(setup), attempt, callback, fork_steps, clock, stop)
    steps = attempt.result().steps
    if steps is not None:
        store.keep(branch_steps=steps)
        print_line(f"  the run met its goal after {steps} steps")


def _train_forked_run(
    setup: StudySetup,
    attempt: Attempt,
    callback: BranchCallback,
    fork_steps: Sequence[int],
    clock: Clock,
    stop: StopRequest,
) -> None:
    """Train a run until it has met its goal and made all forks, or until the time has passed.

    Raises:
        UserError: if the module cannot be forked, or if the run fails.
        Interrupted: if the user asked to stop.
    """
    goal = attempt.goal
    end = time.monotonic() + clock.remaining

    def at_check() -> None:
        stop.check()
        clock.tick()
        if time.monotonic() > end:
            raise Interrupted("the budget")
        met_goal = goal.first_met(attempt.curve) is not None
        if met_goal and _all_forked(fork_steps, callback.forks):
            raise Interrupted("the budget")

    try:
        probe_run(setup, attempt, [callback], at_check)
    except Interrupted:
        stop.check()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"advise: the run that is forked failed: {type(error).__name__}: {error}"
        ) from error


def stored_forks(stored: Mapping[str, Any]) -> list[Fork]:
    """Return the forks of stored advice, by step."""
    forks = [Fork.from_dict(values) for values in stored.get("branches", [])]
    return sorted(forks, key=lambda fork: fork.step)


def branch_law(stored: Mapping[str, Any], setup: StudySetup) -> Branched | None:
    """Return the law of steps from stored forks; None if there are none.

    Args:
        stored: Stored advice.
        setup: The user's configuration.
    """
    forks = stored_forks(stored)
    if not forks:
        return None
    critical = []
    largest = 0
    for fork in forks:
        critical.append(Critical(fork.step, *map(float, fork.critical)))
        largest = max(largest, fork.batch_size * max(fork.factors))
    steps_to_goal = stored.get("branch_steps")
    steps = steps_to_goal or setup.goal_of_trials.max_steps
    return Branched(forks[0].batch_size, steps, critical, largest, met=steps_to_goal is not None)


def describe_forks(forks: Sequence[Fork]) -> list[str]:
    """Return a line for each of one or more forks, and what follows."""
    lines = [
        "branches (Merrill et al. 2025): the largest batch size with a loss not above the loss of "
        "smaller ones"
    ]
    lines += [f"  {describe_fork(fork)}" for fork in forks]
    last = forks[-1]
    low, _ = last.critical
    lines.append(
        f"  After step {last.step}, batch sizes up to {low} lose no progress per example if the "
        "learning rate is multiplied by k (SGD) or sqrt k (like Adam)."
    )
    return lines


def describe_fork(fork: Fork) -> str:
    """Return the critical batch size of a fork, and its losses, in a line."""
    low, high = fork.critical
    bound = f"{low} or more (no branch lost progress)"
    if math.isfinite(high):
        bound = f"{low} to {high:g}"
    losses = []
    for factor, loss in zip(fork.factors, fork.losses, strict=True):
        losses.append(f"{factor * fork.batch_size}: {number_text(loss, 4)}")
    tolerance = number_text(fork.tolerance)
    return (
        f"step {fork.step}: critical batch size {bound}  (loss by B: {', '.join(losses)}; "
        f"tolerance {tolerance})"
    )


def _all_forked(fork_steps: Sequence[int], forks: Sequence[Fork]) -> bool:
    return set(fork_steps) <= {fork.step for fork in forks}


def _affordable_factors(step_seconds: float, seconds: float) -> tuple[int, ...]:
    """Return the factors of a fork that takes no longer than some seconds."""
    count = MIN_BRANCHES
    for branches in range(MIN_BRANCHES, len(FACTORS) + 1):
        steps = REPETITIONS * (branches + 1) * STRETCHES * FACTORS[branches - 1]
        if steps * step_seconds <= seconds:
            count = branches
    return FACTORS[:count]
