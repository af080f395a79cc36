"""A goal over several checks: every engine, and a resumed run, decide alike."""

from __future__ import annotations

import dataclasses

import pytest

from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.parallel.process import Interrupted
from lit_dps.training.checkpoint_files import Checkpoints
from tests.support.runs import engine as engine_of
from tests.support.runs import runs
from tests.support.runs import train as train_all
from tests.unit.engines.test_engine import PARAMS, WORKLOAD, quiet  # noqa: F401

MEAN = {"rule": "mean_of_checks", "options": {"checks": 3}}
STAYS = {"rule": "stays_below", "options": {"checks": 3}}
GOAL = {"error": 0.3, "check_interval": 4, "max_steps": 100, "early_reject": True}
TRIALS = [Trial(Cell(16, 0.5), point, PARAMS) for point in range(2)]
WAYS = {"single": {}, "stacked": {"size": 2}, "lightning": {"lean": False}}


@pytest.mark.parametrize("rule", [MEAN, STAYS], ids=["mean", "stays"])
def test_every_engine_meets_the_goal_at_the_same_check(rule):
    goal = {**GOAL, **rule}
    results = {}
    for name, how in WAYS.items():
        trained = sorted(train_all(TRIALS, WORKLOAD, goal, **how), key=lambda r: r.trial.point)
        assert [result.engine for result in trained] == [name] * 2
        results[name] = trained
    single = train_all(TRIALS, WORKLOAD, GOAL)
    for i, ours in enumerate(results["single"]):
        errors = ours.curve["val_error"]
        assert ours.status is Status.COMPLETE and ours.steps is not None
        if rule is MEAN:
            assert sum(errors[-3:]) / 3 <= 0.3 < sum(errors[-4:-1]) / 3
        else:
            assert max(errors[-3:]) <= 0.3
        assert ours.steps > single[i].steps >= 8
        for name in ("stacked", "lightning"):
            other = results[name][i]
            assert (other.steps, other.status) == (ours.steps, ours.status)
            assert other.curve["val_error"] == pytest.approx(errors, abs=1.01 / 179)


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_a_run_that_resumes_within_a_window_ends_as_an_unbroken_one(tmp_path, how):
    goal = {**GOAL, **MEAN}
    unbroken = train_all(TRIALS, WORKLOAD, goal, **how)
    # The check before the last one lies within the window of the last one.
    stop = min(result.steps for result in unbroken) // 4 - 1
    checkpoints = Checkpoints(tmp_path, "study", minutes=0)
    resumed = []
    for interrupted_after in (stop, 10**6):
        checks = 0

        def at_check() -> None:
            nonlocal checks
            checks += 1
            if checks == interrupted_after:  # noqa: B023
                raise Interrupted("test")

        engine = engine_of(WORKLOAD, goal, checkpoints=checkpoints, **how)
        try:
            resumed += engine.train(runs(TRIALS, goal), at_check)
        except Interrupted:
            assert [*tmp_path.rglob("*.ckpt")]

    def plain(results):
        return {r.trial.point: dataclasses.replace(r, seconds=0.0) for r in results}

    assert plain(resumed) == plain(unbroken)
    for result in resumed:
        assert result.curve["step"][0] == 4
