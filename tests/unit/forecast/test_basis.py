"""What a forecast expects: finished trials, taken to other batch sizes along the law, or the probes
of advice."""

from __future__ import annotations

import dataclasses

import pytest

from lit_dps.analysis.law_verdict import Trust
from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell
from lit_dps.forecast.forecast import study_table
from lit_dps.forecast.remaining import (
    laws_of,
    nearest_record,
    ratio_by_laws,
    remaining_trials,
    stored_record,
)
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.training.workload import Workload
from tests.support.fake_study import SPACE, analysis_of, law_results, write_study
from tests.support.setups import setup_of
from tests.unit.forecast.test_forecast import TIMING

C1, C2 = 4000.0, 100.0
GOAL = Goal(0.1, 1, 20_000)
SIZES = (8, 32, 128)


def k(batch_size: int) -> float:
    return C1 / batch_size + C2


def results(sizes=SIZES, sparsity: float = 0.0):
    cells = [Cell(b, sparsity) for b in sizes]
    return {cell: law_results(cell, 16, C1, C2, goal=GOAL) for cell in cells}


def record(found):
    return analysis_of(found, trials=16, goal=GOAL).record


def mean(trials) -> float:
    return sum(r.steps_run for r in trials) / len(trials)


def test_steps_move_along_the_law_to_batch_sizes_that_nobody_has_trained_at():
    known = results()
    along = ratio_by_laws(laws_of(record(known)))
    assert along(Cell(2, 0.0), 8) == pytest.approx(k(2) / k(8), rel=0.15)
    points = {Cell(2, 0.0): {0}, Cell(512, 0.0): {0, 1}, Cell(32, 0.0): set()}
    most = dict.fromkeys(points, 20_000)
    found = remaining_trials(points, most, record(known), along)
    steps = found[Cell(2, 0.0)].expected_steps
    assert steps == pytest.approx(mean(known[Cell(8, 0.0)]) * along(Cell(2, 0.0), 8))
    nearest = remaining_trials(points, most, record(known), lambda cell, batch_size: 1.0)
    at_nearest = nearest[Cell(2, 0.0)].expected_steps
    assert at_nearest < steps < 4.5 * at_nearest
    assert found[Cell(512, 0.0)].expected_steps < nearest[Cell(512, 0.0)].expected_steps


def test_a_series_without_a_law_has_the_ratio_of_another():
    laws = laws_of(record(results()))
    assert ratio_by_laws(laws)(Cell(2, 0.9), 8) == ratio_by_laws(laws)(Cell(2, 0.0), 8) > 2
    assert ratio_by_laws({})(Cell(2, 0.0), 8) == 1
    assert ratio_by_laws(laws)(Cell(128 * 64, 0.0), 128) == 1, "farther than the law reaches"


def test_a_law_that_only_interpolates_gives_the_ratio_of_measured_k_star():
    """K* is flat up to B = 64, and the fitted constants fall by a factor of 8 from 8 to 64."""
    flat = {8: 1000, 32: 1000, 64: 1000, 128: 300, 256: 100, 512: 100}
    found = {}
    for b, steps in flat.items():
        found[Cell(b)] = law_results(Cell(b), 16, 0.0, steps, goal=GOAL)
    bent = record(found)
    (law,) = laws_of(bent).values()
    assert law.verdict.trust is Trust.INTERPOLATED
    along = ratio_by_laws(laws_of(bent))
    measured = bent.k_star_steps(Cell(64)) / bent.k_star_steps(Cell(8))
    assert along(Cell(64), 8) == pytest.approx(measured)
    assert law.steps(64) / law.steps(8) < 0.5 * measured


def test_two_batch_sizes_have_no_law():
    assert laws_of(record(results(SIZES[:2]))) == {} == laws_of(None)


@pytest.fixture
def asked(tmp_path):
    """A study of which nothing is stored, whose probes are."""
    workload = Workload(
        {"class_path": "mine.Net", "init_args": {"width": 8}}, {"class_path": "mine.Data"}, {}
    )
    goal = {"error": 0.1, "check_interval": 1, "max_steps": 20_000}
    study = StudyConfig(
        name="fake",
        batch_sizes=[2, 8],
        sparsities=[0.0, 0.9],
        trials=4,
        workers=1,
        space=dict(SPACE),
    )
    setup = setup_of(study, StorageConfig(str(tmp_path)), workload, goal, {}, {"interval": None})
    write_study(
        setup.storage.optuna_url,
        results(),
        trials=16,
        goal=GOAL,
        name="fake-advice",
        race_factor=study.race_factor,
    )
    AdviceStore(setup.storage.optuna_url, "fake").keep(configuration=setup.identity(None))
    return setup


def test_the_probes_of_advice_tell_of_a_study_that_has_not_begun(asked):
    assert stored_record(asked) is None
    tells = nearest_record(asked, None)
    assert tells.name == "fake-advice"
    lines = study_table(asked, asked.remaining_points({}), None, TIMING, tells)
    assert lines[0].endswith("time expected")
    steps = sum(
        2 * 4 * mean(tells.results[Cell(8)]) * along
        for along in (1, ratio_by_laws(laws_of(tells))(Cell(2), 8))
    )
    (told,) = (line for line in lines if line.startswith("expected: "))
    assert f"{steps:,.0f} steps" in told and " 48 " in told
    assert "dense" in told and "K*" in told


def test_the_probes_of_another_module_goal_or_race_tell_nothing(asked):
    wide = Workload(
        {"class_path": "mine.Net", "init_args": {"width": 9}}, {"class_path": "mine.Data"}, {}
    )
    goal = dataclasses.replace(asked.goal, error=0.2)
    study = dataclasses.replace(asked.study, race_factor=None)
    for changed in ({"workload": wide}, {"goal": goal}, {"study": study}):
        assert nearest_record(dataclasses.replace(asked, **changed), None) is None
