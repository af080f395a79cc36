"""The interval loop: trains runs from one check to the next, without Lightning's loop.

A single network trains with the same result as in Lightning's loop, to the bit (`SingleNetwork`).
A stack trains many networks of one batch size at once, of all sparsities (`StackedNetworks`). Their
gradients differ by rounding, which training amplifies. The K of a stacked trial is therefore
another draw from the same distribution.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import StorageError
from lit_dps.core.trial import LIGHTNING, SINGLE, STACKED, Status, Trial, TrialResult
from lit_dps.engines.check_outcome import ValidationOutcome
from lit_dps.engines.eligible import NO_CLASSIFIER, ineligibility_reason, is_no_classifier
from lit_dps.engines.engine import NextAttempt, RaiseIfStopped, TrialSettings
from lit_dps.engines.memory import StackLimit, free_unused_memory, is_out_of_memory
from lit_dps.engines.module_hooks import NeedsLightning, end_module
from lit_dps.engines.network_run import NetworkRun, build_trial
from lit_dps.engines.run_group import RunGroup
from lit_dps.engines.single_network import SingleNetwork
from lit_dps.engines.stack import StackedNetworks
from lit_dps.engines.stack_filler import AttemptQueue, StackFiller, batching_key
from lit_dps.engines.trainer import TrainerEngine
from lit_dps.module import ImageClassifier
from lit_dps.training.checkpoint_files import CannotResume
from lit_dps.training.early_validation import HardestFirst
from lit_dps.training.hidden_state import preserve_rng_state


class LoopChoice(NamedTuple):
    """The loop that trains a trial.

    Attributes:
        engine: `STACKED`, `SINGLE` or `LIGHTNING`.
        reason: Why it is not a faster loop; empty if it is the fastest that the study allows.
        needs_stack: Whether the trial trains in a stack of one rather than as a single network.
    """

    engine: str
    reason: str = ""
    needs_stack: bool = False


@dataclass(frozen=True)
class IntervalLoop:
    """Trains the attempts that it supports, and the others by Lightning's loop.

    `eligible.ineligibility_reason` decides which trials it supports. The runs of a stack differ in
    initial weights, mask, learning rate, momentum, schedule, order of examples, and end. When a run
    ends, the next attempt takes its row at the same check. Networks, masks, update rules,
    schedules, batches and the goal are equal to those in `TrainerEngine`.

    Attributes:
        settings: The settings that the trials share.
        stack_size: The largest number of networks in a stack; 1 trains one run after another.
        intervals_ahead: Check intervals that a stack trains before their checks; None to choose
            them by the device (`RunGroup.choose_intervals`). Results do not depend on it.
        stacks_alone: Whether a network without company is a stack of one. On a GPU a stack trains
            by graphs, several times as fast at small batch sizes.
    """

    settings: TrialSettings
    stack_size: int = 1
    intervals_ahead: int | None = None
    stacks_alone: bool = False
    _limit: StackLimit = field(default_factory=StackLimit, init=False, repr=False, compare=False)

    def train(
        self, next_attempt: NextAttempt, raise_if_stopped: RaiseIfStopped = lambda: None
    ) -> Iterator[TrialResult]:
        """Train attempts until none remains, and yield each result; see `Engine.train`."""
        queue = AttemptQueue(next_attempt, self.stack_size)
        choices: dict[tuple, LoopChoice] = {}
        while True:
            attempt = queue.next()
            if attempt is None:
                return
            key = batching_key(attempt)
            if key.loop_key not in choices:
                choices[key.loop_key] = self.choose(attempt.study_trial)
            choice = choices[key.loop_key]
            if choice.engine == LIGHTNING:
                yield self._train_by_lightning(attempt, raise_if_stopped, choice.reason)
            elif choice.engine == STACKED and (
                choice.needs_stack or self.stacks_alone or queue.has(key)
            ):
                yield from self._train_stack(attempt, queue, raise_if_stopped)
            else:
                result = self._train_single(attempt, raise_if_stopped, choice.reason)
                if result.engine == LIGHTNING:
                    choices[key.loop_key] = LoopChoice(LIGHTNING, result.engine_reason)
                yield result

    def choose(self, trial: Trial) -> LoopChoice:
        """Return the loop that trains a trial, and why it is not a faster one."""
        needs_stack = is_no_classifier(self.settings, trial)
        reason_against_stack = ""
        if self.stack_size > 1:
            reason = ineligibility_reason(self.settings, trial, stacked=True)
            if reason is None:
                return LoopChoice(STACKED, needs_stack=needs_stack)
            if needs_stack:
                return LoopChoice(LIGHTNING, reason)
            reason_against_stack = reason
        reason = ineligibility_reason(self.settings, trial)
        if reason is not None:
            return LoopChoice(LIGHTNING, reason)
        return LoopChoice(SINGLE, reason_against_stack)

    def _train_by_lightning(
        self, attempt: Attempt, raise_if_stopped: RaiseIfStopped, reason: str
    ) -> TrialResult:
        """Train an attempt by Lightning's loop and return its result."""
        lightning = TrainerEngine(self.settings, reason=reason)
        train_one = partial(lightning.train_one, raise_if_stopped=raise_if_stopped)
        return self.settings.run_attempt(attempt, train_one)

    def _train_single(
        self, attempt: Attempt, raise_if_stopped: RaiseIfStopped, reason: str
    ) -> TrialResult:
        """Train one attempt and return its result.

        Args:
            attempt: The attempt.
            raise_if_stopped: See `Engine.train`.
            reason: Why it is not stacked; empty if no stack is faster, as for a single attempt.
        """
        run_single = partial(self._run_single, raise_if_stopped=raise_if_stopped, reason=reason)
        try:
            return self.settings.run_attempt(attempt, run_single)
        except NeedsLightning as error:
            # The module has done something for the first time that Lightning's loop alone supports.
            attempt.restart()
            return self._train_by_lightning(attempt, raise_if_stopped, str(error))

    def _run_single(self, attempt: Attempt, raise_if_stopped: RaiseIfStopped, reason: str) -> None:
        """Train one attempt until it ends or pauses.

        If its checkpoint cannot be restored, it begins again, as in Lightning's loop.
        """
        try:
            self._run_once(attempt, raise_if_stopped, reason)
        except CannotResume:
            attempt.restart()
            self._run_once(attempt, raise_if_stopped, reason)

    def _run_once(self, attempt: Attempt, raise_if_stopped: RaiseIfStopped, reason: str) -> None:
        """Train one attempt, from its checkpoint if there is one, until it ends or pauses."""
        trial = attempt.study_trial
        attempt.set_engine(SINGLE, reason)
        # Random layers, such as dropout, draw from the seed of the point.
        with preserve_rng_state(seed=trial.seed_for("order")):
            built, device = build_trial(self.settings, trial)
            if not isinstance(built.module, ImageClassifier):
                name = type(built.module).__name__
                raise NeedsLightning(reason or f"{name} {NO_CLASSIFIER}")
            run = NetworkRun.begin(attempt, built, self.settings, device)
            group = RunGroup(SingleNetwork(run), self.settings)
            while attempt.status is None:
                (outcome,) = group.outcomes(group.train_intervals(1), 0)
                run.record(outcome)
                group.read_end(0)
                if attempt.status is None:
                    group.end_interval(raise_if_stopped)
                elif attempt.status is Status.PAUSED:
                    group.save_if_worth_it(0)
            # Lightning leaves these hooks out if a callback saves a paused run and ends it.
            if attempt.status is not Status.PAUSED or run.file is None:
                end_module(run.module)
            attempt.seconds = run.elapsed_seconds()
            attempt.timed = group.stopwatch.timed

    def _train_stack(
        self, first: Attempt, queue: AttemptQueue, raise_if_stopped: RaiseIfStopped
    ) -> Iterator[TrialResult]:
        """Train an attempt in a stack, with the attempts of the queue that have its key."""
        filler = StackFiller(first, queue, self.settings)
        with preserve_rng_state():
            while filler.has_pending:
                runs = filler.next_runs(min(self.stack_size, self._limit.size))
                if not runs:
                    filler.unstack_pending()
                    break
                if filler.lacks_memory:
                    self._limit.halve(len(runs) + 1, fitting=len(runs))
                _seed_dropout(runs[0])
                yield from self._train_runs(runs, filler, raise_if_stopped)
                runs.clear()
                if filler.has_pending:  # memory was insufficient
                    free_unused_memory()
        for unstacked in filler.unstacked:
            yield self._train_single(unstacked.attempt, raise_if_stopped, unstacked.reason)

    def _train_runs(
        self, runs: list[NetworkRun], filler: StackFiller, raise_if_stopped: RaiseIfStopped
    ) -> Iterator[TrialResult]:
        """Train runs in a stack, and return their attempts to the filler if memory is insufficient.

        A step may have failed in its middle. Therefore all runs of the stack restart, from their
        last checkpoint or from their beginning. Half of them fit into the next stack.
        """
        networks = None
        try:
            networks = StackedNetworks(runs)
            yield from self._train_networks(networks, filler, raise_if_stopped)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if networks is not None:
                runs = [networks.run_at(row) for row in networks.live]
            attempts = [run.attempt for run in runs]
            if len(attempts) == 1:
                filler.unstack_after_error(attempts[0], error)
            elif attempts:
                self._limit.halve(len(attempts))
                filler.put_back(attempts)

    def _train_networks(
        self, networks: StackedNetworks, filler: StackFiller, raise_if_stopped: RaiseIfStopped
    ) -> Iterator[TrialResult]:
        """Train stacked networks, and the next runs in the rows that become empty."""
        group = RunGroup(networks, self.settings)
        while networks.live:
            count = group.choose_intervals(self.intervals_ahead)
            try:
                intervals = group.train_intervals(count)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                # One of the runs caused the error. Training them one at a time shows which.
                for row in networks.live:
                    filler.unstack_after_error(networks.run_at(row).attempt, error)
                return
            for i in range(count):
                for outcome in group.outcomes(intervals, i):
                    result = _record_stacked(group, outcome, filler)
                    if result is not None:
                        yield result
            _fill_empty_rows(networks, group.hardest_first, filler, self._limit)
            _drop_empty_rows(networks, group.hardest_first)
            if networks.live:
                group.end_interval(raise_if_stopped)


def _seed_dropout(first: NetworkRun) -> None:
    """Seed what the networks of a stack draw, by the first run.

    A resumed run draws other numbers than it drew at its start.
    """
    seed = first.attempt.study_trial.seed_for("order")
    torch.manual_seed(hash((seed, first.steps)) % 2**63)


def _record_stacked(
    group: RunGroup, outcome: ValidationOutcome, filler: StackFiller
) -> TrialResult | None:
    """Record the check of a stacked run; return its result if it has ended or pauses, else None.

    The row of a run that has ended is empty.
    """
    run = group.networks.run_at(outcome.row)
    attempt = run.attempt
    try:
        run.record(outcome)
        if attempt.status is None:
            return None
        group.read_end(outcome.row)
    except StorageError:
        raise
    except Exception as error:  # a goal or a reading of the user may raise anything
        group.networks.runs[outcome.row] = None
        filler.unstack_after_error(attempt, error)
        return None
    if attempt.status is Status.PAUSED:
        group.save_if_worth_it(outcome.row, outcome.number)
    group.networks.runs[outcome.row] = None
    attempt.seconds = run.elapsed_seconds()
    attempt.set_engine(STACKED)
    return attempt.result()


def _fill_empty_rows(
    networks: StackedNetworks, hardest_first: HardestFirst, filler: StackFiller, limit: StackLimit
) -> None:
    """Put the next runs into the empty rows of a stack, as far as they fit in memory."""
    room = max(0, limit.size - len(networks.live))
    empty_rows = [row for row, run in enumerate(networks.runs) if run is None][:room]
    # Fewer runs than rows remain at the end of a cell.
    for row, run in zip(empty_rows, filler.next_runs(len(empty_rows)), strict=False):
        try:
            networks.put(row, run)
        except Exception as error:
            networks.runs[row] = None
            filler.on_error(run.attempt, error)
        else:
            hardest_first.begin(row)
    if filler.lacks_memory:
        limit.halve(len(networks.runs), fitting=max(1, len(networks.live)))


def _drop_empty_rows(networks: StackedNetworks, hardest_first: HardestFirst) -> None:
    """Make a stack smaller if at most half of its rows are live.

    An empty row costs as much as a live one, and a new shape costs a little once.
    """
    live = networks.live
    if 0 < 2 * len(live) <= len(networks.runs):
        hardest_first.take(torch.tensor(live, device=hardest_first.priority.device))
        networks.take(live)
