"""Runs advice from its configuration to its answer within a budget of time, or takes it up where it stopped."""

from __future__ import annotations

import math
import sys
import time
from contextlib import contextmanager

from lit_dps.advice import Link, StepTime, Timed, expected_critical, fit_step_time, next_probe, probes
from lit_dps.advising.options import Options, time_text
from lit_dps.advising.probes import Probes, observations, unfinished
from lit_dps.advising.report import tell
from lit_dps.advising.steps import StepTimes, of_one_device, parameters_of, time_steps
from lit_dps.advising.workload import own_batch_size, probing
from lit_dps.analysis import Law, law_of
from lit_dps.errors import UserError
from lit_dps.noise import NoiseScale
from lit_dps.runtime import INTERRUPTED, Interrupted, StopRequest, interruptible
from lit_dps.store import AdviceStore
from lit_dps.study.noise import short_run
from lit_dps.study.progress import FAILED, AllFail
from lit_dps.study.run import LEAVING, check_study
from lit_dps.study.setup import StudySetup
from lit_dps.training.adam_scaling import is_adaptive
from lit_dps.trial import Trial

TIMING, NOISE = 0.1, 0.05  # shares of the budget that timing steps and reading the noise may take, at most
NOISE_STEPS, NOISE_BATCH = 200, 32
WRITING = 0.1, 4.0, 15.0  # share of the budget that is kept for the answer, and at least and at most so many seconds
FIRST = 3  # probes that share what is left alike, since nothing tells yet what they take
APART = 8  # factor between the first two


class Clock:
    """The time that asking takes, over all runs of the command; stored at every look."""

    def __init__(self, budget: float, store: AdviceStore, spent: float):
        self.budget, self.store, self.before, self.began = budget, store, spent, time.monotonic()

    @property
    def spent(self) -> float:
        return self.before + time.monotonic() - self.began

    @property
    def left(self) -> float:
        """Seconds until the answer has to be written."""
        share, least, most = WRITING
        return self.budget - min(max(share * self.budget, least), most) - self.spent

    def keep(self) -> None:
        self.store.keep(spent=self.spent)


def run_advice(setup: StudySetup, options: Options) -> int:
    """Asks and answers; the same call goes on with what is left of the budget.

    Returns:
        The exit code: 0 with an answer, also where that is that nothing can be said; 1 if all first trials fail; 130 if
        it was interrupted.

    Raises:
        UserError: for configuration, data or storage that do not serve, before anything is created.
    """
    probe_setup = _study_of(setup, options)
    data = check_study(probe_setup)
    store = AdviceStore(setup.storage.optuna_url, setup.study.name)
    known = store.read()
    configuration = probe_setup.identity(data)
    if known.get("configuration", configuration) != configuration:
        raise UserError(
            f"advice on {setup.study.name!r} was asked for with another configuration: restore it, or give the new one "
            "another study.name"
        )
    clock, stop = Clock(options.budget, store, known.get("spent", 0.0)), StopRequest()
    _say(f"advice on {setup.study.name}: asking takes {time_text(options.budget)} at most, all in all")
    if known.get("spent"):
        _say(f"  {time_text(known['spent'])} of them are spent, {time_text(max(clock.left, 0.0))} are left")
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
                from lit_dps.advising.branches import run_branches

                run_branches(probe_setup, store, clock, stop)
            else:
                _probe(work, model, times, noise, clock, stop, options)
    except Interrupted as signal:
        print(f"\ninterrupted by {signal}: what was measured is stored; the same command goes on")
        return INTERRUPTED
    except AllFail as error:
        print(f"lit-dps: error: {error}", file=sys.stderr)
        return FAILED
    tell(work, setup, model, times, noise, store, options)
    clock.keep()
    _say(f"asking took {time_text(clock.spent)} of {time_text(options.budget)}")
    return 0


def law_with(found: list, noise: NoiseScale | None) -> Law:
    """The law of some observations, with the noise scale as what else is known of B_crit."""
    return law_of(found, None if noise is None else expected_critical(noise))


def candidates(times: StepTimes, devices: tuple[int, ...], accumulated: int) -> list[int]:
    """Batch sizes to answer for: powers of 2 up to the largest of one device times the most devices."""
    most = times.largest * max(devices) * accumulated
    return [accumulated * 2**i for i in range(int(math.log2(most / accumulated)) + 1)]


def _study_of(setup: StudySetup, options: Options) -> StudySetup:
    """The study that probes; of an optimizer like Adam with its time scales moved with the batch size."""
    plain = probing(setup, options.trials, adaptive=False)
    params = {key: box.at(0.5) for key, box in plain.study.space.items()}
    built = plain.workload.build(Trial(plain.study.cells[0], 0, params, plain.study.seed))
    try:
        found = built.module.configure_optimizers()
        optimizers = found.get("optimizer") if isinstance(found, dict) else found
        optimizers = optimizers[0] if isinstance(optimizers, tuple) else optimizers
        adaptive = is_adaptive(optimizers if isinstance(optimizers, (list, tuple)) else [optimizers])
    except Exception:  # of a module that wants a trainer for it: it is left as it is, and that is said
        adaptive = False
        _say("note: configure_optimizers wants a trainer: whether beta2 has to move with the batch size is not known")
    if adaptive:
        own = own_batch_size(setup.workload)
        _say(f"note: as B moves from {own}, beta2 becomes beta2^(B / {own}) and weight decay grows by B / {own}")
    return probing(setup, options.trials, adaptive)


def _timed(setup: StudySetup, store: AdviceStore, clock: Clock, known: dict) -> StepTimes:
    if "timed" in known:
        rows = [Timed(*row) for row in known["timed"]]
        return StepTimes(rows, known["check"], *known["largest"])
    _say("timing steps")
    one = of_one_device(setup)
    found = time_steps(one if setup.ranks == 1 else setup, TIMING * clock.budget, _say)
    _say(f"  up to {found.largest} examples a device: {found.why}")
    rows = [list(row) for row in found.timed]
    largest = [found.largest, found.why, found.memory]
    store.keep(timed=rows, check=found.check, largest=largest, parameters=parameters_of(setup))
    return found


def _noise(setup, store: AdviceStore, clock: Clock, known: dict, stop: StopRequest) -> NoiseScale | None:
    if "noise" in known:
        return None if known["noise"] is None else NoiseScale.of_stored(known["noise"])
    size = max(2, NOISE_BATCH) * setup.workload.accumulated
    params = {key: box.at(0.5) for key, box in setup.study.space.items()}
    seconds = min(NOISE * clock.budget, max(clock.left, 1.0))
    found = short_run(of_one_device(setup), size, params, NOISE_STEPS, seconds, stop.check)
    if isinstance(found, str):
        _say(f"noise scale not measured: {found}")
        store.keep(noise=None)
        return None
    _say(found.sentence)
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
    step = model.at(own)
    if step is None:
        return
    training = goal.max_steps * (step.value + times.check / goal.check_interval)
    share = clock.budget / training
    _say(model.describe())
    _say(
        f"one training at B = {own} that spends its {goal.max_steps} steps takes {time_text(training)} on one device: "
        f"asking is at most {share:.0%} of that"
    )


def _probe(work: Probes, model, times, noise, clock: Clock, stop: StopRequest, options: Options) -> None:
    """Probes until the time is over, nothing is worth it, or all sizes are done."""
    setup = work.setup
    every = candidates(times, options.devices, setup.workload.accumulated)
    refused: set[int] = set()  # that were probed in this run, or cannot be
    gone: set[int] = set()  # that cannot be
    own = min(every, key=lambda b: abs(math.log(b / own_batch_size(setup.workload))))
    for number in range(2 * len(every)):
        record = work.record()
        known = observations(record)
        done = {int(o.batch_size) for o in known if o.bound == 0} | refused
        law = law_with(known, noise)
        open_ = [b for b in every if b not in done and b not in {int(o.batch_size) for o in known}]
        size = _next(law, known, every, [b for b in open_ if b not in refused], own, model, clock, options)
        share = 1 if len(done) >= FIRST else 1 / (FIRST - len(done))
        if size is None:  # what was left unfinished before goes on
            size, share = next(iter(set(unfinished(record)) - gone), None), 1
        if size is None or clock.left <= 0:
            break
        seconds = clock.left * share
        _say(f"probe {number + 1}: B = {size}, {setup.study.trials} trials, {time_text(seconds)} at most")
        try:
            whole = work.run(size, time.monotonic() + seconds, stop)
        except UserError as error:
            if isinstance(error, AllFail):
                raise
            _say(f"  B = {size} is left out: {error}")
            refused.add(size)
            gone.add(size)
            continue
        clock.keep()
        found = {int(o.batch_size): o for o in observations(work.record())}
        _say(f"  {_told(found.get(size))}{'' if whole else ', its time is over'}")
        refused.add(size)
        if whole:
            gone.add(size)


def _next(law: Law, known, every, open_, own: int, model: StepTime, clock: Clock, options: Options) -> int | None:
    if not open_:
        return None
    if not known:
        return own if own in open_ else open_[len(open_) // 2]
    first = int(known[0].batch_size)
    if len(known) == 1:
        far = [b for b in open_ if b >= APART * first] or [b for b in open_ if b <= first / APART] or [open_[-1]]
        return min(far, key=lambda b: abs(math.log(b / first)))
    if law.fit is None:  # bounds alone: the other end
        return open_[-1] if max(o.batch_size for o in known) < open_[-1] else open_[0]

    def seconds(batch_size: float) -> float:
        return model.at(batch_size).value

    table = probes(law, open_, every, seconds, trials=max(2, options.trials // 2))
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


@contextmanager
def _kept(clock: Clock):
    try:
        yield
    finally:
        clock.keep()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
