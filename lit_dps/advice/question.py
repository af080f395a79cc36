"""What is asked, all that was measured so far, and the answer that follows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

from lit_dps.advice.answer import Answer, answer
from lit_dps.advice.batch_dependence import allows_accumulation
from lit_dps.advice.branch_law import Branched
from lit_dps.advice.branch_run import branch_law
from lit_dps.advice.costs import Checks, Costs
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
from lit_dps.advice.user_workload import Decay, rate_key, user_batch_size
from lit_dps.analysis.law import Law
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
        decay: The decay of the learning rate; None without one.
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
    decay: Decay | None = None

    @cached_property
    def step_time(self) -> StepTime:
        """The model of the step time, with the connection that the options assume."""
        link = None
        if self.options.bandwidth is not None:
            link = Link(self.parameters, self.options.bandwidth, self.options.latency)
        largest = self.times.largest if self.times.is_memory_full else None
        model = fit_step_time(self.times.timed, link, largest)
        # A user who accumulates already has the loss of his parts at every batch size.
        parts = self.setup.workload.accumulated
        can_accumulate = parts > 1 or allows_accumulation(self.depends_on_batch)
        return replace(model, can_accumulate=can_accumulate, least_parts=parts)

    @cached_property
    def checks(self) -> Checks:
        """Full validations: as long as along the pilot, else as timed."""
        times = self.times
        accumulated = self.setup.workload.accumulated
        local = user_batch_size(self.setup.workload) / (accumulated * self.setup.ranks)
        factor = 1.0
        pilot = None if self.plan is None else PilotRun.of_stored(self.store.read())
        if pilot is not None and pilot.check_seconds is not None and times.check_at(local):
            factor = pilot.check_seconds / times.check_at(local)
        return Checks(
            seconds=factor * times.check,
            interval=self.setup.built_goal.check_interval,
            by_batch=factor * times.check_by_batch * accumulated,
            largest=times.largest * accumulated if times.is_memory_full else math.inf,
        )

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

    def sizes_within_budget(self, law: Law | Branched) -> list[int]:
        """Return the batch sizes to answer for: the user's, and others whose K is in the budget.

        Runs at smaller ones may spend `goal.max_steps` before the goal, and runs at larger ones
        `goal.max_examples`. `goal.max_seconds` does not count.
        """
        steps = dict(law.predict(self.batch_sizes)[["batch_size", "steps"]].to_numpy())
        own = user_batch_size(self.setup.workload)
        within = []
        for batch_size in self.batch_sizes:
            last = self._last_step_within_budget(batch_size)
            # Steps of larger batches are nan if the law does not predict them.
            if batch_size == own or not steps.get(batch_size, 0) > last:
                within.append(batch_size)
        return within

    def _last_step_within_budget(self, batch_size: int) -> int:
        """Return the step of the last validation that can meet the goal; 0 without one."""
        goal = self.setup.built_goal
        steps = goal.max_steps
        if goal.max_examples is not None:
            steps = min(steps, goal.max_examples // batch_size)
        last = steps // goal.check_interval * goal.check_interval
        return last if last >= goal.first_possible_step else 0

    @property
    def largest(self) -> int:
        """The largest batch size that is known to fit on the devices that are here."""
        return self.times.largest * self.setup.ranks * self.setup.workload.accumulated

    @property
    def devices_without_times(self) -> list[int]:
        """The numbers of devices for which no step time is known."""
        unknown = []
        # It only has to fit without further parts: more accumulation may be refused.
        local = self.times.largest * self.setup.workload.accumulated
        for count in self.options.devices:
            if count > 1 and self.step_time.at(local * count, count) is None:
                unknown.append(count)
        return unknown

    @property
    def ranks(self) -> int:
        """The devices of the runs of `advise`: those of the trainer; forked runs have one."""
        return 1 if self.plan is None else self.setup.ranks

    def step_seconds(self, batch_size: float, devices: int) -> float:
        """Return the seconds of a step with its share of validation; infinite if unknown."""
        step = self.step_time.at(batch_size, devices)
        if step is None:
            return math.inf
        return step.value + self.checks.seconds_per_step(batch_size, devices)

    def step_seconds_here(self, batch_size: float) -> float:
        """Return the seconds of a step of runs of `advise`, with its share of validation.

        If no step of the ranks could be timed, a step of one device counts.
        """
        seconds = self.step_seconds(batch_size, self.ranks)
        if seconds < math.inf:
            return seconds
        return self.seconds_on_one_device(batch_size) + self.checks.seconds_per_step(batch_size)

    def seconds_on_one_device(self, batch_size: float) -> float:
        """Return the seconds of a step on one device, without validation.

        The seconds count, also of a batch that does not fit and may not be accumulated.
        """
        step = replace(self.step_time, can_accumulate=True).at(batch_size)
        assert step is not None  # one device is always timed
        return step.value

    @property
    def step_seconds_by_devices(self) -> dict[int, Callable[[float], float]]:
        """`step_seconds` by batch size, for each number of devices that is asked for."""
        seconds = {}
        for devices in self.options.devices:
            seconds[devices] = partial(self.step_seconds, devices=devices)
        return seconds

    @property
    def most_steps(self) -> int:
        """Steps of a training that spends its budget here, at the user's batch size."""
        own = user_batch_size(self.setup.workload)
        step = self.step_time.at(own, self.ranks)
        seconds = self.seconds_on_one_device(own) if step is None else step.value
        return self.setup.built_goal.most_steps(own, seconds)

    @property
    def training_seconds(self) -> float:
        """Seconds of `most_steps` steps, with their validations."""
        return self.most_steps * self.step_seconds_here(user_batch_size(self.setup.workload))

    def other_seconds(self, runs: int) -> float:
        """Return about the seconds that the answer and the start of some runs take."""
        cpu_seconds = ANSWER_CPU_SECONDS + runs * RUN_CPU_SECONDS
        # Beside other programs it takes longer, as the timed steps did. The start of the ranks was
        # timed beside them.
        waiting = 1 - min(self.times.waited, MAX_WAITED)
        return cpu_seconds / waiting + runs * self.times.start_of_ranks


def conclude(question: Question) -> Answer:
    """Return the answer from all that was measured so far."""
    options = question.options
    setup = question.probes.setup
    # `fit` makes full validations; validations of probes stop early.
    costs = Costs(options.price, question.checks)
    stored = question.store.read()
    if question.plan is None:
        law = branch_law(stored, question.setup)
        if law is None:
            law = law_with_prior([])
            return answer(law, question.step_time, question.batch_sizes, options.devices, costs)
        # Branches store how they were trained. `question.adaptive` is also None if a callback of
        # the user scales, or if the optimizer could not be read.
        adaptive = stored.get("branch_adaptive", question.adaptive is not None)
        key = rate_key(setup)
        branch_rate = law.rate(key, setup.study.space[key].at(0.5), adaptive)
        sizes = question.sizes_within_budget(law)
        return answer(law, question.step_time, sizes, options.devices, costs, branch_rate)
    record = question.probes.record()
    pilot = PilotRun.of_stored(stored)
    law = law_with_prior(
        observations_of_runs(record, bounds_of(stored)),
        None if pilot is None else pilot.noise,
        question.plan.is_adaptive,
    )
    rate = RuledRate.of(question.plan, best_rates_of_runs(record, question.plan), law.reach)
    sizes = question.sizes_within_budget(law)
    return answer(law, question.step_time, sizes, options.devices, costs, rate, SEED_SPREAD)
