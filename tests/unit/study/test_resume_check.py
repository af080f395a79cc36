"""The dry run resumes a short trial: one that ends with other values is refused, one that cannot
resume is noted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import Cell, Trial
from lit_dps.module import ImageClassifier
from lit_dps.report.notes import Level
from lit_dps.storage.samplers import sobol_point
from lit_dps.study.preflight.dry_run import dry_run
from lit_dps.study.preflight.resume_check import _gap, _ShortRun, check_resume
from lit_dps.study.setup import StudySetup
from lit_dps.training.workload import Workload
from tests.support.saved_study import Study
from tests.unit.engines.test_engine import DATA, MODEL, PARAMS, quiet  # noqa: F401
from tests.unit.study.test_dry_run import ANIMALS, setup
from tests.unit.training.test_checkpoint_callback import assert_goes_on
from tests.zoo.animals.data import TRAIN


def check(
    model: str = "models.Net",
    data: str = "data.Clouds",
    callback: str = "",
    batch_size: int = 16,
    sparsity: float = 0.5,
    goal: dict[str, Any] | None = None,
    **study,
) -> list[str]:
    """The notes on the resume of a trial of animals."""
    made = setup(model, data, goal, **study)
    if callback:
        trainer = {"accelerator": "cpu", "callbacks": [{"class_path": ANIMALS + callback}]}
        made = replace(made, workload=replace(made.workload, trainer=trainer))
    point = sobol_point(made.study.space, 0, 0)
    with made.workload.without_side_effects() as workload:
        settings = replace(made.trial_settings(), workload=workload)
        return check_resume(settings, Trial(Cell(batch_size, sparsity), 0, point), made)


@pytest.mark.parametrize(
    ("key", "name", "animals"),
    [
        ("model", "HiddenCounter", {"model": "forgetful.HiddenCounter"}),
        ("model", "Net, Scaler", {"callback": "forgetful.Scaler"}),
        ("data", "ArrayOrder", {"data": "forgetful.ArrayOrder"}),
        ("model", "WithLookahead", {"model": "optimizers.WithLookahead"}),
    ],
)
def test_a_trial_that_resumes_with_other_values_is_refused(key, name, animals):
    with pytest.raises(ConfigError) as error:
        check(**animals)
    assert (error.value.key, error.value.value) == (key, name)
    assert "study.checkpoint_minutes" in error.value.allowed
    assert check(**animals, checkpoint_minutes=None) == []


@pytest.mark.parametrize(
    "model", ["SavedCounter", "Mean", "SeededDraws", "AsksInSetup", "DrawnMasks"]
)
def test_what_is_saved_is_not_refused(model):
    assert check(f"forgetful.{model}") == []


@pytest.mark.parametrize("batch_size", [TRAIN // 2, TRAIN])
def test_epochs_of_one_or_two_batches_resume_at_the_same_checks(batch_size):
    assert check(batch_size=batch_size) == []
    with pytest.raises(ConfigError) as error:
        check("forgetful.HiddenCounter", batch_size=batch_size)
    assert (error.value.key, error.value.value) == ("model", "HiddenCounter")


def test_a_trial_that_diverges_is_checked_at_another_point():
    with pytest.raises(ConfigError) as error:
        check("forgetful.DivergesAtHighRates")
    assert (error.value.key, error.value.value) == ("model", "DivergesAtHighRates")


def test_a_budget_of_one_step_has_nothing_to_resume():
    goal = {"error": 0.05, "check_interval": 1, "max_steps": 1}
    assert check("forgetful.HiddenCounter", goal=goal) == []


@pytest.mark.parametrize(
    ("model", "sparsity", "reason"),
    [
        ("Diverges", 0.0, "diverges"),
        ("Diverges", 0.5, "diverges"),
        ("FailsAfterValidation", 0.5, "RuntimeError"),
    ],
)
def test_a_check_without_a_finite_run_is_noted(model, sparsity, reason):
    (note,) = check(f"forgetful.{model}", sparsity=sparsity)
    assert f"of {model} can resume is not known" in note and reason in note


class Own(ImageClassifier):
    """Ours, of a class of its own."""


def test_our_data_go_on_with_a_module_of_the_users():
    own = {**MODEL, "class_path": f"{__name__}.Own"}
    made = setup()
    made = replace(made, workload=Workload(own, DATA, {"accelerator": "cpu"}))
    trial = Trial(Cell(16, 0.5), 0, PARAMS)
    assert check_resume(made.trial_settings(), trial, made) == []


@pytest.mark.parametrize("data", ["NumberOrder", "Curriculum"])
def test_attributes_of_data_are_saved(data):
    assert check(data=f"forgetful.{data}") == []


def test_a_curriculum_resumes_in_a_later_epoch(tmp_path):
    model, data = (
        {"class_path": ANIMALS + name} for name in ("models.Net", "forgetful.Curriculum")
    )
    goal = {"error": 0.001, "check_interval": 4, "max_steps": 40}
    study = Study(tmp_path, model=model, data=data, goal=goal)
    assert_goes_on(study, Trial(Cell(16, 0.3), 0, {"model.lr": 1e-4}), (1, 2))


@pytest.mark.parametrize("model", ["ByClock", "Unseeded", "OfTheClass"])
def test_a_trial_that_is_not_reproducible_is_noted(model):
    (note,) = check(f"forgetful.{model}")
    assert f" {model} " in note and "reproducible" in note


def test_rounding_of_a_gpu_that_differs_from_run_to_run_hides_no_state(monkeypatch):
    monkeypatch.setattr(StudySetup, "on_gpu", True)
    assert check("forgetful.Trembling") == []
    for model in ("HiddenCounter", "TremblingCounter"):
        with pytest.raises(ConfigError) as error:
            check(f"forgetful.{model}")
        assert (error.value.key, error.value.value) == ("model", model)
    (note,) = check("forgetful.Unseeded")
    assert " Unseeded " in note and "reproducible" in note


def test_a_trial_that_cannot_resume_is_noted():
    ((note, level),) = dry_run(setup("passes.LateBuffer"))[1].items()
    assert " LateBuffer " in note and "resume" in note
    assert level is Level.INFO, "no number depends on it"


def test_data_go_on_where_the_length_of_training_is_read_in_setup(tmp_path):
    model, data = (
        {"class_path": ANIMALS + name} for name in ("forgetful.AsksInSetup", "data.Clouds")
    )
    goal = {"error": 0.001, "check_interval": 4, "max_steps": 40}
    study = Study(tmp_path, model=model, data=data, goal=goal)
    assert_goes_on(study, Trial(Cell(16, 0.3), 0, {"model.lr": 1e-4}), (1, 2))


@pytest.mark.parametrize(
    ("one", "two", "is_equal"),
    [
        ([1.0, float("nan")], [1.0, float("nan")], True),
        ([float("inf")], [float("inf")], True),
        ([], [], True),
        ([float("nan")], [0.0], False),
        ([float("inf")], [torch.finfo(torch.float64).max], False),
        ([1.0, 0.0], [1.0, float("nan")], False),
    ],
)
def test_a_value_that_is_not_finite_equals_only_itself(one, two, is_equal):
    gap = _gap(torch.tensor(one, dtype=torch.float64), torch.tensor(two, dtype=torch.float64))
    assert (gap == 0) == is_equal


def test_a_value_or_a_weight_that_one_run_alone_has_is_a_difference():
    curve, weights = {"step": [1, 2], "val_error": [0.5, 0.4]}, {"a": torch.ones(2)}
    ended = _ShortRun(curve=curve, weights=weights)
    assert ended.difference(_ShortRun(curve=curve, weights=weights), 0.0) is None
    shorter = {"step": [1], "val_error": [0.5]}
    assert ended.difference(_ShortRun(curve=shorter, weights=weights), 0.0) is not None
    more = {**weights, "b": torch.ones(1)}
    assert ended.difference(_ShortRun(curve=curve, weights=more), 0.0).text.startswith("b ")
