"""A goal over several checks, and its budgets: every engine, and a resumed run, decide alike."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from lightning.pytorch import Trainer
from torch import nn

from lit_dps.core.goal import GoalRule
from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.module import ImageClassifier
from lit_dps.parallel.process import Interrupted
from lit_dps.training import GoalErrorCallback
from lit_dps.training.checkpoint_files import Checkpoints
from tests.support.runs import engine as engine_of
from tests.support.runs import runs
from tests.support.runs import train as train_all
from tests.support.tiny import QUIET, loader
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


class Fails(GoalRule):
    """A rule with an error at the third check of a run."""

    def is_met(self, values, goal):
        if len(values) >= 3:
            raise ArithmeticError("of the rule")
        return False


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
def test_an_error_in_a_goal_of_the_user_fails_its_trials_alone(how):
    goal = {**GOAL, "error": 1e-6, "rule": f"{__name__}.Fails"}
    for result in train_all(TRIALS, WORKLOAD, goal, **how):
        assert result.status is Status.FAILED and "of the rule" in result.failure


@pytest.fixture
def clock(monkeypatch):
    """Each look at the clock takes a second."""
    seconds = itertools.count()
    monkeypatch.setattr("lit_dps.training.stopwatch.now", lambda device=None: float(next(seconds)))


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("budget", [{}, {"max_examples": 10**6}, {"max_seconds": 1e6}])
def test_a_run_that_resumes_within_a_window_ends_as_an_unbroken_one(tmp_path, clock, how, budget):
    if "size" in how and "max_seconds" in budget:
        pytest.skip("a stack has no clock for each network")
    goal = {**GOAL, **MEAN, **budget}
    unbroken = train_all(TRIALS, WORKLOAD, goal, **how)
    # The check before the last one lies within the window of the last one.
    stop = min(result.steps for result in unbroken) // 4 - 1
    checkpoints = Checkpoints(tmp_path, "study", minutes=0)
    resumed = []
    for interrupted_after in (stop, 10**6):
        checks = 0

        def raise_if_stopped() -> None:
            nonlocal checks
            checks += 1
            if checks == interrupted_after:  # noqa: B023
                raise Interrupted("test")

        engine = engine_of(WORKLOAD, goal, checkpoints=checkpoints, **how)
        try:
            resumed += engine.train(runs(TRIALS, goal), raise_if_stopped)
        except Interrupted:
            assert [*tmp_path.rglob("*.ckpt")]

    def plain(results):
        return {r.trial.point: dataclasses.replace(r, seconds=0.0) for r in results}

    assert plain(resumed) == plain(unbroken)
    for result in resumed:
        assert result.curve["step"][0] == 4


def test_examples_are_counted_alike_by_every_engine():
    # 4 steps of 16 examples are 64: the fourth check has spent 200, and is beyond it.
    goal = {**GOAL, "error": 0.001, "max_examples": 200}
    for name, how in WAYS.items():
        for result in train_all(TRIALS, WORKLOAD, goal, **how):
            assert (result.engine, result.status) == (name, Status.INCOMPLETE)
            assert result.curve["examples"] == [64, 128, 192, 256]


@pytest.mark.parametrize("how", ["single", "lightning", "stacked"])
def test_seconds_are_those_of_training_steps(clock, how):
    """Each loop looks at the clock at both ends of an interval. The validation between them takes
    seconds too, which do not count."""
    goal = {**GOAL, "error": 0.001, "max_seconds": 3}
    for result in train_all(TRIALS, WORKLOAD, goal, **WAYS[how]):
        assert result.status is Status.INCOMPLETE
        assert result.curve["seconds"] == [1, 2, 3]
        if how == "stacked":
            assert result.engine == "single" and "goal.max_seconds" in result.engine_reason


def test_short_batches_count_less():
    check = GoalErrorCallback(0.001, 1, 40, max_examples=28)
    module = ImageClassifier(nn.Linear(4, 3))
    Trainer(**QUIET, callbacks=[check]).fit(module, loader(20, 8), loader(20, 8))
    # Each epoch has batches of 8, 8 and 4 examples.
    assert check.curve["examples"] == [8, 16, 20, 28]
    assert check.status is Status.INCOMPLETE


def test_accumulated_batches_count():
    check = GoalErrorCallback(0.001, 1, 40, max_examples=40)
    module = ImageClassifier(nn.Linear(4, 3))
    trainer = Trainer(**QUIET, callbacks=[check], accumulate_grad_batches=2)
    trainer.fit(module, loader(20, 8), loader(20, 8))
    # Lightning steps at the end of an epoch too: 8 + 8, then 4.
    assert check.curve["examples"] == [16, 20, 36, 40]
