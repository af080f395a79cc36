"""Local SGD in a study: what is refused before anything is created, what an identity holds, what a
trial gets."""

from __future__ import annotations

import dataclasses

import pytest

from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.core.search_space import Choices, Range
from lit_dps.core.trial import Cell, Series, Trial
from lit_dps.report.notes import Level
from lit_dps.study.preflight.check import check_configuration
from lit_dps.study.preflight.idle_keys import idle_keys
from lit_dps.study.preflight.keys import check_effects, check_keys, check_new_axes, check_workers
from lit_dps.study.setup import StudySetup
from tests.support.errors import refuses
from tests.support.setups import setup_of, training_of
from tests.unit.optim.test_local_sgd import workload

DEFAULTS = {
    "workers": 1,
    "steps": 1,
    "start": 0,
    "outer_learning_rate": 1.0,
    "outer_momentum": 0.0,
    "outer_nesterov": True,
}
DOUBLING = {"schedule": "doubling", "options": {"start": 0.25, "steps": 10}}
RATES = {"model.learning_rate": Range(0.1, 1.0)}

SHORT_GOAL = {"error": 0.1, "check_interval": 4, "max_steps": 60}


def setup(batch_sizes=(16, 64), space=RATES, grid=None, **local) -> StudySetup:
    study = StudyConfig(
        batch_sizes=list(batch_sizes), sparsities=[0.0], space=space, grid=grid or {}
    )
    return setup_of(
        study,
        StorageConfig(),
        workload("sgd"),
        SHORT_GOAL,
        local={**DEFAULTS, **local},
    )


def check(setup: StudySetup) -> None:
    setup.study.check()
    check_keys(setup)
    for cell in setup.study.cells:
        for end in (0.0, 1.0):
            check_workers(setup, cell, {key: box.at(end) for key, box in setup.study.space.items()})


def test_a_trial_has_the_numbers_of_the_section_its_cell_and_its_point():
    training = training_of(workload("sgd"), {}, local={**DEFAULTS, "workers": 2, "steps": 8})
    cell, params = (
        Cell(16, 0.0, (("local.steps", 3), ("model.momentum", 0.5))),
        {"local.outer_momentum": 0.4},
    )
    assert training.resolve(Trial(cell, 0, params)).local == LocalSGDSchedule(2, 3, 0, 1.0, 0.4)
    assert training.workload.build(Trial(cell, 0, params)).module.hparams.momentum == 0.5


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"workers": 3}, "study.batch_sizes", 16),
        ({"grid": {"local.workers": [4, 24]}}, "study.batch_sizes", 16),
        ({"grid": {"local.steps": [1, 0]}}, "local.steps", 0),
        ({"grid": {"local.rounds": [1, 2]}}, "study.grid", "local.rounds"),
        ({"space": {"local.rate": Range(0.1, 1.0)}}, "study.space", "local.rate"),
        ({"space": {"local.outer_momentum": Range(0.1, 1.0)}}, "local.outer_momentum", 1.0),
        (
            {"space": {"local.steps": Range(1, 8, integer=True)}, "grid": {"local.steps": [1, 2]}},
            "study.grid",
            "local.steps",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_created(given, key, value):
    with refuses(key, value) as refused:
        check(setup(**given))
    if key == "study.batch_sizes":
        workers = given.get("workers", 24)
        assert f"local.workers = {workers}" in refused.value.allowed


@pytest.mark.parametrize(
    ("sections", "key", "value"),
    [
        ({"pruning": {"method": "rigl"}}, "pruning.method", "rigl"),
        ({"batch": DOUBLING}, "batch.schedule", "doubling"),
    ],
)
def test_searched_workers_are_refused_where_one_value_does_not_fit(sections, key, value):
    """The middle of the space, and the dry run, have one worker."""
    space = {**RATES, "local.workers": Choices([4, 1])}
    given = setup(space=space)
    study = dataclasses.replace(given.study, sparsities=[0.0, 0.9])
    searched = setup_of(study, StorageConfig(), given.workload, SHORT_GOAL, **sections)
    with refuses(key, value):
        check_configuration(searched)
    one_worker = dataclasses.replace(study, space=RATES)
    check_configuration(
        setup_of(one_worker, StorageConfig(), given.workload, SHORT_GOAL, **sections)
    )


@pytest.mark.parametrize(
    ("given", "source", "key"),
    [
        ({"grid": {"local.steps": [1, 4, 16]}}, "study.grid", "local.steps"),
        ({"grid": {"local.workers": [1], "local.start": [0, 8]}}, "study.grid", "local.start"),
        (
            {"space": {**RATES, "local.steps": Range(1, 8, integer=True)}},
            "study.space",
            "local.steps",
        ),
        (
            {"workers": 4, "grid": {"local.outer_nesterov": [True, False]}},
            "study.grid",
            "local.outer_nesterov",
        ),
    ],
)
def test_a_key_that_acts_in_no_trial_is_refused_in_a_new_study_and_noted_in_a_stored_one(
    given, source, key
):
    with refuses(source, key):
        check_new_axes(setup(**given))
    with pytest.MonkeyPatch.context() as patch:
        # No other key is tested, so no trial runs.
        patch.setattr("lit_dps.study.preflight.idle_keys._is_known_to_act", lambda *_: True)
        made = setup(**given)
        noted = idle_keys(made.trial_settings(), made)
    assert list(noted.values()) == [Level.WEAK] and next(iter(noted)).startswith(key)


@pytest.mark.parametrize(
    "given",
    [
        {"grid": {"local.workers": [1, 4], "local.steps": [1, 4]}},
        {"grid": {"local.workers": [1], "local.steps": [1]}},
        {"space": {**RATES, "local.workers": Choices([4, 1])}, "grid": {"local.start": [0, 8]}},
        {"outer_learning_rate": 0.5, "grid": {"local.steps": [1, 4]}},
        {
            "grid": {"local.outer_nesterov": [True, False]},
            "space": {**RATES, "local.outer_momentum": Range(0.0, 0.9)},
        },
    ],
)
def test_a_key_that_acts_in_some_trials_is_accepted(given):
    check_new_axes(setup(**given))
    assert check_effects(setup(**given)) == []


def test_a_fixed_value_that_acts_in_no_trial_has_a_note():
    assert len(check_effects(setup(steps=16, outer_nesterov=False))) == 2
    assert check_effects(setup(workers=4, steps=16)) == []


def test_what_fits_is_not():
    check(setup(workers=4, steps=7, grid={"local.steps": [1, 4]}))
    check(setup(batch_sizes=(3, 5)))  # one worker
    check(setup(workers=4, space={**RATES, "local.outer_learning_rate": Range(0.3, 1.0)}))


def test_the_identity_of_a_study_without_local_sgd_is_as_before_there_was_such():
    plain = setup_of(
        *(getattr(setup(), name) for name in ("study", "storage", "workload")), SHORT_GOAL
    )
    assert setup().identity(None) == plain.identity(None) == setup(steps=9).identity(None)
    assert "local" not in setup().identity(None)


def test_an_identity_holds_what_no_axis_and_no_search_varies():
    assert setup(workers=4).identity(None)["local"] == {**DEFAULTS, "workers": 4}
    varied = setup(
        workers=4,
        grid={"local.steps": [1, 4]},
        space={**RATES, "local.outer_momentum": Range(0.1, 0.9)},
    )
    left = {key: value for key, value in DEFAULTS.items() if key not in ("steps", "outer_momentum")}
    assert varied.identity(None)["local"] == {**left, "workers": 4}
    assert setup(grid={"local.workers": [1, 4]}, steps=8).identity(None)["local"]["steps"] == 8


def test_an_axis_that_tables_have_a_column_for_goes_by_its_whole_key():
    series = Series(0.0, (("local.steps", 4), ("local.workers", 2)))
    assert str(series).split() == ["S=0", "local.steps=4", "workers=2"]
