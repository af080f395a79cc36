"""The Optuna side of a study: declares its trials, hands them out, takes their results.

A point is declared by enqueueing a trial that holds its index. A worker claims the first waiting
trial. In a sqlite file, workers declare, claim and store trials under one lock, because sqlite lets
two processes take the same waiting trial. On a server, only declaring needs this lock: each claim
and each result has a separate lock.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import optuna
from optuna.trial import TrialState

from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import StorageError
from lit_dps.core.goal import Goal
from lit_dps.core.racing import last_step, rungs
from lit_dps.core.repeats import RepeatPlan
from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.storage.cells import (
    distance,
    end,
    give_up,
    open_cell,
    race_limit,
    ran_to,
    report,
    steps_of,
    stored_steps,
)
from lit_dps.storage.claim_queries import claim_waiting, fewest_steps, has_waiting, pruned_results
from lit_dps.storage.database import open_storage, storage_errors
from lit_dps.storage.header import attributes, uid_of
from lit_dps.storage.locks import ServerPeers, peers
from lit_dps.storage.repeat_queue import Repeats
from lit_dps.storage.samplers import SearchSampler
from lit_dps.storage.schema import ENVIRONMENT, OWNER, POINT_ATTR, REPEAT_ATTR, RESULT_ATTR, RUNS
from lit_dps.storage.sobol import SobolSampler, distributions

POLL = 1.0  # seconds
MAX_QUEUED = 50  # points of a cell that wait at a time


class Store:
    """The trials of one study, as one worker sees them.

    Args:
        url: Optuna storage URL.
        name: The study's name; its header must exist.
        cells: Cells to run, in this order.
        points: Trials of each cell: points 0 to points - 1.
        sampler: Where the points lie.
        seed: The study's seed, carried by every trial.
        goal: When trials stop.
        further: Further values of the goal's metric that their runs answer.
        slack: How far beyond the best of its cell a trial has to run; see `lit_dps.core.racing`.
        levels: Rungs, ending with infinity; by default those of `lit_dps.core.racing.rungs`.
        uid: What `lit_dps.storage.header.declare` said of the study; None asks nothing.
        run_on, metrics: Whether its runs go on to the budget after their goal; further metrics that
            their curves keep.
        plan: What is repeated on fresh seeds once the search is through.
        run_number: The number of this run of the study (`begin_run`). Trials that failed in earlier
            runs are retried.
        environment: Key of the environment in which this process runs trials; None if it is not
            stored.
    """

    def __init__(
        self,
        url: str,
        name: str,
        cells: Sequence[Cell],
        points: int,
        sampler: SobolSampler | SearchSampler,
        seed: int,
        goal: Goal,
        further: Sequence[float] = (),
        slack: float | None = None,
        levels: Sequence[float] | None = None,
        uid: str | None = None,
        run_number: int = 0,
        run_on: bool = False,
        metrics: Sequence[str] = (),
        plan: RepeatPlan = RepeatPlan(),  # noqa: B008 (it is frozen)
        environment: str | None = None,
    ):
        self.storage, self.peers = open_storage(url), peers(url)
        self.uid, self.run_number = uid, run_number
        self.environment = environment
        self.url, self.name, self.cells, self.points, self.sampler, self.seed = (
            url,
            name,
            cells,
            points,
            sampler,
            seed,
        )
        self.goal, self.further, self.slack, self.run_on, self.metrics = (
            goal,
            further,
            slack,
            run_on,
            metrics,
        )
        self.rungs = (
            (math.inf,) if slack is None else levels or rungs(goal.check_interval, goal.max_steps)
        )
        self.distributions = distributions(sampler.space)
        self._locks_rows = isinstance(self.peers, ServerPeers)
        self._searches = isinstance(sampler, SearchSampler)
        self.repeats = Repeats(
            self.storage, name, uid, self.peers, plan, self.distributions, run_number
        )
        self._claims: dict[tuple[Cell, int, int], optuna.Trial] = {}
        self._studies, self._left = dict[Cell, optuna.Study](), dict[Cell, dict[int, int]]()
        self._limits: dict[Cell, tuple[float, float]] = {}
        self._repeated, self._ends = (
            0,
            dict[Cell, float](),
        )  # whose repeats are handed out; where those end
        # whose points are handed out; whether there may be more of it to declare; whether nothing
        # was left of any
        self._at, self._more, self._searched = -1, False, False

    def next_run(self) -> Attempt | None:
        """The next trial to run; None if no point is left that nobody has run or is running.

        Cells come in their order, and once more from the first: a process that died meanwhile left
        its trials behind, and a run that paused may have to go on. After them come the repeats.
        """
        if self._searched and (run := self._next_repeat()) is not None:
            return run
        for entered in range(len(self.cells) + 1):
            if entered or self._at < 0:
                self._at, self._more = (self._at + 1) % len(self.cells), True
            cell = self.cells[self._at]
            self._leave_others(cell)
            while (run := self._claim(cell)) is None and self._more:
                with self._alone():
                    # Another process may have declared trials while this process waited for the
                    # lock.
                    if not has_waiting(self.storage, self._study(cell)._study_id, self.points):
                        self._more = self._declare(cell)
            if run is not None:
                return run
        self._searched = True
        return self._next_repeat()

    def _next_repeat(self) -> Attempt | None:
        cells = len(self.cells) if self.repeats.plan.count else 0
        for i in range(self._repeated, self._repeated + cells):
            self._repeated = i % cells
            self._leave_others(cell := self.cells[self._repeated])
            with self._alone():
                found = self.repeats.claim(cell, self._study(cell))
            if found is not None:
                claimed, self._ends[cell] = found
                return self._run(cell, claimed, partial(self._ends.__getitem__, cell))
        return None

    def _run(
        self, cell: Cell, claimed: optuna.Trial, limit: Callable[[], float], *searched: float | bool
    ) -> Attempt:
        if self.environment is not None:
            claimed.set_user_attr(ENVIRONMENT, self.environment)
        attrs = claimed.user_attrs
        trial = Trial(
            cell, attrs[POINT_ATTR], dict(claimed.params), self.seed, attrs.get(REPEAT_ATTR, 0)
        )
        self._claims[cell, trial.point, trial.repeat] = claimed
        return Attempt(trial, self.goal, self.further, limit, *searched, metrics=self.metrics)

    def tell(self, result: TrialResult) -> TrialResult:
        """Stores a result for good, unless this process was taken for dead and its trial given up.

        Returns the result with the number of its attempt. Raises StorageError if it cannot be
        written.
        """
        cell, claim = (
            result.trial.cell,
            (result.trial.cell, result.trial.point, result.trial.repeat),
        )
        trial = self._claims[claim]
        with self._alone(trial._trial_id):
            if self._still_mine(trial):
                last_run = 0
                if result.status is Status.FAILED:
                    last_run = attributes(self.storage, self.name).get(RUNS, 0)
                report(trial, result)
                end(trial, result, last_run)
        del self._claims[claim]
        if not result.trial.repeat:
            asked, limit = self._limits.get(cell, (-math.inf, math.inf))
            self._limits[cell] = asked, min(limit, last_step(result.steps, self.slack))
        return dataclasses.replace(result, attempt=trial.number)

    def limit_of(self, trial: Trial) -> float:
        """The step that a trial which was handed out has to reach, by what is stored so far; see
        `limit`."""
        return self._ends[trial.cell] if trial.repeat else self.limit(trial.cell)

    def limit(self, cell: Cell) -> float:
        """The step that trials of a cell have to reach, by what all workers have stored of it so
        far.

        Looks into the storage at most once in `POLL` seconds: a limit that came down meanwhile only
        saves less.
        """
        if self.slack is None:
            return math.inf
        asked, limit = self._limits.get(cell, (-math.inf, math.inf))
        if time.monotonic() - asked > POLL:
            with storage_errors(self.url):
                limit = last_step(
                    fewest_steps(self.storage, self._study(cell)._study_id), self.slack
                )
            self._limits[cell] = time.monotonic(), limit
        return limit

    def abandon(self) -> None:
        """Release the claimed trials that have no result, so that they can be claimed again."""
        claims, self._claims = self._claims, {}
        for trial in claims.values():
            with self._alone(trial._trial_id):
                if self._still_mine(trial):
                    give_up(trial.study, trial.number, trial.user_attrs)

    def leave(self) -> None:
        """Abandon all trials, and show the other processes that this one has ended."""
        self.abandon()
        with storage_errors(self.url):
            self.peers.leave()

    @contextmanager
    def _alone(self, target: int | str | None = None) -> Iterator[None]:
        """Hold a lock, so that no other process changes the study, or one trial.

        Args:
            target: The id of the trial to lock, or the owner for what only this process changes.
                None locks the entire study; so does every lock in a sqlite file.

        Raises:
            StorageError: if the study was deleted and made again since this process opened it.
        """
        lock = f"of {target}"
        if target is None or not self._locks_rows:
            lock = "storage"
        with storage_errors(self.url), self.peers.lock(lock):
            if self.uid is not None and uid_of(self.storage, self.name) != self.uid:
                raise StorageError(
                    f"study {self.name!r} was deleted or made anew while this process worked on it"
                )
            yield

    def _still_mine(self, trial: optuna.Trial) -> bool:
        """Whether a trial still runs in this process's name, by what the database itself holds."""
        stored = self.storage.get_trial(trial._trial_id)
        return (
            stored.state is TrialState.RUNNING
            and stored.user_attrs.get(OWNER) == trial.user_attrs[OWNER]
        )

    def _declare(self, cell: Cell) -> bool:
        """Enqueues the next points of a cell that nobody has run or is running, also those of dead
        processes.

        Not all at once, since Optuna reads all that wait whenever one is taken. Returns whether
        more are missing.
        """
        study = self._study(cell)
        running, ran, waiting = set(), {}, 0
        for trial in study.get_trials(deepcopy=False):
            point, finished = trial.user_attrs[POINT_ATTR], trial.state.is_finished()
            waiting += trial.state is TrialState.WAITING and point < self.points
            # one without an owner was cut short while this lock was held, so nobody runs it
            if trial.state is TrialState.RUNNING and not self.peers.alive(
                trial.user_attrs.get(OWNER)
            ):
                finished = True
                with self._alone(trial._trial_id):
                    # Its process may have stored the result since, if only its connection was lost.
                    trial = self.storage.get_trial(trial._trial_id)
                    give_up(study, trial.number, trial.user_attrs)
            if finished:
                ran[point] = max(
                    ran.get(point, -math.inf), ran_to(trial.user_attrs, self.run_number)
                )
            else:
                running.add(point)
        raced = race_limit(study, self.slack)
        for limit in self.rungs if raced == math.inf else [raced]:
            missing = {
                p for p in range(self.points) if p not in running and ran.get(p, -math.inf) < limit
            }
            if missing:
                break
        steps, room = self._steps_nearby(cell), max(0, MAX_QUEUED - waiting)
        for point in sorted(missing, key=lambda point: (steps.get(point, math.inf), point))[:room]:
            study.enqueue_trial({}, user_attrs={POINT_ATTR: point})
        return len(missing) > room or limit < raced

    def _study(self, cell: Cell) -> optuna.Study:
        """The cell's Optuna study, the same object while the cell is run: a new one reads all its
        trials anew."""
        if cell not in self._studies:
            self._studies[cell] = open_cell(self.storage, self.name, cell, self.uid, self.sampler)
        return self._studies[cell]

    def _leave_others(self, cell: Cell) -> None:
        """Keeps the steps to result alone of other cells that are not run any more: Optuna keeps
        all curves it read."""
        for other in self._studies.keys() - {claim[0] for claim in self._claims} - {cell}:
            self._left[other] = steps_of(self._studies.pop(other))

    def _steps_nearby(self, cell: Cell) -> dict[int, int]:
        """Steps to result, by point, in the nearest of the cells to run that has any, also of an
        earlier run.

        A race is short where a good point runs first, and points that are good in one cell are good
        in the next.
        """
        others = {*self.cells} - {cell} if self.slack is not None else ()
        for other in sorted(others, key=lambda other: (distance(other, cell), other)):
            if other not in self._left:
                self._left[other] = stored_steps(self.storage, self.name, other)
            if self._left[other]:
                return self._left[other]
        return {}

    def _claim(self, cell: Cell) -> Attempt | None:
        """Claim a waiting trial of a cell for this process, and draw its metaparameters."""
        # A search depends on the trials that other processes run, so the processes draw in turn.
        # Otherwise the lock of this process is enough. It begins the session; without a session the
        # other processes would regard this process as dead.
        target = None
        if self._locks_rows and not self._searches:
            target = self.peers.owner
        if cell not in self._studies:
            with self._alone():
                self._study(cell)
        study = self._studies[cell]
        with self._alone(target):
            claimed = self._take(study)
            if claimed is None:
                return None
            rung = self._next_rung(study, claimed.user_attrs[POINT_ATTR])
        return self._run(cell, claimed, partial(self.limit, cell), rung, self.run_on)

    def _take(self, study: optuna.Study) -> optuna.Trial | None:
        if not has_waiting(self.storage, study._study_id, self.points):
            return None
        if self._searches:
            claimed = study.ask(fixed_distributions=self.distributions)
            claimed.set_user_attr(OWNER, self.peers.owner)
            return claimed
        trial_id = claim_waiting(self.storage, study._study_id, self.peers.owner)
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
        ran = -math.inf
        if len(self.rungs) > 1:
            for result in pruned_results(self.storage, study._study_id, point):
                ran = max(ran, ran_to({RESULT_ATTR: result}))
        return next((rung for rung in self.rungs if rung > ran), math.inf)
