"""Runs advice from its configuration to its answer within a budget of time, or takes it up where it stopped."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager

from lit_dps.advice import Answer, Link, StepTime, Timed, fit_step_time
from lit_dps.advising.branches import run_branches
from lit_dps.advising.clock import Clock, say
from lit_dps.advising.confirm import confirm
from lit_dps.advising.options import Options, time_text
from lit_dps.advising.plan import probe_all, training_seconds
from lit_dps.advising.probes import Probes
from lit_dps.advising.recommended import parameters_at
from lit_dps.advising.report import conclude, tell
from lit_dps.advising.steps import StepTimes, of_one_device, parameters_of, time_steps
from lit_dps.advising.workload import own_batch_size, probing, searches_scales
from lit_dps.errors import UserError
from lit_dps.noise import NoiseScale
from lit_dps.runtime import INTERRUPTED, Interrupted, StopRequest, interruptible, waited_for_cpu
from lit_dps.store import AdviceStore
from lit_dps.study.failures import FAILED, AllFail
from lit_dps.study.noise import short_run
from lit_dps.study.run import LEAVING, check_study
from lit_dps.study.setup import StudySetup
from lit_dps.training.adam_scaling import adaptive_of
from lit_dps.trial import Trial

TIMING, NOISE, CONFIRMING = 0.1, 0.05, 0.2  # shares of the budget of each stage but the probes, at most
NOISE_STEPS, NOISE_BATCH = 200, 32


def run_advice(setup: StudySetup, options: Options) -> int:
    """Asks and answers; the same call goes on with what is left of the budget.

    Returns:
        The exit code: 0 with an answer, also where that is that nothing can be said; 1 if all first trials fail; 130 if
        it was interrupted.

    Raises:
        UserError: for configuration, data or storage that do not serve, before anything is created.
    """
    probe_setup, adaptive, told = _study_of(setup, options)
    data = check_study(probe_setup)
    if told:
        say(told)
    store = AdviceStore(setup.storage.optuna_url, setup.study.name)
    known = store.read()
    configuration = probe_setup.identity(data)
    if known.get("configuration", configuration) != configuration:
        raise UserError(
            f"advice on {setup.study.name!r} was asked for with another configuration: restore it, or give the new one "
            "another study.name"
        )
    clock, stop = Clock(options.budget, store, known.get("spent", 0.0)), StopRequest()
    say(f"advice on {setup.study.name}: asking takes {time_text(options.budget)} at most, all in all")
    if known.get("spent"):
        say(f"  {time_text(known['spent'])} of them are spent, {time_text(max(clock.left, 0.0))} are left")
    work = Probes(probe_setup, data)
    try:
        with interruptible(stop, LEAVING), _kept(clock):
            store.keep(configuration=configuration)
            times = _timed(probe_setup, store, clock, known)
            stop.check()
            noise = _noise(probe_setup, store, clock, known, stop)
            model = _model(times, parameters=store.read()["parameters"], options=options)
            _tell_cost(probe_setup, model, times, clock)
            if options.method == "branch":
                own = model.at(own_batch_size(setup.workload))
                run_branches(probe_setup, own.value, store, clock, stop)
            else:
                clock.kept = CONFIRMING * clock.budget
                probe_all(work, model, times, noise, clock, stop, options)
                clock.kept = 0.0
                found = conclude(work, setup, model, times, noise, store, options)
                if found.best is None:  # nothing to run yet: the time that was kept goes into probes
                    probe_all(work, model, times, noise, clock, stop, options)
                    found = conclude(work, setup, model, times, noise, store, options)
                _confirm(probe_setup, work, found, store, clock, stop)
    except Interrupted as signal:
        print(f"\ninterrupted by {signal}: what was measured is stored; the same command goes on")
        return INTERRUPTED
    except AllFail as error:
        print(f"lit-dps: error: {error}", file=sys.stderr)
        return FAILED
    tell(work, setup, model, times, noise, store, options, adaptive)
    clock.keep()
    say(f"asking took {time_text(clock.spent)} of {time_text(options.budget)}")
    return 0


def _confirm(probe: StudySetup, work: Probes, found: Answer, store: AdviceStore, clock: Clock, stop) -> None:
    """Runs the best row on fresh seeds, where one device trains it as it will be trained."""
    if (params := parameters_at(work.record(), found)) is None or clock.left <= 0:
        return
    size, largest = int(found.best["batch_size"]), found.step_time.largest
    if largest is None or size <= largest * probe.workload.accumulated:
        say(f"what is recommended, on fresh seeds: {time_text(clock.left)} at most")
        confirm(probe, size, params, float(found.best["k_star"]), store, clock, stop)


def _study_of(setup: StudySetup, options: Options) -> tuple[StudySetup, tuple[float, float] | None, str]:
    """The study that probes, and beta2 and weight decay of an optimizer like Adam, which then move with the batch size.

    These are None where one of them is searched, and of other optimizers. Last what to say of it, if anything.
    """
    told = ""
    plain = probing(setup, options.trials, adaptive=False)
    params = {key: box.at(0.5) for key, box in plain.study.space.items()}
    built = plain.workload.build(Trial(plain.study.cells[0], 0, params, plain.study.seed))
    try:
        found = built.module.configure_optimizers()
        optimizers = found.get("optimizer") if isinstance(found, dict) else found
        optimizers = optimizers[0] if isinstance(optimizers, tuple) else optimizers
        adaptive = adaptive_of(optimizers if isinstance(optimizers, (list, tuple)) else [optimizers])
    except Exception:  # of a module that wants a trainer for it: it is left as it is, and that is said
        adaptive = None
        told = "note: configure_optimizers wants a trainer: whether beta2 has to move with the batch size is not known"
    if adaptive is not None and searches_scales(plain.study.space):
        adaptive = None
    if adaptive is not None and options.method == "law":
        own = own_batch_size(setup.workload)
        told = f"note: as B moves from {own}, beta2 becomes beta2^(B / {own}) and weight decay grows by B / {own}"
    return probing(setup, options.trials, adaptive is not None), adaptive, told


def _timed(setup: StudySetup, store: AdviceStore, clock: Clock, known: dict) -> StepTimes:
    if "timed" in known:
        rows = [Timed(*row) for row in known["timed"]]
        return StepTimes(rows, known["check"], *known["largest"], known.get("waited", 0.0))
    say("timing steps")
    one = of_one_device(setup)
    began, waited = time.monotonic(), waited_for_cpu()
    found = time_steps(one if setup.ranks == 1 else setup, TIMING * clock.budget, say)
    found.waited = (waited_for_cpu() - waited) / (time.monotonic() - began)
    say(f"  up to {found.largest} examples a device: {found.why}")
    rows = [list(row) for row in found.timed]
    largest = [found.largest, found.why, found.memory]
    store.keep(timed=rows, check=found.check, largest=largest, parameters=parameters_of(setup), waited=found.waited)
    return found


def _noise(setup, store: AdviceStore, clock: Clock, known: dict, stop: StopRequest) -> NoiseScale | None:
    if "noise" in known:
        return None if known["noise"] is None else NoiseScale.of_stored(known["noise"])
    size = max(2, NOISE_BATCH) * setup.workload.accumulated
    params = {key: box.at(0.5) for key, box in setup.study.space.items()}
    seconds = min(NOISE * clock.budget, max(clock.left, 1.0))
    found = short_run(of_one_device(setup), size, params, NOISE_STEPS, seconds, stop.check)
    if isinstance(found, str):
        say(f"noise scale not measured: {found}")
        store.keep(noise=None)
        return None
    say(found.sentence)
    store.keep(noise=found.stored())
    return found


def _model(times: StepTimes, parameters: int, options: Options) -> StepTime:
    link = None
    if options.bandwidth is not None:
        link = Link(parameters, options.bandwidth, options.latency)
    return fit_step_time(times.timed, link, times.largest if times.memory else None)


def _tell_cost(setup: StudySetup, model: StepTime, times: StepTimes, clock: Clock) -> None:
    """What asking costs as a share of one training, as far as that is known: its whole budget of steps."""
    goal, own = setup.goal_of_trials, own_batch_size(setup.workload)
    if (training := training_seconds(setup, model, times)) is None:
        return
    share = clock.budget / training
    say(model.describe())
    say(
        f"one training at B = {own} that spends its {goal.max_steps} steps takes {time_text(training)} on one device: "
        f"asking is at most {share:.0%} of that"
    )


@contextmanager
def _kept(clock: Clock):
    try:
        yield
    finally:
        clock.keep()
