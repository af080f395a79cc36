"""The goal is asked of an error that the module logs over its whole validation split, each time."""

from __future__ import annotations

import pytest

from tests.zoo.run import spec
from tests.zoo.verify import assert_refused, assert_works

KEY = r"goal\.monitor"


def test_an_accuracy(zoo):
    assert_refused(
        zoo("metrics.Accuracy", goal={"monitor": "val_acc", "error": 0.95}), KEY, "val_acc"
    )


def test_an_accuracy_by_another_name(zoo):
    refused = zoo("metrics.Accuracy", goal={"monitor": "val_quality", "error": 0.95})
    assert_refused(refused, "goal", "untrained", "0.95")


def test_a_goal_that_the_untrained_network_meets(zoo):
    assert_refused(zoo(goal={"error": 0.99}), r"goal\.error", "untrained", "0.99")


def test_a_training_loss(zoo):
    assert_refused(
        zoo("metrics.TrainLoss", goal={"monitor": "train_loss"}), KEY, "train_loss", "validation"
    )


def test_a_name_that_is_not_logged(zoo):
    assert_refused(zoo(goal={"monitor": "val/error"}), KEY, "val/error", "val_error")


@pytest.mark.parametrize(
    "options",
    [{"on_step": True, "on_epoch": False}, {"reduce_fx": "sum"}, {"reduce_fx": "max"}],
    ids=["of one batch", "summed", "of the worst batch"],
)
def test_what_is_no_mean_over_the_split(zoo, options):
    assert_refused(zoo(spec("metrics.Reduced", options=options)), KEY, "val_error")


@pytest.mark.long
def test_a_mean_may_be_logged_of_each_batch_too(zoo):
    outcome = zoo(
        spec("metrics.Reduced", options={"on_step": True, "on_epoch": True}), batch_sizes=[16]
    )
    assert_works(outcome)


@pytest.mark.parametrize("name", ["ByMetric", pytest.param("AtTheEnd", marks=pytest.mark.long)])
def test_an_error_may_be_a_metric_or_a_number(zoo, name):
    assert_works(zoo(f"metrics.{name}", batch_sizes=[16]))


@pytest.mark.parametrize("first", [0, 1, 2])
def test_an_error_that_is_not_logged_each_time_is_never_taken_from_before(zoo, first):
    outcome = zoo(
        spec("metrics.EveryThird", first=first), batch_sizes=[32], sparsities=[0.0], trials=2
    )
    assert outcome.code in (1, 2), outcome.out
    results = outcome.results if outcome.study else []
    assert {result.status for result in results} <= {"failed"}
    assert "goal.monitor" in outcome.err + "".join(result.failure for result in results)
    if not results:
        assert_refused(outcome, KEY, "val_error")


def test_a_small_goal_is_met_by_what_is_smaller(zoo):
    outcome = zoo("metrics.Minute", goal={"monitor": "val_loss", "error": 1e-7})
    assert_works(outcome, ["complete"])
    assert {result.steps for result in outcome.results} == {20}
