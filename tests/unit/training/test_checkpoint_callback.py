"""A trial that is interrupted and goes on from its checkpoint ends as an unbroken one, to the last
bit."""

from __future__ import annotations

import math

import pytest
import torch

from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.training.checkpoint_files import steps_saved
from tests.support.saved_study import GOAL, USER, USER_DATA, Study
from tests.support.texts import numbers_in
from tests.unit.engines.test_engine import DATA, MODEL, PARAMS, quiet  # noqa: F401

DECAY = {"schedule": "linear", "decay_steps": 50, "end_factor": 0.1}


def assert_goes_on(study: Study, trial: Trial, checks: tuple[int, ...] = (2, 5)) -> None:
    """Interrupts a trial after so many checks of each attempt; what it ends with has to be the
    unbroken one's."""
    whole, reference = study.run(trial, saved=False)
    taken = 0
    for n in checks:
        broken, steps = study.run(trial, interrupt=n)
        assert broken is None and study.checkpoints().path(trial).exists()
        taken += steps.taken
        assert steps.taken == 4 * n
    result, steps = study.run(trial)
    steps_before = [4 * sum(checks[: i + 1]) for i in range(len(checks))]
    assert [line.startswith(f"{trial.cell} sample {trial.point} ") for line in study.said] == (
        [True] * len(steps_before)
    )
    assert [int(line.rpartition(" ")[2]) for line in study.said] == steps_before
    assert result == whole
    assert torch.equal(steps.weights, reference.weights)
    assert taken + steps.taken == reference.taken, "no step was taken twice"


@pytest.mark.parametrize("early_reject", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("rule", "lean"),
    [
        ({"optimizer": "sgd"}, True),
        ({"optimizer": "momentum", **DECAY}, False),
        ({"optimizer": "momentum", **DECAY}, True),
        *(
            pytest.param({"optimizer": rule}, lean, marks=pytest.mark.long)
            for rule, lean in (("sgd", False), ("nesterov", False), ("nesterov", True))
        ),
    ],
)
def test_our_module_and_data(tmp_path, monkeypatch, rule, lean, early_reject):
    monkeypatch.setattr(
        "lit_dps.training.early_validation.CHUNK", 20
    )  # of 179: checks stop early, hardest examples first
    model = {**MODEL, "init_args": {**MODEL["init_args"], **rule}}
    study = Study(
        tmp_path,
        model=model,
        goal={**GOAL, "early_reject": early_reject},
        lean=lean,
        further=(0.1,),
    )
    assert_goes_on(study, Trial(Cell(100, 0.9), 1, PARAMS))


def test_an_order_of_its_own_and_batches_across_epochs(tmp_path):
    data = {**DATA, "init_args": {"order": "per_trial", "order_seed": 0}}
    assert_goes_on(Study(tmp_path, data=data), Trial(Cell(700, 0.0), 1, PARAMS))


def test_measurements_go_on_too(tmp_path):
    smoothness = {"interval": 6, "examples": 50}
    study = Study(tmp_path, goal={**GOAL, "max_steps": 32}, smoothness=smoothness)
    assert_goes_on(study, Trial(Cell(16, 0.5), 1, PARAMS), (2, 3))


@pytest.mark.parametrize(
    ("arguments", "accumulate"),
    [
        pytest.param({}, 1, marks=pytest.mark.long),
        ({}, 3),
        ({"own_generator": True}, 1),
        pytest.param({"workers": 1}, 1, marks=pytest.mark.long),
    ],
)
def test_a_users_module_and_data(tmp_path, arguments, accumulate):
    data = {"class_path": USER_DATA, "init_args": arguments}
    study = Study(
        tmp_path,
        model=USER,
        data=data,
        trainer={"accumulate_grad_batches": accumulate},
        goal={**GOAL, "max_steps": 40},
    )
    assert_goes_on(study, Trial(Cell(8 * accumulate, 0.3), 0, {"model.rate": 0.01}), (1, 3, 2))


KEPT = (
    "count",
    "window",
    "phase",
    "object",
    "dict",
    "teacher",
    "shadow",
    "array",
    "set",
    "list",
    "buffer",
)


@pytest.mark.parametrize("keeps", KEPT)
def test_what_a_module_keeps_beside_its_weights_goes_on_too(tmp_path, keeps):
    data = {"class_path": USER_DATA}
    model = {"class_path": "tests.support.saved_user.Keeping", "init_args": {"keeps": keeps}}
    study = Study(
        tmp_path, model=model, data=data, goal={**GOAL, "max_steps": 40}, metrics=["val_loss"]
    )
    assert_goes_on(study, Trial(Cell(8, 0.3), 0, {"model.rate": 0.01}), (1, 3, 2))


def test_what_a_callback_keeps_goes_on_too(tmp_path):
    trainer = {"callbacks": [{"class_path": "tests.support.saved_user.Warming"}]}
    study = Study(
        tmp_path,
        model=USER,
        data={"class_path": USER_DATA},
        trainer=trainer,
        goal={**GOAL, "max_steps": 40},
    )
    assert_goes_on(study, Trial(Cell(8, 0.3), 0, {"model.rate": 0.01}), (1, 3, 2))


def test_a_module_that_forgets_begins_anew(tmp_path):
    study = Study(
        tmp_path, model=USER, data={"class_path": USER_DATA}, goal={**GOAL, "max_steps": 24}
    )
    trial = Trial(Cell(8, 0.0), 0, {"model.rate": 0.01, "model.forget": True})
    whole, _ = study.run(trial, saved=False)
    study.run(trial, interrupt=2)
    assert study.run(trial)[0] == whole
    assert "restarts" in study.said[-1]


def test_a_trial_that_pauses_goes_on_from_there(tmp_path):
    study, trial = Study(tmp_path), Trial(Cell(16, 0.5), 1, PARAMS)
    whole, reference = study.run(trial, saved=False)
    paused, steps = study.run(trial, pause=lambda cell: 12)
    assert (paused.status, steps.taken, paused.curve["step"]) == (Status.PAUSED, 12, [4, 8, 12])
    assert paused == study.run(trial, saved=False, pause=lambda cell: 12)[0]
    result, steps = study.run(trial, pause=lambda cell: math.inf)
    assert (result, steps.taken) == (whole, reference.taken - 12)
    assert study.said == [], "a pause is no news"


def test_an_interruption_after_a_pause_is_told(tmp_path):
    study, trial = Study(tmp_path), Trial(Cell(16, 0.5), 1, PARAMS)
    study.run(trial, pause=lambda cell: 12)
    study.run(trial, interrupt=2)
    study.run(trial)
    (line,) = study.said
    assert line.startswith(f"{trial} ") and numbers_in(line)[-1] == 20


@pytest.mark.parametrize(("worth", "steps"), [(0.0, [12]), (600.0, [])])
def test_a_pause_after_a_moment_is_not_worth_a_file(tmp_path, monkeypatch, worth, steps):
    monkeypatch.setattr("lit_dps.training.checkpoint_files.MIN_SECONDS_WORTH_SAVING", worth)
    study, trial = Study(tmp_path, minutes=10.0), Trial(Cell(16, 0.0), 1, PARAMS)
    study.run(trial, pause=lambda cell: 12)
    assert [steps_saved(path) for path in tmp_path.rglob("*.ckpt")] == steps
