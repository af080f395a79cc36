"""What one run needs beside K, the least of several trials, and what the answer makes of it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lit_dps.advice.answer import answer
from lit_dps.advice.one_run import TYPICAL_SPREAD, OneRun, of_runs, of_trials
from lit_dps.advice.step_time import Timed, fit_step_time
from lit_dps.advice.text import render
from lit_dps.analysis.law import fit_law
from lit_dps.analysis.observations import Observation
from lit_dps.report.figures.advice import draw_advice

C1, C2 = 4000.0, 50.0
SIZES = [2**i for i in range(11)]


def law():
    return fit_law([Observation(float(b), C1 / b + C2, noise=0.02) for b in (8, 32, 128, 512)])


def step_time():
    return fit_step_time([Timed(float(b), 0.004 + 0.0002 * b) for b in (1, 4, 16, 64, 256)])


def test_runs_over_k():
    found = of_runs(32, 100.0, [150, 120, 130])
    assert found.ratio == pytest.approx(1.3)
    assert (found.steps, found.source) == ((120, 130, 150), "runs")
    logs = np.log([1.2, 1.3, 1.5])
    deviation = math.sqrt((2 * TYPICAL_SPREAD**2 + ((logs - logs.mean()) ** 2).sum()) / 4)
    assert found.spread == pytest.approx(deviation * math.sqrt(4 / 3))
    assert of_runs(32, 100.0, []) is None
    assert of_runs(32, 100.0, [110, 110]).ratio == pytest.approx(1.1)


def test_runs_that_missed_the_goal_count_as_more():
    assert of_runs(32, 100.0, [math.inf, 120, 130]).ratio == pytest.approx(1.3)
    lost = of_runs(32, 100.0, [math.inf, math.inf, 130])
    assert lost.ratio == math.inf


def test_trials_near_the_rate():
    trials = {
        8: [(0.01, 500.0), (0.015, 550.0), (0.3, 900.0), (0.02, 600.0)],
        32: [(0.03, 180.0), (0.05, 240.0), (0.001, math.inf)],
        128: [(0.1, 90.0)],  # no rate is recommended there
    }
    found = of_trials(trials, {8: 0.012, 32: 0.03})
    assert found.source == "trials" and len(found.ratios) == 5
    assert found.ratio == pytest.approx(1.1)  # of 1, 1, 1.1, 1.2, 1.333
    assert of_trials({8: trials[8][:2]}, {8: 0.012}) is None
    assert of_trials({8: [(0.01, 50.0), (0.01, math.inf), (0.01, math.inf)]}, {8: 0.01}) is None


def test_the_answer_is_of_the_run_that_is_made(golden):
    known = OneRun(1.25, 0.15, (1.2, 1.25, 1.3), "runs", 64, (135.0, 140.6, 146.0))
    best, one = answer(law(), step_time(), SIZES), answer(law(), step_time(), SIZES, one_run=known)
    assert best.table["steps"].tolist() == best.table["k_star"].tolist()
    assert one.table["k_star"].tolist() == best.table["k_star"].tolist()
    assert one.table["steps"].tolist() == pytest.approx((1.25 * best.table["steps"]).tolist())
    assert one.table["hours"].tolist() == pytest.approx((1.25 * best.table["hours"]).tolist())
    assert list(one.table.columns)[-1] == "k_star"
    rows = one.table.set_index("batch_size")
    made, other = (
        rows.loc[64],
        rows.loc[128],
    )  # runs were made at 64: K's own limits are not asked there
    assert made["steps_high"] / made["steps"] == pytest.approx(math.exp(1.96 * 0.15))
    assert other["steps_high"] / other["steps"] > math.exp(1.96 * 0.15)
    golden.check("advice/one-run.txt", render(one))
    golden.check("advice/no-run.txt", render(best))
    lines = draw_advice(one.table, law().observations).axes[0].lines
    drawn = [line.get_ydata().tolist() for line in lines]
    assert one.table["steps"].tolist() in drawn and one.table["k_star"].tolist() in drawn


def test_a_run_that_never_got_there_changes_no_number(golden):
    lost = of_runs(64, 112.5, [math.inf, math.inf])
    found = answer(law(), step_time(), SIZES, one_run=lost)
    assert found.table["steps"].tolist() == found.table["k_star"].tolist()
    golden.check("advice/lost-run.txt", render(found))
