"""What is asked, all that was measured so far, and the answer that follows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from lit_dps.advice.answer import Answer, Checks, Terms, answer
from lit_dps.advice.batch_dependence import LOSS, NORM
from lit_dps.advice.branch_run import branch_law
from lit_dps.advice.next_probe import SEED_SPREAD, law_with_prior
from lit_dps.advice.options import Options
from lit_dps.advice.pilot_evidence import (
    PilotRun,
    best_rates_of_runs,
    bounds_of,
    observations_of_runs,
)
from lit_dps.advice.pilot_plan import PilotPlan, RuledRate
from lit_dps.advice.probe_study import Probes
from lit_dps.advice.step_probe import StepTimes
from lit_dps.advice.step_time import Link, StepTime, fit_step_time
from lit_dps.advice.user_workload import rate_key, user_batch_size
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.study.setup import StudySetup
from lit_dps.training.adam_scaling import AdamScales

# CPU time besides training, by `time.process_time` on an AMD EPYC: of the figure, the files and
# MLflow; and of the start of a run with what is decided before it.
ANSWER_CPU_SECONDS = 4.0
RUN_CPU_SECONDS = 1.0
MAX_WAITED = 0.9
# Runs after the pilot whose start is announced.
LIKELY_RUNS = 6


@dataclass(frozen=True)
class Question:
    """What is asked, and what was measured.

    Attributes:
        setup: The user's configuration.
        options: Options of the command.
        store: The stored measurements.
        probes: The study that probes.
        adaptive: Settings of an adaptive optimizer at the user's batch size, which follow the batch
            size in probes; else None.
        times: The timed steps.
        parameters: The number of elements of the trained parameters.
        plan: The user's run, for the method "pilot"; else None.
        reads_noise: Whether the noise scale can be read along that run.
        depends_on_batch: What of the loss depends on the batch (`batch_dependence`).
    """

    setup: StudySetup
    options: Options
    store: AdviceStore
    probes: Probes
    adaptive: AdamScales | None
    times: StepTimes
    parameters: int
    plan: PilotPlan | None = None
    reads_noise: bool = True
    depends_on_batch: tuple[str, ...] = ()

    @cached_property
    def step_time(self) -> StepTime:
        """The model of the step time, with the connection that the options assume."""
        link = None
        if self.options.bandwidth is not None:
            link = Link(self.parameters, self.options.bandwidth, self.options.latency)
        largest = self.times.largest if self.times.is_memory_full else None
        model = fit_step_time(self.times.timed, link, largest)
        # A user who accumulates already has the loss of his parts at every batch size.
        is_accumulated = self.setup.workload.accumulated > 1
        can_accumulate = is_accumulated or not {LOSS, NORM} & {*self.depends_on_batch}
        return replace(model, can_accumulate=can_accumulate)

    @cached_property
    def check_seconds(self) -> float:
        """Seconds of a full validation: along the pilot, else as timed."""
        pilot = None if self.plan is None else PilotRun.of_stored(self.store.read())
        if pilot is None or pilot.check_seconds is None:
            return self.times.check
        return pilot.check_seconds

    @property
    def batch_sizes(self) -> list[int]:
        """Batch sizes to answer for, up to the largest that all devices have.

        They are powers of 2, or the user's batch size times powers of 2.
        """
        most = self.times.largest
        if not self.times.split_is_used_up:
            most *= max(self.options.devices)
        accumulated = self.setup.workload.accumulated
        if self.plan is not None:
            return self.plan.batch_sizes(accumulated, most * accumulated)
        return [accumulated * 2**i for i in range(int(math.log2(most)) + 1)]

    @property
    def largest(self) -> int:
        """The largest batch size that is known to fit on the devices that are here."""
        return self.times.largest * self.setup.ranks * self.setup.workload.accumulated

    @property
    def user_step_seconds(self) -> float:
        """Seconds of a step at the user's batch size on one device.

        The seconds count, also of a batch that does not fit one device and may not be accumulated.
        """
        times = replace(self.step_time, can_accumulate=True)
        step = times.at(user_batch_size(self.setup.workload))
        assert step is not None  # one device is always timed
        return step.value

    def other_seconds(self, runs: int) -> float:
        """Return about the seconds that the answer and the start of some runs take."""
        cpu_seconds = ANSWER_CPU_SECONDS + runs * RUN_CPU_SECONDS
        # Beside other programs it takes longer, as the timed steps did. The start of the ranks was
        # timed beside them.
        waiting = 1 - min(self.times.waited, MAX_WAITED)
        return cpu_seconds / waiting + runs * self.times.start_of_ranks

    @property
    def training_seconds(self) -> float:
        """Seconds of a training of goal.max_steps steps, at the user's batch size.

        It takes place on all ranks if their steps are timed, as runs of `advise` do.
        """
        goal = self.setup.goal_of_trials
        seconds = self.user_step_seconds
        on_ranks = self.step_time.at(user_batch_size(self.setup.workload), self.setup.ranks)
        if on_ranks is not None:
            seconds = on_ranks.value
        return goal.max_steps * (seconds + self.times.check / goal.check_interval)


def conclude(question: Question) -> Answer:
    """Return the answer from all that was measured so far."""
    options = question.options
    setup = question.probes.setup
    # `fit` makes full validations; validations of probes stop early.
    checks = Checks(question.check_seconds, setup.goal_of_trials.check_interval)
    terms = Terms(options.price, checks)
    asked = question.step_time, question.batch_sizes, options.devices, terms
    stored = question.store.read()
    if question.plan is None:
        law = branch_law(stored, question.setup)
        if law is None:
            return answer(law_with_prior([]), *asked)
        key = rate_key(setup)
        rate = None
        if key:
            # Branches store how they were trained. `question.adaptive` is also None if weight
            # decay is searched, or if the optimizer could not be read.
            adaptive = stored.get("branch_adaptive", question.adaptive is not None)
            rate = law.rate(key, setup.study.space[key].at(0.5), adaptive)
        return answer(law, *asked, rate)
    record = question.probes.record()
    pilot = PilotRun.of_stored(stored)
    law = law_with_prior(
        observations_of_runs(record, bounds_of(stored)),
        None if pilot is None else pilot.noise,
        question.plan.is_adaptive,
    )
    rate = RuledRate.of(question.plan, best_rates_of_runs(record, question.plan), law.reach)
    return answer(law, *asked, rate, SEED_SPREAD)
