"""A study says before it begins which loop trains its cells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.search_space import Range
from lit_dps.study.run_cells import describe_loops
from tests.support.setups import setup_of
from tests.unit.engines.test_module_hooks import HERE
from tests.unit.engines.test_stack_lockstep import GOAL, workload

SPACE = {"model.learning_rate": Range(0.01, 0.1)}
STUDY = StudyConfig(space=SPACE, batch_sizes=[16, 32], sparsities=[0.0, 0.5], trials=4)


def described(model: str | None = None, trainer: dict | None = None, **study) -> str:
    used = workload(class_path=HERE + model) if model else workload()
    used = replace(used, trainer={**used.trainer, **(trainer or {})})
    config = replace(STUDY, **study)
    return describe_loops(setup_of(config, StorageConfig(), used, {**GOAL, "early_reject": True}))


@pytest.mark.parametrize("engine", ["single", "stacked", "lightning"])
def test_the_loop_that_is_set_trains(engine):
    assert described(engine=engine).startswith(f"trains with engine {engine} ")


def test_the_reason_for_another_loop_is_named():
    line = described("EachBatch")
    assert "engine lightning" in line and "EachBatch overrides on_train_batch_end" in line
    line = described("Noisy", engine="stacked")
    assert "engine single" in line and "on_after_backward" in line
    assert "2 ranks" in described(trainer={"devices": 2})


def test_cells_are_counted_if_loops_differ():
    line = described(grid={"local.workers": [1, 2, 4]}, engine="stacked")
    assert line.startswith("trains 8 cells with engine single") and "; 4 cells with" in line
