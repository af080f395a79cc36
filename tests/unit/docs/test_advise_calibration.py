"""The calibration page is what its script writes from the stored results."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lit_dps.core.trial import Cell
from tests.support.fake_study import GOAL, analysis_of
from tests.support.fake_study import result as trial_result

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def calibration():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import advise_calibration
        import advise_measuring  # noqa: F401  (a test imports from it)
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return advise_calibration


def result(recommended: int = 64):
    """Return the result of a workload: K = 100 at B = 32 and 60 at B = 64, as long as 72 steps."""
    rows = []
    for size, median, seconds in ((32, 100.0, 0.01), (64, 60.0, 0.012), (512, None, 0.1)):
        row = {"batch_size": size, "median": median, "by_law": 80.0, "step_seconds": seconds}
        rows.append({**row, "least": 50.0, "most": None})
    return {
        "pilot_size": 32,
        "pilot": {"steps": 100, "steps_run": 100, "seconds": 2.0},
        "runs": [[32, 100, 2.0, 2.0], [64, 60, 1.5, 1.8], [64, 60, 0.5, 0.7]],
        "training_seconds": 1.6,
        "announced": 3.0,
        "exhaustive": rows,
        "predicted": [[32, 90.0, 100.0, 110.0], [64, 61.0, 66.0, 70.0], [512, 1.0, 2.0, 3.0]],
        "recommendation": {"batch_size": recommended},
        "fit": [{"steps": steps, "reached": True} for steps in (30, 50, 40)],
    }


def exhaustive_study(planned: int = 3):
    """Return a study with the two best samples repeated: the second one is better at B = 8."""
    over_seeds = {
        8: ((480, 512, 640), (160, 496, 2000)),
        16: ((240, 304, 320), (240, 320, None)),
        32: ((192, 208, 224), (208, 208, 224)),
    }
    results = {}
    repeated = {}
    for size, steps_of_points in over_seeds.items():
        cell = Cell(size)
        results[cell] = [trial_result(cell, 0, 160), trial_result(cell, 1, 176)]
        repeated[cell] = []
        for searched, all_steps in zip(results[cell], steps_of_points, strict=True):
            for seed, steps in enumerate(all_steps, start=1):
                trial = dataclasses.replace(searched.trial, repeat=seed)
                again = trial_result(cell, searched.trial.point, steps)
                repeated[cell].append(dataclasses.replace(again, trial=trial))
    plan = {"count": planned, "points": 2, "race_factor": None}
    return analysis_of(results, goal=GOAL, repeated=repeated, repeats=plan, trials=2)


def test_an_exhaustive_study_counts_the_sample_with_the_least_median(calibration):
    study = sys.modules["advise_measuring"].measured_study(exhaustive_study())
    small, middle, large = study["exhaustive"]
    assert (small["batch_size"], small["median"], small["k_star"]) == (8, 496, 176)
    assert (small["least"], small["most"], small["runs"]) == (160, 2000, 3)
    assert (middle["median"], middle["k_star"]) == (304, 160)
    assert (large["median"], large["least"]) == (208, 192)
    # The medians are c1 / B + c2 with c1 = 3072 and c2 = 112.
    assert [row["by_law"] for row in study["exhaustive"]] == pytest.approx(
        [496, 304, 208], rel=0.02
    )
    assert study["rates"] == 2


def test_a_study_with_repeats_to_come_has_no_medians(calibration):
    assert sys.modules["advise_measuring"].measured_study(exhaustive_study(planned=4)) == {}


@pytest.mark.parametrize(
    ("rates", "text"),
    [((16, 16), "16 learning rates"), ((16, 8, 16), "16 learning rates (8 for `b`)")],
)
def test_the_page_says_how_many_rates_each_study_tried(calibration, rates, text):
    results = {name: {"rates": count} for name, count in zip("abc", rates, strict=False)}
    assert calibration._rates_text(results) == text


def test_the_page_is_what_the_script_writes(calibration):
    assert calibration.PAGE.read_text() == calibration.page(calibration.read_results())


def test_a_prediction_is_compared_with_the_median_over_seeds(calibration):
    # The median at B = 512 is missing, because most runs missed the goal.
    first, second = calibration.comparisons(result())
    assert (first.batch_size, first.ratio, first.log_error) == (32, 1.0, 0.0)
    assert (second.ratio, second.is_covered) == (2.0, False)
    assert second.log_error == pytest.approx(math.log(66 / 60))
    assert first.is_covered


@pytest.mark.parametrize(
    ("recommended", "lost"),
    [(64, 0.0), (32, 1.0 / 0.72 - 1), (128, 40 * (0.012 + 0.088 / 7) / 0.72 - 1)],
)
def test_the_time_lost_is_relative_to_the_fastest_batch_size(calibration, recommended, lost):
    # At B = 128, which is not in the study, `fit` took 40 steps of about 0.0246 s.
    assert calibration.time_lost(result(recommended)) == pytest.approx(lost)


def test_the_time_lost_beyond_the_study_is_that_of_the_law_or_unknown_if_fit_missed(calibration):
    beyond = result(128)
    beyond["exhaustive"][0]["by_law"] = 100.0
    beyond["exhaustive"][2]["by_law"] = 40.0
    # c1 / B + c2 = 2048 / B + 36; the fastest row is B = 64 with 80 steps of 0.012 s.
    seconds = (2048 / 128 + 36) * (0.012 + 0.088 / 7)
    assert calibration.time_lost(beyond, "by_law") == pytest.approx(seconds / 0.96 - 1)
    for run in beyond["fit"][:2]:
        run["reached"] = False
    assert calibration.time_lost(beyond) is None


def test_the_time_that_is_lost_by_fit_is_that_of_its_runs(calibration):
    """The study's best is 60 steps of 12 ms at B = 64, and `fit` takes other steps there."""
    followed = result(64)
    followed["fit"] = [{"steps": steps, "reached": True} for steps in (90, 80, 500)]
    assert calibration.time_lost_by_fit(followed) == pytest.approx(90 / 60 - 1)
    followed["fit"][0]["reached"] = False
    assert calibration.time_lost_by_fit(followed) == pytest.approx(500 / 60 - 1)
    followed["fit"][1]["reached"] = False
    assert calibration.time_lost_by_fit(followed) is None
    followed["fit"] = [{"steps": 30, "reached": True}]
    assert calibration.time_lost_by_fit(followed) == 0.0


def test_the_law_of_the_study_loses_time_where_its_fastest_batch_size_is_another(calibration):
    """The law says 0.5 s at B = 32 and 0.96 s at B = 64; the medians say 1 s and 0.72 s."""
    measured = result()
    for row, steps in zip(measured["exhaustive"], (50.0, 80.0, 80.0), strict=True):
        row["by_law"] = steps
    assert calibration.time_lost_by_study(measured) == pytest.approx(1.0 / 0.72 - 1)
    measured["exhaustive"][0]["by_law"] = 100.0
    assert calibration.time_lost_by_study(measured) == 0.0


def test_no_time_is_lost_beyond_the_study_by_a_faster_batch_size(calibration):
    fast = result(1024)
    fast["fit"] = [{"steps": 1, "reached": True}]
    assert calibration.time_lost(fast) == 0


def test_the_page_says_whether_other_programs_ran(calibration):
    quiet = {"a": {**result(), "waited": 0.01}, "b": {**result(), "waited": 0.04}}
    assert "a quiet machine (at most 4% of" in calibration._machine_state(quiet)
    busy = {"a": {**result(), "waited": 0.01}, "b": {**result(), "waited": 0.5}}
    unknown = {"a": {**result(), "waited": 0.01}, "b": result()}
    for results in (busy, unknown):
        assert calibration._machine_state(results) == "a machine that ran other programs"


def test_the_cost_is_in_trainings(calibration):
    assert calibration.cost_in_trainings(result()) == 4.0 / 1.6


def test_a_training_has_full_validations_and_no_readings(calibration):
    from advise_measuring import seconds_of_training

    timed = {"steps": 40, "training": 3.0, "checking": 0.5, "checks": 4}
    whole = SimpleNamespace(timed=timed, curve={"exact": [1, 1, 1, 1]})
    assert seconds_of_training(whole, 0.4) == 3.5
    early = SimpleNamespace(timed=timed, curve={"exact": [0, 0, 1, 1]})
    assert seconds_of_training(early, 0.4) == pytest.approx(4.6)


def test_the_scatter_of_a_median_is_that_of_its_seeds(calibration):
    """The logarithms of 16 normal seeds have a standard deviation of 0.2."""
    half = 0.2 * 0.6745
    rows = [{"lower": math.exp(-half), "upper": math.exp(half), "runs": 16}]
    rows.append({"lower": 1.0, "upper": None, "runs": 16})
    found = calibration.median_scatter({"a": {"exhaustive": rows}})
    assert found == pytest.approx(0.2 * 1.253 / 4, rel=1e-3)


@pytest.mark.parametrize(
    ("batch_size", "seconds"), [(16, 0.009), (32, 0.01), (64, 0.012), (288, 0.056), (960, 0.188)]
)
def test_the_time_of_a_step_is_on_lines(calibration, batch_size, seconds):
    of_step = sys.modules["advise_results"].step_seconds(result(), batch_size)
    assert of_step == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("steps", "reached", "expected"), [(80, True, True), (121, True, False), (80, False, False)]
)
def test_a_run_within_the_limits_meets_the_goal(calibration, steps, reached, expected):
    run = {"steps": steps, "reached": reached, "predicted_steps": [60, 90, 120]}
    assert calibration.is_within_limits(run) is expected


def names():
    return [path.stem for path in sorted((ROOT / "configs" / "advice").glob("*-exhaustive.yaml"))]


@pytest.mark.parametrize("name", names())
def test_a_study_beside_advice_is_of_the_same_workload(calibration, name, monkeypatch):
    from lit_dps.advice.user_workload import user_batch_size
    from lit_dps.cli.study import read_setup

    (workload,) = [each for each in calibration.WORKLOADS if each.study == name]
    folder = ROOT / "configs" / "advice"
    monkeypatch.syspath_prepend(folder)
    study = read_setup(["--config", str(folder / f"{name}.yaml")])
    advice = read_setup(["--config", str(folder / f"{workload.name}.yaml")])
    assert study.workload.model["class_path"] == advice.workload.model["class_path"]
    assert study.workload.data["class_path"] == advice.workload.data["class_path"]
    goals = [setup.built_goal for setup in (study, advice)]
    for field in ("metric", "value", "check_interval", "max_steps"):
        assert getattr(goals[0], field) == getattr(goals[1], field)
    assert user_batch_size(advice.workload) in study.study.batch_sizes
    callbacks = study.workload.trainer.get("callbacks") or []
    for callback in callbacks:
        assert callback["init_args"]["reference"] == user_batch_size(advice.workload)
