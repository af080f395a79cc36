"""How long workers wait for a trial, and for a result to be stored, where many share a PostgreSQL
server."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.numbers import Sample
from benchmarks.options import Options
from benchmarks.text import table, times
from lit_dps.core.attempt import Attempt, AttemptRules
from lit_dps.core.config import StudyConfig
from lit_dps.core.errors import StorageError
from lit_dps.core.goal import Goal
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Status, TrialResult
from lit_dps.storage.cells import end_trial
from lit_dps.storage.header import declare
from lit_dps.storage.locks import peers
from lit_dps.storage.samplers import SobolSampler
from lit_dps.storage.schema import OWNER, POINT_ATTR
from lit_dps.storage.trial_queue import TrialQueue

TITLE = "Claims of many workers on PostgreSQL"
WORKERS = 64
SECONDS = 60.0  # of each way, after all workers have begun
POINTS = 100_000  # more than can be claimed in that time
SPACE = {
    "model.learning_rate": Range(1e-3, 1.0, "log"),
    "model.momentum": Range(0.5, 0.99, "linear"),
}
CURVE = {"step": list(range(16, 656, 16)), "val_error": [0.1] * 40, "train_loss": [1.0] * 40}


class OneLock(TrialQueue):
    """As until 2026-11: one lock for all, under which each claim reads all trials that wait."""

    def _claim(self, cell: Cell) -> Attempt | None:
        with self._locked():
            study = self._optuna_study(cell)
            waiting = study.get_trials(deepcopy=False)
            if not any(not t.state.is_finished() and OWNER not in t.user_attrs for t in waiting):
                return None
            claimed = study.ask(fixed_distributions=self.distributions)
            claimed.set_user_attr(OWNER, self.peers.owner)
            rung = self._next_rung(study, claimed.user_attrs[POINT_ATTR])
        return self._attempt(cell, claimed, partial(self.cell_race_limit, cell), rung)

    def store_result(self, result: TrialResult) -> TrialResult:
        trial = self._claims.pop((result.trial.cell, result.trial.point, result.trial.repeat))
        with self._locked():
            if self._is_still_claimed(trial):
                end_trial(self.storage, trial, result, 0)
        return result


@dataclass(frozen=True)
class Row:
    """One way to claim.

    Attributes:
        way: Its name.
        trials: Trials that were claimed and told, each point once.
        claims: Seconds of each claim.
        results: Seconds of storing each result.
    """

    way: str
    trials: int
    claims: Sample
    results: Sample


@dataclass(frozen=True)
class Claims:
    """Both ways, or why neither was measured."""

    workers: int
    seconds: float
    rows: tuple[Row, ...] = ()
    missing: str = ""


def measure(options: Options) -> Claims:
    """Seconds of claims and of results, of workers that train nothing; each is a thread with its
    own sessions."""
    from tests.support.postgres import Unavailable, server

    workers, seconds = (4, 2.0) if options.quick else (WORKERS, SECONDS)
    try:
        with server(connections=4 * workers + 20) as running:
            ways = {"rows of their own": TrialQueue, "one lock (before)": OneLock}
            urls = {way: running.new_database(f"claims_{i}") for i, way in enumerate(ways)}
            rows = [
                _measured(way, store, urls[way], workers, seconds) for way, store in ways.items()
            ]
    except Unavailable as reason:
        return Claims(workers, seconds, missing=str(reason))
    return Claims(workers, seconds, tuple(rows))


def verify(found: Claims) -> None:
    """Raises AssertionError unless trials were told both ways."""
    assert found.missing or all(row.trials for row in found.rows)


def show(found: Claims) -> str:
    """A row for each way."""
    if found.missing:
        return f"Not measured: {found.missing}. On Debian or Ubuntu: apt-get install postgresql."
    head = [
        "way",
        "trials an hour",
        "claim, median",
        "claim, 95 %",
        "result, median",
        "result, 95 %",
        "trials, ratio",
    ]
    before = found.rows[-1].trials
    rows = []
    for row in found.rows:
        hourly = f"{3600 * row.trials / found.seconds:,.0f}"
        each = [
            f"{at(sample, q):.3g} s" for sample in (row.claims, row.results) for q in (0.5, 0.95)
        ]
        rows.append([row.way, hourly, *each, times(Sample((row.trials / before,)))])
    return (
        f"{found.workers} workers that train nothing, on one cell of one study, for "
        f"{found.seconds:g} s each way; "
        "every result reports 32 values of its curve. Each point was run "
        f"once.\n\n{table(head, rows)}"
    )


def at(sample: Sample, quantile: float) -> float:
    """The value below which that share of a sample lies."""
    ordered = sorted(sample.values)
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


def _measured(way: str, store: type[TrialQueue], url: str, workers: int, seconds: float) -> Row:
    config = StudyConfig(name="s", space=SPACE, batch_sizes=[4], sparsities=[0.0], trials=POINTS)
    _, uid = declare(url, config, "claims", Goal(0.1), {}, {})
    claims, results, points = [], [], []
    begin = threading.Barrier(workers)

    def work(number: int) -> None:
        # A worker has sessions of its own, which are kept by the text of the URL.
        own = f"{url}?application_name=worker-{number}"
        with ExitStack() as stack:
            own_peers: Any = peers(own)
            stack.enter_context(closing(own_peers))
            mine = store(
                own,
                "s",
                [Cell(4)],
                POINTS,
                SobolSampler(SPACE, 0),
                0,
                AttemptRules(Goal(0.1)),
                uid=uid,
            )
            stack.callback(mine.storage.engine.dispose)
            begin.wait()
            end_of_all = time.monotonic() + seconds
            while time.monotonic() < end_of_all:
                start = time.monotonic()
                attempt = mine.claim_next()
                assert attempt is not None and attempt.trial is not None
                trial = attempt.trial
                claimed = time.monotonic()
                mine.store_result(TrialResult(trial, Status.INCOMPLETE, None, CURVE))
                claims.append(claimed - start)
                results.append(time.monotonic() - claimed)
                points.append(trial.point)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(points) != len({*points}):
        raise StorageError("a point was run twice")
    return Row(way, len(points), Sample(tuple(claims)), Sample(tuple(results)))
