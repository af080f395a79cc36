"""What advice is asked for, and all that it has measured so far: what its later stages and its
answer are made from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from lit_dps.advice.options import Options
from lit_dps.advice.probe_study import Probes
from lit_dps.advice.step_probe import SPENT, StepTimes
from lit_dps.advice.step_time import Link, StepTime, fit_step_time
from lit_dps.advice.user_workload import own_batch_size
from lit_dps.core.noise_scale import NoiseScale
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.study.setup import StudySetup
from lit_dps.training.adam_scaling import AdamScales


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        setup: The user's configuration.
        options: Of the command.
        store: What is stored of it.
        work: The study that probes.
        adaptive: Settings of an adaptive optimizer at the own batch size, which follow the batch
            size in probes; else None.
        times: The steps that were timed.
        noise: The noise scale; None where it was not measured.
        parameters: Elements of the trained parameters.
    """

    setup: StudySetup
    options: Options
    store: AdviceStore
    work: Probes
    adaptive: AdamScales | None
    times: StepTimes
    noise: NoiseScale | None
    parameters: int

    @cached_property
    def model(self) -> StepTime:
        """Of the step times, with what the options assume of a connection."""
        options, link = self.options, None
        if options.bandwidth is not None:
            link = Link(self.parameters, options.bandwidth, options.latency)
        return fit_step_time(
            self.times.timed, link, self.times.largest if self.times.memory else None
        )

    @property
    def sizes(self) -> list[int]:
        """Batch sizes to answer for: powers of 2 up to the largest of one device times the most
        devices."""
        times, accumulated = self.times, self.setup.workload.accumulated
        split = not times.memory and times.why != SPENT  # several devices have no more examples
        most = times.largest * (1 if split else max(self.options.devices))
        return [accumulated * 2**i for i in range(int(math.log2(most)) + 1)]

    @property
    def largest(self) -> int:
        """The largest batch size that the devices that are here were seen to have room for."""
        return self.times.largest * self.setup.ranks * self.setup.workload.accumulated

    @property
    def own_step(self) -> float:
        """Seconds of a step at the own batch size on one device."""
        return self.model.at(own_batch_size(self.setup.workload)).value

    @property
    def training_seconds(self) -> float:
        """Of one training at the own batch size that spends its budget of steps, on one device."""
        goal = self.setup.goal_of_trials
        return goal.max_steps * (self.own_step + self.times.check / goal.check_interval)
