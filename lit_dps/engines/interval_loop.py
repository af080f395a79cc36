"""The interval loop: trains runs from one check to the next, without Lightning's loop.

A single network trains with the same result as in Lightning's loop, to the bit (`SingleNetwork`).
A stack trains many networks of one batch size at once, of all sparsities (`StackedNetworks`). Their
gradients differ by rounding, which training amplifies. The K of a stacked trial is therefore
another draw from the same distribution.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from lightning.pytorch import Trainer

from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import LIGHTNING, SINGLE, STACKED, Status, Trial, TrialResult
from lit_dps.engines.batching_key import AttemptQueue, BatchingKey, batching_key
from lit_dps.engines.eligible import (
    ineligibility_reason,
    reason_of,
)
from lit_dps.engines.engine import Training
from lit_dps.engines.module_hooks import (
    CALLED_HOOKS,
    NeedsLightning,
    end_module,
    overridden,
    prepare_module,
)
from lit_dps.engines.network_run import CheckOutcome, NetworkRun, SingleNetwork
from lit_dps.engines.run_group import NetworkBatch, RunGroup
from lit_dps.engines.stack import StackedNetworks
from lit_dps.engines.trainer import TrainerEngine
from lit_dps.module import ImageClassifier
from lit_dps.training.checkpoint_files import MIN_SECONDS_WORTH_SAVING
from lit_dps.training.early_check import HardestFirst
from lit_dps.training.rng_state import preserve_rng_state
from lit_dps.training.workload import Built


class Choice(NamedTuple):
    """The loop that trains a trial.

    Attributes:
        engine: `STACKED`, `SINGLE` or `LIGHTNING`.
        reason: Why it is not a faster loop of the engine that was asked for; empty if it is.
    """

    engine: str
    reason: str = ""


@dataclass(frozen=True)
class IntervalLoop:
    """Trains the attempts that it supports, and the others by Lightning's loop.

    `eligible.ineligibility_reason` decides which trials it supports. Each run has its own initial
    weights, mask, learning rate, momentum, schedule, position in the order of examples, and end.
    When a run of a stack ends, the next attempt takes its row at the same check. Networks, masks,
    update rules, schedules, batches and the goal are those of `TrainerEngine`.

    Attributes:
        training: The settings that the trials share.
        stack_size: Networks in a stack, at most; 1 trains one run after another.
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
        choices: dict[tuple, Choice] = {}
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
            elif choice.engine == SINGLE or not queue.has(key):
                result = self._train_single(attempt, at_check, choice.reason)
                if result.engine == LIGHTNING:
                    choices[key.loop_key] = Choice(LIGHTNING, result.engine_reason)
                yield result
            else:
                yield from self._train_stack(attempt, queue, at_check)

    def choose(self, trial: Trial) -> Choice:
        """Return the loop that trains a trial, and why it is not a faster one."""
        reason_against_stack = None
        if self.stack_size > 1:
            reason_against_stack = self.ineligibility_reason(trial, stacked=True)
            if reason_against_stack is None:
                return Choice(STACKED)
        reason = self.ineligibility_reason(trial)
        if reason is not None:
            return Choice(LIGHTNING, reason)
        return Choice(SINGLE, reason_against_stack or "")

    def ineligibility_reason(self, trial: Trial, stacked: bool = False) -> str | None:
        """Return why the interval loop cannot train a trial, or cannot stack it; None if it can."""
        uses_local_sgd = self.training.local_sgd_callback(trial).rounds.on
        if stacked and uses_local_sgd:
            return "the workers of local SGD take the place of one network in turn"
        try:
            built, _ = self._build(trial)
        except Exception as error:  # the trial fails with this error in Lightning's loop
            return reason_of(error)
        if uses_local_sgd and isinstance(built.module, ImageClassifier):
            hooks = overridden(built.module, CALLED_HOOKS)
            if hooks:
                name = type(built.module).__name__
                return f"{name} overrides {', '.join(hooks)}, which the workers of local SGD share"
        return ineligibility_reason(built, self.training, stacked)

    def _build(self, trial: Trial | None) -> tuple[Built, torch.device]:
        """Return a trial with its data set up, and the device on which it trains."""
        assert trial is not None
        built = self.training.workload.build(trial)
        trainer = Trainer(**built.trainer)
        built.data.trainer = trainer  # the setup of a user's data module may read it
        built.data.prepare_data()
        built.data.setup("fit")
        prepare_module(built.module)
        return built, trainer.strategy.root_device

    def _train_by_lightning(
        self, attempt: Attempt, at_check: Callable[[], None], reason: str
    ) -> TrialResult:
        """Train an attempt by Lightning's loop and return its result."""
        lightning = TrainerEngine(self.training, reason=reason)
        train_one = partial(lightning.train_one, at_check=at_check)
        return self.training.run_attempt(attempt, train_one)

    def _train_single(
        self, attempt: Attempt, at_check: Callable[[], None], reason: str = ""
    ) -> TrialResult:
        """Train an attempt by itself and return its result.

        Args:
            attempt: The attempt.
            at_check: See `Engine.train`.
            reason: Why it is not stacked; empty if there is no reason.
        """
        run_single = partial(self._run_single, at_check=at_check, reason=reason)
        try:
            return self.training.run_attempt(attempt, run_single)
        except NeedsLightning as error:
            # The module has done something for the first time that Lightning's loop alone supports.
            attempt.restart()
            return self._train_by_lightning(attempt, at_check, str(error))

    def _run_single(self, attempt: Attempt, at_check: Callable[[], None], reason: str) -> None:
        """Train an attempt by itself until it ends or pauses."""
        assert attempt.trial is not None
        attempt.set_engine(SINGLE, reason)
        # Random layers, such as dropout, draw from the seed of the point.
        with preserve_rng_state(seed=attempt.trial.seed_for("order")):
            built, device = self._build(attempt.trial)
            group = RunGroup(self.training, built, device, stack_size=1)
            run = group.begin(attempt, built)
            networks = SingleNetwork(run)
            hardest_first = group.hardest_first([run])
            while attempt.status is None:
                (outcome,) = self._train_interval(group, networks, hardest_first)
                run.record(outcome)
                if attempt.status in (None, Status.PAUSED):
                    self._save_between_intervals(networks, hardest_first, at_check)
            # Lightning leaves these hooks out if a callback saves a paused run and ends it.
            if attempt.status is not Status.PAUSED or run.file is None:
                end_module(run.module)
            attempt.seconds = run.elapsed_seconds()
            attempt.timed = group.watch.timed

    def _train_stack(
        self, first: Attempt, queue: AttemptQueue, at_check: Callable[[], None]
    ) -> Iterator[TrialResult]:
        """Train an attempt in a stack with those of the queue that have the same key."""
        unstacked: list[Attempt] = []  # attempts that are trained by themselves afterwards
        with preserve_rng_state():
            built, device = self._build(first.trial)
            group = RunGroup(self.training, built, device, self.stack_size)
            next_run = partial(self._next_run, group, queue, batching_key(first), unstacked)
            runs = [group.begin(first, built)]
            while len(runs) < self.stack_size:
                run = next_run()
                if run is None:
                    break
                runs.append(run)
            networks = StackedNetworks(runs)
            hardest_first = group.hardest_first(runs)
            while networks.live:
                try:
                    outcomes = self._train_interval(group, networks, hardest_first)
                except Exception:
                    # One of the runs caused the error. Trained by themselves they show which.
                    for row in networks.live:
                        attempt = networks.run_at(row).attempt
                        attempt.restart()
                        unstacked.append(attempt)
                    break
                for outcome in outcomes:
                    result = self._record_stacked(networks, hardest_first, outcome)
                    if result is not None:
                        yield result
                _fill_empty_rows(networks, hardest_first, next_run)
                _drop_empty_rows(networks, hardest_first)
                if networks.live:
                    self._save_between_intervals(networks, hardest_first, at_check)
        for attempt in unstacked:
            yield self._train_single(attempt, at_check)

    def _next_run(
        self, group: RunGroup, queue: AttemptQueue, key: BatchingKey, unstacked: list[Attempt]
    ) -> NetworkRun | None:
        """Begin the next attempt with this key; None if there is none.

        Attempts that do not fit into the stack, for example with another update rule, are added to
        `unstacked`. So are attempts that raise: by themselves they become failed trials.
        """
        while True:
            attempt = queue.next_with(key)
            if attempt is None:
                return None
            try:
                built, _ = self._build(attempt.trial)
                if group.accepts(built):
                    return group.begin(attempt, built)
            except Exception:
                # Trained by itself it raises the error again, which is stored with its trial.
                attempt.restart()
            unstacked.append(attempt)

    def _record_stacked(
        self, networks: StackedNetworks, hardest_first: HardestFirst, outcome: CheckOutcome
    ) -> TrialResult | None:
        """Record a check of a stacked run; return its result and empty its row if it has ended."""
        run = networks.run_at(outcome.row)
        attempt = run.attempt
        run.record(outcome)
        if attempt.status is None:
            return None
        if attempt.status is Status.PAUSED:
            self._save(networks, hardest_first, outcome.row, MIN_SECONDS_WORTH_SAVING)
        attempt.seconds = run.elapsed_seconds()
        attempt.set_engine(STACKED)
        networks.runs[outcome.row] = None
        return attempt.result()

    def _train_interval(
        self, group: RunGroup, networks: NetworkBatch, hardest_first: HardestFirst
    ) -> list[CheckOutcome]:
        """Train all networks to the next check and check them; return the best outcome first.

        The best comes first because it may end the other runs of its cell.
        """
        group.watch.switch_to("training")
        losses = networks.train(group.x, group.y, group.next_batches(networks.runs)).tolist()
        # The losses were copied from the device, so it has finished the steps.
        group.watch.switch_to("checking")
        finite = networks.finite()
        checks = group.check(networks, hardest_first)
        metrics: list[dict[str, float]] = [{}] * len(checks)
        if self.training.metrics:
            metrics = group.validation_losses(networks)
        group.watch.add_check(group.interval)
        found = list(zip(networks.live, checks, metrics, strict=True))
        outcomes = []
        for row, check, values in sorted(found, key=lambda item: item[1].mistakes):
            error = check.error(hardest_first.size)
            outcomes.append(CheckOutcome(row, error, check.exact, losses[row], finite[row], values))
        return outcomes

    def _save_between_intervals(
        self, networks: NetworkBatch, hardest_first: HardestFirst, at_check: Callable[[], None]
    ) -> None:
        """Call `at_check`, and save the runs whose last checkpoint is old or that pause.

        If `at_check` raises to end the process, save all runs that are worth a file, unless the
        exception says that the process must end now.
        """
        try:
            at_check()
        except BaseException as interruption:
            if not getattr(interruption, "now", False):
                for row in networks.live:
                    self._save(networks, hardest_first, row, MIN_SECONDS_WORTH_SAVING)
            raise
        for row in networks.live:
            run = networks.runs[row]
            assert run is not None
            pauses = run.attempt.status is not None
            self._save(
                networks, hardest_first, row, MIN_SECONDS_WORTH_SAVING if pauses else math.inf
            )

    def _save(
        self, networks: NetworkBatch, hardest_first: HardestFirst, row: int, min_seconds: float
    ) -> None:
        """Save a run if its last file is older than `min_seconds` or the checkpoint interval."""
        run = networks.runs[row]
        checkpoints = self.training.checkpoints
        if run is None or run.file is None or checkpoints is None:
            return
        if time.monotonic() - run.saved_at >= min(min_seconds, checkpoints.seconds):
            networks.write_back(row)
            run.save(hardest_first.priority[row])


def _fill_empty_rows(
    networks: StackedNetworks,
    hardest_first: HardestFirst,
    next_run: Callable[[], NetworkRun | None],
) -> None:
    """Put the next runs into the empty rows of a stack."""
    for row, run in enumerate(list(networks.runs)):
        if run is None:
            new = next_run()
            if new is None:
                return
            networks.put(row, new)
            hardest_first.begin(row, new.priority)


def _drop_empty_rows(networks: StackedNetworks, hardest_first: HardestFirst) -> None:
    """Make a stack smaller if at most half of its rows are live.

    An empty row costs as much as a live one, and a new shape costs a little once.
    """
    live = networks.live
    if 0 < 2 * len(live) <= len(networks.runs):
        hardest_first.take(torch.tensor(live, device=hardest_first.priority.device))
        networks.take(live)
