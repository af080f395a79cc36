"""The method branch: critical batch sizes along one run, without a goal and without full runs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lit_dps.advice.branch_law import Branched, CriticalRange
from lit_dps.advice.options import Clock, print_line
from lit_dps.advice.step_probe import of_one_device
from lit_dps.advice.user_workload import user_batch_size
from lit_dps.analysis.tables import significant
from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import UserError
from lit_dps.core.text import format_duration, number_text
from lit_dps.core.trial import Cell, Trial
from lit_dps.parallel.process import Interrupted, StopRequest
from lit_dps.readings import BranchCallback
from lit_dps.readings.branching import Fork
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.study.probe_run import probe_run
from lit_dps.study.setup import StudySetup

FORKS = 3  # at an eighth of the step budget, a quarter and a half of it
FACTORS = (2, 4, 8, 16, 32)  # of the branches' batch sizes
MIN_BRANCHES = 2
# Draws of examples over which a fork trains its branches (`BranchCallback`).
REPETITIONS = 4
# A new learning rate has a transient, so a branch makes at least this many steps of its own, on at
# least this many batches of the run. Merrill et al. 2025 train on hundreds of batches.
MIN_STEPS_OF_LARGEST = 32
MIN_WINDOW = 256


def run_branches(
    setup: StudySetup, step_seconds: float, store: AdviceStore, clock: Clock, stop: StopRequest
) -> None:
    """Train one run at the user's batch size and rate, fork it, and store each fork.

    The run has no checkpoint. If the command was killed, its next run trains the run again and
    makes only the forks that are not stored.

    Args:
        setup: The study that probes.
        step_seconds: Seconds of a step at the user's batch size. They decide how many branches each
            fork has, so that all forks fit into the time.
        store: Where forks are stored.
        clock: The clock of the budget.
        stop: Whether the user asked to stop.

    Raises:
        UserError: if the time is too short for one fork, if the module cannot be forked, or if the
            run fails.
        Interrupted: if the user asked to stop.
    """
    stored = store.read()
    goal = setup.built_goal
    batch_size = user_batch_size(setup.workload)
    most_steps = setup.most_steps(Cell(batch_size))
    fork_steps = sorted({max(1, most_steps >> (FORKS - i)) for i in range(FORKS)})
    if clock.remaining <= 0 or _has_ended(stored, fork_steps):
        return
    callback = _callback_to_resume(stored, fork_steps)
    if callback is None:
        callback = affordable_callback(fork_steps, step_seconds, clock.remaining)
        store.keep(branch_factors=list(callback.factors))
    forks = callback.forks
    all_scaled = not forks or stored["branch_scaled"]
    callback.seconds = clock.remaining
    callback.fork_seconds = callback.cost * step_seconds

    def on_fork(fork: Fork) -> None:
        # A later run of the command may find all forks and train none, so this is stored here.
        is_scaled = callback.scaling is not None and all_scaled
        store.keep(branch_adaptive=callback.adaptive, branch_scaled=is_scaled)
        store.append("branches", fork.to_dict())
        print_line(f"  {describe_fork(fork)}")

    callback.on_fork = on_fork
    # The step at which the run meets its goal is an estimate of K.
    trial = Trial(Cell(batch_size), 0, setup.middle, setup.study.seed)
    attempt = Attempt(trial, goal, train_past_goal=True)
    if callback.at:
        print_line(announcement(callback, step_seconds, most_steps))
        steps = ", ".join(map(str, sorted(callback.at)))
        print_line(f"forking a run at B = {batch_size}, at steps {steps}")
    else:
        print_line(f"training the forked run at B = {batch_size} again, to its goal")
    has_ended = _train_forked_run(of_one_device(setup), attempt, callback, fork_steps, clock, stop)
    steps_to_goal = attempt.result().steps
    if steps_to_goal is not None:
        store.keep(branch_steps=steps_to_goal)
        print_line(f"  the run met the goal after {steps_to_goal} steps")
    if not _all_forked(fork_steps, callback.forks):
        print_line("  a larger --budget makes the other forks")
    if has_ended:
        store.keep(branch_ended=True)


def _has_ended(stored: Mapping[str, Any], fork_steps: Sequence[int]) -> bool:
    """Return True if all forks are stored and the run has ended."""
    # Advice of earlier versions has no `branch_ended`. The earliest ones have no `branch_factors`
    # either, and did not train on after their last fork.
    is_earlier = bool(stored.get("branches")) and "branch_factors" not in stored
    has_ended = stored.get("branch_ended", False) or "branch_steps" in stored or is_earlier
    return has_ended and _all_forked(fork_steps, stored_forks(stored))


def _callback_to_resume(
    stored: Mapping[str, Any], fork_steps: Sequence[int]
) -> BranchCallback | None:
    """Return the callback of an earlier command, with its forks; None if there was none.

    All forks have the same branches, because the law compares them.
    """
    forks = stored_forks(stored)
    factors = stored.get("branch_factors")
    if factors is None and forks:
        # Advice of earlier versions.
        factors = forks[0].factors
    if factors is None:
        return None
    known = {fork.step for fork in forks}
    remaining = [step for step in fork_steps if step not in known]
    callback = _callback(remaining, len(factors) - 1)
    callback.forks = forks
    return callback


def _train_forked_run(
    setup: StudySetup,
    attempt: Attempt,
    callback: BranchCallback,
    fork_steps: Sequence[int],
    clock: Clock,
    stop: StopRequest,
) -> bool:
    """Train a run until it has met its goal and made all forks, or until the time has passed.

    Returns:
        True if the run ended; False if the budget ended first.

    Raises:
        UserError: if the module cannot be forked, or if the run fails.
        Interrupted: if the user asked to stop.
    """
    goal = attempt.goal
    end = time.monotonic() + clock.remaining

    def has_ended() -> bool:
        met_goal = goal.first_met(attempt.curve) is not None
        return met_goal and _all_forked(fork_steps, callback.forks)

    def raise_if_stopped() -> None:
        stop.raise_if_requested()
        clock.tick()
        if has_ended():
            raise Interrupted("the goal")
        if time.monotonic() > end:
            raise Interrupted("the budget")

    try:
        probe_run(setup, attempt, [callback], raise_if_stopped)
    except Interrupted:
        stop.raise_if_requested()
        return has_ended()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"advise: the run to fork failed ({type(error).__name__}: {error}). Correct "
            "the error, then run the command again."
        ) from error
    return True


def stored_forks(stored: Mapping[str, Any]) -> list[Fork]:
    """Return the forks of stored advice, by step.

    Forks of earlier versions are ignored if they show nothing: without margins, and with margins
    of 0, whose repetitions had the same examples.
    """
    forks = []
    for values in stored.get("branches", []):
        if any(margin != 0 for margin in values.get("margins", ())[1:]):
            forks.append(Fork.from_dict(values))
    return sorted(forks, key=lambda fork: fork.step)


def branch_law(stored: Mapping[str, Any], setup: StudySetup) -> Branched | None:
    """Return the law of steps from stored forks; None if there are none.

    A fork at a learning rate of 0 shows nothing, and is left out.

    Args:
        stored: Stored advice.
        setup: The user's configuration.
    """
    forks = [fork for fork in stored_forks(stored) if not fork.has_no_rate]
    if not forks:
        return None
    critical = []
    largest = 0
    for fork in forks:
        critical.append(CriticalRange(fork.step, *map(float, fork.critical)))
        largest = max(largest, fork.batch_size * max(fork.factors))
    steps_to_goal = stored.get("branch_steps")
    # A run that missed the goal spent its budget.
    steps = steps_to_goal or setup.most_steps(Cell(forks[0].batch_size))
    return Branched(forks[0].batch_size, steps, critical, largest, met=steps_to_goal is not None)


def describe_forks(forks: Sequence[Fork]) -> list[str]:
    """Return a line for each of one or more forks, and what follows."""
    lines = [
        "forks (Merrill et al. 2025): batches of k B0 that are shown to lose no progress per "
        "example if the learning rate is multiplied by k (SGD) or sqrt k (like Adam)"
    ]
    lines += [f"  {describe_fork(fork)}" for fork in forks]
    return lines


def describe_fork(fork: Fork) -> str:
    """Return up to which batch size a fork shows that nothing is lost, with its losses."""
    if fork.has_no_rate:
        return f"{sentence_of_fork(fork)}, because the learning rate is 0 there"
    losses = []
    for i, factor in enumerate(fork.factors):
        text = f"{factor * fork.batch_size}: {number_text(fork.losses[i], 4)}"
        if i and math.isfinite(fork.margins[i]):
            text += f" ({fork.excess[i]:+.2g} +- {fork.margins[i]:.2g})"
        losses.append(text)
    noise = ""
    if fork.has_equal_repetitions:
        noise = "; noise is unknown, because two draws of examples had equal losses"
    return (
        f"{sentence_of_fork(fork)} (loss by B, and its excess: "
        f"{', '.join(losses)}; tolerance {number_text(fork.tolerance)}{noise})"
    )


def sentence_of_fork(fork: Fork) -> str:
    """Return "Batches up to k B0 lose nothing at step t", or that no larger batch is shown to."""
    low, high = fork.critical
    if fork.factor == fork.factors[0]:
        sentence = f"No batch above {low} is shown to lose nothing at step {fork.step}"
    else:
        sentence = f"Batches up to {low} ({fork.factor} B0) lose nothing at step {fork.step}"
    if math.isfinite(high):
        return f"{sentence}; {high:g} loses"
    return sentence


def _all_forked(fork_steps: Sequence[int], forks: Sequence[Fork]) -> bool:
    return set(fork_steps) <= {fork.step for fork in forks}


def affordable_callback(
    fork_steps: Sequence[int], step_seconds: float, seconds: float
) -> BranchCallback:
    """Return the callback with the most branches whose forks all fit into some seconds.

    Args:
        fork_steps: The steps to fork at.
        step_seconds: Seconds of a step of the run.
        seconds: The time for the run up to its last fork, and for its forks.

    Raises:
        UserError: if the time is too short for the run up to its first fork and this fork with
            `MIN_BRANCHES` larger batch sizes.
    """
    callback = _callback(fork_steps, MIN_BRANCHES)
    needed = (min(fork_steps) + callback.cost) * step_seconds
    if needed > seconds:
        raise UserError(
            f"advise: one fork takes {format_duration(needed, 2)} of training, and "
            f"{format_duration(seconds, 2)} of the budget remain. Give a larger --budget, "
            "or use --method pilot, which costs less.",
            key="--budget",
        )
    for branches in range(MIN_BRANCHES + 1, len(FACTORS) + 1):
        larger = _callback(fork_steps, branches)
        steps = max(fork_steps) + len(fork_steps) * larger.cost
        if steps * step_seconds <= seconds:
            callback = larger
    return callback


def _callback(fork_steps: Sequence[int], branches: int) -> BranchCallback:
    """Return the callback that forks into some larger batch sizes, with a window long enough."""
    factors = (1, *FACTORS[:branches])
    stretches = max(MIN_STEPS_OF_LARGEST, MIN_WINDOW // max(factors))
    return BranchCallback(fork_steps, factors, stretches, REPETITIONS)


def announcement(callback: BranchCallback, step_seconds: float, most_steps: int) -> str:
    """Return what forks cost, beside a run at a larger batch size, before they are made."""
    count = len(callback.at)
    cost = format_duration(count * callback.cost * step_seconds, 2)
    share = significant(count * callback.cost / most_steps)
    return (
        f"each of {count} forks trains {len(callback.factors)} branches {callback.repetitions} "
        f"times on {callback.window} batches: in all {cost} at most, as long as {share} trainings "
        f"of {most_steps} steps. Forks cost more than a probe: a run to the goal at a larger batch "
        "size takes at most one training (--method pilot)."
    )
