"""Readings by class path: their values in each loop, resumed, cut, stored and refused."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lit_dps.core.racing import truncate_at_race_limit
from lit_dps.core.statistic import MINIMUM
from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.readings.registry import resolve_readings
from lit_dps.storage.columns import encode_columns
from lit_dps.storage.schema import decode_result, encode_result
from lit_dps.training.workload import Workload
from tests.support.conformance import by_trial
from tests.support.errors import refuses
from tests.support.runs import train, train_one
from tests.support.saved_study import Study as SavedStudy
from tests.support.user_readings import FinalNorm
from tests.unit.engines.test_engine import DATA, MODEL, quiet  # noqa: F401

PLACE = "tests.support.user_readings"
NETWORK = {"class_path": f"{PLACE}.TinyNetwork"}
TINY = {**MODEL, "init_args": {**MODEL["init_args"], "network": NETWORK}}
WORKLOAD = Workload(TINY, DATA, {"accelerator": "cpu"})
GOAL = {"error": 0.05, "check_interval": 4, "max_steps": 16}
EASY = {**GOAL, "error": 0.6, "max_steps": 60}
PARAMS = {"model.learning_rate": 0.1, "model.momentum": 0.9}
TRIAL = Trial(Cell(16, 0.5), 0, PARAMS)


CONVERGED = {"class_path": f"{PLACE}.Sharpness", "init_args": {"iterations": 300}}


def specs(*names):
    return resolve_readings([f"{PLACE}.{name}" for name in names])


def read(*names, goal=GOAL, trial=TRIAL, **options):
    """The result of a trial with readings, without its time."""
    result = train_one(trial, WORKLOAD, goal, readings=specs(*names), **options)
    assert result.status is not Status.FAILED, result.traceback
    return dataclasses.replace(result, seconds=0.0)


def test_sharpness_equals_the_top_eigenvalue_of_the_full_hessian():
    both = resolve_readings([CONVERGED, f"{PLACE}.FullHessian"])
    result = train_one(Trial(Cell(16, 0.0), 0, PARAMS), WORKLOAD, GOAL, readings=both)
    sharpness = result.readings["sharpness"]
    hessian = result.readings["full_hessian"]
    assert sharpness["step"] == hessian["step"] == result.curve["step"] == [4, 8, 12, 16]
    assert hessian["parameters"] == [49 * 5 + 5 + 5 * 10 + 10] * 4
    assert sharpness["sharpness"] == pytest.approx(hessian["top"], rel=1e-3)
    assert min(hessian["top"]) > 0.1


@pytest.mark.parametrize("early", [False, True])
def test_all_loops_read_the_same_and_train_as_without_readings(early):
    names = ("Sharpness", "Norm", "FinalNorm", "Wrong", "Disturbing")
    goal = {**EASY, "early_reject": early}
    single = read(*names, goal=goal)
    lightning = read(*names, goal=goal, lean=False)
    assert (single.engine, lightning.engine) == ("single", "lightning")
    assert single == lightning
    assert single.status is Status.COMPLETE
    assert single.readings["norm"]["step"] == list(range(3, single.steps + 1, 3))
    assert set(single.end_readings) == {"final_norm"}
    # The last check, which meets the goal, is exact also with early checks.
    assert single.readings["wrong"]["wrong"][-1] == pytest.approx(single.curve["val_error"][-1])
    if not early:
        assert single.readings["wrong"]["wrong"] == pytest.approx(single.curve["val_error"])
    assert set(single.readings["disturbing"]["zero"]) == {0.0}
    unread = dataclasses.replace(train_one(TRIAL, WORKLOAD, goal), seconds=0.0)
    assert unread == dataclasses.replace(single, readings={}, end_readings={})


def test_a_stack_reads_each_of_its_networks():
    names = ("Sharpness", "Norm", "FinalNorm")
    trials = []
    for point, rate in enumerate([0.1, 0.05, 1e38]):
        for cell in (Cell(16, 0.0), Cell(16, 0.5)):
            trials.append(Trial(cell, point, {**PARAMS, "model.learning_rate": rate}))
    options = {"readings": specs(*names)}
    stacked = train(trials, WORKLOAD, EASY, size=3, **options)
    alone = by_trial(train(trials, WORKLOAD, EASY, **options))
    assert {result.engine for result in stacked} == {"stacked"}
    for result in stacked:
        expected = alone[result.trial.cell, result.trial.point]
        assert result.status is expected.status and result.steps == expected.steps
        assert result.readings.keys() == expected.readings.keys()
        for name, columns in expected.readings.items():
            for column, values in columns.items():
                assert result.readings[name][column] == pytest.approx(values, rel=1e-2, nan_ok=True)
        assert result.end_readings == pytest.approx(expected.end_readings, rel=1e-4)
    ends = {result.status: set(result.end_readings) for result in stacked}
    assert ends[Status.COMPLETE] == {"final_norm"} and ends[Status.INFEASIBLE] == set()


def test_an_error_of_a_reading_fails_its_trial_alone():
    trials = [Trial(Cell(16, 0.5), point, PARAMS) for point in range(2)]
    for size in (1, 4):
        results = train(trials, WORKLOAD, EASY, size=size, readings=specs("Failing"))
        assert [result.status for result in results] == [Status.FAILED] * 2
        assert all("ArithmeticError" in result.failure for result in results)


@pytest.mark.parametrize("lean", [True, False])
def test_a_resumed_trial_equals_an_unbroken_one(tmp_path, lean):
    names = ("Sharpness", "Norm", "Drift", "FinalNorm", "Flagged")
    options = {"readings": specs(*names), "lean": lean}
    goal = {**GOAL, "max_steps": 24}
    study = SavedStudy(tmp_path, model=TINY, goal=goal, **options)
    unbroken, _ = study.run(TRIAL, saved=False)
    interrupted, _ = study.run(TRIAL, interrupt=3)
    assert interrupted is None
    resumed, steps = study.run(TRIAL)
    assert steps.taken == 24 - 12
    assert resumed == unbroken
    assert resumed.readings["norm"]["step"] == list(range(3, 25, 3))
    assert resumed.status is Status.INCOMPLETE and "final_norm" in resumed.end_readings
    assert resumed.flags == {"counted": 24, "end": 24}


@pytest.mark.parametrize("how", [{}, {"lean": False}, {"size": 2}])
def test_each_trial_has_its_own_flags_also_those_of_the_end(how):
    trials = [dataclasses.replace(TRIAL, point=point) for point in range(2)]
    for result in train(trials, WORKLOAD, GOAL, readings=specs("Flagged"), **how):
        assert (result.flags["counted"], result.flags["end"]) == (16, 16)


def test_the_race_cuts_readings_where_it_cuts_curves():
    best = read("Norm", goal=EASY)
    other = read("Norm", "FinalNorm", goal={**GOAL, "max_steps": 200})
    other = dataclasses.replace(other, trial=dataclasses.replace(other.trial, point=1))
    assert other.status is Status.INCOMPLETE and other.end_readings
    limit = 2 * best.steps
    kept, cut = truncate_at_race_limit([best, other], 2.0, MINIMUM)
    assert kept == best
    assert cut.status is Status.OUTRACED and cut.end_readings == {}
    assert cut.readings["norm"]["step"] == list(range(3, limit + 1, 3))
    length = len(cut.readings["norm"]["step"])
    assert cut.readings["norm"]["norm"] == other.readings["norm"]["norm"][:length]


def test_readings_are_stored():
    result = read("Norm", "FinalNorm", goal=EASY)
    stored = encode_result(result)
    decoded = decode_result(stored, TRIAL)
    assert decoded.readings == result.readings and decoded.end_readings == result.end_readings
    plain = encode_result(dataclasses.replace(result, readings={}, end_readings={}))
    assert set(stored) - set(plain) == {"readings", "end_readings"}


def test_entries_that_are_no_readings_are_refused():
    with refuses("study.readings", "sharpnes"):
        resolve_readings(["sharpnes"])
    with refuses("study.readings", f"{PLACE}.Missing"):
        resolve_readings([f"{PLACE}.Missing"])
    with refuses("study.readings", f"{PLACE}.TinyNetwork"):
        resolve_readings([f"{PLACE}.TinyNetwork"])
    with refuses("study.readings", "norm"):
        resolve_readings([f"{PLACE}.Norm", f"{PLACE}.Same"])
    with refuses("study.readings", f"{PLACE}.Norm"):
        resolve_readings([{"class_path": f"{PLACE}.Norm", "init_args": {"unknown": 1}}])
    with refuses("study.readings", f"{PLACE}.Norm"):
        resolve_readings([{"class_path": f"{PLACE}.Norm", "init_args": {"interval": 0}}])


def test_the_arguments_of_a_reading_decide_its_steps():
    entry = {"class_path": f"{PLACE}.Norm", "init_args": {"interval": 7}}
    result = train_one(TRIAL, WORKLOAD, GOAL, readings=resolve_readings([entry]))
    assert result.readings["norm"]["step"] == [7, 14]


def test_readings_between_checks_see_masks_that_change():
    goal = {**GOAL, "max_steps": 16}
    pruning = {"method": f"{PLACE}.Redraws"}
    trials = [dataclasses.replace(TRIAL, point=point) for point in range(3)]
    options = {"readings": specs("MaskReading"), "pruning": pruning}
    single = train(trials, WORKLOAD, goal, **options)
    lightning = train(trials, WORKLOAD, goal, lean=False, **options)
    stacked = by_trial(train(trials, WORKLOAD, goal, size=3, **options))
    unread = train(trials, WORKLOAD, goal, pruning=pruning)
    for ours, theirs, plain in zip(single, lightning, unread, strict=True):
        of_mask = ours.readings["mask"]
        assert of_mask["step"] == list(range(2, 17, 2)) and set(of_mask["outside"]) == {0.0}
        assert len(set(of_mask["fingerprint"])) == 6  # changed after 3, 6, 9, 12 and 15 steps
        in_stack = stacked[ours.trial.cell, ours.trial.point]
        assert of_mask == theirs.readings["mask"] == in_stack.readings["mask"]
        assert in_stack.engine == "stacked"
        assert ours.curve == theirs.curve == plain.curve


LIPSCHITZ = {"interval": 3, "examples": 40, "delta": 0.5, "batch_size": 16, "noise": True}


def test_all_loops_measure_the_same_lipschitz_constants():
    options = {"smoothness": LIPSCHITZ, "pruning": {"method": f"{PLACE}.Redraws"}}
    single = train_one(TRIAL, WORKLOAD, GOAL, **options)
    lightning = train_one(TRIAL, WORKLOAD, GOAL, lean=False, **options)
    assert (single.engine, lightning.engine) == ("single", "lightning")
    assert single.readings == lightning.readings and single.flags == lightning.flags
    columns = single.readings["lipschitz"]
    assert set(columns) == {"step", "lipschitz", "squared_gradient", "noise"}
    assert columns["step"] == [3, 6, 9, 12, 15]
    assert single.flags["theory/steps"] == 16
    assert single.flags["theory/rate_sum"] == pytest.approx(16 * 0.1)
    named = [{"class_path": "lipschitz", "init_args": LIPSCHITZ}]
    by_name = train_one(TRIAL, WORKLOAD, GOAL, readings=named, pruning=options["pruning"])
    assert (by_name.readings, by_name.flags) == (single.readings, single.flags)


@pytest.mark.parametrize("lean", [True, False])
def test_lipschitz_constants_of_a_resumed_trial_equal_those_of_an_unbroken_one(tmp_path, lean):
    # The checkpoint after step 8 holds the weights before step 9.
    options = {"smoothness": LIPSCHITZ, "lean": lean}
    study = SavedStudy(tmp_path, model=TINY, goal={**GOAL, "max_steps": 16}, **options)
    unbroken, _ = study.run(TRIAL, saved=False)
    interrupted, _ = study.run(TRIAL, interrupt=2)
    assert interrupted is None
    resumed, steps = study.run(TRIAL)
    assert steps.taken == 8
    assert resumed == unbroken
    assert resumed.readings["lipschitz"]["step"] == [3, 6, 9, 12, 15]


def test_results_of_the_first_version_have_the_lipschitz_constant_as_a_reading():
    stored = encode_result(read("Norm", goal=EASY))
    curve = {"step": [4, 8], "lipschitz": [2.5, 1.5], "squared_gradient": [0.5, 0.25]}
    former = {"smoothness": encode_columns(curve), "theory": {"loss": 2.3, "floor": "nan"}}
    decoded = decode_result({**stored, **former}, TRIAL)
    assert decoded.readings["lipschitz"] == curve
    assert decoded.flags["theory/loss"] == 2.3
    assert math.isnan(decoded.flags["theory/floor"])
    again = decode_result(encode_result(decoded), TRIAL)
    assert again.readings == decoded.readings


class Lipschitz(FinalNorm):
    """Has the name of a reading of the package."""

    name = "lipschitz"


def test_a_reading_has_no_name_of_the_package():
    path = f"{__name__}.Lipschitz"
    with refuses("study.readings", path):
        resolve_readings([path])
