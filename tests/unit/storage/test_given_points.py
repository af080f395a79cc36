"""Points whose metaparameters the caller gives, and a cost after which every trial stops."""

from __future__ import annotations

import math

import pytest

from lit_dps.core.attempt import AttemptRules
from lit_dps.core.config import StudyConfig
from lit_dps.core.goal import Goal
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Status, TrialResult
from lit_dps.storage.header import declare
from lit_dps.storage.samplers import make_sampler
from lit_dps.storage.trial_queue import TrialQueue

RATE = "model.learning_rate"
SPACE = {RATE: Range(1e-5, 1.0, "log")}
GOAL, CELL = Goal(0.1, 1, 10_000), Cell(16)


def queue(folder, points: list[float], cost_limit: float = math.inf, race_factor=1.0) -> TrialQueue:
    """A worker's queue of trials at some rates."""
    url = f"sqlite:///{folder}/study.db"
    config = StudyConfig(
        name="s",
        batch_sizes=[16],
        sparsities=[0.0],
        trials=len(points),
        space=SPACE,
        race_factor=race_factor,
    )
    _, uid = declare(url, config, "w", GOAL, {}, {})
    sampler = make_sampler(config, GOAL, points=[{RATE: rate} for rate in points])
    return TrialQueue(
        url,
        "s",
        [CELL],
        len(points),
        sampler,
        0,
        AttemptRules(GOAL),
        uid=uid,
        race_factor=race_factor,
        cost_limit=cost_limit,
    )


def outraced(trial, steps: int) -> TrialResult:
    return TrialResult(trial, Status.OUTRACED, None, {"step": [steps], "val_error": [0.5]})


def complete(trial, steps: int) -> TrialResult:
    return TrialResult(trial, Status.COMPLETE, steps, {"step": [steps], "val_error": [0.1]})


def test_each_trial_has_its_given_rate_and_keeps_it(tmp_path):
    worker = queue(tmp_path, [0.1, 0.2])
    attempts = [worker.claim_next(), worker.claim_next()]
    assert [attempt.trial.params[RATE] for attempt in attempts] == [0.1, 0.2]
    worker.store_result(complete(attempts[0].trial, 50))
    worker.store_result(outraced(attempts[1].trial, 20))
    again = queue(tmp_path, [0.3, 0.4, 0.5])
    drawn = {}
    while (attempt := again.claim_next()) is not None:
        drawn[attempt.trial.point] = attempt.trial.params[RATE]
        again.store_result(outraced(attempt.trial, 50))
    # Point 1 must run to the K of point 0, at the rate that it had. Point 2 is new.
    assert drawn == {1: 0.2, 2: 0.5}


@pytest.mark.parametrize("race_factor", [None, 1.0])
def test_every_trial_stops_at_the_cost_limit(tmp_path, race_factor):
    worker = queue(tmp_path, [0.1, 0.2], cost_limit=70, race_factor=race_factor)
    first = worker.claim_next()
    assert first.read_race_limit() == 70 and first.pause_at == math.inf
    worker.store_result(outraced(first.trial, 70))
    second = worker.claim_next()
    assert second.trial.point == 1 and second.read_race_limit() == 70
    worker.store_result(outraced(second.trial, 70))
    assert worker.claim_next() is None
    # A larger limit continues both.
    later = queue(tmp_path, [0.1, 0.2], cost_limit=90, race_factor=race_factor)
    assert later.claim_next().read_race_limit() == 90


def test_the_race_stops_a_trial_before_the_cost_limit(tmp_path):
    worker = queue(tmp_path, [0.1, 0.2], cost_limit=70)
    worker.store_result(complete(worker.claim_next().trial, 40))
    assert worker.claim_next().read_race_limit() == 40
