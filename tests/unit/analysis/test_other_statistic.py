"""Tables, laws and repeats of a study whose K* is not the minimum, by hand."""

from __future__ import annotations

import dataclasses
import math
import shlex
from itertools import combinations

import numpy as np
import optuna
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.best_of_n import best_of
from lit_dps.analysis.observations import (
    AT_LEAST,
    noise_of_k_star,
    noise_of_minimum,
    observations_of_cells,
)
from lit_dps.analysis.rate_rules import TOO_FEW
from lit_dps.core.goal import Goal
from lit_dps.core.statistic import MINIMUM, median_of_best
from lit_dps.core.trial import Cell
from lit_dps.report.answer import retrain_command
from lit_dps.report.screen import screen
from lit_dps.storage.read import read_study
from lit_dps.study.retrain import stored_trial
from tests.support.errors import refuses
from tests.support.fake_study import analysis_of, law_study, result, write_study

CELL, OTHER = Cell(4), Cell(16)
GOAL = Goal(0.1, check_interval=16, max_steps=320)
MEDIAN = "median_of_best_3"
RATE = "model.learning_rate"
SPACE = {RATE: {"low": 1e-3, "high": 10.0, "scale": "log"}}


def trial(cell: Cell, point: int, steps: int | None, status: str = "complete", run: int = 320):
    params = {"model.learning_rate": 0.1 * (point + 1), "model.momentum": 0.9}
    last = steps or run
    curve = {"step": list(range(16, last + 1, 16))}
    curve |= {"val_error": [0.5] * len(curve["step"]), "train_loss": [1.0] * len(curve["step"])}
    return result(cell, point, steps, status, params, curve=curve)


STEPS = [160, None, 96, 112, 240]


def study(statistic: str | None = MEDIAN, **kw) -> Analysis:
    cells = {
        CELL: [trial(CELL, point, k) for point, k in enumerate(STEPS)],
        OTHER: [trial(OTHER, point, k) for point, k in enumerate([None, 64, None, None, None])],
    }
    header = {} if statistic is None else {"statistic": statistic}
    return analysis_of(cells, goal=GOAL, **header, **kw)


def test_another_statistic_keeps_the_study_at_its_first_goal():
    first = study().record
    at_other_goal = Analysis(study().record, original=first)
    assert at_other_goal.with_statistic(MINIMUM.name).original is first


def test_tables_have_the_median_and_its_trial():
    table = study().table
    assert table["k_star"].tolist()[0] == 112 and math.isnan(table["k_star"].astype(float)[1])
    assert table["point"].tolist()[0] == 3
    trials = study().trials
    assert trials[trials["k_star"]]["point"].tolist() == [3]
    by_default = study(None)
    assert by_default.table["k_star"].tolist() == [96, 64]
    assert by_default.record.statistic is MINIMUM


def test_the_race_stops_at_the_second_best():
    record = study(race_factor=1).record
    statuses = [str(r.status) for r in record.results[CELL]]
    assert statuses == ["outraced", "outraced", "complete", "complete", "outraced"]
    assert [r.steps_run for r in record.results[CELL]] == [112, 112, 96, 112, 112]
    assert [r.steps for r in record.results[OTHER]] == [None, 64, None, None, None]


def test_a_cell_of_one_complete_trial_has_a_lower_bound():
    (of_cell, of_other) = observations_of_cells(study().record, study().cells)
    assert of_cell.k == 112 and not of_cell.bound
    assert (of_other.k, of_other.bound) == (GOAL.max_steps, AT_LEAST)


@pytest.mark.parametrize("count", [5, 25, 100])
def test_its_noise_is_that_of_the_second_of_exponential_distances(count):
    steps = [100, 110, 125, 130, *[None] * (count - 4)]
    noise = noise_of_minimum(steps, 2)
    assert noise_of_k_star(steps, 2, MINIMUM) == noise
    # Renyi: the second of n exponential distances of mean d is the sum of two independent ones.
    expected = noise * count * math.hypot(1 / count, 1 / (count - 1))
    assert noise_of_k_star(steps, 2, median_of_best(3)) == pytest.approx(expected, rel=0.05)


def test_draws_are_the_median_of_every_choice():
    statistic = median_of_best(3)
    few, all_of_them = best_of(STEPS, [3, 5], statistic)
    assert (all_of_them.median, all_of_them.none) == (112, 0)
    assert all_of_them.mean == pytest.approx(112)
    every = [statistic.k_star(chosen) for chosen in combinations(STEPS, 3)]
    known = [k for k in every if k is not None]
    assert few.none == 1 - len(known) / len(every)
    assert few.mean == pytest.approx(np.exp(np.mean(np.log(known))), rel=0.02)
    assert few.median == sorted(every)[(len(every) - 1) // 2]


def test_repeats_are_of_the_point_of_k_star():
    plan = {"count": 2, "points": 2, "race_factor": 2.0}
    analysis = study(repeats=plan)
    assert [each.point for each in analysis.repeats] == [3, 2]
    missing = analysis.record.missing_repeats(CELL)
    assert missing == [(3, 1), (2, 1), (3, 2), (2, 2)]
    assert analysis.record.missing_repeats(OTHER) == []


def test_reports_say_what_k_star_is():
    text = screen(study())
    assert "K* is the median of the steps of the best 3 trials" in text
    assert "Fewer than 2 trials reached the goal in 1 of 2 cells" in text
    assert "median" not in screen(study(None))


def test_another_statistic_of_a_stored_study_is_what_its_trials_determine():
    full = study(None)
    assert full.with_statistic(MEDIAN).table["k_star"].tolist()[0] == 112
    assert full.with_statistic("minimum").table.equals(full.table)
    assert study().with_statistic("minimum").table["k_star"].tolist() == [96, 64]
    raced = study(None, race_factor=2)  # stopped at 192 and at 128
    assert raced.record.results[OTHER][0].steps_run == 128
    with refuses("--statistic", MEDIAN) as caught:
        raced.with_statistic(MEDIAN)
    assert "B=16,S=0" in str(caught.value.allowed) and "1 of 2" in str(caught.value.allowed)
    part = dataclasses.replace(raced.record, results={CELL: raced.record.results[CELL]})
    assert part.with_statistic(MEDIAN).k_star(CELL) == 112
    with refuses("--statistic", "median_of_best_9"):
        raced.with_statistic("median_of_best_9")


def test_a_raced_study_has_the_tables_of_the_full_one():
    """The law, whose noise of K* uses trials beyond, differs; K* and its trials do not."""
    tables = []
    for race_factor in (None, 1.0, 2.0):
        storage = optuna.storages.InMemoryStorage()
        law_study(storage, race_factor=race_factor, statistic=MEDIAN)
        table = Analysis(read_study(storage, "fake")).table
        tables.append(table[["batch_size", "k_star", "floor", "point", "boundary"]])
    assert tables[0]["k_star"].notna().all()
    assert tables[0].equals(tables[1]) and tables[0].equals(tables[2])


def test_a_price_compares_the_same_statistic():
    storage = optuna.storages.InMemoryStorage()
    law_study(storage, trials=64, statistic=MEDIAN)
    analysis = Analysis(read_study(storage, "fake"))
    prices = analysis.prices
    assert len(prices) and (prices["k_star"] > 0).all()
    for row in prices.to_dict("records"):
        if row["verdict"] == "measured":
            assert row["price"] == row["steps"] / row["k_star"] >= 1
            assert row["price_low"] <= row["price"] <= row["price_high"]
        if row["near"] == 1:
            assert row["verdict"] == TOO_FEW


def test_a_study_is_written_with_its_statistic():
    storage = optuna.storages.InMemoryStorage()
    write_study(storage, {CELL: [trial(CELL, 0, 96)]}, statistic="median_of_best_0")
    with refuses("study.statistic", "median_of_best_0"):
        read_study(storage, "fake")


def test_the_command_retrains_the_trial_of_the_shown_statistic():
    for name in ("minimum", MEDIAN):
        for stored in (study(None), study()):
            shown = stored.with_statistic(name)
            words = shlex.split(retrain_command(shown))
            cell = stored.record.parse_cell(words[words.index("--cell") + 1])
            point = None
            if "--point" in words:
                point = int(words[words.index("--point") + 1])
            best = shown.by_cell[cell].best.trial.point
            assert stored_trial(stored.record, cell, point).trial.point == best
            # The trial of the stored statistic needs no number.
            assert (point is None) == (shown.record.statistic is stored.record.statistic)
