"""The method branch: the critical batch size along a run, without a goal and without full runs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from lit_dps.advice.branch_law import Branched, Critical
from lit_dps.advice.stages import Clock, say
from lit_dps.advice.step_probe import of_one_device
from lit_dps.advice.user_workload import own_batch_size
from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import UserError
from lit_dps.core.format import number_text
from lit_dps.core.trial import Cell, Trial
from lit_dps.parallel.process import Interrupted, StopRequest
from lit_dps.readings import BranchCallback
from lit_dps.readings.branching import Fork
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.study.probe_run import probe_run
from lit_dps.study.setup import StudySetup

FORKS = 6  # at a 64th of the budget of steps, a 32nd, ... and a half of it
FACTORS = 2, 4, 8, 16, 32


def run_branches(
    setup: StudySetup, step_seconds: float, store: AdviceStore, clock: Clock, stop: StopRequest
) -> None:
    """Runs one training at the user's own batch size and rate, forks it, and stores what each fork
    says.

    It has as many branches as let all forks fit into the time, by the seconds of a step at the own
    batch size.

    Raises:
        UserError: for a module that cannot be forked.
        Interrupted: if the user asked to leave.
    """
    known = [Fork.from_dict(each) for each in store.read().get("branches", [])]
    most, size = setup.goal_of_trials.max_steps, own_batch_size(setup.workload)
    at = sorted({max(1, most >> (FORKS - i)) for i in range(FORKS)})
    callback = BranchCallback(at, (1, *_affordable(step_seconds, clock.left / (len(at) + 1))))
    callback.forks = known

    was_scaled = not known or store.read().get("branch_scaled", False)

    def on_fork(fork: Fork) -> None:
        # with the first fork, since a later run of the command may find all of them and train none
        store.keep(
            branch_adaptive=callback.adaptive,
            branch_scaled=callback.scaling is not None and was_scaled,
        )
        store.append("branches", fork.to_dict())
        say(f"  {_line(fork)}")

    callback.on_fork = on_fork
    end = time.monotonic() + clock.left
    callback.seconds = clock.left

    def at_check() -> None:
        stop.check()
        clock.tick()
        done = all(any(f.step == step for f in callback.forks) for step in at)
        if time.monotonic() > end or (done and any(map(goal.is_reached, run.curve[goal.metric]))):
            raise Interrupted("the budget")

    if clock.left <= 0 or all(any(f.step == step for f in known) for step in at):
        return
    say(f"forking a run at B = {size}, at steps {', '.join(map(str, at))}")
    trial = Trial(Cell(size), 0, setup.middle, setup.study.seed)
    goal = setup.goal_of_trials
    # The step at which the run meets its goal is an estimate of K.
    run = Attempt(trial, goal, train_past_goal=True)
    try:
        probe_run(of_one_device(setup), run, [callback], at_check)
    except Interrupted:
        stop.check()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"advise: the run that is forked failed: {type(error).__name__}: {error}"
        ) from error
    if (met := run.result().steps) is not None:
        store.keep(branch_steps=met)
        say(f"  the run met its goal after {met} steps")


def branched(kept: Mapping[str, Any], setup: StudySetup) -> Branched | None:
    """What the forks that are stored say of the steps of other batch sizes; None without any."""
    forks = sorted(
        (Fork.from_dict(each) for each in kept.get("branches", [])), key=lambda fork: fork.step
    )
    if not forks:
        return None
    met = kept.get("branch_steps")
    critical = [Critical(fork.step, *map(float, fork.critical)) for fork in forks]
    largest = max(fork.batch_size * max(fork.factors) for fork in forks)
    steps = met or setup.goal_of_trials.max_steps
    return Branched(forks[0].batch_size, steps, critical, largest, met is not None)


def described(stored: list[dict[str, Any]]) -> list[str]:
    """What all forks say, a line each, and what follows."""
    forks = sorted((Fork.from_dict(each) for each in stored), key=lambda fork: fork.step)
    if not forks:
        return ["branches: no fork was reached within the time"]
    last = forks[-1]
    low, _ = last.critical
    lines = [
        "branches (Merrill et al. 2025): the largest batch whose loss is not above that of "
        "smaller ones"
    ]
    lines += [f"  {_line(fork)}" for fork in forks]
    lines.append(
        f"  after step {last.step} batches up to {low} cost no progress per example, with the "
        "rate times k "
        "(SGD) or sqrt k (like Adam); earlier, as the lines above say"
    )
    return lines


def _affordable(step: float, seconds: float) -> tuple[int, ...]:
    """The factors of a fork that takes no longer: repetitions x branches x stretches x largest
    factor steps."""
    fitting = [
        n for n in range(2, len(FACTORS) + 1) if 3 * (n + 1) * 4 * FACTORS[n - 1] * step <= seconds
    ]
    return FACTORS[: max(fitting, default=2)]


def _line(fork: Fork) -> str:
    low, high = fork.critical
    bound = (
        f"{low} to {high:g}" if math.isfinite(high) else f"{low} or more: no branch lost anything"
    )
    losses = []
    for factor, loss in zip(fork.factors, fork.losses, strict=True):
        losses.append(f"{factor * fork.batch_size}: {number_text(loss, 4)}")
    shown = f"loss by B: {', '.join(losses)}; tolerance {number_text(fork.tolerance)}"
    return f"step {fork.step}: critical batch size {bound}  ({shown})"
