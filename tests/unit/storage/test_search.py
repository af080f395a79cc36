"""study.sampler: adaptive searches by Optuna's samplers, beside the Sobol points of the
protocol."""

from __future__ import annotations

import dataclasses
import math
from statistics import median

import optuna
import pytest

from lit_dps.core.attempt import AttemptRules
from lit_dps.core.config import StudyConfig
from lit_dps.core.goal import Goal
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.storage.header import declare
from lit_dps.storage.samplers import distributions, make_sampler, sobol_point
from lit_dps.storage.schema import encode_result
from lit_dps.storage.trial_queue import TrialQueue
from tests.support.errors import refuses

SPACE = {
    "model.learning_rate": Range(1e-5, 1.0, "log"),
    "model.momentum": Range(0.5, 0.999, "reverse_log"),
}
GOAL, CELL, TRIALS = Goal(0.1, 1, 10_000), Cell(16), 10


def study(sampler: str) -> StudyConfig:
    return StudyConfig(
        name="s", batch_sizes=[16], sparsities=[0.0], trials=TRIALS, space=SPACE, sampler=sampler
    )


def steps(params) -> int:
    """Fewest at a rate of 0.01 and a momentum of 0.97, which lies at the end of a linear scale."""
    far = (
        math.log10(params["model.learning_rate"] / 0.01) ** 2
        + math.log10((1 - params["model.momentum"]) / 0.03) ** 2
    )
    return min(round(100 * math.exp(3 * far)), GOAL.max_steps + 1)


def ended(trial) -> TrialResult:
    k = steps(trial.params)
    if k > GOAL.max_steps:
        return TrialResult(
            trial, Status.INCOMPLETE, None, {"step": [GOAL.max_steps], "val_error": [0.5]}
        )
    return TrialResult(trial, Status.COMPLETE, k, {"step": [k], "val_error": [0.1]})


def search(folder, sampler: str, stop: int = TRIALS) -> list[dict]:
    """Runs up to so many trials, as one worker that may have been there before; the points'
    metaparameters."""
    url, config = f"sqlite:///{folder}/study.db", study(sampler)
    _, uid = declare(url, config, "w", GOAL, {}, {})
    worker, found = (
        TrialQueue(
            url, "s", [CELL], TRIALS, make_sampler(config, GOAL), 0, AttemptRules(GOAL), uid=uid
        ),
        [],
    )
    while len(found) < stop and (run := worker.claim_next()) is not None:
        worker.store_result(ended(run.trial))
        found.append(dict(run.trial.params))
    return found


def in_memory(sampler: str, trials: int) -> list[dict]:
    """The same search without a database."""
    memory, found = optuna.create_study(sampler=make_sampler(study(sampler), GOAL)), []
    for point in range(trials):
        memory.enqueue_trial({}, user_attrs={"point": point})
        trial = memory.ask(distributions(SPACE))
        found.append(dict(trial.params))
        trial.set_user_attr("result", encode_result(ended(Trial(CELL, point, found[-1]))))
        memory.tell(trial, 1.0)
    return found


@pytest.mark.parametrize(("sampler", "trials"), [("tpe", 32), ("gp", 12)])
def test_a_search_comes_nearer_than_the_sobol_points(sampler, trials):
    found, sobol = in_memory(sampler, trials), [sobol_point(SPACE, 0, i) for i in range(trials)]
    assert found[:6] == sobol[:6] and found[6] != sobol[6]
    half = trials // 2
    assert median(map(steps, found[half:])) < median(map(steps, sobol[half:])) / 2
    assert all(box.low <= point[key] <= box.high for point in found for key, box in SPACE.items())


@pytest.mark.parametrize("unit", ["examples", "seconds"])
def test_a_search_minimizes_the_cost_in_the_unit_of_the_goal(unit):
    """The trial with the most steps costs the least: its steps are on fewer examples."""
    goal = dataclasses.replace(GOAL, unit=unit)
    sampler = make_sampler(study("tpe"), goal)
    column = goal.cost_unit.column
    stored = []
    ends = [(Status.COMPLETE, 100, 400.0), (Status.COMPLETE, 200, 300.0)]
    ends += [(Status.INCOMPLETE, None, 500.0), (Status.INFEASIBLE, None, 16.0)]
    for point, (status, k, cost) in enumerate(ends):
        curve = {"step": [k or 300], "val_error": [0.1 if k else 0.6], column: [cost]}
        each = TrialResult(Trial(CELL, point), status, k, curve, unit=goal.cost_unit)
        stored.append(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.FAIL, user_attrs={"result": encode_result(each)}
            )
        )
    largest = sampler._largest_cost(stored)
    assert largest == 500.0
    objectives = [sampler.objective(trial, largest) for trial in stored]
    # The incomplete trial is a distance of 5 / 6 away; divergence adds 2.
    missed = math.log(1000.0)
    assert objectives == pytest.approx([math.log(400), math.log(300), missed + 5 / 6, missed + 2])
    assert make_sampler(study("tpe"), GOAL)._largest_cost(stored) == GOAL.max_steps


def test_a_search_goes_on_as_an_unbroken_one(tmp_path):
    assert search(tmp_path, "tpe", 8) + search(tmp_path, "tpe") == in_memory("tpe", TRIALS)


def test_several_workers_draw_different_points(tmp_path):
    url, config = f"sqlite:///{tmp_path}/study.db", study("tpe")
    _, uid = declare(url, config, "w", GOAL, {}, {})
    workers = [
        TrialQueue(
            url, "s", [CELL], TRIALS, make_sampler(config, GOAL), 0, AttemptRules(GOAL), uid=uid
        )
        for _ in range(2)
    ]
    drawn = []
    for _ in range(5):
        runs = [worker.claim_next() for worker in workers]  # at the same time
        drawn += [tuple(run.trial.params.values()) for run in runs]
        for worker, run in zip(workers, runs, strict=True):
            worker.store_result(ended(run.trial))
    assert len(set(drawn)) == 10


def test_a_point_that_runs_again_keeps_its_metaparameters(tmp_path):
    url, config = f"sqlite:///{tmp_path}/study.db", study("tpe")
    _, uid = declare(url, config, "w", GOAL, {}, {})
    worker = TrialQueue(
        url,
        "s",
        [CELL],
        7,
        make_sampler(config, GOAL),
        0,
        AttemptRules(GOAL),
        race_factor=2.0,
        rungs=(4.0, math.inf),
        uid=uid,
    )
    seen: dict[int, list] = {}
    while (run := worker.claim_next()) is not None:  # all pause at the first rung
        seen.setdefault(run.trial.point, []).append(dict(run.trial.params))
        paused = run.pause_at == 4
        curve = {"step": [4 if paused else GOAL.max_steps], "val_error": [0.5]}
        worker.store_result(
            TrialResult(run.trial, Status.PAUSED if paused else Status.INCOMPLETE, None, curve)
        )
    assert len(seen) == 7
    assert all(len(params) == 2 and params[0] == params[1] for params in seen.values())


def test_worse_trials_are_worth_less():
    sampler = make_sampler(study("tpe"), GOAL)

    def value(status: str, **result):
        trial = type(
            "T",
            (),
            {"user_attrs": {"result": {"status": status, "curve": {}, "steps": None, **result}}},
        )
        return sampler.objective(trial, GOAL.max_steps)

    fast, slow = value("complete", steps=100), value("complete", steps=9_000)
    near, far = (value("incomplete", curve={"val_error": [e]}) for e in (0.11, 0.9))
    assert fast < slow < near < far < value("infeasible", curve={"val_error": ["nan"]})
    assert value("failed") is None


def test_other_samplers_come_by_class_path_or_are_refused():
    assert make_sampler(study("optuna.samplers.RandomSampler"), GOAL)
    with refuses("study.sampler", "best"):
        study("best").check()
    with refuses("study.sampler", "optuna.samplers.No"):
        make_sampler(study("optuna.samplers.No"), GOAL)
    with refuses("study.sampler", "optuna.samplers.GridSampler"):
        make_sampler(study("optuna.samplers.GridSampler"), GOAL)
