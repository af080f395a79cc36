"""The interval loop: trains runs from one check to the next, without Lightning's loop.

A single network trains with the same result as in Lightning's loop, to the bit (`SingleNetwork`).
A stack trains many networks of one batch size at once, of all sparsities (`StackedNetworks`). Their
gradients differ by rounding, which training amplifies. The K of a stacked trial is therefore
another draw from the same distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import LIGHTNING, SINGLE, STACKED, Status, Trial, TrialResult
from lit_dps.engines.eligible import ineligibility_reason, reason_of
from lit_dps.engines.engine import Training
from lit_dps.engines.module_hooks import CALLED_HOOKS, NeedsLightning, end_module, overridden
from lit_dps.engines.network_run import CheckOutcome, NetworkRun, build_trial
from lit_dps.engines.run_group import RunGroup
from lit_dps.engines.single_network import SingleNetwork
from lit_dps.engines.stack import StackedNetworks
from lit_dps.engines.stack_filler import AttemptQueue, StackFiller, batching_key
from lit_dps.engines.trainer import TrainerEngine
from lit_dps.module import ImageClassifier
from lit_dps.training.early_check import HardestFirst
from lit_dps.training.rng_state import preserve_rng_state


class LoopChoice(NamedTuple):
    """The loop that trains a trial.

    Attributes:
        engine: `STACKED`, `SINGLE` or `LIGHTNING`.
        reason: Why it is not a faster loop; empty if it is the fastest that the study allows.
    """

    engine: str
    reason: str = ""


@dataclass(frozen=True)
class IntervalLoop:
    """Trains the attempts that it supports, and the others by Lightning's loop.

    `eligible.ineligibility_reason` decides which trials it supports. The runs of a stack differ in
    initial weights, mask, learning rate, momentum, schedule, order of examples, and end. When a run
    ends, the next attempt takes its row at the same check. Networks, masks, update rules,
    schedules, batches and the goal are equal to those in `TrainerEngine`.

    Attributes:
        training: The settings that the trials share.
        stack_size: The largest number of networks in a stack; 1 trains one run after another.
    """

    training: Training
    stack_size: int = 1

    def train(
        self,
        next_attempt: Callable[[], Attempt | None],
        at_check: Callable[[], None] = lambda: None,
    ) -> Iterator[TrialResult]:
        """Train attempts until none remains, and yield each result; see `Engine.train`."""
        queue = AttemptQueue(next_attempt, self.stack_size)
        choices: dict[tuple, LoopChoice] = {}
        while True:
            attempt = queue.next()
            if attempt is None:
                return
            assert attempt.trial is not None
            key = batching_key(attempt)
            if key.loop_key not in choices:
                choices[key.loop_key] = self.choose(attempt.trial)
            choice = choices[key.loop_key]
            if choice.engine == LIGHTNING:
                yield self._train_by_lightning(attempt, at_check, choice.reason)
            elif choice.engine == STACKED and queue.has(key):
                yield from self._train_stack(attempt, queue, at_check)
            else:
                result = self._train_single(attempt, at_check, choice.reason)
                if result.engine == LIGHTNING:
                    choices[key.loop_key] = LoopChoice(LIGHTNING, result.engine_reason)
                yield result

    def choose(self, trial: Trial) -> LoopChoice:
        """Return the loop that trains a trial, and why it is not a faster one."""
        reason_against_stack = ""
        if self.stack_size > 1:
            reason = self.ineligibility_reason(trial, stacked=True)
            if reason is None:
                return LoopChoice(STACKED)
            reason_against_stack = reason
        reason = self.ineligibility_reason(trial)
        if reason is not None:
            return LoopChoice(LIGHTNING, reason)
        return LoopChoice(SINGLE, reason_against_stack)

    def ineligibility_reason(self, trial: Trial, stacked: bool = False) -> str | None:
        """Return why the interval loop cannot train a trial, or cannot stack it; None if it can."""
        uses_local_sgd = self.training.local_sgd_callback(trial).rounds.on
        if stacked and uses_local_sgd:
            return "the workers of local SGD use one network, one after another"
        try:
            built, _ = build_trial(self.training, trial)
        except Exception as error:  # the trial fails with this error in Lightning's loop
            return reason_of(error)
        if uses_local_sgd and isinstance(built.module, ImageClassifier):
            hooks = overridden(built.module, CALLED_HOOKS)
            if hooks:
                name = type(built.module).__name__
                return f"{name} overrides {', '.join(hooks)}, which the workers of local SGD share"
        return ineligibility_reason(built, self.training, stacked)

    def _train_by_lightning(
        self, attempt: Attempt, at_check: Callable[[], None], reason: str
    ) -> TrialResult:
        """Train an attempt by Lightning's loop and return its result."""
        lightning = TrainerEngine(self.training, reason=reason)
        train_one = partial(lightning.train_one, at_check=at_check)
        return self.training.run_attempt(attempt, train_one)

    def _train_single(
        self, attempt: Attempt, at_check: Callable[[], None], reason: str
    ) -> TrialResult:
        """Train one attempt and return its result.

        Args:
            attempt: The attempt.
            at_check: See `Engine.train`.
            reason: Why it is not stacked; empty if no stack is faster, as for a single attempt.
        """
        run_single = partial(self._run_single, at_check=at_check, reason=reason)
        try:
            return self.training.run_attempt(attempt, run_single)
        except NeedsLightning as error:
            # The module has done something for the first time that Lightning's loop alone supports.
            attempt.restart()
            return self._train_by_lightning(attempt, at_check, str(error))

    def _run_single(self, attempt: Attempt, at_check: Callable[[], None], reason: str) -> None:
        """Train one attempt until it ends or pauses."""
        assert attempt.trial is not None
        attempt.set_engine(SINGLE, reason)
        # Random layers, such as dropout, draw from the seed of the point.
        with preserve_rng_state(seed=attempt.trial.seed_for("order")):
            built, device = build_trial(self.training, attempt.trial)
            run = NetworkRun.begin(attempt, built, self.training, device)
            group = RunGroup(SingleNetwork(run), self.training)
            while attempt.status is None:
                (outcome,) = group.train_interval()
                run.record(outcome)
                if attempt.status is None:
                    group.end_interval(at_check)
                elif attempt.status is Status.PAUSED:
                    group.save_if_worth_it(0)
            # Lightning leaves these hooks out if a callback saves a paused run and ends it.
            if attempt.status is not Status.PAUSED or run.file is None:
                end_module(run.module)
            attempt.seconds = run.elapsed_seconds()
            attempt.timed = group.stopwatch.timed

    def _train_stack(
        self, first: Attempt, queue: AttemptQueue, at_check: Callable[[], None]
    ) -> Iterator[TrialResult]:
        """Train an attempt in a stack, with the attempts of the queue that have its key."""
        filler = StackFiller(first, queue, self.training)
        with preserve_rng_state():
            runs = filler.next_runs(self.stack_size)
            if runs:
                yield from self._train_runs(runs, filler, at_check)
        for unstacked in filler.unstacked:
            yield self._train_single(unstacked.attempt, at_check, unstacked.reason)

    def _train_runs(
        self, runs: list[NetworkRun], filler: StackFiller, at_check: Callable[[], None]
    ) -> Iterator[TrialResult]:
        """Train runs in a stack, and the next runs in the rows that become empty."""
        networks = StackedNetworks(runs)
        group = RunGroup(networks, self.training)
        while networks.live:
            try:
                outcomes = group.train_interval()
            except Exception as error:
                # One of the runs caused the error. Training them one at a time shows which.
                for row in networks.live:
                    filler.unstack_after_error(networks.run_at(row).attempt, error)
                return
            for outcome in outcomes:
                result = _record_stacked(group, outcome)
                if result is not None:
                    networks.runs[outcome.row] = None
                    yield result
            _fill_empty_rows(networks, group.hardest_first, filler)
            _drop_empty_rows(networks, group.hardest_first)
            if networks.live:
                group.end_interval(at_check)


def _record_stacked(group: RunGroup, outcome: CheckOutcome) -> TrialResult | None:
    """Record the check of a stacked run; return its result if it has ended or pauses, else None."""
    run = group.networks.run_at(outcome.row)
    attempt = run.attempt
    run.record(outcome)
    if attempt.status is None:
        return None
    if attempt.status is Status.PAUSED:
        group.save_if_worth_it(outcome.row)
    attempt.seconds = run.elapsed_seconds()
    attempt.set_engine(STACKED)
    return attempt.result()


def _fill_empty_rows(
    networks: StackedNetworks, hardest_first: HardestFirst, filler: StackFiller
) -> None:
    """Put the next runs into the empty rows of a stack."""
    for row, run in enumerate(list(networks.runs)):
        if run is None:
            next_run = filler.next_run()
            if next_run is None:
                return
            networks.put(row, next_run)
            hardest_first.begin(row, next_run.priority)


def _drop_empty_rows(networks: StackedNetworks, hardest_first: HardestFirst) -> None:
    """Make a stack smaller if at most half of its rows are live.

    An empty row costs as much as a live one, and a new shape costs a little once.
    """
    live = networks.live
    if 0 < 2 * len(live) <= len(networks.runs):
        hardest_first.take(torch.tensor(live, device=hardest_first.priority.device))
        networks.take(live)
