"""The dry run: what a trial knows, and no more; metrics of one network at both ends of the grid."""

from __future__ import annotations

import copy
import math
import re
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.search_space import Choices, Range
from lit_dps.core.trial import Cell
from lit_dps.study.preflight.batch_size_check import (
    ROUNDING,
    ROUNDING_OF_HALF,
    _differences,
    _random_ranges,
)
from lit_dps.study.preflight.dry_run import _weights_by_address, dry_run
from lit_dps.study.preflight.varied_trials import trials_with_each_value
from lit_dps.study.setup import StudySetup
from lit_dps.training.workload import Workload
from tests.support.errors import refuses
from tests.support.setups import setup_of
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.zoo.animals import dry_runs

ANIMALS = "tests.zoo.animals."
SPACE = {"model.lr": Range(1e-3, 0.1, "log")}
GOAL = {"error": 0.05, "check_interval": 5, "max_steps": 40}


def setup(
    model: str = "models.Net",
    data: str | dict[str, Any] = "data.Clouds",
    goal: dict[str, Any] | None = None,
    arguments: dict[str, Any] | None = None,
    **study: Any,
) -> StudySetup:
    """A study of two animals, of dense networks at two batch sizes."""
    specs = [{"class_path": ANIMALS + model, "init_args": dict(arguments or {})}]
    if isinstance(data, str):
        data = {"class_path": ANIMALS + data}
    specs.append({"init_args": {}, **data})
    config = StudyConfig(
        **{"space": SPACE, "batch_sizes": [4, 16], "sparsities": [0.0], "trials": 1, **study}
    )
    pruning = {"method": "snip", "biases": "paper", "batch_size": 50}
    workload = Workload(*specs, {"accelerator": "cpu"})
    return setup_of(config, StorageConfig(), workload, goal or GOAL, pruning, {"interval": None})


def of(metric: str, **more: Any) -> dict[str, Any]:
    return {"metric": metric, "at_most": 0.01, "check_interval": 5, "max_steps": 40, **more}


@pytest.mark.parametrize(
    ("model", "metric"),
    [
        ("RootOfBatch", "val_rmse"),
        ("ZeroHead", "val_rmse"),
        ("BatchStatistics", "val_loss"),
        ("Contrastive", "val_contrast"),
    ],
)
def test_a_metric_that_depends_on_the_validation_batch_size_is_refused(model, metric):
    with pytest.raises(ConfigError) as error:
        dry_run(setup(f"dry_runs.{model}", "dry_runs.OneBatchSize", of(metric)))
    assert (error.value.key, error.value.value) == ("goal.metric", metric)
    sizes = re.findall(r"B = (\d+)", error.value.allowed)
    assert {"4", "16"} <= set(sizes)
    assert dry_run(setup(f"dry_runs.{model}", goal=of(metric)))[1] == {}, (
        "validation has a batch size of its own"
    )


@pytest.mark.parametrize(
    ("model", "arguments", "path"),
    [
        ("SharedObject", {}, "train_accuracy.metric_b"),
        ("ComputedAtTheEnd", {"resets": False}, "error.metric_b"),
        ("ComputedAtTheEnd", {}, None),
        ("ByAccuracies", {}, None),
        ("ByMetric", {}, None),
    ],
)
def test_a_metric_that_counts_earlier_batches_has_a_note(model, arguments, path):
    notes = dry_run(setup(f"metrics.{model}", arguments=arguments))[1]
    notes = [note for note in notes if "torchmetrics" in note]
    if path is None:
        assert notes == []
    else:
        assert [note.split()[4] for note in notes] == [path]


@pytest.mark.parametrize("model", ["RootOfBatch", "HalfAlone"])
def test_half_precision_hides_no_dependence_on_the_batch_size(model):
    """The difference of a root is below 1 %. A module that fails in full precision is validated in
    its own."""
    made = setup(f"dry_runs.{model}", "dry_runs.OneBatchSize", of("val_rmse"))
    trainer = {"accelerator": "cpu", "precision": "bf16-true"}
    with pytest.raises(ConfigError) as error:
        dry_run(replace(made, workload=replace(made.workload, trainer=trainer)))
    assert (error.value.key, error.value.value) == ("goal.metric", "val_rmse")


def test_an_intermediate_batch_size_alone_may_leave_a_short_validation_batch():
    sizes = {
        "data": "dry_runs.OneBatchSize",
        "goal": of("val_rmse"),
        "batch_sizes": [5, 10, 12, 25],
    }
    with pytest.raises(ConfigError) as error:
        dry_run(setup("dry_runs.RootOfBatch", **sizes))
    assert error.value.value == "val_rmse"


def test_a_mean_over_the_examples_may_be_taken_in_any_batches():
    assert dry_run(setup(data="dry_runs.OneBatchSize", goal=of("val_loss")))[1] == {}
    assert dry_run(setup(data="dry_runs.OneBatchSize"))[1] == {}


def test_a_further_metric_that_depends_on_the_validation_batch_size_is_noted():
    (note,) = dry_run(
        setup("dry_runs.RootOfBatch", "dry_runs.OneBatchSize", metrics=["val_rmse", "val_loss"])
    )[1]
    assert note.startswith("val_rmse ")


@pytest.mark.parametrize("model", ["Denoising", "DenoisingZeroHead"])
def test_random_validation_is_noted_and_not_refused(model):
    (note,) = dry_run(setup(f"dry_runs.{model}", "dry_runs.OneBatchSize", of("val_noisy")))[1]
    assert note.startswith("val_noisy ")


def test_a_random_metric_that_depends_on_the_validation_batch_size_is_refused():
    (note,) = dry_run(setup("dry_runs.NoisyRoot", goal=of("val_rmse")))[1]
    assert "is random" in note, "validation has a batch size of its own"
    with pytest.raises(ConfigError) as error:
        dry_run(setup("dry_runs.NoisyRoot", "dry_runs.OneBatchSize", of("val_rmse")))
    assert (error.value.key, error.value.value) == ("goal.metric", "val_rmse")


def test_a_difference_is_random_up_to_three_times_the_range_of_one_network():
    short = Mock()
    short.epochs.repeated = [{"e": 0.50}, {"e": 0.51}, {"e": 0.49}]
    ranges = _random_ranges(short, ROUNDING)
    assert ranges == {"e": pytest.approx(0.02)}
    for other, is_random in ((0.559, True), (0.561, False), (0.439, False), (math.nan, False)):
        found = _differences([{"e": 0.5}], [{"e": other}], ROUNDING, ranges)
        assert ("e" not in found) is is_random
    short.epochs.repeated = [{"e": 0.500}, {"e": 0.504}]
    assert _random_ranges(short, ROUNDING_OF_HALF) == {}


@pytest.mark.parametrize("model", ["Seeding", "Pretrained", "LoadsInSetup"])
def test_weights_that_are_equal_at_all_points_are_noted(model):
    (note,) = dry_run(setup(f"dry_runs.{model}"))[1]
    assert "weights" in note


def test_loaded_weights_that_meet_the_goal_only_without_pruning_are_refused():
    both = setup("dry_runs.LogsPrunedShare", sparsities=[0.0, 0.8])
    with pytest.raises(ConfigError) as refused:
        dry_run(both)
    assert (refused.value.key, refused.value.value) == ("goal.error", 0.05)
    assert "S=0" in str(refused.value)
    dry_run(setup("dry_runs.LogsPrunedShare", sparsities=[0.8]))


def test_weights_that_setup_draws_are_not_equal():
    assert dry_run(setup("dry_runs.DrawsInSetup"))[1] == {}


SHORT = {
    "class_path": f"{ANIMALS}data.Clouds",
    "init_args": {"n": 32},
}  # 2 steps an epoch at B = 16
LONG = {"class_path": f"{ANIMALS}data.Clouds", "init_args": {"n": 160}}


@pytest.mark.parametrize("model", ["ReadsAtEpochEnd", "ReadsAttribute"])
def test_a_value_of_a_check_is_not_there_before_the_first_check(model):
    with refuses(None, Cell(16), error=UserError) as refused:
        dry_run(setup(f"dry_runs.{model}", SHORT))
    assert "on_train_epoch_end" in str(refused.value)
    notes = dry_run(setup(f"dry_runs.{model}", LONG))[1]
    assert not [note for note in notes if "cannot resume" not in note], (
        "the first check precedes the end of an epoch"
    )


def test_a_metric_that_an_error_names_has_no_value_before_the_first_check():
    with refuses(None, Cell(4), error=UserError) as refused:
        dry_run(setup("dry_runs.ReadsLoggedMetrics", LONG))
    # A hint follows the place of the error, and names the interval.
    assert "goal.check_interval" in str(refused.value)


def test_a_module_may_have_to_train_before_it_validates():
    assert dry_run(setup("dry_runs.TrainsBeforeItValidates"))[1] == {}


def test_the_last_batch_of_an_epoch_is_tried():
    ragged = {"class_path": f"{ANIMALS}data.Clouds", "init_args": {"n": 35}}
    arguments = {"arguments": {"size": 8}, "batch_sizes": [8]}
    with refuses(None, Cell(8), error=UserError) as refused:
        dry_run(setup("dry_runs.FailsAtTheLastBatch", ragged, **arguments))
    assert "AssertionError" in str(refused.value)
    full = {"class_path": f"{ANIMALS}data.Clouds", "init_args": {"n": 35, "drop_last": True}}
    assert dry_run(setup("dry_runs.FailsAtTheLastBatch", full, **arguments))[1] == {}


@pytest.mark.parametrize(
    "data", ["data.Clouds", "dry_runs.OwnSampler", "dry_runs.OwnPruningLoader"]
)
def test_the_last_batch_of_the_pruning_pass_is_tried(data):
    """Batch normalization refuses one example: 151 are three batches of 50 and one; at B = 16 the
    last batch has 7."""
    at = {"batch_sizes": [16], "sparsities": [0.0, 0.5]}
    with pytest.raises(ConfigError) as error:
        dry_run(
            setup("parts.BatchNorm", {"class_path": ANIMALS + data, "init_args": {"n": 151}}, **at)
        )
    assert (error.value.key, error.value.value) == ("pruning.method", "snip")
    assert "pruning.batch_size" in error.value.allowed
    even = {"class_path": ANIMALS + data, "init_args": {"n": 152}}
    assert dry_run(setup("parts.BatchNorm", even, **at))[1] == {}


@pytest.mark.parametrize(
    ("model", "metric"),
    [("KeepsPredictions", "val_all"), ("Denoising", "val_noisy"), ("RootOfBatch", None)],
)
def test_a_metric_that_differs_between_two_validations_of_one_network_is_noted(model, metric):
    """Its validation batches have a fixed size here."""
    name = metric or "val_rmse"
    notes = dry_run(setup(f"dry_runs.{model}", goal=of(name)))[1]
    assert [note.split()[0] for note in notes] == ([metric] if metric else [])


@pytest.mark.parametrize(
    ("data", "is_noted"), [("SplitBySeed", True), ("SplitOnce", False), ("Clouds", False)]
)
def test_validation_examples_that_the_seed_of_a_point_draws_are_noted(data, is_noted):
    notes = dry_run(setup(data=f"data.{data}", trials=2))[1]
    assert any("validate" in note for note in notes) is is_noted


@pytest.mark.parametrize(
    "values", [["fixed", "drawn"], pytest.param(["drawn", "fixed"], marks=pytest.mark.long)]
)
def test_every_value_of_a_data_axis_and_of_a_choice_is_validated_at_two_points(values):
    for more in (
        {"grid": {"data.split": values}},
        {"space": {**SPACE, "data.split": Choices(values)}},
    ):
        notes = dry_run(setup(data="data.SplitByName", trials=2, **more))[1]
        assert any("validate" in note for note in notes)


@pytest.mark.parametrize("values", [["none", "pretrained"], ["pretrained", "none"]])
def test_every_value_of_a_model_axis_and_of_a_choice_shows_its_weights(values):
    for more in (
        {"grid": {"model.fault": values}},
        {"space": {**SPACE, "model.fault": Choices(values)}},
    ):
        notes = dry_run(setup("dry_runs.WithFault", **more))[1]
        (note,) = [note for note in notes if "equal weights" in note]
        assert "equal weights at model.fault = pretrained: WithFault loads them" in note


@pytest.mark.parametrize("body", ["shared", "memory"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_weights_that_trials_share_are_refused_before_they_change(body, is_frozen, monkeypatch):
    backbone = copy.deepcopy(dry_runs.BACKBONE).requires_grad_(not is_frozen)
    monkeypatch.setattr(dry_runs, "BACKBONE", backbone)
    before = copy.deepcopy(backbone.state_dict())
    for axis in ([body], ["copy", body]):
        with refuses("model", "OnBackbone"):
            dry_run(setup("dry_runs.OnBackbone", grid={"model.body": axis}))
    for name, weight in backbone.state_dict().items():
        assert torch.equal(weight, before[name])
    dry_run(setup("dry_runs.OnBackbone", grid={"model.body": ["copy"]}))


def test_equal_weights_at_all_values_name_no_value():
    notes = dry_run(setup("dry_runs.WithFault", grid={"model.fault": ["pretrained"]}))[1]
    assert any("begin with equal weights: WithFault loads them" in note for note in notes)


@pytest.mark.parametrize("values", [["none", "forgetful"], ["forgetful", "none"]])
def test_every_value_of_an_axis_and_of_a_choice_is_resumed(values):
    for more in (
        {"grid": {"model.fault": values}},
        {"space": {**SPACE, "model.fault": Choices(values)}},
    ):
        with refuses("model", "WithFault"):
            dry_run(setup("dry_runs.WithFault", **more))


def test_few_trials_have_every_value_of_axes_and_choices():
    made = setup(
        grid={"model.width": [8, 16, 32], "data.n": [80, 160]},
        space={**SPACE, "model.fault": Choices(["none", "forgetful"])},
    )
    trials = trials_with_each_value(made)
    shown = [(*dict(each.cell.axes).values(), each.params["model.fault"]) for each in trials]
    assert shown == [(8, 80, "none"), (16, 160, "forgetful"), (32, 80, "none")]
    assert {each.cell.batch_size for each in trials} == {4}
    trials = trials_with_each_value(made, ["data"])
    assert [dict(each.cell.axes) for each in trials] == [
        {"model.width": 8, "data.n": 80},
        {"model.width": 8, "data.n": 160},
    ]


@pytest.mark.parametrize("values", [[80, 160], [80]])
def test_each_axis_value_is_compared_at_both_ends_of_the_grid(values):
    data, grid = "dry_runs.WholeValidationBatches", {"data.n": values}
    with pytest.raises(ConfigError) as error:
        dry_run(setup(data=data, batch_sizes=[4, 11], grid=grid))
    assert (error.value.key, error.value.value) == ("data", "WholeValidationBatches")
    assert "B = 4" in error.value.allowed and "B = 11" in error.value.allowed


def test_parameters_without_memory_of_their_own_are_not_shared():
    module = dry_runs.OnBackbone(body="copy")
    module.register_parameter("sparse", torch.nn.Parameter(torch.eye(2).to_sparse()))
    assert "sparse" not in _weights_by_address(module).values()
