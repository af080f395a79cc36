"""K at the values of rules for Adam over K tuned: the values and the prices, by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from lit_dps.analysis.adam_rules import RULES, AdamSettings
from lit_dps.analysis.analysis import Analysis
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import Choices
from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.report.figures import adam_rules as figure

RATES = (0.001, 0.002, 0.004)
BETAS = (0.999, 0.996, 0.95)


def test_the_values_of_the_rules():
    start = AdamSettings(0.002, 0.9, 0.999)
    assert start.scaled("fixed", 4) == start
    assert start.scaled("linear", 4) == AdamSettings(0.008, 0.9, 0.999)
    root = start.scaled("square_root", 4)
    assert (root.rate, root.beta1, root.beta2) == pytest.approx((0.004, 0.6, 0.996))
    half_life = start.scaled("beta2", 4)
    assert (half_life.rate, half_life.beta1) == (0.002, 0.9)
    assert half_life.beta2 == pytest.approx(0.999**4)
    # 4 beta2 steps have the second moment of one: the half-life in examples is the same.
    assert math.log(2) / -math.log(half_life.beta2) * 4 == pytest.approx(
        math.log(2) / -math.log(0.999)
    )
    # The floor, which does not raise a lower beta2.
    assert start.scaled("beta2", 256).beta2 == 0.95
    assert start.scaled("square_root", 8).beta2 == pytest.approx(0.992)
    assert AdamSettings(0.002, None, 0.999).scaled("square_root", 256).beta2 == 0.95
    assert AdamSettings(0.002, None, 0.9).scaled("beta2", 4).beta2 == 0.9
    # 1 - beta1 would be 1.6.
    assert start.scaled("square_root", 16) is None


def trial(batch_size, point, rate, beta2, steps):
    params = {"model.learning_rate": rate, "model.beta2": beta2}
    status = Status.COMPLETE
    curve = {"step": [steps or 50], "val_error": [0.1], "train_loss": [1.0]}
    if steps is None:
        status = Status.OUTRACED
    elif steps < 0:
        status, steps = Status.INFEASIBLE, None
    return TrialResult(Trial(Cell(batch_size), point, params), status, steps, curve=curve)


def study(cells, optimizer="adamw"):
    results = {}
    for batch_size, values in cells.items():
        results[Cell(batch_size)] = [
            trial(batch_size, point, *each) for point, each in enumerate(values)
        ]
    init_args = {"optimizer": optimizer}
    return Analysis(
        StudyRecord(
            name="made up",
            workload="digits",
            goal=Goal(0.1, check_interval=2, max_steps=400),
            space={"model.learning_rate": Choices(RATES), "model.beta2": Choices(BETAS)},
            batch_sizes=tuple(cells),
            sparsities=(0.0,),
            trials=8,
            seed=0,
            goals=(),
            race_factor=None,
            config={"model": {"class_path": "any.Module", "init_args": init_args}},
            results=results,
            running=dict.fromkeys(results, 0),
        )
    )


# At B = 4 the pair (0.002, 0.999) has the least median, 40, though another trial has the least K.
FIRST = [
    (0.002, 0.999, 38),
    (0.002, 0.999, 42),
    (0.004, 0.999, 30),
    (0.004, 0.999, 60),
    (0.001, 0.999, 80),
    (0.001, 0.999, 80),
]
SECOND = [
    (0.002, 0.999, 30),
    (0.002, 0.999, 34),
    (0.002, 0.996, 20),
    (0.002, 0.996, 28),
    (0.004, 0.996, 16),
    (0.004, 0.996, 16),
    (0.004, 0.999, None),
    (0.004, 0.999, 18),
]


def prices(found):
    table = found.adam_rules
    return {(r.batch_size, r.rule): r for r in table.itertuples()}


def test_prices_are_of_the_medians_at_the_values():
    rows = prices(study({4: FIRST, 16: SECOND}))
    assert set(rows) == {(batch_size, rule) for batch_size in (4, 16) for rule in RULES}
    for rule in RULES:
        of_start = rows[4, rule]
        assert (of_start.best_rate, of_start.tuned, of_start.price) == (0.002, 40, 1)
        assert rows[16, rule].scaled_from == 4
        assert rows[16, rule].tuned == 16
    assert (rows[16, "fixed"].price, rows[16, "fixed"].near) == (32 / 16, 2)
    # 0.004 and 0.996, the tuned pair.
    assert rows[16, "square_root"].price == 1
    assert rows[16, "square_root"].rule_beta2 == pytest.approx(0.996)
    assert rows[16, "beta2"].price == 24 / 16
    # 0.008 was not tried.
    assert rows[16, "linear"].verdict == "no trial near"
    fixed = rows[16, "fixed"]
    assert fixed.price_low <= 2 <= fixed.price_high


def test_half_of_the_trials_that_were_stopped_make_a_bound():
    stopped = [(0.002, 0.999, None), (0.002, 0.999, None), *SECOND[2:]]
    fixed = prices(study({4: FIRST, 16: stopped}))[16, "fixed"]
    # They were stopped at step 50.
    assert (fixed.verdict, fixed.price) == ("at least", 50 / 16)
    diverged = [(0.002, 0.999, -1), (0.002, 0.999, -1), *SECOND[2:]]
    fixed = prices(study({4: FIRST, 16: diverged}))[16, "fixed"]
    assert fixed.verdict == "all near diverged" and math.isnan(fixed.price)


@pytest.mark.parametrize("third, at, verdict", [(60, 18, "at most"), (48, 49, "measured")])
def test_a_trial_that_was_stopped_below_the_median_makes_an_upper_bound(third, at, verdict):
    """Four trials met the goal. The fifth was stopped at some step, and counts as infinite."""
    near = [(0.002, 0.999, steps) for steps in (30, 34, third, 64, None)]
    found = study({4: FIRST, 16: [*near, *SECOND[2:]]})
    results = found.record.results[Cell(16)]
    curve = {"step": [at], "val_error": [0.5], "train_loss": [1.0]}
    results[4] = dataclasses.replace(results[4], status=Status.STOPPED, curve=curve)
    row = prices(found)[16, "fixed"]
    assert (row.near, row.steps, row.price, row.verdict) == (5, third, third / 16, verdict)
    assert math.isnan(row.price_low) == (verdict == "at most")


def test_values_that_half_of_the_trials_missed_have_no_price():
    """Each pair of values met the goal once of two trials, so that no median is finite."""
    half = [(0.002, 0.999, 30), (0.002, 0.999, None), (0.002, 0.996, 20), (0.002, 0.996, -1)]
    for cells in ({4: FIRST, 16: half}, {4: half, 16: SECOND}):
        for (batch_size, _), row in prices(study(cells)).items():
            if cells[batch_size] is half or batch_size == 16:
                assert row.verdict == "half of the trials missed"
                assert math.isnan(row.price) and math.isnan(row.tuned)
    diverged = [(0.002, 0.999, 30), (0.002, 0.999, -1), *SECOND[2:]]
    fixed = prices(study({4: FIRST, 16: diverged}))[16, "fixed"]
    assert fixed.verdict == "half of the trials missed" and math.isnan(fixed.price)


def test_other_optimizers_and_one_batch_size_have_no_rules():
    assert not len(study({4: FIRST, 16: SECOND}, optimizer="sgd").adam_rules)
    alone = study({4: FIRST})
    assert not len(alone.adam_rules)
    assert "beta2 in the search space" in figure.missing(alone)


def test_the_figure_draws_each_price():
    found = study({4: FIRST, 16: SECOND})
    drawn = figure.draw(figure.rows(found), found)
    assert len(drawn.axes) == 2
    heights = []
    for line in drawn.axes[0].lines:
        heights += [float(y) for y in line.get_ydata() if line.get_linestyle() == "None"]
    known = found.adam_rules["price"].dropna()
    assert sorted(heights) == pytest.approx(sorted(known))
    assert any("1 of 8" in note or "7 of 8" in note for note in figure.notes(found))
