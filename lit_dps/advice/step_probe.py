"""Times steps and validation at growing batch sizes, up to the memory or the time that there is."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from lit_dps.advice.step_memory import Memory, is_full
from lit_dps.advice.step_time import Timed
from lit_dps.core.config import MAX_THREADS, cores
from lit_dps.core.errors import UserError, first_line, is_about
from lit_dps.core.text import format_duration, number_text
from lit_dps.core.trial import Cell, Trial
from lit_dps.study.probe_run import RunTimes, steps_that_take, timed_run, whole_periods
from lit_dps.study.setup import StudySetup

TRAINING_SECONDS = 1.0  # of training that are timed at each size, at most
MIN_STEPS = 3  # that are timed at each size
MAX_STEPS = 200
# Between two sizes. The larger factor is taken where this many doublings would take longer than the
# time that remains.
FACTOR = 2
LARGE_FACTOR = 8
DOUBLINGS = 10
# Smaller sizes may fail: a batch norm, for example, does not accept a single example.
MAX_SIZE_THAT_MAY_FAIL = 2
# Why no larger batch was timed. Both are stored and compared.
SPENT = "the time for it is spent"
FULL = "it does not fit the memory"
# Two validations whose times differ by at most this share are equal.
EQUAL_CHECKS = 0.1
# A further validation may take this share of the time that remains.
MAX_CHECK_SHARE = 0.25
MIN_SHARE = 0.05  # of a time that remains without the wait for a CPU, at least


@dataclass
class StepTimes:
    """Timed steps.

    Attributes:
        timed: The steps.
        check: Seconds of a validation of the entire split, at any batch size.
        check_by_batch: Seconds times examples: over the local batch, further seconds of a
            validation whose batch size follows that of the training.
        largest: The largest batch of one device that was timed.
        reason: Why no larger one was timed.
        is_memory_full: Whether memory is the reason; then a larger batch has to be accumulated.
        waited: Share of the time that this process waited for a CPU (`cpu_wait_seconds`).
        start_of_ranks: Seconds that the ranks of a run take to start; 0 on one device.
        slowdown: The seconds of steps over those without the wait for a CPU. It is part of `timed`.
    """

    timed: list[Timed] = field(default_factory=list)
    check: float = 0.0
    largest: int = 0
    reason: str = ""
    is_memory_full: bool = False
    waited: float = 0.0
    start_of_ranks: float = 0.0
    check_by_batch: float = 0.0
    slowdown: float = 1.0

    def check_at(self, local_batch: float) -> float:
        """Return the seconds of a validation for a local batch of some examples."""
        return self.check + self.check_by_batch / local_batch

    @property
    def split_is_used_up(self) -> bool:
        """Whether the training split has no larger batch."""
        return not self.is_memory_full and self.reason != SPENT

    def to_stored(self) -> dict[str, Any]:
        """Return the values of the advice store (`lit_dps.storage.schema.ADVICE_ATTRS`)."""
        return {
            "timed": [list(row) for row in self.timed],
            "check": self.check,
            "check_by_batch": self.check_by_batch,
            "largest": [self.largest, self.reason, self.is_memory_full],
            "waited": self.waited,
            "start_of_ranks": self.start_of_ranks,
            "slowdown": self.slowdown,
        }

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> StepTimes:
        """Return the step times of stored advice."""
        timed = [Timed(*row) for row in stored["timed"]]
        return cls(
            timed,
            stored["check"],
            *stored["largest"],
            waited=stored["waited"],
            # Advice of earlier versions lacks the following values.
            start_of_ranks=stored.get("start_of_ranks", 0.0),
            check_by_batch=stored.get("check_by_batch", 0.0),
            slowdown=stored.get("slowdown", 1.0),
        )


def without_wait(seconds: float, waited: float) -> float:
    """Return a time without the wait for a CPU."""
    return max(seconds - waited, MIN_SHARE * seconds)


def time_steps(
    setup: StudySetup,
    seconds: float,
    print_line: Callable[[str], None],
    memory: Memory | None = None,
    warm: bool = False,
    first: int = 1,
    factor: int = FACTOR,
) -> StepTimes:
    """Return timed steps of one device at powers of 2, then of the ranks that the trainer asks for.

    The sizes grow until the time, the training split or memory is used up. On a GPU, memory is full
    if a step fails. On a CPU the system would kill a process, so a size is only timed if it is
    estimated to take less than 80 % of the free memory (`Memory`).

    Args:
        setup: The study that probes.
        seconds: The time for all steps.
        print_line: Is called with a line for each size.
        memory: Measures this process's memory.
        warm: Whether this process has trained before. Its first run takes longer.
        first: The smallest batch of one device, in examples.
        factor: Between two sizes.

    Raises:
        UserError: if fewer than two sizes can be timed, or if one fails for another reason than
            memory and split.
    """
    begin = time.monotonic()
    seconds_on_one = seconds
    if setup.ranks > 1:
        # Starting ranks takes seconds.
        seconds_on_one = 0.5 * seconds
    torch.set_num_threads(fit_threads(setup))
    end = begin + seconds_on_one
    ladder = _SizeLadder(setup, seconds, end, print_line, memory or Memory(), warm, factor)
    times = ladder.climb(first)
    if setup.ranks > 1:
        _time_ranks(setup, times, begin + seconds, print_line)
    return times


@dataclass
class _SizeLadder:
    """Times steps of one device, from small to large batches.

    Attributes:
        setup: The study that probes.
        seconds: The time for all steps, which decides how many are timed at each size.
        end: When to stop, on the monotonic clock.
        print_line, memory, warm, factor: Like in `time_steps`.
        times: The timed steps so far.
        checks: Examples and seconds of each timed validation.
        slowdowns: The seconds of each step with the wait for a CPU, over those without it.
        smallest_failed: The smallest size that failed.
        expected_step: Seconds of a step at the next size.
    """

    setup: StudySetup
    seconds: float
    end: float
    print_line: Callable[[str], None]
    memory: Memory
    warm: bool
    factor: int
    times: StepTimes = field(default_factory=StepTimes)
    checks: list[tuple[float, float]] = field(default_factory=list)
    slowdowns: list[float] = field(default_factory=list)
    smallest_failed: float = math.inf
    expected_step: float = math.nan

    def climb(self, first: int) -> StepTimes:
        """Return the timed steps of one device, from a first batch of some examples."""
        size: int | None = first
        while size is not None:
            size = self._time(size)
        times = self.times
        if len(times.timed) < 2:
            raise UserError(
                f"advise: steps could be timed at fewer than 2 batch sizes ({times.reason}). "
                "Use smaller study.batch_sizes.",
                key="study.batch_sizes",
            )
        # Other programs slow some sizes down and not others, which would favour the others. So
        # all sizes get the same slowdown, and times remain those of this machine.
        slowdown = times.slowdown = statistics.median(self.slowdowns)
        times.timed = [row._replace(seconds=slowdown * row.seconds) for row in times.timed]
        check, by_batch = fit_check_seconds(self.checks)
        times.check, times.check_by_batch = slowdown * check, slowdown * by_batch
        times.is_memory_full = times.reason.startswith(FULL)
        return times

    def _time(self, size: int) -> int | None:
        """Time a size, and return the next one; None ends the ladder."""
        begin = time.monotonic()
        self.memory.begin()
        parts = self.setup.workload.accumulated
        trial = _trial(self.setup, size * parts)
        training_seconds = min(TRAINING_SECONDS, self.seconds / 20)
        steps = steps_that_take(training_seconds, self.expected_step, MIN_STEPS, MAX_STEPS)
        may_fail = not self.times.timed and size <= MAX_SIZE_THAT_MAY_FAIL
        most_seconds = None
        if not self._times_validation():
            most_seconds = training_seconds
        result = _time_trial(self.setup, trial, steps, may_fail=may_fail, most_seconds=most_seconds)
        if isinstance(result, str):
            return self._size_after_failure(size, result)
        if not self.warm:
            self.warm = True
            self.expected_step = result.step
            return size
        self.memory.end(size)
        quiet_step = self._without_wait(result.step, result.step_waited)
        self.times.timed.append(Timed(float(size), quiet_step, 1, 1, parts))
        self.times.largest = size
        self.slowdowns.append(result.step / quiet_step)
        seconds = time.monotonic() - begin
        if math.isfinite(result.check):
            self.checks.append((size, self._without_wait(result.check, result.check_waited)))
            # The next sizes may do without a validation.
            seconds -= result.check
        self.print_line(
            f"  {size} examples on one device: a step takes {format_duration(result.step, 2)}"
        )
        return self._size_after_success(size, result.step, seconds)

    def _without_wait(self, seconds: float, waited: float) -> float:
        """Return a time without the wait for a CPU, in which a GPU works."""
        if self.setup.on_gpu:
            return seconds
        return without_wait(seconds, waited)

    def _times_validation(self) -> bool:
        """Return True if a validation is timed at the next size.

        The second one shows whether its time depends on the batch size. It is left out if it would
        take most of the remaining time.
        """
        if not self.checks:
            return True
        _, first = self.checks[0]
        _, last = self.checks[-1]
        if len(self.checks) > 1 and abs(last - first) <= EQUAL_CHECKS * first:
            return False
        return last <= MAX_CHECK_SHARE * (self.end - time.monotonic())

    def _size_after_failure(self, size: int, reason: str) -> int | None:
        # Trainer and module refer to each other, and to the tensors of the step.
        gc.collect()
        torch.cuda.empty_cache()
        self.times.reason = reason
        self.smallest_failed = size
        if self.times.timed:
            between = FACTOR * self.times.largest
            return between if between < size else None
        if reason == FULL or size > MAX_SIZE_THAT_MAY_FAIL:
            return None
        self.smallest_failed = math.inf
        return 2 * size

    def _size_after_success(self, size: int, step: float, seconds: float) -> int | None:
        if math.isinf(self.smallest_failed):
            self.times.reason = ""  # of a smaller size, which does not limit the larger ones
        if FACTOR * size >= self.smallest_failed:
            return None
        remaining = self.end - time.monotonic()
        if remaining < 2 * seconds and len(self.times.timed) > 1:
            self.times.reason = self.times.reason or SPENT
            return None
        factor = self.factor
        if FACTOR * size < self.smallest_failed <= factor * size:
            factor = FACTOR
        if DOUBLINGS * seconds >= remaining and LARGE_FACTOR * size < self.smallest_failed:
            factor = max(LARGE_FACTOR, self.factor)
        if not self.setup.on_gpu and self.memory.missing(factor * size) > 0:
            factor = FACTOR
            missing = self.memory.missing(factor * size)
            if missing > 0:
                self.times.reason = (
                    f"{FULL}: {factor * size} examples would take about "
                    f"{number_text(missing / 2**30)} GiB more than may be used"
                )
                return None
        self.expected_step = factor * step
        return factor * size


def fit_check_seconds(checks: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return c and d of c + d / m, the seconds of a validation for a local batch of m examples.

    The number of its batches is proportional to 1 / m if their size follows that of the training.
    Both constants are at least 0. The relative errors have the least squares. Times that differ by
    at most `EQUAL_CHECKS` give d = 0 and the least time, because their difference is noise.

    Args:
        checks: Local batch and seconds of timed validations.
    """
    if len(checks) < 2:
        ((_, seconds),) = checks
        return seconds, 0.0
    sizes, seconds = np.transpose(checks)
    if np.ptp(seconds) <= EQUAL_CHECKS * seconds[0]:
        return float(seconds.min()), 0.0
    columns = np.column_stack([1 / seconds, 1 / sizes / seconds])
    (constant, by_batch), _ = nnls(columns, np.ones(len(checks)))
    return float(constant), float(by_batch)


def time_briefly(setup: StudySetup, batch_size: int) -> RunTimes | None:
    """Return rough seconds of a step and of a validation on one device.

    Returns:
        None if the batch size cannot be trained.
    """
    torch.set_num_threads(fit_threads(setup))
    result = _time_trial(setup, _trial(setup, batch_size), MIN_STEPS)
    return None if isinstance(result, str) else result


def _time_ranks(
    setup: StudySetup, times: StepTimes, end: float, print_line: Callable[[str], None]
) -> None:
    """Add steps of all ranks: at a small batch of each and, if time remains, at the largest one.

    The small one is near the user's batch size, and takes less of the time.
    """
    ranks = setup.ranks
    parts = setup.workload.accumulated
    seconds = {row.local_batch: row.seconds for row in times.timed}
    most = math.inf
    if times.split_is_used_up:
        most = times.largest / ranks
    fitting = [local for local in seconds if local <= most] or [min(seconds)]
    for local in dict.fromkeys((min(fitting), max(fitting))):
        begin = time.monotonic()
        trial = _trial(setup, int(local) * ranks * parts)
        steps = steps_that_take(TRAINING_SECONDS / 20, seconds[local], MIN_STEPS, MAX_STEPS)
        steps = whole_periods(setup, trial, steps)
        result = _time_trial(setup, trial, steps, on_all_ranks=True)
        place = f"  {local:g} examples on each of {ranks} devices"
        if isinstance(result, str):
            print_line(f"{place}: no time, because {result}")
            continue
        times.timed.append(Timed(local, result.step, ranks, 1, parts))
        trained = (steps + 1) * result.step + result.check
        times.start_of_ranks = max(time.monotonic() - begin - trained, 0.0)
        print_line(f"{place}: a step takes {format_duration(result.step, 2)}")
        now = time.monotonic()
        if now + (now - begin) > end:
            break


def _time_trial(
    setup: StudySetup,
    trial: Trial,
    steps: int,
    on_all_ranks: bool = False,
    may_fail: bool = False,
    most_seconds: float | None = None,
) -> RunTimes | str:
    """Return seconds of a step and of a validation, or the reason why they cannot be timed.

    Args:
        setup: The study that probes.
        trial: The trial.
        steps: The number of steps to time.
        on_all_ranks: Whether all ranks of the trainer train the trial, or this process alone.
        may_fail: Whether the reason may be another one than memory and the training split.
        most_seconds: If it is given, the time after which the run ends without a validation.

    Raises:
        UserError: with the cause of any other failure.
    """
    try:
        return timed_run(setup, trial, steps, on_all_ranks, most_seconds=most_seconds)
    except Exception as error:
        # On several ranks, errors of the module are raised as they are.
        if not on_all_ranks and not isinstance(error, (UserError, RuntimeError, MemoryError)):
            raise
        if is_full(error):
            return FULL
        line = first_line(error).removeprefix("cannot time a trial: ")
        above_split = getattr(error, "above_split", False)
        if above_split or may_fail or is_above_split(line, setup.workload.batch_size_key):
            return line.replace("study.batch_sizes is", "a batch size is")
        raise UserError(
            f"advise: a step at B = {trial.cell.batch_size} cannot be timed: {line}",
            value=trial.cell.batch_size,
        ) from None


def is_above_split(line: str, batch_size_key: str) -> bool:
    """Return True for the error of a batch with more examples than the training split."""
    # `refuse_too_large` and the data modules of the package name these keys.
    return is_about(line, "study.batch_sizes") or is_about(line, batch_size_key)


def count_parameters(setup: StudySetup) -> int:
    """Return the number of elements of the trained parameters."""
    trial = Trial(setup.study.cells[0], 0, setup.middle, setup.study.seed)
    module = setup.workload.build(trial).module
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def of_one_device(setup: StudySetup) -> StudySetup:
    """Return the same study with trials on one device."""
    trainer = {**setup.workload.trainer, "devices": 1, "strategy": "auto"}
    return dataclasses.replace(setup, workload=dataclasses.replace(setup.workload, trainer=trainer))


def fit_threads(setup: StudySetup) -> int:
    """Return the CPU threads of a training by `fit`: OMP_NUM_THREADS, else all cores over ranks.

    `study.threads` is for trials that train at the same time as others.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked):
        return min(int(asked), MAX_THREADS)
    return max(1, cores() // setup.ranks)


def _trial(setup: StudySetup, batch_size: int) -> Trial:
    return Trial(Cell(batch_size), 0, setup.middle, setup.study.seed)
