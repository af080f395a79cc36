"""What would have no effect in a study is refused, or told."""

from __future__ import annotations

import dataclasses
import re

import pytest

from lit_dps.core.search_space import Choices
from lit_dps.study.preflight.keys import check_effects
from tests.support.errors import refuses
from tests.unit.engines.test_engine import MODEL
from tests.unit.study.test_grid import NETWORK, SPACE, setup


def test_arguments_that_no_class_of_an_axis_would_have_are_refused():
    with refuses("study.grid", "model.network"):
        check_effects(setup(NETWORK))
    network = {
        "class_path": "lit_dps.models.MLP",
        "init_args": {"hidden": [300, 100], "width": None},
    }
    assert (
        check_effects(
            setup(NETWORK, model={**MODEL, "init_args": {**MODEL["init_args"], "network": network}})
        )
        == []
    )


@pytest.mark.parametrize(
    ("sparsity", "grid"), [(0.0, [0.9]), (0.5, [0.5]), (0.5, [0.0, 0.5]), (0.5, [0.0, 0.9])]
)
def test_the_sparsity_of_fit_is_told_apart_from_those_of_a_study(sparsity, grid):
    made = setup({}, batch_sizes=[16], sparsities=grid)
    made = dataclasses.replace(made, pruning=dataclasses.replace(made.pruning, sparsity=sparsity))
    if sparsity and sparsity not in grid:
        with refuses("pruning.sparsity", 0.5):
            check_effects(made)
        return
    assert len(check_effects(made)) == (sparsity > 0 and len(grid) > 1)


def with_decay(optimizer: str, grid: dict, class_path: str = MODEL["class_path"]):
    arguments = {**MODEL["init_args"], "optimizer": optimizer, "weight_decay": 0.5}
    return setup(grid, model={"class_path": class_path, "init_args": arguments})


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov"])
def test_a_weight_decay_that_no_rule_applies_has_a_note(optimizer):
    assert len(check_effects(with_decay(optimizer, {}))) == 1
    assert len(check_effects(with_decay("adamw", {"model.optimizer": [optimizer]}))) == 1


def test_a_weight_decay_that_a_rule_may_apply_is_accepted():
    accepted = [
        with_decay("adamw", {}),
        with_decay("schedule_free_sgd", {}),
        with_decay("sgd", {"model.optimizer": ["sgd", "lion"]}),
        with_decay("sgd", {}, class_path="tests.unit.engines.test_stack_filler.Penalized"),
    ]
    for made in accepted:
        assert check_effects(made) == []
    study = dataclasses.replace(
        accepted[0].study, space={**SPACE, "model.optimizer": Choices(["sgd", "adamw"])}
    )
    assert check_effects(dataclasses.replace(with_decay("sgd", {}), study=study)) == []


@pytest.mark.parametrize(
    ("optimizer", "given", "grid", "idle"),
    [
        ("adam", {"momentum": 0.95, "epsilon": 1e-6}, {}, {"momentum"}),
        ("adam", {"momentum": 0.95}, {"model.optimizer": ["adam", "momentum"]}, set()),
        ("adam", {"momentum": 0.95}, {"model.momentum": [0.9, 0.95]}, set()),
        ("momentum", {"beta2": 0.99, "refresh_steps": 5}, {}, {"beta2", "refresh_steps"}),
        ("lit_dps.optim.sgd.MOMENTUM", {"beta2": 0.9}, {}, {"beta2"}),
        ("sgd", {"decay_steps": 50, "end_factor": 0.1}, {}, {"decay_steps", "end_factor"}),
        ("sgd", {"decay_steps": 50}, {"model.schedule": ["constant", "linear"]}, set()),
        ("sgd", {"beta1": 0.9, "epsilon": 1e-8, "decay_steps": 40_000}, {}, set()),  # defaults
        ("sgd", {"warmup_steps": 5, "label_smoothing": 0.1, "weight_decay": 0.0}, {}, set()),
        ("sgd", {"schedule": "linear", "decay_steps": 50, "decay_share": 0.5}, {}, {"decay_share"}),
        ("sgd", {"schedule": "wsd", "decay_steps": 50, "decay_share": 0.5}, {}, set()),
    ],
)
def test_an_argument_that_neither_rule_nor_schedule_reads_has_a_note(optimizer, given, grid, idle):
    arguments = {**MODEL["init_args"], "optimizer": optimizer, **given}
    notes = check_effects(setup(grid, model={**MODEL, "init_args": arguments}))
    assert {re.search(r"model\.(\w+)", note)[1] for note in notes} == idle
