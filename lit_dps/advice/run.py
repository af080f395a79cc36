"""Runs the command: checks, times steps, trains within a budget, then answers.

Each stage stores what it measures, so that the same command resumes with the remaining budget.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from lit_dps.advice.announced_cost import print_cost, print_end, print_pilot, print_share
from lit_dps.advice.batch_dependence import batch_dependence, note_on
from lit_dps.advice.branch_run import run_branches
from lit_dps.advice.max_steps import Proposal, settle_max_steps
from lit_dps.advice.options import MIN_ANSWER_SECONDS, Clock, Options, print_line
from lit_dps.advice.pilot_course import ask_by_pilot
from lit_dps.advice.probe_study import Probes
from lit_dps.advice.question import Question
from lit_dps.advice.report import log_measurements, publish_answer
from lit_dps.advice.result import Advice
from lit_dps.advice.step_probe import (
    FACTOR,
    StepTimes,
    count_parameters,
    of_one_device,
    time_briefly,
    time_steps,
)
from lit_dps.advice.user_workload import (
    ProbeStudy,
    prepare_branches,
    prepare_pilot,
    user_batch_size,
)
from lit_dps.core.environment import (
    Environment,
    changes_since,
    described_otherwise,
    lacks_parts,
    remedy_of_constants,
)
from lit_dps.core.errors import ConfigError, StorageError, UserError, first_line
from lit_dps.core.exit_codes import ExitCode
from lit_dps.core.text import for_terminal, format_duration
from lit_dps.core.trial import LIGHTNING, Cell, Trial
from lit_dps.core.unit import STEPS
from lit_dps.parallel.process import (
    Interrupted,
    StopRequest,
    cpu_wait_seconds,
    interruptible,
    prepare_process,
)
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.storage.header import identity_changes, remedy_of
from lit_dps.storage.read import read_study
from lit_dps.storage.schema import PROBES_SUFFIX
from lit_dps.study.display import LEAVING
from lit_dps.study.environment import environment_of
from lit_dps.study.failures import AllFail
from lit_dps.study.hardware import hardware
from lit_dps.study.noise import short_run
from lit_dps.study.preflight.check import CheckedStudy, check_study
from lit_dps.study.preflight.parts_check import UNKNOWN
from lit_dps.study.setup import StudySetup
from lit_dps.study.sources import refuse_changed_sources, source_hashes, written_files

# Shares of the budget that stages may take; training takes the rest.
TIMING_SHARE = 0.1
NOISE_SHARE = 0.05
MAX_TIMING_SECONDS = 20.0
BATCH_SIZES = "study.batch_sizes"
# Sizes that are timed for the pilot: B0 / 4, B0, 4 B0, ...
PILOT_FACTOR = 4
NOISE_TRIAL_STEPS = 3
NOISE_SECONDS = 20.0
MIN_MEASURING_SECONDS = 10.0  # for step times
MLFLOW_SECONDS = 30.0  # that have to remain for MLflow, which takes some to start


@dataclass(frozen=True)
class _Session:
    """One run of the command, after its checks.

    Attributes:
        setup: The user's configuration.
        options: Options of the command.
        probe_study: The study that probes.
        checked: What the check of that study found.
        environment: Its code and data.
        store: Where measurements are stored.
        stored: What was stored before this run.
        clock: The clock of the budget.
        stop: Whether the user asked to stop.
    """

    setup: StudySetup
    options: Options
    probe_study: ProbeStudy
    checked: CheckedStudy
    environment: Environment
    store: AdviceStore
    stored: Mapping[str, Any]
    clock: Clock
    stop: StopRequest


def run_advice(
    setup: StudySetup,
    options: Options,
    began: float | None = None,
    proposes_max_steps: bool = False,
    on_answer: Callable[[Advice], None] | None = None,
) -> int:
    """Ask and answer; the same call resumes with the remaining budget.

    Args:
        setup: The user's configuration.
        options: Options of the command.
        began: When the budget began, on the monotonic clock; None is now.
        proposes_max_steps: Whether the user set no goal.max_steps, so that a short run proposes
            one.
        on_answer: Called with the answer once it is printed.

    Returns:
        The exit code: `ExitCode.DONE` with a recommendation, `NO_RESULT` without one, `FAILED` if
        all first trials fail, `INTERRUPTED`.

    Raises:
        UserError: for wrong configuration, data or storage, before anything is created.
    """
    if not setup.study.k_star_statistic.is_minimum:
        allowed = "minimum, because advise uses the best trial of each probe"
        raise ConfigError("study.statistic", setup.study.statistic, allowed)
    if not setup.batch.build().is_constant:
        allowed = "constant, because advise compares constant batch sizes"
        raise ConfigError("batch.schedule", setup.batch.schedule, allowed)
    if setup.goal.unit != STEPS.name:
        allowed = "steps, because advise compares times by the law of steps"
        raise ConfigError("goal.unit", setup.goal.unit, allowed)
    prepare_process()
    store = AdviceStore(setup.storage.optuna_url, setup.study.name)
    with ExitStack() as stack:
        if store.read():
            stack.enter_context(store.sole_command())
        return _check_and_ask(setup, options, store, began, proposes_max_steps, on_answer)


def _check_and_ask(
    setup: StudySetup,
    options: Options,
    store: AdviceStore,
    began: float | None,
    proposes_max_steps: bool,
    on_answer: Callable[[Advice], None] | None,
) -> int:
    """Check, ask and answer, as `run_advice` does."""
    sources = source_hashes(setup.config(), is_start=True)
    stop = StopRequest()
    stored = store.read()
    _refuse_removed_method(setup, stored)
    proposal = None
    if proposes_max_steps:
        try:
            proposal = settle_max_steps(setup, options, stored, stop)
        except Interrupted as signal:
            print(f"\ninterrupted by {signal}: nothing was stored")
            return ExitCode.INTERRUPTED
    if proposal is not None:
        goal = dataclasses.replace(setup.goal, max_steps=proposal.max_steps)
        setup = dataclasses.replace(setup, goal=goal)
    probe_study, checked = _check(setup, options, stored, proposal)
    before = stored.get("environment")
    environment = environment_of(probe_study.setup, checked.data, stored=[before] if before else [])
    refuse_changed_sources(sources, environment.sources)
    _refuse_changed_code(setup.study.name, before, environment)
    spent, announced = stored.get("spent", 0.0), stored.get("announced", math.inf)
    clock = Clock(options.budget, store, spent, began, announced)
    if "timed" not in stored:
        _refuse_small_budget(clock)
    elif clock.budget < stored.get("budget", clock.spent):
        former = format_duration(stored.get("budget", clock.spent), 2)
        allowed = (
            f"at least {former}, the budget of the stored measurements. Or choose another "
            "study.name"
        )
        raise ConfigError("--budget", format_duration(clock.budget, 2), allowed)
    parts = setup, options, probe_study, checked, environment
    session = _Session(*parts, store, stored, clock, stop)
    with store.sole_command():
        if bool(store.read()) != bool(stored):
            raise _refused(
                setup.study.name,
                "another command started to measure advice for study.name "
                f"{setup.study.name!r}. Run this command again to continue.",
            )
        _announce(session)
        return _ask_and_answer(session, proposal, on_answer)


def _check(
    setup: StudySetup, options: Options, stored: Mapping[str, Any], proposal: Proposal | None
) -> tuple[ProbeStudy, CheckedStudy]:
    """Check the study that probes; return it and what the check found.

    Raises:
        UserError: if a check fails, or if the stored advice has another configuration.
    """
    prepare = prepare_pilot if options.method == "pilot" else prepare_branches
    probe_study = prepare(setup)
    try:
        checked = check_study(probe_study.setup)
    except ConfigError as error:
        if error.key != BATCH_SIZES:
            raise
        # The user has written another key.
        key = setup.workload.batch_size_key
        raise ConfigError(key, error.value, str(error.allowed)) from error
    notes = list(probe_study.notes)
    if proposal is not None:
        notes.append(proposal.note)
    for note in notes:
        print_line(f"note: {note}")
    if "configuration" not in stored:
        return probe_study, checked
    before = stored["configuration"]
    differences = identity_changes(before, probe_study.setup.identity(checked.data))
    if differences:
        raise _refused(
            setup.study.name,
            f"the stored advice of study.name {setup.study.name!r} has another "
            f"configuration: {'; '.join(map(str, differences))}. {remedy_of(differences)}",
        )
    return probe_study, checked


def _refuse_removed_method(setup: StudySetup, stored: Mapping[str, Any]) -> None:
    """Raise UserError for stored advice of the method law, which earlier versions had."""
    if not stored or "reads_noise" in stored:  # which the method pilot stores before any run
        return
    name = setup.study.name
    try:
        read_study(setup.storage.optuna_url, f"{name}{PROBES_SUFFIX}")
    except StorageError:
        return
    raise _refused(
        name,
        f"the stored advice of study.name {name!r} was measured by the method law, "
        "which was removed. Choose another study.name. (`lit-dps analyze` with "
        f"--study.name {name}{PROBES_SUFFIX} shows its runs.)",
    )


def _refuse_changed_code(
    name: str, stored: Mapping[str, Any] | None, environment: Environment
) -> None:
    """Raise UserError if stored advice was measured with other code or data."""
    if stored is None:  # the code of the measurements is not recorded
        return
    changes = changes_since([stored], environment.content)
    if changes:
        raise _refused(
            name,
            f"advice of study.name {name!r}: {', '.join(changes)} changed since the "
            "stored measurements. Restore the former version, or choose another study.name."
            f"{remedy_of_constants(changes)}",
        )
    names = described_otherwise(stored, environment.content)
    if names:
        print_line(
            f"note: Another version of lit_dps or Python described {', '.join(names)} for the "
            "stored measurements. It cannot be compared."
        )


def _refused(name: str, message: str) -> UserError:
    """Return an error about the advice of a study."""
    return UserError(message, key="study.name", value=name)


def _refuse_small_budget(clock: Clock) -> None:
    """Raise ConfigError if the budget leaves no time to measure; nothing is stored yet."""
    needed = MIN_MEASURING_SECONDS + MIN_ANSWER_SECONDS
    least = clock.spent + needed
    if clock.budget < least:
        allowed = (
            f"at least {math.ceil(least)}s. The start took {clock.spent:.0f} s, and "
            f"timing steps and the answer take {needed:.0f} s"
        )
        raise ConfigError("--budget", format_duration(clock.budget, 2), allowed)


def _announce(session: _Session) -> None:
    """Print what asking costs, and what it will not answer."""
    options, clock = session.options, session.clock
    limit = ""
    if options.budget < math.inf:
        limit = f"; it takes at most {format_duration(options.budget, 2)} in total"
    print_line(f"advice on {session.setup.study.name}{limit}")
    ranks = session.probe_study.setup.ranks
    unknown = [str(count) for count in options.devices if count not in (1, ranks)]
    if unknown and options.bandwidth is None:
        print_line(
            f"note: There will be no answer for {', '.join(unknown)} devices, which are not used "
            "here. Give --bandwidth (bytes per second between two devices, such as 1e10)."
        )
    spent = session.stored.get("spent")
    if spent and options.budget < math.inf:
        remaining = format_duration(max(clock.remaining, 0.0), 2)
        print_line(f"  {format_duration(spent, 2)} of this budget are spent, {remaining} remain")


def _ask_and_answer(
    session: _Session, proposal: Proposal | None, on_answer: Callable[[Advice], None] | None
) -> int:
    """Measure, train and print the answer; return the exit code."""
    store, clock = session.store, session.clock
    try:
        with interruptible(session.stop, f"\n{LEAVING}\n"), ExitStack() as stack:
            stack.callback(_save_time, clock)
            stack.callback(lambda: store.forget_files(written_files()))
            if proposal is not None:
                store.keep(max_steps=proposal.max_steps)
            store.keep(configuration=session.probe_study.setup.identity(session.checked.data))
            if session.checked.trials_remain:
                store.keep(weaknesses=session.checked.weaknesses)
            if clock.budget < math.inf:
                store.keep(budget=clock.budget)
            stored = session.stored.get("environment")
            if stored is None or lacks_parts(stored, session.environment.content):
                store.keep(environment=session.environment.content)
            question = _measure(session)
            print_cost(question, clock)
            if clock.remaining > MLFLOW_SECONDS:
                log_measurements(question)
            try:
                _ask(question, clock, session.stop)
            except StorageError as error:
                # For example, the disk is full. What is stored gives an answer.
                print_line(f"advice ends early: {error}")
    except Interrupted as signal:
        message = (
            f"interrupted by {signal}: the measurements so far are stored; the same command resumes"
        )
        print(f"\n{for_terminal(message)}")
        return ExitCode.INTERRUPTED
    except AllFail as error:
        print(f"lit-dps: error: {error}", file=sys.stderr)
        return ExitCode.FAILED
    advice = publish_answer(question)
    _save_time(clock)
    print_end(clock)
    if on_answer is not None:
        on_answer(advice)
    return advice.exit_code


def _measure(session: _Session) -> Question:
    """Return the question, with step times as stored or measured now."""
    times = _step_times(session)
    plan = session.probe_study.plan
    reads_noise = plan is not None and _can_read_noise(session)
    depends_on_batch = _batch_dependence(session)
    parameters = session.store.read()["parameters"]
    setup = dataclasses.replace(session.probe_study.setup, environment=session.environment)
    probes = Probes(setup, session.checked.data)
    return Question(
        setup=session.setup,
        options=session.options,
        store=session.store,
        probes=probes,
        adaptive=session.probe_study.adaptive,
        times=times,
        parameters=parameters,
        plan=plan,
        reads_noise=reads_noise,
        depends_on_batch=tuple(depends_on_batch),
        decay=session.probe_study.decay,
    )


def _step_times(session: _Session) -> StepTimes:
    setup, clock = session.probe_study.setup, session.clock
    place = f"{hardware()}, {'GPU' if setup.on_gpu else 'CPU'}, devices: {setup.ranks}"
    if "timed" in session.stored:
        # Advice of earlier versions does not know where it timed steps.
        timed_on = session.stored.get("timed_on", place)
        if timed_on == place:
            return StepTimes.from_stored(session.stored)
        print_line(f"the stored step times are of {timed_on}; this is {place}")
        if "pilot" in session.stored:
            # Its validations took another time there.
            session.store.keep(pilot={**session.stored["pilot"], "check_seconds": None})
    if session.probe_study.plan is not None:
        # The answer is of `fit`, which trains in Lightning's loop.
        study = dataclasses.replace(setup.study, engine=LIGHTNING)
        setup = dataclasses.replace(setup, study=study)
    one_device = of_one_device(setup)
    batch_size = user_batch_size(setup.workload)
    rough = time_briefly(one_device, batch_size)
    if rough is not None:
        goal = setup.built_goal
        most_steps = goal.most_steps(batch_size, rough.step)
        training = most_steps * (rough.step + rough.check / goal.check_interval)
        if session.probe_study.plan is None:
            print_share(clock.budget, batch_size, most_steps, training, "about ")
        else:
            print_pilot(session.probe_study.plan, most_steps, training, setup.ranks)
    print_line("timing steps")

    def print_and_check(line: str) -> None:
        print_line(line)
        clock.tick()
        session.stop.raise_if_requested()

    begin, waited = time.monotonic(), cpu_wait_seconds()
    timed_setup = one_device if setup.ranks == 1 else setup
    seconds = min(TIMING_SHARE * clock.budget, MAX_TIMING_SECONDS)
    first, factor = 1, FACTOR
    if session.probe_study.plan is not None:
        local = batch_size // (setup.workload.accumulated * setup.ranks)
        first, factor = max(1, local // PILOT_FACTOR), PILOT_FACTOR
    times = time_steps(
        timed_setup,
        seconds,
        print_and_check,
        warm=rough is not None,
        first=first,
        factor=factor,
    )
    times.waited = (cpu_wait_seconds() - waited) / (time.monotonic() - begin)
    print_line(f"  up to {times.largest} examples per device: {times.reason}")
    session.store.keep(**times.to_stored(), timed_on=place, parameters=count_parameters(setup))
    return times


def _can_read_noise(session: _Session) -> bool:
    """Return whether the noise scale can be read along the pilot; a few steps try it."""
    if "reads_noise" in session.stored:
        return session.stored["reads_noise"]
    setup, clock, plan = session.probe_study.setup, session.clock, session.probe_study.plan
    assert plan is not None

    def at_step() -> None:
        session.stop.raise_if_requested()
        clock.tick()

    one_device = of_one_device(setup)
    seconds = max(min(NOISE_SHARE * clock.budget, NOISE_SECONDS), 1.0)
    params = {plan.rate_key: plan.rate}
    scale = short_run(one_device, plan.batch_size, params, NOISE_TRIAL_STEPS, seconds, at_step)
    if isinstance(scale, str):
        print_line(f"the noise scale cannot be measured along the run: {scale}")
    session.store.keep(reads_noise=not isinstance(scale, str))
    return not isinstance(scale, str)


def _batch_dependence(session: _Session) -> list[str]:
    """Return what of the loss depends on the batch, as stored or by a few steps now."""
    if "depends_on_batch" in session.stored:
        return session.stored["depends_on_batch"]
    setup = session.probe_study.setup
    trial = Trial(Cell(user_batch_size(setup.workload)), 0, setup.middle, setup.study.seed)
    try:
        depends = batch_dependence(setup, trial)
    except Exception as error:
        # For example, a module may not accept a part of its batch.
        print_line(f"it is unknown whether the loss depends on the batch: {first_line(error)}")
        depends = [UNKNOWN]
    for each in depends:
        print_line(f"note: {note_on(each, setup.workload.accumulated > 1)}")
    session.store.keep(depends_on_batch=depends)
    return depends


def _ask(question: Question, clock: Clock, stop: StopRequest) -> None:
    """Train the user's run and others, or fork a run."""
    if question.plan is not None:
        ask_by_pilot(question, question.plan, clock, stop)
        return
    setup = question.probes.setup
    step = question.seconds_on_one_device(user_batch_size(setup.workload))
    run_branches(setup, step, question.store, clock, stop)


def _save_time(clock: Clock) -> None:
    """Store the time that was spent; print a note if the storage refuses it."""
    try:
        clock.save()
    except StorageError as error:
        print_line(f"the spent time could not be stored: {error}")
