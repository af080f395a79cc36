"""Keys of the grid and of the search that change nothing are noted by the dry run, others are
not."""

from __future__ import annotations

from typing import Any

import pytest

from lit_dps.core.search_space import Choices, Range
from lit_dps.report.notes import Level
from lit_dps.study.preflight.dry_run import dry_run
from lit_dps.study.preflight.idle_keys import idle_keys
from tests.unit.engines.test_engine import quiet  # noqa: F401
from tests.unit.study.test_dry_run import setup

LR = {"model.lr": Range(1e-3, 0.1, "log")}


def idle(space: dict[str, Any], model: str = "idle.Swallowing", **more: Any) -> dict[str, str]:
    """The notes of keys that change nothing, by key."""
    given, keywords = more.pop("arguments", {}), more.pop("keywords", {})
    made = setup(model, arguments=given, batch_sizes=[16], space={**LR, **space}, **more)
    made.workload.model["dict_kwargs"] = keywords
    notes = idle_keys(made.trial_settings(), made)
    return {note.partition(" ")[0]: note for note in notes}


def test_keys_that_change_nothing_are_noted():
    space = {"model.rate": Range(0.01, 1, "log"), "model.dict_kwargs.temperature": Range(1, 2)}
    notes = idle(
        space,
        data="idle.FixedNoise",
        grid={"data.noise": [0.5, 8.0]},
        keywords={"temperature": 1.0},
    )
    assert notes.keys() == {"model.rate", "model.dict_kwargs.temperature", "data.noise"}


def test_the_dry_run_notes_them():
    made = setup("idle.Swallowing", space={**LR, "model.rate": Range(0.01, 1)})
    ((note, level),) = dry_run(made)[1].items()
    assert note.startswith("model.rate ") and level is Level.WEAK


@pytest.mark.parametrize("key", ["shift", "smoothing", "late"])
def test_a_key_may_act_in_validation_in_the_loss_or_after_the_first_epoch(key):
    assert idle({f"model.{key}": Range(0.0, 0.9)}) == {}


def test_a_key_is_not_noted_where_no_validation_succeeds():
    assert idle({"model.shift": Range(0.0, 0.9)}, model="idle.FailsInValidation") == {}


def test_a_key_may_act_on_the_rate_late_in_the_budget():
    assert idle({"model.decay": Range(0.1, 1.0)}, arguments={"optimizer": "decay"}) == {}
    assert idle({"model.decay": Range(0.1, 1.0)}).keys() == {"model.decay"}


def test_a_key_may_belong_to_one_value_of_another_key():
    momentum = {"model.momentum": Range(0.0, 0.9)}
    assert idle(momentum).keys() == {"model.momentum"}
    assert idle(momentum, grid={"model.optimizer": ["sgd", "momentum"]}) == {}
    assert idle({**momentum, "model.optimizer": Choices(["sgd", "momentum"])}) == {}


def test_an_option_that_an_optimizer_ignores_is_noted():
    notes = idle({"model.inertia": Range(0.0, 0.9)}, arguments={"optimizer": "options"})
    assert notes.keys() == {"model.inertia"}


def test_the_validation_data_may_be_all_that_a_key_changes():
    assert idle({}, data="idle.FixedNoise", grid={"data.cut": [0, 10]}) == {}


def test_pruning_of_dense_networks_changes_nothing():
    grid = {"pruning.method": ["snip", "random"]}
    assert idle({}, grid=grid).keys() == {"pruning.method"}
    dense = setup("idle.Swallowing", batch_sizes=[16], space=LR, grid=grid)
    assert list(dry_run(dense)[1].values()) == [Level.INFO]  # not stored: it may get sparse cells
    assert idle({}, grid=grid, sparsities=[0.0, 0.5]) == {}
