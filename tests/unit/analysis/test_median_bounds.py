"""A median over seeds at the first check is an upper bound, wherever it is shown."""

import math

import pytest

from lit_dps.analysis.answer import MEDIAN, is_upper_bound
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.core.unit import SECONDS, STEPS
from lit_dps.report.document import study_document
from lit_dps.report.figures import draws, scaling
from lit_dps.report.result_table import result_rows
from lit_dps.report.warnings import first_check_bounds, median_bounds
from lit_dps.tracking.description import cell_outcomes
from lit_dps.tracking.description import scaling as scaling_metrics
from tests.support.fake_study import analysis_of

INTERVAL = 8
# Batch size -> K* and seconds of a step.
SEARCHED = {8: (64, 0.002), 16: (40, 0.003), 32: (32, 0.006), 64: (16, 0.006)}
REPEATED = {
    8: (64, 72, 80, 64, 72),
    16: (40, 48, 40, 40, 48),
    32: (32, 32, 40, 32, 40),
    64: (8, 8, 8, 16, 16),
}


def run(batch_size, steps, each, unit=STEPS, point=0, repeat=0):
    """Return a trial that meets the goal after some steps of `each` seconds."""
    trial = Trial(Cell(batch_size), point, {"model.learning_rate": 0.1}, repeat=repeat)
    checks = list(range(INTERVAL, steps + 1, INTERVAL))
    curve = {"step": checks, "val_error": [0.5] * (len(checks) - 1) + [0.09]}
    if unit is SECONDS:
        curve["seconds"] = [step * each for step in checks]
    timed = {"steps": steps, "training": steps * each, "checks": len(checks), "checking": 0.1}
    return TrialResult(
        trial, Status.COMPLETE, steps, curve=curve, seconds=2.0, timed=timed, unit=unit
    )


def study(unit=STEPS, searched=SEARCHED, repeated=REPEATED):
    """Return a study of three trials per cell, and of repeats of the best one."""
    results = {}
    repeats = {}
    for batch_size, (steps, each) in searched.items():
        cell = Cell(batch_size)
        results[cell] = []
        for point, later in enumerate((0, 16, 24)):
            results[cell].append(run(batch_size, steps + later, each, unit, point))
        repeats[cell] = []
        for number, k in enumerate(repeated[batch_size], 1):
            repeats[cell].append(run(batch_size, k, each, unit, repeat=number))
    goal = Goal(0.1, check_interval=INTERVAL, max_steps=400, unit=unit.name)
    return analysis_of(results, goal=goal, repeated=repeats)


@pytest.mark.parametrize("unit", [STEPS, SECONDS])
def test_a_median_at_the_first_check_is_a_bound_beside_an_exact_k_star(unit):
    analysis = study(unit)
    answer = analysis.answer.set_index("batch_size")
    assert set(answer["steps_of"]) == {MEDIAN}
    assert answer.loc[64, "steps"] == 8
    assert answer["floor"].tolist() == [0, 0, 0, 0]
    assert answer["steps_floor"].tolist() == [0, 0, 0, 1]
    assert [is_upper_bound(row) for row in analysis.answers.values()] == [False] * 3 + [True]
    marks = [cell["marks"] for cell in study_document(analysis, []).to_dict()["cells"]]
    assert ["upper_bound" in each for each in marks] == [False, False, False, True]
    assert list(median_bounds(analysis)) == [{"places": "B = 64"}]
    assert not list(first_check_bounds(analysis))
    metrics = {outcome.cell.batch_size: outcome.metrics for outcome in cell_outcomes(analysis)}
    for name in ("to_goal_upper_bound", "K_median_upper_bound"):
        assert [metrics[b].get(name) for b in SEARCHED] == [None, None, None, 1]
    last = result_rows(analysis)[-1]
    shown = [last["examples"], last[next(name for name in last if name.startswith("time"))]]
    shown.append(last["expected" if unit is STEPS else "expected steps"])
    assert all(text.startswith("<= ") for text in shown)


def test_a_bound_of_the_median_competes_as_a_bound():
    # 8 steps of 20 ms are at most 160 ms, and B = 32 takes 114 ms. A time of 0 to 160 ms is below
    # 114 ms with a probability of 0.7.
    answer = study(searched=SEARCHED | {64: (16, 0.02)}).answer.set_index("batch_size")
    assert answer["fastest"].tolist() != [False, False, False, True]
    assert answer.loc[64, "total_seconds"] == pytest.approx(0.16)
    assert 0.3 < answer.loc[64, "probability"] < 0.9
    assert answer.loc[64, "tied"]


@pytest.mark.parametrize("unit", [STEPS, SECONDS])
def test_a_bound_of_k_star_does_not_mark_an_exact_median(unit):
    searched = SEARCHED | {64: (8, 0.006)}
    repeated = REPEATED | {64: (16, 16, 24, 16, 24)}
    analysis = study(unit, searched, repeated)
    answer = analysis.answer.set_index("batch_size")
    assert answer.loc[64, "floor"] == 1
    assert answer["steps_floor"].tolist() == [0, 0, 0, 0]
    assert not math.isnan(answer.loc[64, "total_low"])
    assert not list(median_bounds(analysis))
    (row,) = first_check_bounds(analysis)
    assert row["places"] == "B = 64"


def test_the_curves_mark_the_bounds_of_medians():
    analysis = study()
    curve = analysis.law_curves
    bounds = curve[curve["median_floor"] == 1]
    assert bounds["batch_size"].tolist() == [64]
    assert bounds["median"].tolist() == [8]
    assert bounds["floor"].tolist() == [0]
    panel = scaling.draw(scaling.rows(analysis), analysis).axes[0]
    (arrows,) = [each for each in panel.containers if each.lines[0].get_marker() == "x"]
    assert arrows.lines[0].get_xydata().tolist() == [[64, 8]]
    panel = draws.draw(draws.rows(analysis), analysis).axes[0]
    assert [text.xy[1] for text in panel.texts] == [8]
    assert scaling_metrics(analysis)["K_median/S_0"] == {8: 72, 16: 40, 32: 32}
