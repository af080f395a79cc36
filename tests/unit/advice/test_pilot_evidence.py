"""What is read of the pilot and of the runs after it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from lit_dps.advice.next_probe import SEED_SPREAD
from lit_dps.advice.pilot_evidence import (
    LUCK_OF_RATES,
    PilotRun,
    best_rates_of_runs,
    bounds_of,
    observations_of_runs,
    seconds_of_runs,
    unfinished_searches,
)
from lit_dps.advice.pilot_plan import (
    FIRST_FACTORS,
    MET,
    MISSED,
    Outcome,
    PilotPlan,
    next_factor,
)
from lit_dps.analysis.law_fit import data_of
from lit_dps.analysis.observations import AT_LEAST, AT_MOST
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import Range
from lit_dps.core.trial import NOISE_SCALE, Cell, Status, Trial, TrialResult

RATE = "model.lr"
PLAN = PilotPlan(32, RATE, 0.1, 1.0, is_adaptive=False)
GOAL = Goal(0.1, 10, 1000)


def result(batch_size: int, point: int, rate: float, steps: int | None, **fields) -> TrialResult:
    trial = Trial(Cell(batch_size), point, {RATE: rate})
    checks = list(range(10, (steps or 100) + 1, 10))
    curve = {"step": checks, "val_error": [0.5] * (len(checks) - 1) + [0.05 if steps else 0.5]}
    status = Status.COMPLETE if steps else Status.INFEASIBLE
    return TrialResult(trial, status, steps, curve, seconds=2.0, **fields)


def record_of(*results: TrialResult) -> StudyRecord:
    sizes = sorted({each.trial.cell.batch_size for each in results})
    by_cell = {}
    for size in sizes:
        by_cell[Cell(size)] = [each for each in results if each.trial.cell.batch_size == size]
    return StudyRecord(
        name="s",
        workload="w",
        goal=GOAL,
        space={RATE: Range(1e-4, 10.0, "log")},
        batch_sizes=tuple(sizes),
        sparsities=(0.0,),
        trials=3,
        seed=0,
        goals=(),
        race_factor=1.0,
        config={},
        results=by_cell,
        running=dict.fromkeys(by_cell, 0),
    )


def test_each_batch_size_has_the_fewest_steps_of_its_runs_with_the_noise_of_a_run():
    record = record_of(
        result(32, 0, 0.1, 200),
        result(128, 0, 0.4, 90),
        result(128, 1, 0.8, 70),
        result(512, 0, 1.6, 10),
        result(1024, 0, 3.2, None),
    )
    at = {o.batch_size: o for o in observations_of_runs(record, {1024: 200.0, 128: 200.0})}
    assert {size: o.k for size, o in at.items()} == {32: 200, 128: 70, 512: 10, 1024: 200}
    assert at[32].noise == at[128].noise == SEED_SPREAD and at[32].resolution == 10
    assert at[512].bound == AT_MOST, "the goal may have been met before the first check"
    assert at[1024].bound == AT_LEAST and at[32].bound == at[128].bound == 0
    assert best_rates_of_runs(record, PLAN) == {32: 0.1, 128: 0.8, 512: 1.6}
    # 90 and 70 steps at 4 B0, 10 at 16 B0, 100 at 32 B0: all runs but the pilot
    seconds = seconds_of_runs(record, PLAN, lambda run: run.trial.cell.batch_size / 32)
    assert seconds == 4 * 160 + 16 * 10 + 32 * 100
    assert observations_of_runs(None, {}) == []
    # The first rate took 128 steps; the race cut its curve at 96, where a later rate met the goal.
    raced = record_of(result(128, 0, 0.4, None, timed={"steps": 128}), result(128, 1, 0.8, 90))
    assert seconds_of_runs(raced, PLAN, lambda run: 0.01) == pytest.approx(2.18)


def search_rates(random: np.random.Generator, first: tuple[float, float]) -> tuple[int, float]:
    """Return the number of rates of a search, and the expected log K of its best less log K."""
    best_rate = random.uniform(-1.0, 1.5)  # in doublings of the rate by the rule
    tried: dict[float, Outcome] = {}
    expected = {}
    fewest = math.inf
    factor = next_factor(tried, first)
    while factor is not None:
        expected[factor] = math.log(1.22) * (math.log2(factor) - best_rate) ** 2
        log_k = expected[factor] + SEED_SPREAD * random.standard_normal()
        if log_k < fewest:
            tried[factor] = Outcome(MET, 1e6 * math.exp(log_k))
            fewest = log_k
        else:
            tried[factor] = Outcome(MISSED, log_k)
        factor = next_factor(tried, first)
    best = min(tried, key=lambda each: tried[each])
    return len(tried), expected[best] - fewest


def test_the_luck_of_the_least_is_that_of_a_simulated_search():
    random = np.random.default_rng(0)
    luck: dict[int, list[float]] = {}
    for i in range(8000):
        rates, of_search = search_rates(random, list(FIRST_FACTORS.values())[i % 2])
        luck.setdefault(rates, []).append(of_search)
    assert set(luck) == {2, 3, 4, 5}
    for rates, values in luck.items():
        assert np.mean(values) == pytest.approx(LUCK_OF_RATES[rates - 1], abs=0.04), rates


def test_the_law_is_fitted_to_k_of_a_further_run_and_the_table_shows_the_real_one():
    one = record_of(result(128, 0, 0.4, 90))
    three = record_of(*(result(128, point, 0.2 * 2**point, 90) for point in range(3)))
    stopped = replace(result(128, 2, 0.2, None), status=Status.STOPPED)
    others_diverged = record_of(result(128, 0, 0.4, 90), result(128, 1, 0.8, None), stopped)
    records = {"one": one, "three": three, "others diverged": others_diverged}
    expected = {}
    for name, record in records.items():
        (observation,) = observations_of_runs(record, {})
        assert observation.k == 90
        expected[name] = data_of([observation]).steps.item()
    assert expected["one"] == expected["others diverged"] == 90
    assert expected["three"] == pytest.approx(90 * math.exp(0.13))


def test_a_search_that_the_time_ended_is_known_by_its_rates():
    stored = {
        "tried": [
            [32, 4.0, MISSED, 0.2],  # the rerun of the user's batch size
            [64, 0.5, MET, 90],
            [128, 0.5, MET, 90],
            [128, 1.0, MET, 88],
            [256, 0.5, MET, 90],
            [256, 1.0, MET, 60],
            [512, 0.5, MISSED, 0.4],
        ]
    }
    # The second rate at B = 128 is little better, so its search is complete. There is no K at 512.
    assert unfinished_searches(stored, PLAN) == {64: 1, 256: 2}
    assert unfinished_searches({}, PLAN) == {}


def test_only_the_second_half_of_the_pilot_tells_the_noise_scale():
    steps = list(range(0, 210, 10))
    columns = {
        "step": steps,
        f"{NOISE_SCALE}_squared_gradient": [1e6 if step < 100 else 2.0 for step in steps],
        f"{NOISE_SCALE}_variance": [1.0 if step < 100 else 100.0 for step in steps],
    }
    record = record_of(result(32, 0, 0.1, 200, readings={NOISE_SCALE: columns}))
    pilot = PilotRun.of_record(record, PLAN)
    assert pilot.noise.value == pytest.approx(50.0) and pilot.noise.readings == 11
    assert (pilot.steps, pilot.steps_run, pilot.seconds) == (200, 200, 2.0)
    assert PilotRun.of_stored({"pilot": json.loads(json.dumps(pilot.to_dict()))}) == pilot


def test_the_pilot_is_the_first_run_at_the_users_batch_size():
    record = record_of(result(32, 0, 0.1, 200), result(128, 0, 0.4, 90))
    pilot = PilotRun.of_record(record, PLAN)
    assert pilot.steps == 200 and pilot.noise is None
    assert PilotRun.of_record(record_of(result(128, 0, 0.4, 90)), PLAN) is None
    assert PilotRun.of_record(None, PLAN) is None and PilotRun.of_stored({}) is None
    missed = PilotRun.of_record(record_of(result(32, 0, 0.1, None)), PLAN)
    assert missed.steps is None and missed.steps_run == 100 and missed.status == "infeasible"


def test_bounds_are_read_as_they_are_stored():
    assert bounds_of({"bounds": [[64, 200.0], [128, 300]]}) == {64: 200.0, 128: 300.0}
    assert bounds_of({}) == {}


def test_a_bound_of_a_validation_that_stopped_early_is_no_best_value():
    run = result(32, 0, 0.1, None)
    run.curve["val_error"][2:4] = [0.101, 0.3]
    assert PilotRun.of_record(record_of(run), PLAN).best == 0.101
    run.curve["exact"] = [1, 1, 0, *[1] * 7]
    assert PilotRun.of_record(record_of(run), PLAN).best == 0.3
    run.curve["exact"] = [0] * 10
    assert PilotRun.of_record(record_of(run), PLAN).best is None


@pytest.mark.parametrize(
    ("max_examples", "steps_run", "best", "keys"),
    [
        # Step 100 has 3,200 examples, and the value there does not meet the goal.
        (3000, 90, 0.2, {"goal.max_examples"}),
        (3200, 100, 0.05, {"goal.max_steps", "goal.max_examples"}),
        (None, 100, 0.05, {"goal.max_steps"}),
        (300, 0, 0.05, {"goal.max_examples", "goal.check_interval"}),
    ],
)
def test_a_missed_goal_has_the_bound_of_its_budgets(max_examples, steps_run, best, keys):
    max_steps = 100 if "goal.max_steps" in keys else 400
    goal = Goal(0.1, check_interval=10, max_steps=max_steps, max_examples=max_examples)
    run = result(32, 0, 0.1, None)
    run.curve["val_error"][8:] = [0.2, 0.05]
    run.curve["examples"] = [32 * step for step in run.curve["step"]]
    missed = replace(run, status=Status.INCOMPLETE)
    pilot = PilotRun.of_record(replace(record_of(missed), goal=goal), PLAN)
    assert (pilot.steps_run, pilot.best) == (steps_run, best)
    stored = json.loads(json.dumps(pilot.to_dict()))
    assert PilotRun.of_stored({"pilot": stored}) == pilot
    assert set(re.findall(r"goal\.\w+", pilot.advice())) == keys


@pytest.mark.parametrize(
    ("status", "expected"), [("infeasible", "lower learning rate"), ("stopped", "train longer")]
)
def test_a_run_that_a_budget_did_not_end_is_not_advised_to_have_a_larger_one(status, expected):
    pilot = PilotRun(steps=None, steps_run=40, seconds=1.0, status=status, noise=None)
    assert expected in pilot.advice() and "goal.max_" not in pilot.advice()
