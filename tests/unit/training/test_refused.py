"""Values that would fail deep within another library, or have no effect, are refused in one line."""

from __future__ import annotations

import pytest
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import Trainer

from lit_dps.cli.parser import refuse_nulls
from lit_dps.core.config import StudyConfig
from lit_dps.core.parse_errors import refusal
from lit_dps.core.trial_config import PruningConfig, SmoothnessConfig
from lit_dps.models import MLP
from lit_dps.training import GoalErrorCallback
from lit_dps.training.trainer_rules import check_trainer, filter_callbacks
from tests.support.errors import refuses
from tests.unit.study.test_grid import SPACE


@pytest.mark.parametrize(
    ("call", "key", "value"),
    [
        (lambda: StudyConfig(seed=2**32, space=SPACE).check(), "study.seed", 2**32),
        (lambda: StudyConfig(threads=10**9, space=SPACE).check(), "study.threads", 10**9),
        (lambda: StudyConfig(workers=10**9, space=SPACE).check(), "study.workers", 10**9),
        (lambda: StudyConfig(slots=10**9, space=SPACE).check(), "study.slots", 10**9),
        (lambda: StudyConfig(trials=10**20, space=SPACE).check(), "study.trials", 10**20),
        (lambda: StudyConfig(repeats=10**12, space=SPACE).check(), "study.repeats", 10**12),
        (lambda: PruningConfig(batch_size=10**20), "pruning.batch_size", 10**20),
        (lambda: SmoothnessConfig(batch_size=10**20), "smoothness.batch_size", 10**20),
        (lambda: SmoothnessConfig(examples=10**20), "smoothness.examples", 10**20),
        (lambda: StudyConfig(space={3: {"low": 0.1, "high": 1}}), "study.space", 3),
        (lambda: StudyConfig(grid={3: [1]}), "study.grid", 3),
        (lambda: refuse_nulls({"goal": 3}, {"goal": GoalErrorCallback}), "goal", 3),
        (lambda: refuse_nulls({"study": []}, {"study": StudyConfig}), "study", []),
        (
            lambda: check_trainer({"accumulate_grad_batches": 0}),
            "trainer.accumulate_grad_batches",
            0,
        ),
        (
            lambda: filter_callbacks([GoalErrorCallback(error=0.1)], "trainer.callbacks"),
            "trainer.callbacks",
            "GoalErrorCallback",
        ),
        (lambda: MLP(hidden=(0,)), "model.network.hidden", [0]),
        (lambda: MLP(hidden=(8, -3)), "model.network.hidden", [8, -3]),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_in_one_line(call, key, value):
    with refuses(key, value) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_all_values_of_a_choice_of_several_kinds_are_told():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(
        Trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True
    )
    with pytest.raises(ArgumentError) as caught:
        parser.parse_object({"trainer": {"precision": 7}})
    refused = refusal(caught.value)
    assert (refused.key, refused.value) == ("trainer.precision", "7")
    assert refused.allowed is not None
    choices = refused.allowed.removeprefix("one of ").split(", ")
    assert {"64", "32", "16", "bf16", "transformer-engine", "32-true", "64-true"} <= {*choices}
    assert len(choices) == len({*choices})


def test_the_largest_values_are_allowed():
    StudyConfig(seed=2**32 - 1, threads=1024, workers=1024, space=SPACE).check()
    one_cell = {"batch_sizes": [2], "sparsities": [0.0]}
    StudyConfig(trials=10**6, space=SPACE, **one_cell).check()
    with refuses("study.trials", 10**6 + 1):
        StudyConfig(trials=10**6 + 1, space=SPACE, **one_cell).check()
    two_cells = one_cell | {"sparsities": [0.0, 0.5]}
    with refuses("study.trials", 500_001):
        StudyConfig(trials=500_001, space=SPACE, **two_cells).check()
    # The cells are counted, not listed.
    axes = {"optim.delay": list(range(10**4)), "local.every": list(range(1, 10**4))}
    with refuses("study.grid", 10**4 * (10**4 - 1) * 2):
        StudyConfig(trials=1, space=SPACE, grid=axes, **two_cells).check()
    check_trainer({"accumulate_grad_batches": None})
    check_trainer({"accumulate_grad_batches": 2})
