"""Seconds of a step at local batch sizes in powers of 2, up to the memory or the time that there
is."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from lit_dps.advice.memory import Memory, is_full
from lit_dps.advice.step_time import Timed
from lit_dps.core.config import cores
from lit_dps.core.errors import UserError
from lit_dps.core.format import format_duration, number_text
from lit_dps.core.trial import Cell, Trial
from lit_dps.study.probe_run import timed_run
from lit_dps.study.setup import StudySetup

EACH = 1.0  # seconds of training that are timed at each size, at most
FEWEST = 3  # steps that are timed at each
FACTOR, FASTER, OCTAVES = (
    2,
    8,
    10,
)  # between sizes; where so many more sizes would take longer than there is
SPENT, FULL = (
    "the time for it is spent",
    "it does not fit the memory",
)  # why no larger batch was timed


@dataclass
class StepTimes:
    """What was timed.

    Attributes:
        timed: The steps.
        check: Seconds of a check of the validation split; the median.
        largest: The largest batch of one device that was timed.
        why: Why no larger one was timed.
        memory: Whether that is for want of memory: a larger batch has to be accumulated.
        waited: Share of the time that this process waited for a CPU, beside other programs
            (`cpu_wait_seconds`).
    """

    timed: list[Timed] = field(default_factory=list)
    check: float = 0.0
    largest: int = 0
    why: str = ""
    memory: bool = False
    waited: float = 0.0


def time_steps(
    setup: StudySetup,
    seconds: float,
    say: Callable[[str], None],
    memory: Memory | None = None,
    warm: bool = False,
) -> StepTimes:
    """Times batches of 1 device in powers of 2, from small to large, then steps of the ranks that
    the trainer asks for.

    It ends where the next size would take more than what is left of the time; where the training
    split ends; and where memory does. On a GPU that is where the step does not fit. On a CPU nobody
    may try: the system would kill this process or another. So it ends before a step is estimated to
    take more than 80 % of the free memory (`Memory`).

    Args:
        setup: The study that probes.
        seconds: That it may take.
        say: Is told of each size.
        memory: What tells of this process's memory.
        warm: Whether this process has trained already: what its first run takes is none of a
            step's.

    Raises:
        UserError: if not even two sizes can be timed, or one fails for another reason than memory
            and split.
    """
    begun, found, checks = time.monotonic(), StepTimes(), []
    end = begun + seconds * (
        0.5 if setup.ranks > 1 else 1.0
    )  # ranks have to be started, which takes seconds
    memory = memory or Memory()
    parts, size = setup.workload.accumulated, 1
    failed, ceiling = "", math.inf  # why a size could not be timed, and the smallest such
    torch.set_num_threads(threads_of_fit(setup))
    params = setup.middle
    last = math.nan
    while True:
        began = time.monotonic()
        memory.begin()
        trial = Trial(Cell(size * parts), 0, params, setup.study.seed)
        # a batch norm, say, takes no single example: the smallest sizes may fail
        timed, why = _timed(
            setup, trial, _steps(last, seconds), may_fail=not found.timed and size <= 2
        )
        if timed is None:
            gc.collect()  # trainer and module hold each other, and the step's tensors
            torch.cuda.empty_cache()
            failed, ceiling = why, size
            if found.timed and size > FACTOR * found.largest:
                size = FACTOR * found.largest  # between this one and the last
            elif found.timed or why == FULL or size > 2:
                break
            else:
                size, ceiling = 2 * size, math.inf
            continue
        step, check = timed
        took, left = time.monotonic() - began, end - time.monotonic()
        if not warm:
            warm, last = True, step
            continue
        memory.end(size)
        found.timed.append(Timed(float(size), step, 1, 1, parts))
        found.largest = size
        checks.append(check)
        say(f"  {size} examples on one device: a step {format_duration(step, 2)}")
        if FACTOR * size >= ceiling:
            break
        if left < 2 * took and len(found.timed) > 1:
            failed = failed or SPENT
            break
        factor = FACTOR if OCTAVES * took < left or FASTER * size >= ceiling else FASTER
        if not setup.on_gpu and memory.wanting(factor * size) > 0:
            factor = FACTOR
            if (more := memory.wanting(factor * size)) > 0:
                failed = (
                    f"{FULL}: the next would take about {number_text(more / 2**30)} GiB "
                    "more than "
                    "may be taken"
                )
                break
        size, last = factor * size, factor * step
    if len(found.timed) < 2:
        raise UserError(f"advise: steps can be timed at fewer than 2 batch sizes: {failed}")
    found.check, found.why, found.memory = (
        sorted(checks)[len(checks) // 2],
        failed,
        failed.startswith(FULL),
    )
    if setup.ranks > 1:
        _together(setup, found, params, begun + seconds, say)
    return found


def first_look(setup: StudySetup, batch_size: int) -> tuple[float, float] | None:
    """About the seconds of a step and of a check on one device, by a few steps; None where it
    cannot be trained."""
    torch.set_num_threads(threads_of_fit(setup))
    found, _ = _timed(setup, Trial(Cell(batch_size), 0, setup.middle, setup.study.seed), FEWEST)
    return found


def _together(
    setup: StudySetup, found: StepTimes, params: dict, end: float, say: Callable[[str], None]
) -> None:
    """Adds steps of all ranks that the trainer asks for: at the largest batch of each and, in time,
    a small one.

    Where the training split ended the ladder, the ranks share what it has.
    """
    n, parts = setup.ranks, setup.workload.accumulated
    seconds = {row.local_batch: row.seconds for row in found.timed}
    shared = found.largest / n if not found.memory and found.why != SPENT else math.inf
    fitting = [local for local in seconds if local <= shared] or [min(seconds)]
    for local in dict.fromkeys((max(fitting), min(fitting))):
        began, trial = (
            time.monotonic(),
            Trial(Cell(int(local) * n * parts), 0, params, setup.study.seed),
        )
        timed, why = _timed(setup, trial, max(FEWEST, _steps(seconds[local], EACH)), together=True)
        if timed is None:
            say(f"  {local:g} examples on each of {n} devices: not timed: {why}")
            continue
        found.timed.append(Timed(local, timed[0], n, 1, parts))
        say(f"  {local:g} examples on each of {n} devices: a step {format_duration(timed[0], 2)}")
        if (now := time.monotonic()) + (now - began) > end:
            break


def _timed(
    setup: StudySetup, trial: Trial, steps: int, together: bool = False, may_fail: bool = False
) -> tuple[tuple[float, float] | None, str]:
    """Seconds of a step and of a check, or None and why; what the failure held is free once this
    returns.

    Args:
        may_fail: Whether any failure is returned, and not only for want of memory and of training
            examples.

    Raises:
        UserError: with the cause of any other failure.
    """
    try:
        _, step, check = timed_run(setup, trial, steps, together)
    except Exception as error:  # of several ranks, what the module raises comes as it is
        if not together and not isinstance(error, (UserError, RuntimeError, MemoryError)):
            raise
        line = next(iter(str(error).splitlines()), type(error).__name__).removeprefix(
            "cannot time a trial: "
        )
        if is_full(error):
            return None, FULL
        above_split = getattr(error, "above_split", False) or is_above_split(
            line, setup.workload.batch_size_key
        )
        if not (above_split or may_fail):
            raise UserError(
                f"advise: a step at B = {trial.cell.batch_size} cannot be timed: {line}"
            ) from None
        return None, line
    return (step, check), ""


def is_above_split(line: str, batch_size_key: str) -> bool:
    """Return whether a refusal says that the training split has fewer examples than a batch."""
    # `refuse_too_large` and the data modules of the package name these keys
    return line.startswith(("study.batch_sizes: ", f"{batch_size_key}: "))


def parameters_of(setup: StudySetup) -> int:
    """Elements of the trained parameters."""
    module = setup.workload.build(
        Trial(setup.study.cells[0], 0, setup.middle, setup.study.seed)
    ).module
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def of_one_device(setup: StudySetup) -> StudySetup:
    """The same study, each trial trained by one device."""
    trainer = {**setup.workload.trainer, "devices": 1, "strategy": "auto"}
    return dataclasses.replace(setup, workload=dataclasses.replace(setup.workload, trainer=trainer))


def threads_of_fit(setup: StudySetup) -> int:
    """CPU threads of a training by itself, as `fit` makes it: OMP_NUM_THREADS, else all cores,
    shared by its ranks.

    `study.threads` are those of trials that train beside others.
    """
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() else max(1, cores() // setup.ranks)


def _steps(step: float, seconds: float) -> int:
    each = min(EACH, seconds / 20)
    return FEWEST if math.isnan(step) else max(FEWEST, min(200, round(each / max(step, 1e-6))))
