"""The queue of a study's trials: enqueues points, hands out trials, stores their results.

The life of a trial:

1. A worker enqueues the next points of a cell. Each becomes a WAITING trial that holds its point.
2. A worker claims the first waiting trial. It is RUNNING, and its user attribute `owner` names the
   process.
3. The worker trains it and stores the result, which ends the trial.
4. If the process is killed instead, its owner is no longer alive. The next worker that enqueues
   points of the cell ends the trial as failed, and enqueues its point again.

Before a worker writes a result, it checks under a lock that it still owns the trial. So each result
is stored exactly once. In a SQLite file, workers enqueue, claim and store under one lock, because
SQLite lets two processes claim the same waiting trial. On a server, only enqueueing needs this
lock: each claim and each result has a separate lock.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import optuna
from optuna.trial import FrozenTrial, TrialState, create_trial

from lit_dps.core.attempt import Attempt, AttemptRules
from lit_dps.core.errors import StorageError
from lit_dps.core.racing import CellCoverage, default_rungs, next_rung, race_limit
from lit_dps.core.repeats import RepeatPlan
from lit_dps.core.statistic import MINIMUM, Statistic
from lit_dps.core.trial import Cell, Status, Trial, TrialKey, TrialResult
from lit_dps.core.unit import STEPS, Cost
from lit_dps.storage import schema
from lit_dps.storage.bulk import add_trials
from lit_dps.storage.cells import (
    cell_distance,
    claim_waiting,
    costs_by_point,
    end_interrupted,
    end_trial,
    has_waiting,
    open_cell,
    pruned_results,
    stored_costs_by_point,
    stored_reruns_above,
)
from lit_dps.storage.database import open_storage, storage_errors
from lit_dps.storage.locks import ServerPeers, peers
from lit_dps.storage.repeat_queue import claim_repeat
from lit_dps.storage.samplers import PointSampler, SearchSampler, distributions
from lit_dps.storage.schema import ENVIRONMENT, OWNER, POINT_ATTR, REPEAT_ATTR, RESULT_ATTR
from lit_dps.storage.stored_format import study_attributes

POLL_SECONDS = 1.0  # how often a running trial reads K* of its cell; a late value only saves less
# Optuna reads all waiting trials at each claim, so few of a cell wait at a time.
MAX_QUEUED = 50


class CachedLimit(NamedTuple):
    """The race limit of a cell, and when it was read."""

    read_at: float  # seconds of time.monotonic
    cost: float


UNREAD_LIMIT = CachedLimit(-math.inf, math.inf)


@dataclass(eq=False)
class TrialQueue:
    """The trials of one study, as one worker sees them.

    Attributes:
        url: Optuna storage URL.
        name: The study's name; its header must exist.
        cells: Cells to run, in this order.
        trials_per_cell: The number of trials of each cell (`study.trials`), at points from 0.
        sampler: Draws the metaparameters of the points.
        trial_seed: Seed from which the seeds of the trials are derived (`Trial.seed`).
        rules: The goal of the trials, and what their curves keep.
        race_factor: A trial must run to this multiple of K* (`lit_dps.core.racing`); None to
            max_steps.
        rungs: Steps at which the trials of a cell without a complete trial pause, then infinity;
            by default `lit_dps.core.racing.default_rungs`. Without a race, or with a cost limit,
            only infinity.
        uid: The study's id (`lit_dps.storage.header.declare`); None skips the check of it.
        run_number: The number of this run of the study (`begin_run`). Trials that failed in earlier
            runs are retried.
        repeat_plan: What is repeated on fresh seeds after the search.
        environment: Key of the environment in which this process runs trials; None if it is not
            recorded.
        statistic: What K* is.
        cost_limit: The cost after which each trial of the search stops, beside the race.
    """

    url: str
    name: str
    cells: Sequence[Cell]
    trials_per_cell: int
    sampler: PointSampler
    trial_seed: int
    rules: AttemptRules
    race_factor: float | None = None
    rungs: Sequence[float] = ()
    uid: str | None = None
    run_number: int = 0
    repeat_plan: RepeatPlan = RepeatPlan()
    environment: str | None = None
    statistic: Statistic = MINIMUM
    cost_limit: float = math.inf

    def __post_init__(self):
        self.storage = open_storage(self.url)
        self.sampler.read_other_studies(self.storage)
        self.peers = peers(self.url)
        self.distributions = distributions(self.sampler.space)
        if self.race_factor is None or self.cost_limit < math.inf:
            self.rungs = (math.inf,)
        elif not self.rungs:
            self.rungs = default_rungs(self.rules.goal.check_interval, self.rules.goal.max_steps)
        self._locks_rows = isinstance(self.peers, ServerPeers)
        self._is_search = isinstance(self.sampler, SearchSampler)
        self._claims: dict[TrialKey, optuna.Trial] = {}
        self._optuna_studies: dict[Cell, optuna.Study] = {}  # of the cells that this process runs
        self._finished_costs: dict[Cell, dict[int, Cost]] = {}  # of the other cells
        self._limits: dict[Cell, CachedLimit] = {}
        self._repeat_limits: dict[Cell, float] = {}
        self._position = 0  # of the cell whose points are handed out
        self._repeat_position = 0  # of the cell whose repeats are handed out
        self._has_more_points = True  # whether points of this cell may have to be enqueued
        self._is_search_over = False

    def claim_next(self) -> Attempt | None:
        """Return the next attempt to run; None if every point is finished or runs elsewhere.

        The cells come in their order, and once more from the first: a process may have died
        meanwhile, or a paused trial may have to continue. The repeats follow.
        """
        if self._is_search_over:
            attempt = self._claim_repeat()
            if attempt is not None:
                return attempt
        attempt = self._enqueue_and_claim(self.cells[self._position])
        for _ in self.cells:
            if attempt is None:
                attempt = self._enqueue_and_claim(self._next_cell())
        if attempt is None:
            self._is_search_over = True
            attempt = self._claim_repeat()
        return attempt

    def store_result(self, result: TrialResult) -> TrialResult:
        """Store a result, and return it with the number of its attempt.

        Nothing is stored if another process has ended the trial, because it regarded this process
        as dead.

        Raises:
            StorageError: if the result cannot be written.
        """
        trial = result.trial
        claimed = self._claims[trial.key]
        with self._locked(claimed._trial_id):
            if self._is_still_claimed(claimed):
                last_run = 0
                if result.status is Status.FAILED:
                    last_run = study_attributes(self.storage, self.name).get(schema.RUNS, 0)
                end_trial(self.storage, claimed, result, last_run)
        del self._claims[trial.key]
        if not trial.repeat:
            # The result may change the limit, which is read again.
            known = self._limits.get(trial.cell, UNREAD_LIMIT)
            self._limits[trial.cell] = CachedLimit(-math.inf, known.cost)
        return dataclasses.replace(result, attempt=claimed.number)

    def trial_race_limit(self, trial: Trial) -> float:
        """Return the cost that a claimed trial must reach, by the results stored so far."""
        if trial.repeat:
            return self._repeat_limits[trial.cell]
        return self.cell_race_limit(trial.cell)

    def cell_race_limit(self, cell: Cell) -> float:
        """Return the cost that a cell's trials must reach, by the results of all workers so far.

        The storage is read at most once in `POLL_SECONDS`. While it cannot be read, the last limit
        holds: limits only fall, so a trial runs longer than it has to.
        """
        if self.race_factor is None:
            return self.cost_limit
        cached = self._limits.get(cell, UNREAD_LIMIT)
        if time.monotonic() - cached.read_at <= POLL_SECONDS:
            return cached.cost
        try:
            with storage_errors(self.url):
                costs = costs_by_point(self.storage, self._optuna_study(cell)._study_id)
        except StorageError:
            cost = min(cached.cost, self.cost_limit)
        else:
            limit = race_limit(costs.values(), self.race_factor, self.statistic)
            cost = min(limit, self.cost_limit)
        self._limits[cell] = CachedLimit(time.monotonic(), cost)
        return cost

    def release_claims(self) -> None:
        """Release the claimed trials that have no result, so that they can be claimed again."""
        claims, self._claims = self._claims, {}
        for trial in claims.values():
            with self._locked(trial._trial_id):
                if self._is_still_claimed(trial):
                    end_interrupted(trial.study, trial.number, trial.user_attrs)

    def leave(self) -> None:
        """Release all trials, and show the other processes that this one has ended."""
        self.release_claims()
        with storage_errors(self.url):
            self.peers.leave()

    # ---- Locks ----

    @contextmanager
    def _locked(self, target: int | str | None = None) -> Iterator[None]:
        """Hold a lock, so that no other process changes the study, or one trial.

        Args:
            target: The id of the trial to lock, or the owner for what only this process changes.
                None locks the entire study; so does every lock in a SQLite file.

        Raises:
            StorageError: if the study was deleted and made again since this process opened it.
        """
        lock = f"of {target}"
        if target is None or not self._locks_rows:
            lock = "storage"
        with storage_errors(self.url), self.peers.lock(lock):
            if self.uid is not None:
                uid = study_attributes(self.storage, self.name).get(schema.UID)
                if uid != self.uid:
                    raise StorageError(
                        f"study {self.name!r} was deleted or created again during this run. "
                        "Start the command again.",
                        key="study.name",
                        value=self.name,
                    )
            yield

    def _is_still_claimed(self, trial: optuna.Trial) -> bool:
        """Return True if the database still has this process as the owner of a running trial."""
        stored = self.storage.get_trial(trial._trial_id)
        is_ours = stored.user_attrs.get(OWNER) == trial.user_attrs[OWNER]
        return stored.state is TrialState.RUNNING and is_ours

    # ---- Enqueueing points ----

    def _next_cell(self) -> Cell:
        """Move to the next cell, after the last one to the first, and return it."""
        self._position = (self._position + 1) % len(self.cells)
        self._has_more_points = True
        return self.cells[self._position]

    def _enqueue_and_claim(self, cell: Cell) -> Attempt | None:
        """Claim a trial of a cell; enqueue points if none waits."""
        self._close_cells_except(cell)
        attempt = self._claim(cell)
        while attempt is None and self._has_more_points:
            with self._locked():
                # Another process may have enqueued points while this process waited for the lock.
                if not has_waiting(
                    self.storage, self._optuna_study(cell)._study_id, self.trials_per_cell
                ):
                    self._has_more_points = self._enqueue_points(cell)
            attempt = self._claim(cell)
        return attempt

    def _enqueue_points(self, cell: Cell) -> bool:
        """Enqueue the next points of a cell; return whether more have to be enqueued later."""
        study = self._optuna_study(cell)
        trials = self.end_dead_trials(study)
        coverage = self._coverage_of(trials)
        costs_here = costs_by_point(self.storage, study._study_id)
        limit = race_limit(costs_here.values(), self.race_factor, self.statistic)
        limit = min(limit, self.cost_limit)
        if limit < math.inf:
            missing = coverage.points_short_of_limit(self.trials_per_cell, limit)
            is_last = True
        else:
            # Too few trials of the cell are complete for a limit, or the study does not race.
            missing, is_last = coverage.points_short_of_rung(self.trials_per_cell, self.rungs)
        # Good points of a similar cell are probably good here. A good first result ends the others
        # early.
        costs = self._costs_in_nearest_cell(cell)
        missing.sort(key=lambda point: (costs.get(point, math.inf), point))
        room = max(0, MAX_QUEUED - self._count_waiting(trials))
        waiting = []
        for point in missing[:room]:
            # As by `optuna.Study.enqueue_trial`, which makes a transaction for each trial.
            attrs = {POINT_ATTR: point, REPEAT_ATTR: 0}
            fixed = {"fixed_params": {}}
            waiting.append(
                create_trial(state=TrialState.WAITING, system_attrs=fixed, user_attrs=attrs)
            )
        add_trials(self.storage, study, waiting)
        return len(missing) > room or not is_last

    def end_dead_trials(self, study: optuna.Study) -> list[FrozenTrial]:
        """End the trials of an Optuna study whose processes are dead, and return all its trials."""
        trials = []
        for trial in study.get_trials(deepcopy=False):
            # A trial without an owner was interrupted within a claim, so no process runs it.
            is_running = trial.state is TrialState.RUNNING
            if is_running and not self.peers.alive(trial.user_attrs.get(OWNER)):
                with self._locked(trial._trial_id):
                    # Its process may have stored the result since, if only its connection was lost.
                    stored = self.storage.get_trial(trial._trial_id)
                    end_interrupted(study, stored.number, stored.user_attrs)
                trial = self.storage.get_trial(trial._trial_id)
            trials.append(trial)
        return trials

    def _coverage_of(self, trials: Iterable[FrozenTrial]) -> CellCoverage:
        """Return which points the trials of a cell take, and how far their results reach."""
        coverage = CellCoverage()
        for trial in trials:
            point = trial.user_attrs[POINT_ATTR]
            if trial.state.is_finished():
                cost = stored_reruns_above(trial.user_attrs, self.run_number)
                step = stored_reruns_above(trial.user_attrs, self.run_number, STEPS)
                coverage.add(point, cost, step)
            else:
                coverage.taken.add(point)
        return coverage

    def _count_waiting(self, trials: Iterable[FrozenTrial]) -> int:
        """Return how many of a cell's trials wait, among the points of this queue."""
        waiting = [trial for trial in trials if trial.state is TrialState.WAITING]
        return sum(trial.user_attrs[POINT_ATTR] < self.trials_per_cell for trial in waiting)

    def _optuna_study(self, cell: Cell) -> optuna.Study:
        """Return the Optuna study of a cell.

        It is the same object as long as the cell is run, because a new one reads all trials again.
        """
        if cell not in self._optuna_studies:
            unit = self.rules.goal.cost_unit
            study = open_cell(self.storage, self.name, cell, self.uid, self.sampler, unit=unit)
            self._optuna_studies[cell] = study
        return self._optuna_studies[cell]

    def _close_cells_except(self, cell: Cell) -> None:
        """Keep only the costs of cells without claims; Optuna would keep their curves."""
        claimed = {claim[0] for claim in self._claims}
        for other in self._optuna_studies.keys() - claimed - {cell}:
            study = self._optuna_studies.pop(other)
            self._finished_costs[other] = costs_by_point(self.storage, study._study_id)

    def _costs_in_nearest_cell(self, cell: Cell) -> dict[int, Cost]:
        """Return costs by point of the nearest cell that has any; {} without racing."""
        if self.race_factor is None:
            return {}
        others = set(self.cells) - {cell}
        for other in sorted(others, key=lambda other: (cell_distance(other, cell), other)):
            if other not in self._finished_costs:
                costs = stored_costs_by_point(self.storage, self.name, other)
                self._finished_costs[other] = costs
            if self._finished_costs[other]:
                return self._finished_costs[other]
        return {}

    # ---- Claiming ----

    def _claim(self, cell: Cell) -> Attempt | None:
        """Claim a waiting trial of a cell for this process, and draw its metaparameters."""
        # A search draws from the results of all processes, so one process draws at a time.
        # Other samplers need only the lock of this process. Taking it also begins the session of
        # this process; without a session the other processes would regard it as dead.
        target = None
        if self._locks_rows and not self._is_search:
            target = self.peers.owner
        if cell not in self._optuna_studies:
            with self._locked():
                self._optuna_study(cell)
        study = self._optuna_studies[cell]
        with self._locked(target):
            claimed = self._claim_trial(study)
            if claimed is None:
                return None
            rung = self._next_rung(study, claimed.user_attrs[POINT_ATTR])
        return self._attempt(cell, claimed, partial(self.cell_race_limit, cell), rung)

    def _claim_trial(self, study: optuna.Study) -> optuna.Trial | None:
        if not has_waiting(self.storage, study._study_id, self.trials_per_cell):
            return None
        if self._is_search:
            claimed = study.ask(fixed_distributions=self.distributions)
            claimed.set_user_attr(OWNER, self.peers.owner)
            return claimed
        attributes = {OWNER: self.peers.owner, ENVIRONMENT: self.environment}
        trial_id = claim_waiting(self.storage, study._study_id, self.trials_per_cell, attributes)
        if trial_id is None:
            return None
        # Without Optuna's cache, which would read all trials to find this one.
        direct = copy.copy(study)
        direct._storage = self.storage
        claimed = optuna.Trial(direct, trial_id)
        for name, distribution in self.distributions.items():
            claimed._suggest(name, distribution)
        return claimed

    def _next_rung(self, study: optuna.Study, point: int) -> float:
        """Return the first rung that no attempt at a point has reached; infinity after the last."""
        reached = -math.inf
        if len(self.rungs) > 1:
            for result in pruned_results(self.storage, study._study_id, point):
                reached = max(reached, stored_reruns_above({RESULT_ATTR: result}, unit=STEPS))
        return next_rung(reached, self.rungs)

    def _claim_repeat(self) -> Attempt | None:
        """Claim a repeat of any cell, beginning with the cell of the last one."""
        if not self.repeat_plan.count:
            return None
        start = self._repeat_position
        for i in range(len(self.cells)):
            self._repeat_position = (start + i) % len(self.cells)
            cell = self.cells[self._repeat_position]
            self._close_cells_except(cell)
            with self._locked():
                repeat = claim_repeat(self, cell, self._optuna_study(cell))
            if repeat is not None:
                self._repeat_limits[cell] = repeat.limit
                limit = partial(self._repeat_limits.__getitem__, cell)
                return self._attempt(cell, repeat.trial, limit)
        return None

    def _attempt(
        self,
        cell: Cell,
        claimed: optuna.Trial,
        get_limit: Callable[[], float],
        rung: float = math.inf,
    ) -> Attempt:
        """Return the attempt at a claimed trial."""
        if ENVIRONMENT not in claimed.user_attrs:
            claimed.set_user_attr(ENVIRONMENT, self.environment)
        attrs = claimed.user_attrs
        repeat = attrs[REPEAT_ATTR]
        trial = Trial(cell, attrs[POINT_ATTR], dict(claimed.params), self.trial_seed, repeat)
        self._claims[trial.key] = claimed
        return self.rules.attempt(trial, get_limit, rung)
