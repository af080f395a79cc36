"""What users bring trains in a stack as in Lightning's loop, or a stack refuses it."""

from __future__ import annotations

import pytest
from torch import nn

from lit_dps.core.trial import Cell, Trial
from lit_dps.module import ImageClassifier
from lit_dps.training.workload import Workload
from tests.support.runs import train
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.engines.test_logged_modules import both, trials, workload
from tests.zoo.run import ANIMALS

GOAL = {"metric": "val_loss", "at_most": 1e-6, "check_interval": 4, "max_steps": 24}


def curves(results, column="val_loss"):
    return {result.trial.point: result.curve[column] for result in results}


def assert_same(ours, reference, columns=("val_loss",), rel=1e-4):
    assert not [result.failure for result in (*ours, *reference) if result.failure]
    for column in columns:
        theirs = curves(reference, column)
        for point, values in curves(ours, column).items():
            assert values == pytest.approx(theirs[point], rel=rel)


def test_persistent_workers_draw_the_order_of_lightning_s_loop():
    ours, reference = both(workload(data="users.KeptWorkers"), trials(Cell(16, 0.0)), GOAL)
    assert {result.engine for result in ours} == {"stacked"}
    assert_same(ours, reference)


def test_a_schedule_of_another_class_that_follows_a_metric_is_not_stacked():
    ours, reference = both(workload("users.OwnPlateau"), trials(Cell(16, 0.0)), GOAL)
    assert {result.engine for result in ours} == {"lightning"}
    assert_same(ours, reference)


@pytest.mark.parametrize(
    ("kind", "part", "engine"),
    [
        ("bfloat16", "", "lightning"),
        ("float64", "head", "lightning"),
        ("float64", "", "stacked"),
    ],
)
def test_weights_of_16_bits_or_two_types_are_not_stacked(kind, part, engine):
    used = workload("users.Halved", kind=kind, part=part)
    ours, reference = both(used, trials(Cell(16, 0.5)), GOAL)
    assert {result.engine for result in ours} == {engine}
    assert_same(ours, reference, rel=1e-3)


@pytest.mark.parametrize("at_end", [False, True])
def test_collections_of_metrics_have_the_values_of_lightning_s_loop(at_end):
    names = ("val_loss", "val_accuracy", "val_f1", "val_precision")
    ours, reference = both(
        workload("users.Scores", at_end=at_end), trials(Cell(16, 0.0)), GOAL, metrics=names
    )
    assert {result.engine for result in ours} == {"stacked"}
    assert_same(ours, reference, names, rel=1e-3)


@pytest.mark.parametrize(("how", "engine"), [("data", "lightning"), ("in_place", "stacked")])
@pytest.mark.parametrize("batch_size", [16, 48])
def test_a_teacher_that_is_no_copy_learns_as_in_lightning_s_loop(how, engine, batch_size):
    ours, reference = both(workload("users.Taught", how=how), trials(Cell(batch_size, 0.0)), GOAL)
    assert {result.engine for result in ours} == {engine}
    assert_same(ours, reference, rel=1e-3)


def digits(model: str, data: str) -> Workload:
    network = {"class_path": "lit_dps.models.MLP", "init_args": {"hidden": [16]}}
    arguments = {"network": network, "optimizer": "sgd", "learning_rate": 0.05}
    return Workload(
        {"class_path": ANIMALS + model, "init_args": arguments},
        {"class_path": ANIMALS + data, "init_args": {}},
        {"accelerator": "cpu"},
    )


ERROR_GOAL = {"error": 0.001, "check_interval": 4, "max_steps": 16, "early_reject": True}
FULL_CHECKS = {"rule": "mean_of_checks", "options": {"checks": 2}}  # a mean needs each value


@pytest.mark.parametrize("batch_size", [2, 3, 4])
def test_labels_of_two_dimensions_belong_to_the_examples(batch_size):
    used = digits("users.SoftClassifier", "users.SoftDigits")
    asked = []
    for i, rate in enumerate((0.05, 0.1, 0.2)):
        asked.append(Trial(Cell(batch_size, 0.0), i, {"model.learning_rate": rate}))
    ours = train(asked, used, ERROR_GOAL, size=3, metrics=("val_loss",))
    reference = train(asked, used, ERROR_GOAL, metrics=("val_loss",))
    goal = ERROR_GOAL | FULL_CHECKS
    lightning = train(asked, used, goal, lean=False, metrics=("val_loss",))
    assert {result.engine for result in ours} == {"stacked"}
    assert {result.engine for result in lightning} == {"lightning"}
    assert_same(ours, reference, rel=1e-3)
    assert_same(ours, lightning, rel=1e-3)


def test_an_error_of_nan_is_a_mistake_in_all_loops():
    """Checks do not stop early, because the goal allows nearly all mistakes."""
    used = digits("users.Undecided", "users.RareClasses")
    asked = [Trial(Cell(8, 0.0), i, {"model.learning_rate": 0.05 * (1 + i)}) for i in range(2)]
    goal = ERROR_GOAL | {"error": 0.999}
    lightning = train(asked, used, goal, lean=False)
    assert min(curves(lightning, "val_error")[0]) > 0.1
    for size, engine in ((1, "single"), (2, "stacked")):
        ours = train(asked, used, goal, size=size)
        assert {result.engine for result in ours} == {engine}
        assert_same(ours, lightning, ("val_error",))


class LargestLosses(ImageClassifier):
    """Trains on the largest losses of a batch: of all examples up to 64."""

    def loss(self, batch):
        x, y = batch
        losses = nn.functional.cross_entropy(self(x), y, reduction="none")
        return losses.topk(min(64, len(y))).values.mean()


@pytest.mark.parametrize(("batch_size", "engine"), [(32, "stacked"), (1000, "single")])
def test_a_loss_that_is_no_mean_of_large_batches_is_not_divided(batch_size, engine):
    network = {"class_path": "lit_dps.models.MLP", "init_args": {"hidden": [16]}}
    model = {"class_path": f"{__name__}.LargestLosses", "init_args": {"network": network}}
    used = Workload(model, {"class_path": "lit_dps.data.Digits"}, {"accelerator": "cpu"})
    asked = []
    for i in range(2):
        asked.append(Trial(Cell(batch_size, 0.0), i, {"model.learning_rate": 0.05 * (1 + i)}))
    ours = train(asked, used, ERROR_GOAL, size=2, metrics=("val_loss",))
    reference = train(asked, used, ERROR_GOAL, metrics=("val_loss",))
    assert {result.engine for result in ours} == {engine}
    assert_same(ours, reference, rel=1e-4)


def test_a_loss_with_class_weights_is_no_mean_over_examples():
    used = digits("users.Weighted", "users.RareClasses")
    asked = [Trial(Cell(1000, 0.0), i, {"model.learning_rate": 0.05 * (1 + i)}) for i in range(2)]
    ours = train(asked, used, ERROR_GOAL, size=2, metrics=("val_loss",))
    reference = train(asked, used, ERROR_GOAL, metrics=("val_loss",))
    assert {result.engine for result in ours} == {"single"}
    assert_same(ours, reference, rel=1e-4)
