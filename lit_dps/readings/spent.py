"""What training spends: PeakMemory, StepSeconds and Examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from lit_dps.core.process_memory import peak_bytes, reset_peak
from lit_dps.core.trial import PEAK_OF_PROCESS
from lit_dps.core.unit import EXAMPLES, SECONDS
from lit_dps.parallel import ranks
from lit_dps.readings.reading import CurveReading, Moment, Reading


class PeakMemory(Reading):
    """The peak memory of a trial from its first step to its end, in MiB (column "peak_memory").

    On CUDA it is the most that PyTorch allocates on the device. Elsewhere it is the peak of the
    process, including what Python and earlier trials still hold. If the system cannot reset it, it
    includes the peaks of earlier trials, and a note reports the trials. Of several ranks it is the
    largest one. With local SGD the networks of all workers of the process count.
    """

    name = "peak_memory"
    when = "end"
    stacked = False  # the networks of a stack share the memory
    over_ranks = True

    def __init__(self):
        self._on_cuda = False
        self._peak_before = 0.0  # of the process from which the trial was resumed

    def start(self, moment: Moment) -> None:
        self._on_cuda = moment.device.type == "cuda"
        self._reset()

    def _reset(self) -> None:
        is_reset = reset_peak()
        if not is_reset and not self._on_cuda:
            self.flags[PEAK_OF_PROCESS] = 1
        if torch.cuda.is_initialized():
            # All ranks resume from one checkpoint, which therefore does not name the device.
            for device in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(device)

    def _peak(self) -> float:
        """Return the peak so far in bytes."""
        peak = peak_bytes()
        if self._on_cuda:
            # The process trains on one of the devices.
            devices = range(torch.cuda.device_count())
            peak = max(map(torch.cuda.max_memory_allocated, devices))
        return max(peak, self._peak_before)

    def read(self, moment: Moment) -> Mapping[str, float]:
        return {"peak_memory": max(ranks.all_gather(self._peak())) / 2**20}

    def state_dict(self) -> dict[str, Any]:
        return {"peak": self._peak()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reset()
        self._peak_before = state["peak"]


class StepSeconds(CurveReading):
    """Seconds of an optimizer step with its data (column "step_seconds").

    It is the median over the intervals between checks so far, of the mean step of an interval.
    Validations and readings do not count. Of several ranks the clock of the first one decides.
    With local SGD it is a step of all workers, which one process takes one after another.
    """

    name = "step_seconds"
    stacked = False  # the networks of a stack share their steps
    counted = (SECONDS.column,)

    def read_curve(self, curve: Mapping[str, Sequence[float]]) -> Mapping[str, float]:
        means = []
        step_before = 0.0
        seconds_before = 0.0
        for step, seconds in zip(curve["step"], curve[SECONDS.column], strict=True):
            means.append((seconds - seconds_before) / (step - step_before))
            step_before = step
            seconds_before = seconds
        return {"step_seconds": median(means)}


class Examples(CurveReading):
    """Training examples up to a check (column "examples_seen"), over all ranks.

    They are counted as for `goal.unit: examples`: an example counts each time it is trained on.
    """

    name = "examples"
    counted = (EXAMPLES.column,)

    def read_curve(self, curve: Mapping[str, Sequence[float]]) -> Mapping[str, float]:
        return {"examples_seen": curve[EXAMPLES.column][-1]}
