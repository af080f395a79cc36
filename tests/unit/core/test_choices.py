"""Discrete metaparameters: each choice as likely, stored, told, drawn and merged as ranges are."""

from __future__ import annotations

import copy
import math
from collections import Counter

import optuna
import pytest

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.attempt import AttemptRules
from lit_dps.core.config import StudyConfig
from lit_dps.core.search_space import Choices, Range, extreme_points, space_from_dict, space_to_dict
from lit_dps.core.trial import Cell, Trial
from lit_dps.models import MLP, SimpleCNN
from lit_dps.report.figures import drawn, metaparameters
from lit_dps.report.text import render
from lit_dps.storage.database import open_storage
from lit_dps.storage.merge import merge
from lit_dps.storage.read import OtherStorage, read_study
from lit_dps.storage.samplers import SobolSampler, distributions, sobol_point
from lit_dps.storage.trial_queue import TrialQueue
from tests.support.errors import refuses
from tests.support.fake_study import GOAL, result, write_study
from tests.unit.engines.test_engine import WORKLOAD

DECAY, NETWORKS = (
    Choices([0.0, 0.01, 0.1]),
    Choices(["lit_dps.models.MLP", "lit_dps.models.SimpleCNN"]),
)
SPACE = {
    "model.learning_rate": Range(1e-3, 1.0, "log"),
    "model.momentum": DECAY,
    "model.network": NETWORKS,
}
CELL = Cell(16, 0.0)


@pytest.mark.parametrize(
    ("u", "value"), [(0.0, 0.0), (0.333, 0.0), (0.334, 0.01), (0.667, 0.1), (0.999, 0.1), (1, 0.1)]
)
def test_each_choice_owns_an_equal_part(u, value):
    assert DECAY.at(u) == value
    assert DECAY.at(DECAY.unit(value)) == value and DECAY.boundary(value) is None


@pytest.mark.parametrize("n", [2, 3, 5, 7, 10, 100])
def test_the_middle_of_a_part_is_its_choice_for_any_number(n):
    box = Choices(list(range(n)))
    assert [box.at(box.unit(i)) for i in range(n)] == list(range(n))
    assert box.at(math.nextafter(1.0, 0.0)) == n - 1


def test_sobol_points_take_each_choice_as_often():
    values = [sobol_point(SPACE, 3, i) for i in range(96)]
    assert Counter(v["model.network"] for v in values) == dict.fromkeys(NETWORKS.choices, 48)
    assert all(30 <= n <= 34 for n in Counter(v["model.momentum"] for v in values).values())
    plain = {"model.learning_rate": SPACE["model.learning_rate"], "model.momentum": Range(0, 1)}
    asked = {key: SPACE[key] for key in plain}
    for i in range(9):  # the same points as a range in its place
        assert sobol_point(asked, 3, i)["model.momentum"] == DECAY.at(
            sobol_point(plain, 3, i)["model.momentum"]
        )


@pytest.mark.parametrize(
    "choices",
    [
        [],
        [0.1],
        [0.1, "a"],  # a number and a name
        [0.1, math.nan],
        [0.1, 0.1],
        ["a.Net", "b.Net"],  # names are told by their last part
    ],
)
def test_choices_that_are_not_allowed(choices):
    with refuses("study.space.k.choices", choices):
        Choices(choices).check("study.space.k")


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"choices": 0.1}, "study.space.k.choices", 0.1),
        ({"choices": [True, 0.1]}, "study.space.k.choices", [True, 0.1]),
        ({"choices": [0.1, 0.2], "low": 1}, "study.space.k.low", 1),
        ({"choises": [0.1, 0.2]}, "study.space.k.choises", [0.1, 0.2]),
        ({"low": 1}, "study.space.k", {"low": 1}),
        ({"low": 1, "high": "x"}, "study.space.k.high", "x"),
        ({"low": 1, "high": 2, "integer": 1}, "study.space.k.integer", 1),
        (3, "study.space.k", 3),
        ({}, "study.space.k", {}),
    ],
)
def test_what_is_no_box_is_refused(given, key, value):
    with refuses(key, value):
        StudyConfig(space={"k": given})


def test_boxes_as_a_configuration_has_them():
    space = StudyConfig(
        space={"k": {"low": 1, "high": 2, "scale": "log"}, "c": {"choices": [1, 2.5]}}
    ).space
    assert space == {"k": Range(1.0, 2.0, "log"), "c": Choices([1, 2.5])}
    assert isinstance(space["k"].low, float)


def test_extremes_have_both_ends_and_every_choice():
    assert extreme_points({"a": Range(1, 3), "b": DECAY}) == [
        {"a": 1, "b": 0.0},
        {"a": 3, "b": 0.01},
        {"a": 3, "b": 0.1},
    ]


def test_a_space_is_stored_as_plain_fields():
    assert space_from_dict(space_to_dict(SPACE)) == SPACE
    assert space_to_dict(SPACE)["model.momentum"] == {"choices": [0.0, 0.01, 0.1]}
    assert space_to_dict(SPACE)["model.learning_rate"] == {
        "low": 1e-3,
        "high": 1.0,
        "scale": "log",
        "integer": False,
    }


def test_optuna_holds_the_choices_themselves(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    assert distributions(SPACE)["model.momentum"] == optuna.distributions.CategoricalDistribution(
        [0.0, 0.01, 0.1]
    )
    run = TrialQueue(
        url, "s", [CELL], 1, SobolSampler(SPACE, 3), 3, AttemptRules(GOAL)
    ).claim_next()
    (kept,) = optuna.load_study(study_name="s | B=16 S=0", storage=open_storage(url)).trials
    assert dict(kept.params) == run.trial.params == sobol_point(SPACE, 3, 0)


def test_a_trial_is_built_with_its_choice():
    for name, kind in zip(NETWORKS.choices, (MLP, SimpleCNN), strict=True):
        built = WORKLOAD.build(Trial(CELL, 0, {"model.network": name, "model.momentum": 0.01}))
        assert isinstance(built.module.network, kind) and built.module.hparams.momentum == 0.01


def written(url: str, steps=(160, 96, 128)) -> None:
    params = [
        {"model.learning_rate": 0.1, "model.momentum": m, "model.network": NETWORKS.choices[i % 2]}
        for i, m in enumerate(DECAY.choices)
    ]
    trials = [
        result(CELL, i, k, params=p) for i, (p, k) in enumerate(zip(params, steps, strict=True))
    ]
    write_study(url, {CELL: trials}, space=SPACE, identity={"study": {}}, seed=3)


def test_table_boundary_and_figure(tmp_path):
    written(url := f"sqlite:///{tmp_path}/study.db")
    study = Analysis(read_study(url, "fake"))
    assert study.record.space == SPACE
    row = render(study).splitlines()[3].split()
    assert row[:3] == ["16", "0", "96"] and row[6:9] == ["0.100", "0.01", "SimpleCNN"]
    assert study.cells[0].boundary == {}, "0.1 of [1e-3, 1] is no end, and choices have none"
    assert study.trials["network"].tolist() == [NETWORKS.choices[i % 2] for i in range(3)]
    axes = metaparameters.axes_of(study.record)
    assert [list(pair) for pair in axes][0] == ["learning_rate", "momentum"]
    figure = metaparameters.draw(metaparameters.rows(study), study, axes[2])
    (ax,) = figure.axes
    assert [text.get_text() for text in ax.get_xticklabels()] == ["0", "0.01", "0.1"]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["MLP", "SimpleCNN"]
    places = {tuple(p) for marks in ax.collections for p in marks.get_offsets().data.tolist()}
    assert {(0, 0), (1, 1), (2, 0)} <= places
    assert drawn(metaparameters, study) is not None


def test_results_of_another_machine_are_merged(tmp_path):
    here, there = (f"sqlite:///{tmp_path}/{name}.db" for name in ("here", "there"))
    written(here), written(there)
    (found,) = merge(here, [OtherStorage("there", open_storage(there))]).values()
    assert (found.added, found.unchanged, found.conflicts) == (0, 3, {})
    other = copy.deepcopy(SPACE)
    assert read_study(here, "fake").space == other
