"""A trial depends on its cell and its point alone, whatever ran before it and whoever runs it."""

from __future__ import annotations

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

import lit_dps.training.workload as workload_module
from lit_dps.core.errors import UserError
from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.models import MLP
from lit_dps.module import ImageClassifier
from lit_dps.training.workload import Workload, locate
from tests.support.errors import refuses
from tests.support.runs import train as train_all
from tests.support.runs import train_one
from tests.support.texts import numbers_in

MODEL = {
    "class_path": "lit_dps.module.ImageClassifier",
    "init_args": {
        "network": {"class_path": "lit_dps.models.MLP", "init_args": {"hidden": [32]}},
        "optimizer": "momentum",
    },
}
DATA = {"class_path": "lit_dps.data.Digits"}
WORKLOAD = Workload(MODEL, DATA, {"accelerator": "cpu"})
GOAL = {"error": 0.3, "check_interval": 4, "max_steps": 100}
RATE = "model.learning_rate"
PARAMS = {"model.learning_rate": 0.02, "model.momentum": 0.9}


@pytest.fixture(autouse=True)
def quiet():
    from lit_dps.parallel.process import prepare_process

    with warnings.catch_warnings():
        prepare_process()
        yield


def weights(trial: Trial, workload: Workload = WORKLOAD) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in workload.build(trial).module.parameters()])


def train(trial: Trial, **kw):
    return dataclasses.replace(train_one(trial, WORKLOAD, GOAL, **kw), seconds=0.0)


def test_initial_weights_are_of_the_point_and_seed_not_of_the_cell_or_global_state():
    first = weights(Trial(Cell(16, 0.0), 3, PARAMS))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert torch.equal(first, weights(Trial(Cell(64, 0.9), 3, PARAMS)))
    assert torch.equal(torch.get_rng_state(), state), (
        "building a trial draws nothing from the global generator"
    )
    assert not torch.equal(first, weights(Trial(Cell(16, 0.0), 4, PARAMS)))
    assert not torch.equal(first, weights(Trial(Cell(16, 0.0), 3, PARAMS, seed=1)))


def test_a_trial_is_repeated_exactly_after_others_ran():
    trial = Trial(Cell(16, 0.5), 0, PARAMS)
    first = train(trial)
    train(Trial(Cell(32, 0.0), 1, PARAMS))
    torch.manual_seed(99)
    np.random.seed(99)
    assert train(trial) == first
    assert first.status is Status.COMPLETE
    assert first.curve["step"] == list(range(4, first.steps + 1, 4))
    assert first.curve["val_error"][-1] <= 0.3 < min(first.curve["val_error"][:-1])
    kept = sum(n for n, _ in first.kept.values())
    assert kept == round(0.5 * sum(total for _, total in first.kept.values()))


def test_the_three_endings():
    def status(rate):
        return train(Trial(Cell(16, 0.0), 0, {**PARAMS, "model.learning_rate": rate}))

    assert (status(0.02).status, status(0.02).steps is not None) == (Status.COMPLETE, True)
    spent = status(1e-5)
    assert (spent.status, spent.steps, spent.curve["step"][-1]) == (Status.INCOMPLETE, None, 100)
    diverged = status(1e30)
    assert (diverged.status, diverged.steps) == (Status.INFEASIBLE, None)


@pytest.mark.parametrize("lean", [True, False])
def test_scores_are_those_of_a_trial_s_own_metaparameters(lean):
    """Of a search that draws a point of its own for each cell, such as tpe."""
    goal = {**GOAL, "max_steps": 4}
    first = Trial(Cell(16, 0.9), 0, {**PARAMS, "model.label_smoothing": 0.0})
    other = Trial(Cell(64, 0.9), 0, {**PARAMS, "model.label_smoothing": 0.9})
    (_, after), (alone,) = (
        train_all(asked, WORKLOAD, goal, lean=lean) for asked in ([first, other], [other])
    )
    assert after.kept == alone.kept and after.curve == alone.curve


def first_batches(order: str, trials: list[Trial]) -> list[list[int]]:
    workload = dataclasses.replace(
        WORKLOAD, data={**DATA, "init_args": {"order": order, "order_seed": 0}}
    )
    batches = []
    for trial in trials:
        data = workload.build(trial).data
        data.setup("fit")
        batches.append(next(iter(data.train_dataloader())).index.tolist())
    return batches


def test_trials_share_an_order_or_have_one_each():
    trials = [Trial(Cell(16, s), point, PARAMS) for point in (0, 1) for s in (0.0, 0.9)]
    shared = first_batches("authors", trials)
    assert shared[0] == shared[1] == shared[2] == shared[3]
    own = first_batches("per_trial", trials)
    assert own[0] == own[1] and own[2] == own[3], "the order is the point's, at every sparsity"
    assert own[0] != own[2] and own[0] != shared[0]


def test_overrides_reach_the_arguments_of_nested_classes():
    built = WORKLOAD.build(Trial(Cell(7, 0.0), 0, {**PARAMS, "model.network.num_classes": 12}))
    assert built.data.batch_size == 7
    assert built.module.hparams.learning_rate == 0.02
    assert built.module.network.layers[-1].out_features == 12
    assert MODEL["init_args"]["network"]["init_args"] == {"hidden": [32]}, (
        "the workload itself is not changed"
    )


@pytest.mark.parametrize(
    "key",
    [
        "learning_rate",
        "optimizer.lr",
        "model.net.width",  # the model has no part "net"
        "model.network",  # no number
    ],
)
def test_keys_that_lead_nowhere(key):
    with refuses("study.space", key):
        locate({"model": MODEL, "data": DATA}, key, "study.space")


def test_unknown_arguments_and_refused_values_are_user_errors():
    with pytest.raises(UserError) as refused:
        WORKLOAD.build(Trial(Cell(16, 0.0), 0, {"model.foo": 1.0}))
    assert "'foo'" in str(refused.value)
    with refuses("model.momentum", 1.5):
        WORKLOAD.build(Trial(Cell(16, 0.0), 0, {"model.momentum": 1.5}))


class Stops(Callback):
    """Stops its trainer after some steps, as a guard against bad numbers would."""

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= 6


class Raises(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 6:
            raise RuntimeError("a guard\nof two")


def with_callback(callback: type):
    callbacks = [{"class_path": f"{__name__}.{callback.__name__}"}]
    slow = Trial(Cell(16, 0.0), 0, {**PARAMS, "model.learning_rate": 1e-5})
    return train_one(
        slow,
        dataclasses.replace(WORKLOAD, trainer={"accelerator": "cpu", "callbacks": callbacks}),
        GOAL,
    )


def test_a_run_that_something_else_stops_is_stopped():
    result = with_callback(Stops)
    assert (result.status, result.steps, result.curve["step"]) == (Status.STOPPED, None, [4])
    assert numbers_in(result.failure) == [6]


def test_what_a_callback_raises_is_a_failed_trial():
    result = with_callback(Raises)
    assert (result.status, result.steps, result.failure) == (
        Status.FAILED,
        None,
        "RuntimeError: a guard",
    )
    assert "on_train_batch_end" in result.traceback and "of two" in result.traceback


def test_jsonargparse_parses_the_classes_of_a_study_once(monkeypatch):
    parsed = []
    parse = workload_module._parse_object

    def count(name, spec):
        parsed.append(name)
        return parse(name, spec)

    monkeypatch.setattr(workload_module, "_parse_object", count)
    monkeypatch.setattr(workload_module, "_parsed", {})
    for point in range(4):
        rate = 0.01 * (point + 1)
        built = WORKLOAD.build(Trial(Cell(2 ** (point + 3), 0.5), point, PARAMS | {RATE: rate}))
        assert built.module.hparams.learning_rate == rate
        assert built.data.batch_size == 2 ** (point + 3)
    assert sorted(parsed) == ["data", "model", "trainer"]


@pytest.mark.parametrize(("key", "value"), [("learning_rate", "fast"), ("network.hidden", 0.5)])
def test_a_value_is_refused_after_other_trials_as_it_is_before(key, value, monkeypatch):
    trial = Trial(Cell(16, 0.5), 0, {f"model.{key}": value})
    monkeypatch.setattr(workload_module, "_parsed", {})
    with pytest.raises(UserError) as first:
        WORKLOAD.build(trial)
    WORKLOAD.build(Trial(Cell(16, 0.5), 0, PARAMS))
    with pytest.raises(UserError) as second:
        WORKLOAD.build(trial)
    assert str(first.value) == str(second.value)
    assert key.rpartition(".")[2] in str(first.value)


def test_a_class_may_change_the_lists_that_it_is_given():
    spec = {"class_path": "tests.unit.engines.test_engine.Widens", "init_args": {"widths": [8]}}
    workload = Workload(spec, DATA, {"accelerator": "cpu"})
    for point in range(2):
        assert workload.build(Trial(Cell(16), point, {})).module.widths == [8, 1]


class Widens(ImageClassifier):
    def __init__(self, widths: list[int]):
        super().__init__(MLP())
        self.widths = widths
        self.widths.append(1)
