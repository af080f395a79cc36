"""TrialEngine: trains the trials of a study, each by the fastest loop that supports it.

- A stack trains many networks of one batch size at once, of all sparsities (`StackedNetworks`).
  Their gradients differ by rounding, which training amplifies. The K of a stacked trial is
  therefore another draw from the same distribution.
- A single network trains with the same result as in Lightning's loop, to the bit
  (`SingleNetwork`).
- Lightning's loop trains any LightningModule (`LightningLoop`).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from lightning.pytorch import Callback

from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import StorageError, UserError, error_text
from lit_dps.core.trial import (
    ENGINE_SET,
    LIGHTNING,
    SINGLE,
    STACKED,
    Status,
    Trial,
    TrialResult,
)
from lit_dps.engines.eligible import NO_CLASSIFIER, ineligibility_reason, is_no_classifier
from lit_dps.engines.lightning_loop import LightningLoop
from lit_dps.engines.memory import StackLimit, free_unused_memory, is_out_of_memory
from lit_dps.engines.module_hooks import NeedsLightning, end_module
from lit_dps.engines.network_run import NetworkRun, ValidationOutcome, build_trial
from lit_dps.engines.run_group import RunGroup
from lit_dps.engines.single_network import SingleNetwork
from lit_dps.engines.stack import StackedNetworks
from lit_dps.engines.stack_filler import AttemptQueue, StackFiller, batching_key
from lit_dps.engines.trial_settings import NextAttempt, RaiseIfStopped, TrialSettings
from lit_dps.module import ImageClassifier
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import ranks_asked
from lit_dps.training.checkpoint_files import CannotResume
from lit_dps.training.early_validation import HardestFirst
from lit_dps.training.hidden_state import preserve_rng_state
from lit_dps.training.lightning_private import error_of_fit


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
class TrialEngine:
    """Trains attempts at trials, each by the fastest loop that supports it.

    `eligible.ineligibility_reason` decides which trials the faster loops support. The runs of a
    stack differ in initial weights, mask, learning rate, momentum, schedule, order of examples, and
    end. When a run ends, the next attempt takes its row at the same validation. Networks, masks,
    update rules, schedules, batches and the goal are equal in all loops.

    Attributes:
        settings: The settings that the trials share.
        stack_size: The largest number of networks in a stack; 1 trains one run after another.
        intervals_ahead: Intervals that a stack trains before it validates them; None to choose them
            by the device (`RunGroup.choose_intervals`). Results do not depend on it.
        stacks_alone: Whether a network without company is a stack of one. On a GPU a stack trains
            by graphs, several times as fast at small batch sizes.
        engine: `LIGHTNING` trains all trials by Lightning's loop. Other values do nothing here:
            the study has turned them into `stack_size` and `stacks_alone`.
        callbacks: Further callbacks of the trials in Lightning's loop.
    """

    settings: TrialSettings
    stack_size: int = 1
    intervals_ahead: int | None = None
    stacks_alone: bool = False
    engine: str = "auto"
    callbacks: tuple[Callback, ...] = ()
    _limit: StackLimit = field(default_factory=StackLimit, init=False, repr=False, compare=False)

    def train(
        self, next_attempt: NextAttempt, raise_if_stopped: RaiseIfStopped = lambda: None
    ) -> Iterator[TrialResult]:
        """Train attempts until none remains, and yield each result as soon as it is available.

        Args:
            next_attempt: Returns the next attempt, or None if no attempt remains at present. It is
                called when there is room for another attempt.
            raise_if_stopped: Called after a validation if the run continues. It may raise to stop
                training, then on all ranks. The runs are saved. They resume when they are attempted
                again.
        """
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
            if choice.engine == STACKED and (
                choice.needs_stack or self.stacks_alone or queue.has(key)
            ):
                yield from self._train_stack(attempt, queue, raise_if_stopped)
                continue
            result = self._train_alone(attempt, raise_if_stopped, choice)
            if result.engine == LIGHTNING:
                choices[key.loop_key] = LoopChoice(LIGHTNING, result.engine_reason)
            yield result

    def choose(self, trial: Trial) -> LoopChoice:
        """Return the loop that trains a trial, and why it is not a faster one."""
        reason = self._reason_for_lightning
        if reason is not None:
            return LoopChoice(LIGHTNING, reason)
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

    @property
    def _reason_for_lightning(self) -> str | None:
        """Why Lightning's loop trains all trials; None if each trial decides."""
        processes = ranks_asked(self.settings.workload.trainer)
        if processes > 1:
            return f"{processes} ranks train each trial"
        if self.engine == LIGHTNING:
            return ENGINE_SET
        return None

    def _train_alone(
        self, attempt: Attempt, raise_if_stopped: RaiseIfStopped, choice: LoopChoice
    ) -> TrialResult:
        """Train one attempt and return its result; an error in its code makes it a failed trial.

        Raises:
            Exception: Errors of the storage or of a rank; on several ranks any error, because the
                other ranks may be elsewhere in the code.
        """
        try:
            if choice.engine == LIGHTNING:
                self._lightning_loop(choice.reason).train(attempt, raise_if_stopped)
            else:
                self._train_single(attempt, raise_if_stopped, choice.reason)
        except Exception as raised:
            error = error_of_fit(raised)
            if isinstance(error, StorageError) or ranks.is_rank_loss(error) or ranks.world() > 1:
                raise
            self._fail(attempt, error)
        return attempt.result()

    def _lightning_loop(self, reason: str) -> LightningLoop:
        """Return Lightning's loop, which stores with a trial why no faster loop trains it."""
        return LightningLoop(self.settings, self.callbacks, reason)

    def _fail(self, attempt: Attempt, error: BaseException) -> None:
        """Make an attempt a failed trial, and remove its checkpoint."""
        if self.settings.checkpoints is not None:
            self.settings.checkpoints.remove(attempt.study_trial)
        if isinstance(error, UserError):
            text = str(error)
        else:
            text = f"{type(error).__name__}: {error_text(error)}"
        attempt.restart()
        attempt.status = Status.FAILED
        attempt.failure = text.strip().splitlines()[0].removesuffix(":")
        attempt.traceback = "".join(traceback.format_exception(error))

    def _train_single(
        self, attempt: Attempt, raise_if_stopped: RaiseIfStopped, reason: str
    ) -> None:
        """Train one attempt as a single network, else by Lightning's loop.

        Args:
            attempt: The attempt.
            raise_if_stopped: See `train`.
            reason: Why it is not stacked; empty if no stack is faster, as for a single attempt.
        """
        try:
            try:
                self._train_network(attempt, raise_if_stopped, reason)
            except CannotResume:
                attempt.restart()
                self._train_network(attempt, raise_if_stopped, reason)
        except NeedsLightning as error:
            # The module has done something for the first time that Lightning's loop alone supports.
            attempt.restart()
            self._lightning_loop(str(error)).train(attempt, raise_if_stopped)

    def _train_network(
        self, attempt: Attempt, raise_if_stopped: RaiseIfStopped, reason: str
    ) -> None:
        """Train a single network until its attempt ends or pauses, from a checkpoint if it has one.

        Raises:
            CannotResume: If its checkpoint cannot be restored. The file is removed.
            NeedsLightning: If the module does what only Lightning's loop supports.
        """
        trial = attempt.study_trial
        attempt.set_engine(SINGLE, reason)
        # Random layers, such as dropout, draw from the seed of the point.
        with preserve_rng_state(seed=trial.seed_for("order")):
            built, device = build_trial(self.settings, trial)
            if not isinstance(built.module, ImageClassifier):
                name = type(built.module).__name__
                raise NeedsLightning(reason or f"{name} {NO_CLASSIFIER}")
            run = NetworkRun.build_or_resume(attempt, built, self.settings, device)
            run.prune_unless_resumed(self.settings)
            group = RunGroup(SingleNetwork(run), self.settings)
            while attempt.status is None:
                for (outcome,) in group.train_intervals(1):
                    group.record(outcome)
                if attempt.status is None:
                    group.end_interval(raise_if_stopped)
            if attempt.status is Status.PAUSED:
                group.save_if_due(0, run_ends=True)
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
            choice = LoopChoice(SINGLE, unstacked.reason)
            yield self._train_alone(unstacked.attempt, raise_if_stopped, choice)

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
            for outcomes in intervals:
                for outcome in outcomes:
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
    """Record the validation of a stacked run; return its result, or None if it continues.

    The row of a run that has ended is empty.
    """
    run = group.networks.run_at(outcome.row)
    attempt = run.attempt
    try:
        group.record(outcome)
    except StorageError:
        raise
    except Exception as error:  # a goal or a reading of the user may raise anything
        group.networks.runs[outcome.row] = None
        filler.unstack_after_error(attempt, error)
        return None
    if attempt.status is None:
        return None
    if attempt.status is Status.PAUSED:
        group.save_if_due(outcome.row, outcome.snapshot_index, run_ends=True)
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
