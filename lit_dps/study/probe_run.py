"""Short runs beside a study: they measure or check something, and store nothing.

- `probe_run` trains a trial in Lightning's loop, with callbacks that read it.
- `probe_fit` does the same for the dry run, whose callbacks follow the study's callbacks.
- `read_first_batch` calls a function at the first batch of a `probe_fit`.
- `engine_run` trains a trial as the study does, by its engine and on its ranks.
- `timed_run` measures the seconds of steps and of a validation, by `engine_run`.

A callback ends its run by raising `EndProbe`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import UserError, is_about
from lit_dps.core.trial import LIGHTNING, SINGLE, Status, Trial, TrialResult
from lit_dps.engines.lightning_loop import LightningLoop, TrialFit
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.optim.soap import REFRESH_STEPS, SOAP
from lit_dps.parallel.process import cpu_wait_seconds
from lit_dps.study.setup import StudySetup
from lit_dps.study.workers import train_on_ranks
from lit_dps.training.checkpoint_callback import Paused
from lit_dps.training.hidden_state import preserve_rng_state
from lit_dps.training.stopwatch import now

# A timed run may end after `MIN_BLOCKS` of its `BLOCKS` blocks of steps, if the standard error of
# the mean time is at most this share.
BLOCKS = 16
MIN_BLOCKS = 6
NARROW = 0.02
MIN_TIMED_STEPS = 3  # of a run that ends because its time is over
MAX_PERIOD = 50  # steps between refreshes of which the timed steps include a whole period
SHORTEST = 1e-9  # seconds; keeps ratios defined if something takes no time
LOCAL_START = "local.start"  # key of the step at which the workers of local SGD separate
ResultT = TypeVar("ResultT")


class EndProbe(Exception):
    """Raised by a callback to end its short run."""


class CannotTime(UserError):
    """A trial cannot be timed.

    Attributes:
        why: The reason.
        above_split: Whether the batch size exceeds the training split.
    """

    def __init__(self, why: str, above_split: bool = False):
        super().__init__(f"cannot time a trial: {why}")
        self.why = why
        self.above_split = above_split


def steps_that_take(
    seconds: float, step_seconds: float, fewest: int, most: float = math.inf
) -> int:
    """Return how many steps take about some seconds; the fewest if the time of a step is nan."""
    if math.isnan(step_seconds):
        return fewest
    return int(max(fewest, min(most, round(seconds / max(step_seconds, SHORTEST)))))


def whole_periods(setup: StudySetup, trial: Trial, steps: int) -> int:
    """Return a number of steps, rounded up to a multiple of the steps between SOAP's refreshes.

    A refresh may take longer than a step. The mean time of fewer steps would often leave it out.
    Refreshes after more than `MAX_PERIOD` steps are rare, and may be left out.
    """
    arguments = setup.workload.specs(trial)["model"].get("init_args", {})
    if arguments.get("optimizer") != SOAP.name:
        return steps
    period = int(arguments.get("refresh_steps", REFRESH_STEPS))
    if period > MAX_PERIOD:
        return steps
    return math.ceil(steps / period) * period


def probe_run(
    setup: StudySetup,
    attempt: Attempt,
    callbacks: Sequence[Callback],
    raise_if_stopped: Callable[[], None] = lambda: None,
) -> None:
    """Train an attempt in Lightning's loop until it ends or a callback raises `EndProbe`.

    What module and data write into the folder of the trial is removed.

    Args:
        setup: The study.
        attempt: The trial and its goal, such as `setup.unreachable_goal(steps)`.
        callbacks: They are called before the study's callbacks.
        raise_if_stopped: Called after each check; may raise to end the run.

    Raises:
        Exception: An error of the module, its data or a callback.
    """
    torch.set_num_threads(setup.study.threads)
    with suppress(EndProbe), setup.workload.without_side_effects() as workload:
        settings = replace(setup.trial_settings(), workload=workload, readings=())
        LightningLoop(settings, tuple(callbacks)).train(attempt, raise_if_stopped)


def probe_fit(settings: TrialSettings, trial: Trial, callback: Callback) -> None:
    """Train a trial until it ends or a callback raises `EndProbe`.

    A pruning pass before it is short.

    Args:
        settings: The settings of the study.
        trial: The trial.
        callback: It is called after the study's callbacks.

    Raises:
        Exception: An error of the module, its data or a callback.
    """
    attempt = Attempt(trial, settings.goal.build(), metrics=settings.metrics)
    fit = TrialFit.of(settings, attempt)
    fit.pruning.is_short = True
    with suppress(EndProbe):
        train_fit(fit, trial, [callback])


def train_fit(
    fit: TrialFit, trial: Trial, callbacks: Sequence[Callback], checkpoint: Path | None = None
) -> Trainer:
    """Train a trial with the objects of a fit, and return its trainer.

    Args:
        fit: The objects with which Lightning trains the trial.
        trial: The trial.
        callbacks: They are called after the study's callbacks.
        checkpoint: The checkpoint to resume from; None trains from the first step.

    Raises:
        UserError: If the trainer refuses its arguments.
        Exception: An error of the module, its data or a callback.
    """
    with preserve_rng_state(seed=trial.seed_for("order")):
        try:
            trainer = fit.trainer(last=callbacks)
        except (ValueError, TypeError, MisconfigurationException) as error:
            raise UserError(f"trainer: {error}") from error
        built = fit.built
        trainer.fit(built.module, datamodule=built.data, ckpt_path=checkpoint, weights_only=True)
    return trainer


def read_first_batch(
    settings: TrialSettings, trial: Trial, read: Callable[[Trainer, LightningModule, Any], ResultT]
) -> ResultT | None:
    """Return what a function reads of a trial at its first batch; None if it has no batch.

    Raises:
        Exception: An error of the module, its data or the function.
    """
    reader = _FirstBatchReader(read)
    probe_fit(settings, trial, reader)
    return reader.result


class _FirstBatchReader(Callback, Generic[ResultT]):
    """Calls a function with trainer, module and batch before the first step, and ends the run."""

    def __init__(self, read: Callable[[Trainer, LightningModule, Any], ResultT]):
        self.read = read
        self.result: ResultT | None = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.result = self.read(trainer, pl_module, batch)
        raise EndProbe


def engine_run(setup: StudySetup, attempt: Attempt, on_all_ranks: bool = False) -> TrialResult:
    """Train an attempt by the engine of the study, and return its result.

    Args:
        setup: The study.
        attempt: The trial and its goal.
        on_all_ranks: Whether all ranks of the trainer train the trial, or this process alone.

    Raises:
        Exception: On several ranks, an error of the module, its data or a callback. Otherwise such
            an error makes the result a failed one.
    """
    queue = iter([attempt])
    with setup.workload.without_side_effects() as workload:
        setup = replace(setup, workload=workload)
        engine = setup.engine()
        train = engine.train
        if on_all_ranks:
            train = partial(train_on_ranks, setup, engine)
        (result,) = train(lambda: next(queue, None), lambda: None)
        return result


class RunTimes(NamedTuple):
    """Seconds of a timed run.

    Attributes:
        start: Its start.
        step: One step with its data.
        check: One full validation; nan if the run ended before it.
        step_waited: Seconds of a step for which this process was ready to run but had no CPU.
        check_waited: Like `step_waited`, of the validation.
    """

    start: float
    step: float
    check: float
    step_waited: float = 0.0
    check_waited: float = 0.0


def timed_run(
    setup: StudySetup,
    trial: Trial,
    steps: int,
    on_all_ranks: bool = False,
    warm_up: int = 1,
    most_seconds: float | None = None,
) -> RunTimes:
    """Time some steps of a trial and a full validation, as the study's engine runs them.

    Module and schedules see the `max_steps` of the study. Steps beyond these are not timed. With
    SOAP, the steps are `whole_periods` of its refreshes.

    Args:
        setup: The study.
        trial: The trial.
        steps: The number of steps to time.
        on_all_ranks: Whether all ranks of the trainer train the trial, or this process alone.
        warm_up: The number of first steps that are not timed, at least 1.
        most_seconds: If it is given, a run in Lightning's loop ends without a validation after
            this time, or once the time of a step is known to `NARROW`.

    Raises:
        CannotTime: if the trial fails or ends early.
    """
    shown_steps = max(setup.built_goal.max_steps, 2)
    warm_up = min(warm_up, shown_steps - 1)
    period = whole_periods(setup, trial, 1)
    steps = min(whole_periods(setup, trial, steps), shown_steps - warm_up)
    total = warm_up + steps
    goal = replace(setup.goal, check_interval=total, max_steps=total, early_reject=False)
    # With checkpoints, the other ranks would wait for a checkpoint that this process never saves.
    engine = LIGHTNING if setup.study.engine == LIGHTNING else SINGLE
    timed = setup.with_study(engine=engine, checkpoint_minutes=None)
    timed = replace(timed, goal=goal, shown_steps=shown_steps)
    timed, trial = _separated_from_start(timed, trial)
    attempt = Attempt(trial, setup.unreachable_goal(total - 1))
    if engine != LIGHTNING or on_all_ranks:
        # Only Lightning's loop of one process can end at any step.
        most_seconds = None
    timer = _StepTimer(attempt, warm_up, most_seconds, period)
    begin = time.perf_counter()
    result = engine_run(timed, attempt, on_all_ranks)
    if timer.ended_after is not None:
        steps = timer.ended_after
    elif result.status is Status.FAILED:
        # `refuse_too_large` and data modules of the package name this key.
        raise CannotTime(result.failure, is_about(result.failure, "study.batch_sizes"))
    elif timer.steps < total:
        taken = f"it took {timer.steps} of {total} steps"
        raise CannotTime(
            f"{taken} at {trial.cell}. Is the batch size larger than the training split?",
            above_split=not timer.steps,
        )
    step = (timer.last.time - timer.first.time) / steps
    start = max(timer.first.time - begin - warm_up * step, 0.0)
    waited = (timer.last.waited - timer.first.waited) / steps
    if timer.ended_after is not None:
        return RunTimes(start, step, math.nan, waited)
    check = timer.checked.time - timer.last.time
    return RunTimes(start, step, check, waited, timer.checked.waited - timer.last.waited)


def _separated_from_start(setup: StudySetup, trial: Trial) -> tuple[StudySetup, Trial]:
    """Return study and trial with local SGD workers that separate before the first step.

    Their steps take longer than synchronous ones.
    """
    axes = tuple(pair for pair in trial.cell.axes if pair[0] != LOCAL_START)
    params = {key: value for key, value in trial.params.items() if key != LOCAL_START}
    separated = replace(setup, local=replace(setup.local, start=0))
    return separated, replace(trial, cell=replace(trial.cell, axes=axes), params=params)


class Instant(NamedTuple):
    """A time in seconds, and the `cpu_wait_seconds` of this process until then."""

    time: float
    waited: float

    @classmethod
    def now(cls, device: torch.device | None = None) -> Instant:
        """Return this instant, after the device has finished its work."""
        return cls(now(device), cpu_wait_seconds())


class _StepTimer:
    """Notes when an attempt has taken its first and its last timed step, and ended its validation.

    Args:
        attempt: The attempt to time.
        warm_up: The number of first steps that are not timed.
        most_seconds: The attempt ends after this time, or once the mean step time is known to
            `NARROW`; None times all steps.
        period: The attempt ends early only after a multiple of these steps.

    Attributes:
        steps: The number of steps so far.
        first, last, checked: The ends of the warm-up, of the last step, and of the validation.
        ended_after: The number of timed steps, if the attempt ended before all of them.
    """

    def __init__(
        self, attempt: Attempt, warm_up: int, most_seconds: float | None = None, period: int = 1
    ):
        self.steps = 0
        self.first = Instant(0.0, 0.0)
        self.last = self.first
        self.checked = self.first
        self.ended_after: int | None = None
        self._attempt = attempt
        self._engine = attempt.engine
        self._warm_up = warm_up
        self._all_steps = attempt.goal.max_steps
        self._most_seconds = most_seconds
        block_steps = max(1, (attempt.goal.max_steps - warm_up) // BLOCKS)
        self._block_steps = math.ceil(block_steps / period) * period
        self._blocks: list[float] = []
        attempt.on_validation = self.on_validation
        attempt.on_step = self.on_step

    def on_step(self, device: torch.device) -> None:
        """Note the time after the first and the last timed step; called after every step."""
        if self._attempt.engine != self._engine:
            # The attempt begins again if the interval loop finds that it needs Lightning's loop.
            self._engine = self._attempt.engine
            self.steps = 0
            self._blocks = []
        self.steps += 1
        timed = self.steps - self._warm_up
        if timed == 0:
            self.first = Instant.now(device)
            self.last = self.first
        elif self.steps == self._all_steps:
            self.last = Instant.now(device)
        elif self._most_seconds is not None and timed > 0 and timed % self._block_steps == 0:
            self._end_block(Instant.now(device), self._most_seconds)

    def _end_block(self, end: Instant, most_seconds: float) -> None:
        """Note the end of a block of steps.

        The attempt ends once the mean step time is known to `NARROW`.
        """
        seconds = end.time - self.last.time - (end.waited - self.last.waited)
        self._blocks.append(seconds / self._block_steps)
        self.last = end
        steps = len(self._blocks) * self._block_steps
        is_over = steps >= MIN_TIMED_STEPS and end.time - self.first.time > most_seconds
        if is_over or is_narrow(self._blocks):
            self.ended_after = steps
            raise Paused

    def on_validation(self, attempt: Attempt) -> None:
        """Note the time after a validation."""
        self.checked = Instant.now()


def is_narrow(seconds: Sequence[float]) -> bool:
    """Return True if the mean of some measurements has a standard error of at most `NARROW`."""
    if len(seconds) < MIN_BLOCKS:
        return False
    error = statistics.stdev(seconds) / math.sqrt(len(seconds))
    return error <= NARROW * statistics.fmean(seconds)
