"""Training steps and data loaders of all shapes."""

from __future__ import annotations

from functools import partial

import pytest

from tests.zoo.run import spec, study
from tests.zoo.verify import assert_refused, assert_works


@pytest.fixture
def zoo(tmp_path):
    """Runs a study whose networks are all pruned; test_plain.py has dense ones."""
    return partial(study, tmp_path, sparsities=[0.8])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("OneArgument", marks=pytest.mark.long),
        "SkipsSome",
        pytest.param("ReturnsDict", marks=pytest.mark.long),
    ],
)
def test_training_steps(zoo, name):
    assert_works(zoo(f"steps.{name}"))


@pytest.mark.parametrize(
    "data",
    [
        "DictOfLoaders",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("ListOfLoaders", "Combined")),
    ],
)
def test_several_train_dataloaders(zoo, data):
    assert_works(zoo("steps.OnManyLoaders", f"data.{data}"))


@pytest.mark.parametrize("split", [pytest.param(0, marks=pytest.mark.long), 1])
def test_several_validation_dataloaders(zoo, split):
    goal = {"monitor": f"val_error/dataloader_idx_{split}"}
    outcome = zoo("steps.OnTwoValidations", "data.TwoValidations", goal=goal)
    assert_works(outcome)
    assert {tuple(outcome.audit(result).split) for result in outcome.results} == {(50, 30)}


def test_a_data_module_that_asks_its_trainer(zoo):
    assert_works(zoo(data="data.AsksTheTrainer"))


def test_loader_processes(zoo):
    assert_works(zoo(data=spec("data.Clouds", workers=1), batch_sizes=[32], goal={"max_steps": 20}))


def test_a_stream_can_be_trained_on_and_not_pruned_by(zoo):
    refused = zoo(data="data.Streamed", sparsities=[0.0, 0.8])
    assert_refused(refused, "data", "finite|length")


def test_a_stream_without_a_pass(zoo):
    assert_works(zoo(data="data.Streamed", pruning={"method": "magnitude"}))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"gradient_clip_val": 0.1}, marks=pytest.mark.long),
        {"precision": "bf16-mixed"},
        pytest.param({"precision": "64-true"}, marks=pytest.mark.long),
        pytest.param({"reload_dataloaders_every_n_epochs": 1}, marks=pytest.mark.long),
        {"detect_anomaly": True, "inference_mode": False},
        {"logger": True, "log_every_n_steps": 1, "num_sanity_val_steps": 2},
    ],
    ids=lambda options: " ".join(options),
)
def test_trainers(zoo, options):
    outcome = zoo(trainer=options, batch_sizes=[16])
    assert_works(outcome)
    assert {path.name for path in outcome.folder.iterdir()} <= {"zoo.yaml", "mlruns"}
