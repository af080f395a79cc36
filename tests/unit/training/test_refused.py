"""Values that only failed deep within another library, or had no effect, are refused in one line
that says what is."""

from __future__ import annotations

import pytest
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import Trainer

from lit_dps.cli.parser import refuse_nulls
from lit_dps.core.config import StudyConfig
from lit_dps.core.errors import ConfigError, one_line
from lit_dps.models import MLP
from lit_dps.training import GoalErrorCallback
from lit_dps.training.trainer_rules import check_trainer
from tests.unit.study.test_grid import SPACE


@pytest.mark.parametrize(
    ("refused", "said"),
    [
        (
            lambda: StudyConfig(seed=2**32, space=SPACE).check(),
            "study.seed: 4294967296 is not allowed; 0 or more, and below",
        ),
        (
            lambda: StudyConfig(threads=10**9, space=SPACE).check(),
            "study.threads: 1000000000 is not allowed; 1024 at most",
        ),
        (
            lambda: StudyConfig(space={3: {"low": 0.1, "high": 1}}),
            "study.space: 3 is not allowed; a key of the configuration",
        ),
        (
            lambda: StudyConfig(grid={3: [1]}),
            "study.grid: 3 is not allowed; a key of the configuration",
        ),
        (
            lambda: refuse_nulls({"goal": 3}, {"goal": GoalErrorCallback}),
            "goal: 3 is not allowed; arguments by name",
        ),
        (
            lambda: refuse_nulls({"study": []}, {"study": StudyConfig}),
            "study: [] is not allowed; arguments by name",
        ),
        (
            lambda: check_trainer({"accumulate_grad_batches": 0}),
            "trainer.accumulate_grad_batches: 0 is not allowed; 1 or more batches",
        ),
        (
            lambda: MLP(hidden=(0,)),
            "model.network.hidden: [0] is not allowed; widths of at least 1",
        ),
        (
            lambda: MLP(hidden=(8, -3)),
            "model.network.hidden: [8, -3] is not allowed; widths of at least 1",
        ),
    ],
)
def test_it_is_one_line(refused, said):
    with pytest.raises(ConfigError) as caught:
        refused()
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_all_values_of_a_choice_of_several_kinds_are_told():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(
        Trainer, "trainer", fail_untyped=False, instantiate=False, sub_configs=True
    )
    with pytest.raises(ArgumentError) as caught:
        parser.parse_object({"trainer": {"precision": 7}})
    said = one_line(caught.value)
    assert said.startswith(
        "trainer.precision: '7' is not allowed; one of 64, 32, 16, 'transformer-engine', "
    )
    assert said.endswith("'32-true', '64-true', 'bf16'")


def test_the_largest_values_are_allowed():
    StudyConfig(seed=2**32 - 1, threads=1024, space=SPACE).check()
    check_trainer({"accumulate_grad_batches": None})
    check_trainer({"accumulate_grad_batches": 2})
