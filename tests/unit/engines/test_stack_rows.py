"""Trials in a stack end like trials in Lightning's loop."""

from __future__ import annotations

import math
from itertools import product

import pytest

from lit_dps.core.attempt import Validation
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.engines.network_run import ValidationOutcome
from lit_dps.engines.run_group import best_first
from lit_dps.engines.stack import StackedNetworks
from lit_dps.training.workload import Workload
from tests.support.conformance import assert_conform, by_trial
from tests.support.runs import engine, runs, train
from tests.unit.engines.test_engine import DATA, MODEL, quiet  # noqa: F401

GOAL = {"error": 0.2, "check_interval": 4, "max_steps": 80}
EXAMPLES = 179  # of the digits' validation split
RATES = [0.0005, 0.06, 0.01, 0.03, 0.02, 1e20]  # too small, good ones, and one that diverges
ADAM = [0.0001, 0.003, 0.002, 1e30]
RESNET = {"class_path": "lit_dps.models.ResNet8", "init_args": {"in_channels": 1}}


def workload(trainer=None, data=None, class_path=MODEL["class_path"], **init_args) -> Workload:
    model = {"class_path": class_path, "init_args": {**MODEL["init_args"], **init_args}}
    return Workload(
        model, {**DATA, "init_args": data or {}}, {"accelerator": "cpu", **(trainer or {})}
    )


def trials(*cells: Cell, rates=RATES, momentum=0.9) -> list[Trial]:
    params = [{"model.learning_rate": rate, "model.momentum": momentum} for rate in rates]
    return [Trial(cell, i, p) for cell in cells for i, p in enumerate(params)]


def both(workload: Workload, asked: list[Trial], goal=GOAL, slots=16, **options):
    """Return results of trials in a stack, and one at a time by Lightning; nothing may fall back to one
    at a time."""

    stacked = train(asked, workload, goal, size=slots, **options)
    assert not any(result.engine_reason for result in stacked)
    return stacked, train(asked, workload, goal, lean=False, **options)


# each rule once, with both schedules and checks among them; the whole product is a long form
BRIEF = {("sgd", "linear", True), ("momentum", "constant", False), ("nesterov", "linear", False)}
BRIEF |= {("adam", "constant", True), ("adamw", "linear", False)}
RULES = product(
    ("sgd", "momentum", "nesterov", "adam", "adamw"), ("constant", "linear"), (False, True)
)


@pytest.mark.parametrize(
    ("rule", "schedule", "early"),
    [pytest.param(*each, marks=[] if each in BRIEF else pytest.mark.long) for each in RULES],
)
def test_every_trial_ends_as_alone(rule, schedule, early):
    rates = {"sgd": [5 * rate for rate in RATES], "adam": ADAM, "adamw": ADAM}.get(rule, RATES)
    asked = trials(Cell(16, 0.0), Cell(16, 0.9), Cell(50, 0.5), rates=rates)
    used = workload(
        optimizer=rule, schedule=schedule, decay_steps=60, end_factor=0.1, weight_decay=0.01
    )
    goal = {**GOAL, "early_reject": early}
    ours, reference = both(used, asked, goal, further=(0.4,))
    assert assert_conform(ours, reference, Goal.from_dict(GOAL), EXAMPLES) == []
    assert {r.status for r in ours} == {Status.COMPLETE, Status.INCOMPLETE, Status.INFEASIBLE}


FILLED = {("authors", 4), ("per_trial", 1)}  # the others are long forms


@pytest.mark.parametrize(
    ("order", "slots"),
    [
        pytest.param(*each, marks=[] if each in FILLED else pytest.mark.long)
        for each in product(("authors", "per_trial"), (1, 2, 4))
    ],
)
def test_a_slot_that_is_filled_again_changes_nothing(order, slots):
    asked = trials(Cell(16, 0.0), Cell(16, 0.9))
    ours, reference = both(workload(data={"order": order}), asked, slots=slots)
    assert assert_conform(ours, reference, Goal.from_dict(GOAL), EXAMPLES) == []
    assert len({r.steps_run for r in ours}) > 3, "slots became free at different checks"


def test_a_batch_in_parts_is_the_same_batch(monkeypatch):
    monkeypatch.setattr(StackedNetworks.__init__, "__defaults__", (7,))
    ours, reference = both(workload(), trials(Cell(50, 0.5)))
    assert assert_conform(ours, reference, Goal.from_dict(GOAL), EXAMPLES) == []


def test_methods_and_biases_of_pruning():
    for pruning in (
        {"method": "random"},
        {"method": "magnitude", "biases": "keep"},
        {"batch_size": 300},
    ):
        ours, reference = both(
            workload(), trials(Cell(16, 0.7), rates=[0.03, 0.05]), pruning=pruning
        )
        assert assert_conform(ours, reference, Goal.from_dict(GOAL), EXAMPLES) == []
        assert all(r.kept for r in ours)


def test_a_race_in_a_stack_ends_with_the_first_finisher():
    best: dict[Cell, int] = {}
    asked = trials(Cell(16, 0.0), Cell(16, 0.9))

    def limit(cell):
        return best.get(cell, math.inf)

    goal = {**GOAL, "max_steps": 4000}
    results = []
    for result in engine(workload(), goal, size=16).train(runs(asked, goal, limit=limit)):
        results.append(result)
        if result.status is Status.COMPLETE:
            best[result.trial.cell] = min(best.get(result.trial.cell, 10**9), result.steps)
    for cell, k in best.items():
        ended = [r for r in results if r.trial.cell == cell and r.status is not Status.INFEASIBLE]
        assert {r.steps_run for r in ended} == {k}, "nobody runs a step beyond the best"
        assert {r.status for r in ended} == {Status.COMPLETE, Status.OUTRACED}
    full = [r for r in train(asked, workload(), GOAL) if r.status is Status.COMPLETE]
    assert best == {cell: min(r.steps for r in full if r.trial.cell == cell) for cell in best}


def test_the_best_outcome_of_a_check_is_recorded_first():
    """It may end the others. A rising metric is the best where it is the largest."""
    outcomes = []
    for row, value in enumerate([0.3, math.nan, 0.1, 0.2]):
        outcomes.append(ValidationOutcome(row, 0, Validation(4, value)))
    assert [outcome.row for outcome in best_first(outcomes, at_least=False)] == [2, 3, 0, 1]
    assert [outcome.row for outcome in best_first(outcomes, at_least=True)] == [0, 3, 2, 1]


def test_results_come_as_soon_as_they_are_known_and_trials_are_asked_for_when_there_is_room():
    asked, log = trials(Cell(16, 0.0), rates=[0.05, 0.0005, 0.05, 0.05]), []

    def queue():
        for trial in asked:
            log.append(("asked", trial.point))
            yield trial

    for result in engine(workload(), GOAL, size=2).train(runs(queue(), GOAL)):
        log.append(("known", result.trial.point))
    assert log[:3] == [("asked", 0), ("asked", 1), ("known", 0)]
    assert log.index(("asked", 2)) < log.index(("known", 1))


def test_a_stack_measures_the_lipschitz_constant_of_each_network():
    measured = {"interval": 4, "examples": 50, "delta": 0.5, "last": 1.0}
    measured |= {"batch_size": 50, "floor": 0.0}
    goal = {**GOAL, "max_steps": 8}
    asked = trials(Cell(16, 0.5), rates=[0.02, 0.05])
    stacked = train(asked, workload(), goal, size=16, smoothness=measured)
    alone = by_trial(train(asked, workload(), goal, smoothness=measured))
    assert [result.engine for result in stacked] == ["stacked", "stacked"]
    for ours in stacked:
        theirs = alone[ours.trial.cell, ours.trial.point]
        for name, values in theirs.readings["lipschitz"].items():
            assert ours.readings["lipschitz"][name] == pytest.approx(values, rel=1e-3)
        assert ours.flags == pytest.approx({**theirs.flags, "stacked": 1}, rel=1e-4)


def test_trials_of_another_architecture_are_trained_by_themselves():
    params = [
        {"model.learning_rate": 0.05, "model.network.init_args.hidden": [width]}
        for width in (32, 32, 16)
    ]
    asked = [Trial(Cell(16, 0.5), i, p) for i, p in enumerate(params)]
    ours = by_trial(train(asked, workload(), GOAL, size=16))
    reference = by_trial(train(asked, workload(), GOAL, lean=False))
    assert [(r.status, r.steps, r.kept) for r in map(ours.get, reference)] == [
        (r.status, r.steps, r.kept) for r in reference.values()
    ]
