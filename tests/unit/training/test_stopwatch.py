"""The seconds of steps and of checks that a trial tells, by a clock that the network itself
moves."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.utils.data import default_collate

from lit_dps.advice.prediction import (
    PredictionCallback,
    calibrate,
    describe_goal,
    settings_texts,
)
from lit_dps.analysis.step_seconds import step_seconds
from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.models import MLP
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.storage.advice_store import AdviceStore, list_advice
from lit_dps.storage.schema import decode_result, encode_result
from lit_dps.training import GoalErrorCallback
from lit_dps.training.checkpoint_callback import CheckpointCallback
from lit_dps.training.checkpoint_files import CheckpointFile
from lit_dps.training.stopwatch import Stopwatch
from lit_dps.training.trainer_rules import STUDY_TRAINER
from lit_dps.training.workload import Workload
from tests.support.runs import train_one
from tests.support.texts import numbers_in
from tests.support.tiny import Plain, fit, loader
from tests.unit.analysis.test_answer import record
from tests.unit.engines.test_engine import DATA, MODEL, PARAMS, quiet  # noqa: F401

CLOCK = SimpleNamespace(seconds=0.0, waited=0.0)
STEP, CHECK = 2.0, 100.0  # seconds of a forward pass
TIMED = {"steps": 12, "training": 12 * STEP, "checks": 3, "checking": 3 * CHECK, "waited": 0.0}
GOAL = {"error": 1e-9, "check_interval": 4, "max_steps": 12}
TRIAL = Trial(Cell(32, 0.0), 0, PARAMS)


class Timed(nn.Module):
    """A network whose passes take a time of their own."""

    def __init__(self):
        super().__init__()
        self.inner = MLP(hidden=[8])

    def forward(self, x):
        CLOCK.seconds += STEP if self.training else CHECK
        return self.inner(x)


SLOW = {
    **MODEL,
    "init_args": {**MODEL["init_args"], "network": {"class_path": f"{__name__}.Timed"}},
}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(
        "lit_dps.training.stopwatch.time", SimpleNamespace(perf_counter=lambda: CLOCK.seconds)
    )
    monkeypatch.setattr("lit_dps.training.stopwatch.cpu_wait_seconds", lambda: CLOCK.waited)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("early", [True, False])
def test_steps_and_checks_are_told_apart(lean, early):
    found = train_one(
        TRIAL,
        Workload(SLOW, DATA, {"accelerator": "cpu"}),
        {**GOAL, "early_reject": early},
        lean=lean,
    )
    assert found.status is Status.INCOMPLETE
    assert found.timed == TIMED


LOAD, ELSEWHERE = 7.0, 1000.0  # seconds to load a training batch, and to save


def slow_collate(examples):
    CLOCK.seconds += LOAD
    return default_collate(examples)


class SlowSaves(Callback):
    """Takes a time after each validation, and in each checkpoint."""

    def on_validation_end(self, trainer, pl_module):
        CLOCK.seconds += ELSEWHERE

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        CLOCK.seconds += ELSEWHERE


def fit_with_slow_loader(interval: int, file: Path, checkpoint: Path | None = None):
    """Fit 20 steps over epochs of 12 batches, and save after each validation."""
    goal = GoalErrorCallback(1e-9, check_interval=interval, max_steps=20, unit="seconds")
    attempt = Attempt(None, goal.goal)
    goal.record_in(attempt)
    saving = CheckpointCallback(attempt, CheckpointFile(file, {"name": "run"}, print, 0.0))
    goal.after_check = saving.after_validation
    train = loader(48, 4, shuffle=True, collate_fn=slow_collate)
    fit(Plain(), train, loader(), [goal, SlowSaves(), saving], ckpt_path=checkpoint)
    return goal


@pytest.mark.parametrize("interval", [1, 4])
def test_loading_is_part_of_a_step_and_saving_is_not(interval, tmp_path):
    file = tmp_path / "run.ckpt"
    before = CLOCK.seconds
    goal = fit_with_slow_loader(interval, file)
    checks = 20 // interval
    assert CLOCK.seconds - before == 20 * LOAD + (2 * checks - 1) * ELSEWHERE
    training = 20 * LOAD
    expected = {"steps": 20, "training": training, "checks": checks, "checking": 0.0}
    assert goal.stopwatch.timed == {**expected, "waited": 0.0}
    assert goal.curve["seconds"] == [step * LOAD for step in goal.curve["step"]]


def test_the_way_to_the_place_of_a_resumed_run_is_no_loading(tmp_path):
    """The file is of step 16, the 4th batch of an epoch. Its next batch is loaded on that way."""
    file = tmp_path / "run.ckpt"
    fit_with_slow_loader(4, file)
    before = CLOCK.seconds
    resumed = fit_with_slow_loader(4, tmp_path / "other.ckpt", file)
    assert CLOCK.seconds - before == 8 * LOAD + ELSEWHERE
    assert resumed.stopwatch.timed["training"] == 3 * LOAD


def test_measuring_smoothness_is_no_part_of_a_step():
    smoothness = {"interval": 3, "examples": 64}
    workload = Workload(SLOW, DATA, {"accelerator": "cpu"})
    begin, found = (
        CLOCK.seconds,
        train_one(TRIAL, workload, GOAL, lean=False, smoothness=smoothness),
    )
    assert len(found.readings["lipschitz"]["step"]) == 4
    assert (
        CLOCK.seconds - begin > 12 * STEP + 3 * CHECK + 4 * 11 * STEP
    )  # passes between the weights of a step
    assert found.timed == TIMED
    each = step_seconds(record({32: [found]}))[TRIAL.cell]
    assert (each.training, each.check) == (STEP, CHECK)
    assert each.median == each.low == STEP


def test_it_is_stored():
    found = train_one(TRIAL, Workload(SLOW, DATA, {"accelerator": "cpu"}), GOAL)
    stored = json.loads(json.dumps(encode_result(found)))
    assert decode_result(stored, TRIAL).timed == found.timed


def test_fit_keeps_steps_and_checks_apart_from_what_it_does_beside(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "lit_dps.advice.prediction.time",
        SimpleNamespace(monotonic=lambda: CLOCK.seconds, time=lambda: 0.0),
    )

    class Saves(Callback):  # as a checkpoint of Lightning's, at each check
        def on_validation_end(self, trainer, pl_module):
            CLOCK.seconds += 1000

    url = f"sqlite:///{tmp_path}/study.db"
    predicted = {"steps": [10, 12, 14], "hours": [0.05, 0.1, 0.2]}
    prediction = PredictionCallback(url, "mine", 32, 1, **predicted)
    built = Workload(SLOW, DATA, {"accelerator": "cpu", **STUDY_TRAINER}).build(TRIAL)
    callbacks = [prediction, GoalErrorCallback(**GOAL), Saves()]
    Trainer(**{**built.trainer, "callbacks": callbacks}).fit(built.module, built.data)
    (found,) = list_advice(url)["mine"]["outcomes"]
    assert found["steps"] == 12 and not found["reached"]
    assert found["hours"] == pytest.approx((12 * STEP + 3 * CHECK) / 3600)
    assert found["other_hours"] == pytest.approx(3 * 1000 / 3600)
    shown = calibrate({"mine": [found]})
    assert "other hours" in shown.splitlines()[0] and shown.splitlines()[1].endswith("0.833")
    earlier = {key: value for key, value in found.items() if key != "other_hours"}
    assert "earlier version" in calibrate({"mine": [earlier]})


def test_a_run_of_another_batch_size_is_no_pair(tmp_path, capsys):
    url = f"sqlite:///{tmp_path}/study.db"
    prediction = PredictionCallback(url, "mine", 64, 1, [10, 12, 14], [0.05, 0.1, 0.2])
    built = Workload(SLOW, DATA, {"accelerator": "cpu", **STUDY_TRAINER}).build(TRIAL)
    Trainer(**{**built.trainer, "callbacks": [prediction, GoalErrorCallback(**GOAL)]}).fit(
        built.module, built.data
    )
    warning = capsys.readouterr().err
    assert {64, 32} <= set(numbers_in(warning))
    assert AdviceStore(url, "mine").read() == {}


def fitted(url: str, goal: dict, text: str | None, checkpoint: str | None = None) -> Trainer:
    """Return the trainer of a run whose prediction is for a goal by its text."""
    prediction = PredictionCallback(url, "mine", 32, 1, [10, 12, 14], [0.05, 0.1, 0.2], text)
    built = Workload(SLOW, DATA, {"accelerator": "cpu", **STUDY_TRAINER}).build(TRIAL)
    callbacks = [prediction, GoalErrorCallback(**goal)]
    trainer = Trainer(**{**built.trainer, "callbacks": callbacks})
    trainer.fit(built.module, built.data, ckpt_path=checkpoint, weights_only=False)
    return trainer


def test_a_run_from_a_checkpoint_has_steps_and_no_hours(tmp_path):
    """The 8 steps before the checkpoint were not timed."""
    url, file = f"sqlite:///{tmp_path}/study.db", str(tmp_path / "half.ckpt")
    fitted(url, {**GOAL, "max_steps": 8}, None).save_checkpoint(file)
    fitted(url, GOAL, None, file)
    first, resumed = list_advice(url)["mine"]["outcomes"]
    assert first["hours"] == pytest.approx((8 * STEP + 2 * CHECK) / 3600)
    assert (resumed["steps"], resumed["hours"], resumed["other_hours"]) == (12, None, None)
    lines = calibrate({"mine": [{**first, "reached": True}, {**resumed, "reached": True}]})
    assert "1 that met the goal" in lines.split("hours: ")[1]
    assert "2 that met the goal" in lines.split("steps: ")[1]


def test_a_run_that_resumes_after_its_goal_has_the_steps_to_the_goal(tmp_path):
    url, file = f"sqlite:///{tmp_path}/study.db", str(tmp_path / "met.ckpt")
    easy = {**GOAL, "error": 0.99}
    met = fitted(url, easy, None)
    assert met.global_step == 4
    met.save_checkpoint(file)
    assert fitted(url, easy, None, file).global_step > 4
    outcomes = list_advice(url)["mine"]["outcomes"]
    assert [(each["reached"], each["steps"]) for each in outcomes] == [(True, 4)] * 2


def test_a_run_of_another_goal_is_no_pair(tmp_path, capsys):
    url = f"sqlite:///{tmp_path}/study.db"
    text = describe_goal(GoalErrorCallback(**GOAL).goal)
    fitted(url, {**GOAL, "error": 0.5}, text)
    assert "error 0.5" in capsys.readouterr().err
    fitted(url, {**GOAL, "check_interval": 6}, text)
    assert AdviceStore(url, "mine").read() == {}
    fitted(url, {**GOAL, "max_steps": 8}, text)
    (stored,) = list_advice(url)["mine"]["outcomes"]
    assert stored["steps"] == 8


PREDICTED = [
    ("model.class_path", "my_script.Net"),
    ("model.init_args", {"lr": 0.02, "loss": {"class_path": "a.B", "init_args": {"p": 1}}}),
    ("data.class_path", "my_script.Data"),
    ("data.init_args", {"root": "here", "sizes": [8, 16]}),
    ("trainer.max_epochs", 3),
]


def difference(*others: tuple[str, object]) -> str | None:
    """Return how a run with other settings beside the predicted ones differs, as a clause."""
    texts = settings_texts(PREDICTED)
    prediction = PredictionCallback("", "mine", 32, 1, [1, 2, 3], [1, 2, 3], None, texts)
    trainer = SimpleNamespace(callbacks=[], world_size=1)
    assert prediction._difference(trainer) is None
    prediction.settings = [*PREDICTED, *others]
    return prediction._difference(trainer)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        # Classes move from a script to a module.
        *[("model.class_path", "my_module.Net"), ("data", "my_module.Data")],
        # These change speed or folders alone.
        *[("trainer.devices", 2), ("data.num_workers", 8), ("data.init_args.root", "/scratch")],
        # These repeat a value in another spelling.
        *[("model.lr", "2e-2"), ("model.init_args.lr", 0.02), ("model.loss.p", 1.0)],
        *[("model", {"init_args": {"lr": 0.02}}), ("data.sizes", [8, 16])],
    ],
)
def test_free_and_repeated_settings_are_no_other_ones(key, value):
    assert difference((key, value)) is None


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        (("model.lr", 0.2), "model.lr"),
        (("model.init_args", {"lr": 0.2}), "model.lr"),
        (("model.init_args.loss.init_args.p", 2), "model.loss.p"),
        (("model.class_path", "my_module.Other"), "model"),
        (("model.loss.class_path", "a.C"), "model.loss"),
        (("data", "my_module.Other"), "data"),
        (("data.sizes", [8]), "data.sizes, data.sizes.1"),
        (("pruning.sparsity", 0.9), "pruning.sparsity"),
        (("trainer.precision", "bf16-mixed"), "trainer.precision"),
    ],
)
def test_a_run_with_other_settings_is_no_pair_and_names_them(setting, key):
    assert f" of {key} than" in difference(setting)


def test_the_last_of_two_values_counts():
    assert difference(("model.lr", 0.2), ("model.init_args", {"lr": 0.02})) is None


def test_a_run_that_diverges_is_stored_as_diverged(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"

    class Explodes(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            with torch.no_grad():
                next(pl_module.parameters()).fill_(math.nan)

    prediction = PredictionCallback(url, "mine", 32, 1, [10, 12, 14], [0.05, 0.1, 0.2])
    built = Workload(SLOW, DATA, {"accelerator": "cpu", **STUDY_TRAINER}).build(TRIAL)
    callbacks = [prediction, GoalErrorCallback(**GOAL), Explodes()]
    Trainer(**{**built.trainer, "callbacks": callbacks}).fit(built.module, built.data)
    (stored,) = list_advice(url)["mine"]["outcomes"]
    assert stored["diverged"] and not stored["reached"] and stored["steps"] == 4


def test_the_batch_size_on_several_ranks_is_the_declared_one(monkeypatch):
    """A rank has a part of 16 of a batch of 32, and a step has two batches."""
    monkeypatch.setattr("lit_dps.advice.prediction.declared_batch_size", lambda trainer: 32)
    strategy = SharedBatchDDP.__new__(SharedBatchDDP)
    trainer = SimpleNamespace(world_size=2, strategy=strategy, accumulate_grad_batches=2)
    prediction = PredictionCallback("", "mine", 32, 2, [10, 12, 14], [0.05, 0.1, 0.2])
    prediction.on_train_batch_start(trainer, None, [torch.zeros(16)], 0)
    assert "64" in prediction._difference(trainer)


def test_an_outcome_that_the_storage_refuses_ends_no_run(tmp_path, capsys):
    (tmp_path / "folder").write_text("a file in its place")
    prediction = PredictionCallback(
        f"sqlite:///{tmp_path}/folder/study.db", "mine", 32, 1, [10, 12, 14], [0.05, 0.1, 0.2]
    )
    built = Workload(SLOW, DATA, {"accelerator": "cpu", **STUDY_TRAINER}).build(TRIAL)
    trainer = Trainer(**{**built.trainer, "callbacks": [prediction, GoalErrorCallback(**GOAL)]})
    trainer.fit(built.module, built.data)
    assert trainer.global_step == 12
    assert "lit-dps calibration" in capsys.readouterr().err


def test_it_stands_still_where_it_is_stopped():
    watch = Stopwatch()
    assert watch.timed == {}
    watch.switch_to("training")
    CLOCK.seconds += 1
    CLOCK.waited += 0.25
    with watch.paused():
        CLOCK.seconds += 10
        CLOCK.waited += 4
    CLOCK.seconds += 2
    watch.switch_to("checking")
    CLOCK.seconds += 5
    CLOCK.waited += 0.5
    watch.add_validation(4)
    CLOCK.seconds += 50
    watch.switch_to("training")
    CLOCK.seconds += 3  # steps that no check has seen
    phases = {"steps": 4, "training": 3.0, "checks": 1, "checking": 5.0}
    assert watch.timed == {**phases, "waited": 0.75}
