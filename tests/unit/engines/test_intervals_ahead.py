"""Intervals that a stack trains before their checks: the same results, to the bit."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.module import ImageClassifier
from lit_dps.training import early_validation
from lit_dps.training.checkpoint_files import Checkpoints
from tests.support.conformance import by_trial
from tests.support.runs import engine, runs, train
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_stack_rows import RATES, trials, workload

GOAL = {"error": 0.3, "check_interval": 4, "max_steps": 80, "early_reject": True}
CHUNK = 16  # so that checks of the 179 validation examples stop early
AHEAD = [2, 3, 7, 8, 16, 32]  # intervals; 80 steps are 20 intervals
SETTINGS = {
    "plain": {},
    "further": {"further": (0.4, 0.3), "metrics": ["val_loss"]},
    "delay": {"optim": {"delay": 3}, "train_past_goal": True},
    "readings": {"readings": ["gradient_norm", "examples"]},
    "mean": {"goal": {"rule": "mean_of_checks", "options": {"checks": 3}}},
}
# The ends of a plain run, and of each run a number that does not divide its intervals.
BRIEF = {("plain", 2), ("plain", 32), *((name, 7) for name in SETTINGS)}
PAIRS = [
    pytest.param(name, ahead, marks=[] if (name, ahead) in BRIEF else pytest.mark.long)
    for name in SETTINGS
    for ahead in AHEAD
]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(early_validation, "CHUNK", CHUNK)


def facts(results: list[TrialResult]) -> dict[tuple, dict]:
    """Everything that results say, except seconds."""
    found = {}
    for key, result in by_trial(results).items():
        of_result = dataclasses.asdict(dataclasses.replace(result, seconds=0.0, timed={}))
        found[key] = repr(of_result)  # NaN equals NaN here
    return found


@pytest.mark.parametrize(("name", "ahead"), PAIRS)
def test_results_are_those_of_one_interval_at_a_time(name, ahead):
    options = dict(SETTINGS[name])
    goal = {**GOAL, **options.pop("goal", {})}
    if "rule" in goal:
        del goal["early_reject"]
    used = workload(optimizer="momentum", schedule="linear", decay_steps=60, end_factor=0.1)
    asked = trials(Cell(16, 0.0), Cell(16, 0.9), rates=[*RATES, 0.004])
    expected = train(asked, used, goal, size=16, ahead=1, **options)
    assert {r.status for r in expected} >= {Status.COMPLETE, Status.INFEASIBLE}
    assert {r.engine for r in expected} == {"stacked"}
    if "rule" not in goal:
        exact = [e for r in expected for e in r.curve["exact"]]
        assert 0 in exact and 1 in exact, "some checks stop early"
    found = train(asked, used, goal, size=16, ahead=ahead, **options)
    assert facts(found) == facts(expected)


@pytest.mark.long
@pytest.mark.parametrize("ahead", [3, pytest.param(32, marks=pytest.mark.long)])
def test_rows_are_filled_again_and_a_race_ends_as_one_interval_at_a_time(ahead):
    asked = trials(Cell(16, 0.0), Cell(16, 0.9))

    def raced(ahead: int) -> tuple[dict, dict]:
        best: dict[Cell, float] = {}

        def limit(cell: Cell) -> float:
            return 2 * best.get(cell, math.inf)

        results = []
        for result in engine(workload(), GOAL, size=3, ahead=ahead).train(
            runs(asked, GOAL, limit=limit)
        ):
            results.append(result)
            if result.status is Status.COMPLETE:
                cell = result.trial.cell
                best[cell] = min(best.get(cell, math.inf), result.steps)
        return best, by_trial(results)

    best, expected = raced(1)
    found_best, found = raced(ahead)
    assert found_best == best and len(best) == 2
    assert found.keys() == expected.keys()
    for key, theirs in expected.items():
        # A race limit that comes earlier or later cuts a curve, and changes no value in it.
        ours = found[key]
        for name in ("step", "val_error", "exact"):
            length = min(len(ours.curve[name]), len(theirs.curve[name]))
            assert ours.curve[name][:length] == theirs.curve[name][:length], (key, name)
        limit = 2 * best[theirs.trial.cell]
        if theirs.status is Status.COMPLETE and theirs.steps <= limit:
            assert ours.steps == theirs.steps, key


@pytest.mark.parametrize("ahead", [pytest.param(1, marks=pytest.mark.long), 5])
def test_a_run_that_pauses_among_the_intervals_resumes_from_there(tmp_path, monkeypatch, ahead):
    monkeypatch.setattr("lit_dps.training.checkpoint_files.MIN_SECONDS_WORTH_SAVING", 0.0)
    asked = trials(Cell(16, 0.5), rates=[0.01, 0.02, 0.0005])
    goal = {**GOAL, "error": 0.15, "max_steps": 200}
    expected = facts(train(asked, workload(), goal, size=4))
    checkpoints = Checkpoints(tmp_path / str(ahead), "study", minutes=60)
    made = engine(workload(), goal, size=4, ahead=ahead, checkpoints=checkpoints)
    paused = list(made.train(runs(asked, goal, pause=lambda cell: 24)))
    assert [r.status for r in paused] == [Status.PAUSED] * 3
    assert [r.curve["step"][-1] for r in paused] == [24] * 3
    assert all(checkpoints.path(trial).exists() for trial in asked)
    resumed = list(made.train(runs(asked, goal)))
    assert facts(resumed) == expected


@pytest.mark.parametrize("ahead", [pytest.param(1, marks=pytest.mark.long), 5])
def test_an_interrupted_stack_resumes_after_its_last_intervals(tmp_path, monkeypatch, ahead):
    monkeypatch.setattr("lit_dps.training.checkpoint_files.MIN_SECONDS_WORTH_SAVING", 0.0)
    asked = trials(Cell(16, 0.5), rates=[0.01, 0.0005])
    goal = {**GOAL, "error": 0.1}
    expected = facts(train(asked, workload(), goal, size=4))
    made = engine(
        workload(), goal, size=4, ahead=ahead, checkpoints=Checkpoints(tmp_path, "study", 60)
    )

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(made.train(runs(asked, goal), interrupt))
    checks: list[int] = []
    resumed = list(made.train(runs(asked, goal), lambda: checks.append(1)))
    assert facts(resumed) == expected
    steps = max(len(result.curve["step"]) for result in resumed)
    assert len(checks) == math.ceil(steps / ahead) - 2, "resumed after the first intervals"


def test_a_schedule_without_rates_beyond_the_end_is_not_asked_for_them():
    used = workload(class_path="tests.unit.engines.test_intervals_ahead.ListedRates")
    asked = [Trial(Cell(16, 0.0), i, {"model.learning_rate": 0.01}) for i in range(2)]
    goal = {**GOAL, "error": 0.01}
    results = train(asked, used, goal, size=4, ahead=7)
    assert [(r.status, r.engine, r.steps_run) for r in results] == [
        (Status.INCOMPLETE, "stacked", 80)
    ] * 2


class ListedRates(ImageClassifier):
    """Its schedule is a list with a factor for each of the 80 steps, and one for their end."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.hparams.learning_rate, momentum=0.9)
        factors = [1 - step / 100 for step in range(81)]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factors[step])
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }
