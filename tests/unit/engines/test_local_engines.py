"""Local SGD as a study runs it: interrupted and taken up, on several ranks, and on another number
of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from lit_dps.core.trial import Cell, Trial
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import trainer_arguments
from lit_dps.training import LocalSGDCallback
from tests.support.ranks import on_ranks, same_on_ranks
from tests.support.runs import train_one
from tests.support.saved_study import Study
from tests.support.texts import numbers_in
from tests.support.tiny import QUIET, Plain, fit, loader, weights
from tests.unit.engines.test_engine import MODEL, quiet  # noqa: F401
from tests.unit.optim.test_local_sgd import workload

LOCAL = {"steps": 5, "start": 6, "outer_learning_rate": 0.7, "outer_momentum": 0.5}
PARAMS = {"model.learning_rate": 0.05}
CHECKS = {"error": 0.02, "check_interval": 8, "max_steps": 24}


def trial(workers: int = 2, sparsity: float = 0.8, batch_size: int = 16, **local) -> Trial:
    others = tuple(
        (f"local.{key}", value) for key, value in {"workers": workers, **LOCAL, **local}.items()
    )
    return Trial(Cell(batch_size, sparsity, others), 1, PARAMS)


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("rule", "lean"),
    [
        ("momentum", True),
        ("adam", False),
        pytest.param("momentum", False, marks=LONG),
        pytest.param("adam", True, marks=LONG),
    ],
)
def test_an_interrupted_trial_ends_as_an_unbroken_one(tmp_path, lean, rule):
    """After steps 4, 12 and 28: before the start, in a round, and in another."""
    model = {
        **MODEL,
        "init_args": {
            **MODEL["init_args"],
            "optimizer": rule,
            "schedule": "linear",
            "decay_steps": 40,
        },
    }
    study, one = Study(tmp_path, model=model, lean=lean), trial(4, batch_size=100)
    whole, reference = study.run(one, saved=False)
    assert not whole.failure
    for n in (1, 2, 4):
        assert study.run(one, interrupt=n)[0] is None and study.checkpoints().path(one).exists()
    result, steps = study.run(one)
    assert [line.rpartition(" ")[2] for line in study.said] == ["4", "12", "28"]
    assert result == whole and torch.equal(steps.weights, reference.weights)


def test_a_checkpoint_of_other_rounds_is_none(tmp_path):
    study = Study(tmp_path, local={"workers": 2, "steps": 3})
    one = Trial(Cell(100, 0.0), 1, PARAMS)
    study.run(one, interrupt=2)
    other = Study(tmp_path, local={"workers": 2, "steps": 4})
    other.run(one)
    assert len(other.said) == 1 and "restarts" in other.said[0]


def together(trial: Trial, rule: str) -> dict[str, list[float]]:
    """What a rank knows of a trial; its checks leave the workers alone."""
    found = [
        train_one(trial, workload(rule), {**CHECKS, **more}, lean=False).curve
        for more in ({}, {"early_reject": True}, {"check_interval": 24})
    ]
    assert (
        found[1]["train_loss"] == found[0]["train_loss"]
        and found[2]["train_loss"][-1] == found[0]["train_loss"][-1]
    )
    return found[0]


@pytest.mark.parametrize(
    ("world", "workers", "rule"),
    [
        pytest.param(2, 2, "momentum", marks=LONG),
        (2, 4, "adam"),
        pytest.param(3, 3, "sgd", marks=LONG),
    ],
)
def test_ranks_train_what_one_process_simulates(world, workers, rule):
    one = dataclasses.replace(trial(workers, batch_size=24), params={"model.learning_rate": 0.01})
    alone, ours = together(one, rule), same_on_ranks(world, together, one, rule)
    assert ours["step"] == alone["step"]
    assert ours["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-5)
    assert ours["val_error"] == pytest.approx(alone["val_error"], abs=2 / 179)


def any_module(workers: int, steps: int, start: int) -> dict[str, list]:
    module = Plain()
    local = LocalSGDCallback(workers, steps, start, 0.7, 0.5)
    fit(module, loader(), callbacks=[local], max_steps=13, **trainer_arguments(QUIET))
    return {name: mean.tolist() for name, mean in weights(module).items()}


@pytest.mark.parametrize("start", [0, 5])
def test_the_mean_of_two_ranks_is_that_of_two_workers_of_one_process(start):
    alone, ours = any_module(2, 4, start), same_on_ranks(2, any_module, 2, 4, start)
    for name in alone:
        torch.testing.assert_close(
            torch.tensor(ours[name]), torch.tensor(alone[name]), rtol=1e-6, atol=1e-7
        )
    if start == 0:  # nothing is added up in another order
        assert ours == alone


def taken_up(folder: Path, one: Trial) -> tuple:
    study = Study(folder if ranks.rank() == 0 else folder / "elsewhere")
    whole, reference = study.run(one, saved=False)
    for n in (1, 2, 4):
        study.run(one, interrupt=n)
    result, steps = study.run(one)
    return study.said, result == whole, torch.equal(steps.weights, reference.weights)


@pytest.mark.long
def test_ranks_go_on_to_the_bit_too(tmp_path):
    one = trial(4, batch_size=100)
    said, same_result, same_weights = same_on_ranks(2, taken_up, tmp_path, one)
    assert [line.rpartition(" ")[2] for line in said] == ["4", "12", "28"]
    assert same_result and same_weights


def test_workers_that_the_ranks_cannot_share_are_refused():
    for error in on_ranks(2, any_module, 3, 4, 0):
        assert (error.key, error.value) == ("local.workers", 3) and numbers_in(error.allowed) == [2]
