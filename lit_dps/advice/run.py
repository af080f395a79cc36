"""Runs advice from its configuration to its answer within a budget of time, or takes it up where it
stopped."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningDataModule

from lit_dps.advice.answer import Answer
from lit_dps.advice.branch_run import run_branches
from lit_dps.advice.max_steps import settle_max_steps
from lit_dps.advice.mlflow_log import show
from lit_dps.advice.optimizer_probe import look_at_optimizers
from lit_dps.advice.options import Options
from lit_dps.advice.probe_plan import probe_all
from lit_dps.advice.probe_study import Probes
from lit_dps.advice.question import Question
from lit_dps.advice.recommended_config import parameters_at
from lit_dps.advice.report import conclude, tell
from lit_dps.advice.stages import WRITING, Clock, say
from lit_dps.advice.step_probe import (
    StepTimes,
    first_look,
    of_one_device,
    parameters_of,
    time_steps,
)
from lit_dps.advice.step_time import Timed
from lit_dps.advice.user_workload import own_batch_size, probing, searches_scales
from lit_dps.advice.verify import verify_recommendation
from lit_dps.analysis.tables import significant
from lit_dps.core.batch_scaling import BETA2_FLOOR
from lit_dps.core.environment import SOURCES, changes_since
from lit_dps.core.errors import ConfigError, StorageError, UserError
from lit_dps.core.format import format_duration, number_text
from lit_dps.core.noise_scale import NoiseScale
from lit_dps.core.trial import Trial
from lit_dps.parallel.process import (
    INTERRUPTED,
    Interrupted,
    StopRequest,
    cpu_wait_seconds,
    interruptible,
    prepare_process,
)
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.storage.header import identity_changes
from lit_dps.study.environment import environment_of
from lit_dps.study.failures import FAILED, AllFail
from lit_dps.study.noise import short_run
from lit_dps.study.run import LEAVING, check_study
from lit_dps.study.setup import StudySetup
from lit_dps.study.sources import refuse_changed_sources, source_hashes
from lit_dps.training.adam_scaling import AdamScales

TIMING, NOISE, CONFIRMING = (
    0.1,
    0.05,
    0.2,
)  # shares of the budget of each stage but the probes, at most
NOISE_STEPS, NOISE_BATCH = 200, 32
MEASURING = 10.0  # seconds that step times and noise take at least
ENVIRONMENT = "environment"  # of the store: code and data of what was measured first
# seconds that have to be left for MLflow, which takes some to begin, to be told before the end
BEGINNING = 30.0


def run_advice(
    setup: StudySetup,
    options: Options,
    began: float | None = None,
    proposes_max_steps: bool = False,
) -> int:
    """Asks and answers; the same call goes on with what is left of the budget.

    Args:
        setup: The user's configuration.
        options: Of the command.
        began: When the budget began to be spent, on the monotonic clock; None is now.
        proposes_max_steps: Whether the user set no goal.max_steps, so that a short run proposes
            one.

    Returns:
        The exit code: 0 with an answer, also where that is that nothing can be said; 1 if all first
        trials fail; 130 if it was interrupted.

    Raises:
        UserError: for configuration, data or storage that do not serve, before anything is created.
    """
    prepare_process()
    sources = source_hashes(setup.config())
    store, stop = AdviceStore(setup.storage.optuna_url, setup.study.name), StopRequest()
    known, proposal = store.read(), None
    if proposes_max_steps:
        try:
            proposal = settle_max_steps(setup, options, known, stop)
        except Interrupted as signal:
            print(f"\ninterrupted by {signal}: nothing was stored")
            return INTERRUPTED
    if proposal is not None:
        goal = dataclasses.replace(setup.goal, max_steps=proposal.max_steps)
        setup = dataclasses.replace(setup, goal=goal)
    probe_setup, adaptive, notes = _study_of(setup, options)
    if proposal is not None:
        notes.append(proposal.note)
    data, _ = check_study(probe_setup)
    for note in notes:
        say(f"note: {note}")
    configuration = probe_setup.identity(data)
    stored = known.get("configuration", configuration)
    if identity_changes(stored, configuration) and (
        before := _begun_before(setup, options, adaptive, data, stored)
    ):
        probe_setup, adaptive = before
        configuration = stored
        say(
            "note: these probes began under an earlier version: weight decay follows the batch "
            "size as it did there"
        )
    if differences := identity_changes(stored, configuration):
        raise UserError(
            f"advice on {setup.study.name!r} was asked for with another configuration: "
            f"{'; '.join(map(str, differences))}; "
            "restore it, or give the new one another study.name"
        )
    environment = environment_of(probe_setup, data)
    refuse_changed_sources(sources, environment[SOURCES])
    _refuse_changed_code(setup.study.name, known.get(ENVIRONMENT), environment)
    clock = Clock(options.budget, store, known.get("spent", 0.0), began)
    if "timed" not in known:
        _refuse_small_budget(clock)
    say(
        f"advice on {setup.study.name}: asking takes {format_duration(options.budget, 2)} at most, "
        "all in all"
    )
    unknown = [n for n in options.devices if n not in (1, probe_setup.ranks)]
    if unknown and options.bandwidth is None:
        say(
            f"note: nothing will be answered for {', '.join(map(str, unknown))} devices, which "
            "are not used here: give "
            "--bandwidth, the bytes a second between two devices, such as 1e10"
        )
    if known.get("spent"):
        remaining = format_duration(max(clock.left, 0.0), 2)
        say(f"  {format_duration(known['spent'], 2)} of them are spent, {remaining} are left")
    try:
        with interruptible(stop, LEAVING), _kept(clock):
            if proposal is not None:
                store.keep(max_steps=proposal.max_steps)
            store.keep(configuration=configuration)
            if ENVIRONMENT not in known:
                store.keep(environment=environment)
            times = _timed(probe_setup, store, clock, known, stop)
            noise = _noise(probe_setup, times, store, clock, known, stop)
            parameters = store.read()["parameters"]
            probes = Probes(probe_setup, data, environment)
            case = Question(setup, options, store, probes, adaptive, times, noise, parameters)
            _say_cost(case)
            if clock.left > BEGINNING:
                show(case)
            try:
                if options.method == "branch":
                    run_branches(probe_setup, case.own_step, store, clock, stop)
                else:
                    _ask(case, clock, stop)
            except StorageError as error:  # a full disk, say: what is stored gives an answer
                say(f"asking ends early: {error}")
    except Interrupted as signal:
        print(f"\ninterrupted by {signal}: what was measured is stored; the same command goes on")
        return INTERRUPTED
    except AllFail as error:
        print(f"lit-dps: error: {error}", file=sys.stderr)
        return FAILED
    tell(case)
    _keep_time(clock)
    say(f"asking took {format_duration(clock.spent, 2)} of {format_duration(options.budget, 2)}")
    return 0


def _refuse_small_budget(clock: Clock) -> None:
    """Raise ConfigError if the budget leaves no time to measure anything; nothing is stored yet."""
    least = clock.spent + MEASURING + WRITING[1]
    if clock.budget < least:
        raise ConfigError(
            "--budget",
            format_duration(clock.budget, 2),
            f"at least {math.ceil(least)}s: to begin took {clock.spent:.0f} s, and timing steps "
            "and the answer take "
            f"{MEASURING + WRITING[1]:.0f} s",
        )


def _refuse_changed_code(
    name: str, known: Mapping[str, Any] | None, environment: Mapping[str, Any]
) -> None:
    """Raise UserError if stored advice was measured with other code or data; earlier versions
    stored neither."""
    changes = [] if known is None else changes_since([known], environment)
    if changes:
        verb = "is" if len(changes) == 1 else "are"
        raise UserError(
            f"advice on {name!r}: {', '.join(changes)} {verb} not as in its stored measurements; "
            "restore it, or give "
            "the new advice another study.name"
        )


def _ask(case: Question, clock: Clock, stop: StopRequest) -> None:
    """Probes, then runs what is recommended."""
    clock.kept = CONFIRMING * clock.budget
    probe_all(case, clock, stop)
    clock.kept = 0.0
    found = conclude(case)
    if found.best is None:  # nothing to run yet: the time that was kept goes into probes
        probe_all(case, clock, stop)
        found = conclude(case)
    _confirm(case, found, clock, stop)


def _confirm(case: Question, found: Answer, clock: Clock, stop: StopRequest) -> None:
    """Runs the best row on fresh seeds, where one device trains it as it will be trained."""
    if (params := parameters_at(case.work.record(), found)) is None or clock.left <= 0:
        return
    probe, size, largest = case.work.setup, int(found.best["batch_size"]), found.step_time.largest
    if largest is None or size <= largest * probe.workload.accumulated:
        say(f"what is recommended, on fresh seeds: {format_duration(clock.left, 2)} at most")
        verify_recommendation(
            probe, size, params, float(found.best["k_star"]), case.store, clock, stop
        )


def _study_of(
    setup: StudySetup, options: Options
) -> tuple[StudySetup, AdamScales | None, list[str]]:
    """Return the study that probes, the settings of an adaptive optimizer that follow the batch
    size, and notes.

    The settings are None where one of them is searched, and of other optimizers.
    """
    plain = probing(setup, options.trials, adaptive=None)
    own = Trial(plain.study.cells[0], 0, {}, plain.study.seed)
    adaptive, notes = None, []
    try:
        look = look_at_optimizers(plain, own)
        adaptive, notes = look.adaptive, look.notes
    except Exception as error:  # what does not train is refused next, by the checks of the study
        line = next(iter(str(error).splitlines()), type(error).__name__)
        notes = [
            "whether beta2 has to move with the batch size is not known: the optimizer was not "
            f"reached: {line}"
        ]
    if adaptive is not None and searches_scales(plain.study.space):
        adaptive = None
    if adaptive is not None and options.method == "law":
        size = own_batch_size(setup.workload)
        moves = []
        if adaptive.beta2 is not None:
            moves.append(f"beta2 becomes beta2^(B / {size}), at least {BETA2_FLOOR:g}")
        if adaptive.weight_decay:
            rate = (
                "the learning rate"
                if adaptive.rate is None
                else f"the learning rate / {number_text(adaptive.rate)}"
            )
            moves.append(f"weight decay grows by B / {size} and falls by {rate}")
        if moves:
            notes.append(f"as B moves from {size}, {' and '.join(moves)}")
    return probing(setup, options.trials, adaptive), adaptive, notes


def _begun_before(
    setup: StudySetup,
    options: Options,
    adaptive: AdamScales | None,
    data: LightningDataModule,
    stored: Any,
) -> tuple[StudySetup, AdamScales | None] | None:
    """Return the study that probes, as an earlier version declared it, if that is the stored
    one."""
    if adaptive is None:
        return None
    for earlier in (dataclasses.replace(adaptive, rate=None), None):
        found = probing(setup, options.trials, earlier)
        if not identity_changes(stored, found.identity(data)):
            return found, earlier
    return None


def _timed(
    setup: StudySetup, store: AdviceStore, clock: Clock, known: dict, stop: StopRequest
) -> StepTimes:
    if "timed" in known:
        rows = [Timed(*row) for row in known["timed"]]
        return StepTimes(rows, known["check"], *known["largest"], known.get("waited", 0.0))
    one, own, goal = of_one_device(setup), own_batch_size(setup.workload), setup.goal_of_trials
    if (look := first_look(one, own)) is not None:
        step, check = look
        _say_share(
            clock.budget,
            own,
            goal.max_steps,
            goal.max_steps * (step + check / goal.check_interval),
            "about ",
        )
    say("timing steps")

    def along(line: str) -> None:
        say(line)
        clock.tick()
        stop.check()

    began, waited = time.monotonic(), cpu_wait_seconds()
    timed = one if setup.ranks == 1 else setup
    found = time_steps(timed, TIMING * clock.budget, along, warm=look is not None)
    found.waited = (cpu_wait_seconds() - waited) / (time.monotonic() - began)
    say(f"  up to {found.largest} examples a device: {found.why}")
    rows = [list(row) for row in found.timed]
    largest = [found.largest, found.why, found.memory]
    store.keep(
        timed=rows,
        check=found.check,
        largest=largest,
        parameters=parameters_of(setup),
        waited=found.waited,
    )
    return found


def _noise(
    setup: StudySetup,
    times: StepTimes,
    store: AdviceStore,
    clock: Clock,
    known: dict,
    stop: StopRequest,
) -> NoiseScale | None:
    if "noise" in known:
        return None if known["noise"] is None else NoiseScale.from_dict(known["noise"])
    size = min(NOISE_BATCH, times.largest) * setup.workload.accumulated
    seconds = min(NOISE * clock.budget, max(clock.left, 1.0))

    def at_step() -> None:
        stop.check()
        clock.tick()

    found = short_run(of_one_device(setup), size, setup.middle, NOISE_STEPS, seconds, at_step)
    if isinstance(found, str):
        say(f"noise scale not measured: {found}")
        store.keep(noise=None)
        return None
    say(found.sentence)
    store.keep(noise=found.to_dict())
    return found


def _say_cost(case: Question) -> None:
    """What asking costs as a share of one training, by all steps that were timed."""
    say(case.model.describe())
    own, most = own_batch_size(case.setup.workload), case.setup.goal_of_trials.max_steps
    _say_share(case.options.budget, own, most, case.training_seconds)


def _say_share(budget: float, own: int, most: int, training: float, about: str = "") -> None:
    share = budget / training
    cost = f"{share:.0%} of" if share < 2 else f"{significant(share)} times"
    say(
        f"one training at B = {own} that spends its {most} steps takes "
        f"{about}{format_duration(training, 2)} on one device: "
        f"asking is at most {cost} that"
    )


@contextmanager
def _kept(clock: Clock):
    try:
        yield
    finally:
        _keep_time(clock)


def _keep_time(clock: Clock) -> None:
    """Store the time that was spent. A storage that refuses it costs no answer."""
    try:
        clock.keep()
    except StorageError as error:
        say(f"the time that was spent is not stored: {error}")
