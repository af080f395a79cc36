"""The user's run to its goal, which the method pilot trains first.

The user wants this training anyway, so its checkpoint is kept. The noise scale is read along it.
"""

from __future__ import annotations

import gc
import time
from functools import partial
from pathlib import Path

from lit_dps.advice.options import Clock, print_line
from lit_dps.advice.pilot_evidence import PilotRun, bounds_of
from lit_dps.advice.pilot_plan import PilotPlan, pilot_setup
from lit_dps.advice.probe_study import CannotRun, ChosenPoints
from lit_dps.advice.question import Question
from lit_dps.core.text import format_duration, number_text
from lit_dps.core.trial import Status
from lit_dps.parallel.process import StopRequest
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.study.setup import StudySetup


def train_pilot(
    question: Question, plan: PilotPlan, clock: Clock, stop: StopRequest
) -> PilotRun | None:
    """Train the user's run to its goal, unless it is stored, and return it.

    Returns:
        None if the steps to the goal are unknown: the run missed the goal, met it at its first
        validation, or its time is over.

    Raises:
        Interrupted: if the user asked to stop.
        UserError: with the cause of a run that failed.
    """
    goal = question.setup.built_goal
    pilot = PilotRun.of_stored(question.store.read())
    if pilot is None:
        pilot = _run_pilot(question, plan, clock, stop)
    else:
        print_line(f"your run, by an earlier command: {_settings_text(plan)}")
    if pilot is None:
        return None
    if pilot.steps is None:
        best = ""
        if pilot.best is not None:
            best = f", its best {goal.metric} was {number_text(pilot.best)}"
        why = pilot.advice()
        if pilot.steps_run:
            ended = f"{pilot.steps_run} steps ({pilot.status}){best}"
            why = f"the run did not meet the goal in {ended}. {why}"
        print_line(f"  {why}")
        if pilot.status != Status.INFEASIBLE:  # another rate may meet the goal earlier
            store_bound(question.store, plan.batch_size, pilot.steps_run)
        return None
    print_line(
        f"  the run met the goal after {pilot.steps} steps, {format_duration(pilot.seconds, 2)}"
    )
    if pilot.steps <= goal.check_interval:
        print_line(
            "  that is its first validation, so it may have met the goal earlier. Set "
            f"goal.check_interval below {goal.check_interval} and another study.name."
        )
        return None
    if pilot.noise is not None:
        print_line(f"  gradient noise scale of its second half: {pilot.noise}")
    file = pilot_checkpoint(question.setup)
    if file.exists():
        print_line(f"  checkpoint: {file}")
    return pilot


def _run_pilot(
    question: Question, plan: PilotPlan, clock: Clock, stop: StopRequest
) -> PilotRun | None:
    """Train the pilot and store its results; return None if its time is over."""
    pilot = PilotRun.of_record(question.probes.record(), plan)
    if pilot is not None:
        # A command was killed between the end of the run and the line that stores it below.
        print_line(f"your run, by an earlier command: {_settings_text(plan)}")
    elif clock.remaining > 0:
        budget = question.setup.built_goal.budget_text
        print_line(f"your run: {_settings_text(plan)}, at most {budget}")
        file = pilot_checkpoint(question.setup)
        change = partial(pilot_setup, reads_noise=question.reads_noise, file=file)
        chosen = ChosenPoints(plan.points(plan.batch_size, (1.0,)), change=change)
        run_trials(question, plan.batch_size, chosen, clock, stop)
        pilot = PilotRun.of_record(question.probes.record(), plan)
    if pilot is not None:
        question.store.keep(pilot=pilot.to_dict())
        # The pilot measures validations better than the first table.
        vars(question).pop("checks", None)
    return pilot


def _settings_text(plan: PilotPlan) -> str:
    return f"B = {plan.batch_size}, {plan.rate_key} = {number_text(plan.rate)}"


def pilot_checkpoint(setup: StudySetup) -> Path:
    """Return the file of the checkpoint of the user's run."""
    return setup.storage.checkpoints(setup.study.name) / "pilot.ckpt"


def run_trials(
    question: Question, batch_size: int, chosen: ChosenPoints, clock: Clock, stop: StopRequest
) -> bool:
    """Run the chosen trials at a batch size, and return True if all have ended."""
    # Otherwise a collection of all objects, which may take half a second, is likely in a short run.
    gc.collect()
    end = time.monotonic() + clock.remaining
    try:
        has_ended = question.probes.run(batch_size, end, stop, clock, chosen)
    except CannotRun as error:
        print_line(f"  B = {batch_size} cannot be run: {error}")
        return False
    finally:
        clock.save()
    if not has_ended:
        print_line("  the budget ended during the run; a larger --budget continues it")
    return has_ended


def store_bound(store: AdviceStore, batch_size: int, steps: int) -> None:
    """Store that no run at a batch size met the goal within some steps; 0 is no bound."""
    if not steps:
        return
    bounds = bounds_of(store.read()) | {batch_size: float(steps)}
    store.keep(bounds=[list(pair) for pair in bounds.items()])
