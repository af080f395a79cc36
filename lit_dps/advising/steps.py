"""Seconds of a step at local batch sizes in powers of 2, up to the memory or the time that there is."""

from __future__ import annotations

import dataclasses
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lit_dps.advice import Timed
from lit_dps.errors import UserError
from lit_dps.study.setup import StudySetup
from lit_dps.study.timing import timed_run
from lit_dps.trial import Cell, Trial

EACH = 1.0  # seconds of training that are timed at each size, at most
FEWEST = 3  # steps that are timed at each
FACTOR, FASTER, OCTAVES = 2, 8, 10  # between sizes; where so many more sizes would take longer than there is
SHARE = 0.8  # of the free memory that a step may take
SPENT = "the time for it is spent"
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory")
_CGROUP = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")


@dataclass
class StepTimes:
    """What was timed.

    Attributes:
        timed: The steps.
        check: Seconds of a check of the validation split; the median.
        largest: The largest batch of one device that was timed.
        why: Why no larger one was timed.
        memory: Whether that is for want of memory: a larger batch has to be accumulated.
    """

    timed: list[Timed] = field(default_factory=list)
    check: float = 0.0
    largest: int = 0
    why: str = ""
    memory: bool = False


def time_steps(setup: StudySetup, seconds: float, say: Callable[[str], None]) -> StepTimes:
    """Times batches of 1 device in powers of 2, from small to large, then steps of the ranks that the trainer asks for.

    It ends where the next size would take more than what is left of the time; where the training split ends; and where
    memory does. On a GPU that is where the step does not fit. On a CPU nobody may try: the system would kill this
    process or another. So it ends before a step is estimated to take more than 80 % of the free memory, from how the
    peak of this process grew over the last doubling.

    Args:
        setup: The study that probes.
        seconds: That it may take.
        say: Is told of each size.

    Raises:
        UserError: if not even two sizes can be timed.
    """
    end, found, checks = time.monotonic() + seconds, StepTimes(), []
    parts, size, warm, peak = setup.workload.accumulated, 1, False, _peak()
    growth, factor = 0.0, FACTOR
    torch.set_num_threads(setup.study.threads)
    params = {key: box.at(0.5) for key, box in setup.study.space.items()}
    last, refusal = math.nan, ""
    while True:
        began, steps = time.monotonic(), _steps(last, seconds)
        trial = Trial(Cell(size * parts), 0, params, setup.study.seed)
        try:
            _, step, check = timed_run(setup, trial, steps)
        except (UserError, RuntimeError, MemoryError) as error:
            found.memory = isinstance(error, MemoryError) or any(sign in str(error) for sign in _OUT_OF_MEMORY)
            refusal = "it does not fit the memory" if found.memory else str(error).removeprefix("cannot time a trial: ")
            if found.memory and torch.cuda.is_available():
                torch.cuda.empty_cache()
            if found.timed and factor == FASTER and size > 2 * found.largest:
                size, factor = 2 * found.largest, 2  # between this one and the last
                continue
            if found.timed or found.memory or size > 2:
                break
            size *= 2  # a batch norm, say, takes no single example
            continue
        took, left = time.monotonic() - began, end - time.monotonic()
        if not warm:  # what the first run of a process takes is none of the step's
            warm, last = True, step
            continue
        found.timed.append(Timed(float(size), step, 1, 1, parts))
        found.largest = size
        checks.append(check)
        say(f"  {size} examples on one device: a step {1e3 * step:.3g} ms")
        if left < 2 * took and len(found.timed) > 1:
            refusal = SPENT
            break
        growth, peak = max(_peak() - peak, growth), max(_peak(), peak)
        if not setup.on_gpu and 2 * growth > SHARE * _free():
            found.memory, refusal = True, f"it would take about {2 * growth / 2**30:.2g} GiB more memory"
            break
        factor = FACTOR if OCTAVES * took < left else FASTER
        size, last = factor * size, factor * step
    if len(found.timed) < 2:
        raise UserError(f"advise: steps can be timed at fewer than 2 batch sizes: {refusal}")
    found.check, found.why = sorted(checks)[len(checks) // 2], refusal
    if setup.ranks > 1:
        _together(setup, found, params, say)
    return found


def _together(setup: StudySetup, found: StepTimes, params: dict, say: Callable[[str], None]) -> None:
    """Adds steps of all ranks that the trainer asks for, at a small and at the largest batch of each."""
    n, parts = setup.ranks, setup.workload.accumulated
    seconds = {row.local_batch: row.seconds for row in found.timed}
    for local in sorted({min(seconds), max(seconds)}):
        trial = Trial(Cell(int(local) * n * parts), 0, params, setup.study.seed)
        try:
            _, step, _ = timed_run(setup, trial, max(FEWEST, _steps(seconds[local], EACH)), together=True)
        except UserError as error:
            say(f"  {local:g} examples on each of {n} devices: not timed: {error}")
            continue
        found.timed.append(Timed(local, step, n, 1, parts))
        say(f"  {local:g} examples on each of {n} devices: a step {1e3 * step:.3g} ms")


def parameters_of(setup: StudySetup) -> int:
    """Elements of the trained parameters."""
    params = {key: box.at(0.5) for key, box in setup.study.space.items()}
    module = setup.workload.build(Trial(setup.study.cells[0], 0, params, setup.study.seed)).module
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def of_one_device(setup: StudySetup) -> StudySetup:
    """The same study, each trial trained by one device."""
    trainer = {**setup.workload.trainer, "devices": 1, "strategy": "auto"}
    return dataclasses.replace(setup, workload=dataclasses.replace(setup.workload, trainer=trainer))


def _steps(step: float, seconds: float) -> int:
    each = min(EACH, seconds / 20)
    return FEWEST if math.isnan(step) else max(FEWEST, min(200, round(each / max(step, 1e-6))))


def _peak() -> int:
    """The most bytes that this process has ever held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _free() -> float:
    """Bytes that are free on this machine, within the limit of its container."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * next(float(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
        limit, used = (file.read_text().strip() for file in _CGROUP)
        free = free if limit == "max" else min(free, float(limit) - float(used))
    except (OSError, StopIteration, ValueError):  # another system, or no container
        pass
    return free
