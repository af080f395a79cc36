"""A study says before it begins which loop trains its cells."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from lit_dps.core.config import StorageConfig, StudyConfig
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Status, Trial, TrialResult
from lit_dps.study.run import describe_loops
from lit_dps.study.setup import StudySetup
from tests.support.setups import setup_of
from tests.unit.engines.test_module_hooks import HERE
from tests.unit.engines.test_stack_rows import GOAL, workload

SPACE = {"model.learning_rate": Range(0.01, 0.1)}
STUDY = StudyConfig(space=SPACE, batch_sizes=[16, 32], sparsities=[0.0, 0.5], trials=4)


def engine_counts(line: str) -> list[str]:
    """Return the engines that a line names."""
    return re.findall(r"with engine (\w+)", line)


def described(model: str | None = None, trainer: dict | None = None, **study) -> str:
    return describe_loops(setup(model, trainer, **study).loop_choices())


def setup(model: str | None = None, trainer: dict | None = None, **study) -> StudySetup:
    used = workload(class_path=HERE + model) if model else workload()
    used = replace(used, trainer={**used.trainer, **(trainer or {})})
    config = replace(STUDY, **study)
    return setup_of(config, StorageConfig(), used, {**GOAL, "early_reject": True})


@pytest.mark.parametrize("engine", ["single", "stacked", "lightning"])
def test_the_loop_that_is_set_trains(engine):
    assert engine_counts(described(engine=engine)) == [engine]


def test_the_reason_for_another_loop_is_named():
    line = described("EachBatch")
    assert engine_counts(line) == ["lightning"]
    assert "EachBatch" in line and "on_train_batch_end" in line
    line = described("Noisy", engine="stacked")
    assert engine_counts(line)[0] == "single" and "on_after_backward" in line
    assert "2 ranks" in described(trainer={"devices": 2})


def test_cells_are_counted_if_loops_differ():
    line = described(grid={"local.workers": [1, 2, 4]}, engine="stacked")
    assert re.findall(r"(\d+) cells with engine (\w+)", line)[0] == ("8", "single")
    assert "4 cells " in line


@pytest.mark.parametrize(
    ("at_a_time", "finished", "study"),
    [
        (1, 0, {"engine": "single", "workers": 1}),
        (2, 0, {"engine": "single", "workers": 2}),
        # Stacks have both sparsities of a batch size: 8 trials.
        (8, 0, {"engine": "stacked", "workers": 1}),
        (8, 0, {"engine": "stacked", "workers": 2}),
        (3, 0, {"engine": "stacked", "workers": 1, "slots": 3}),
        (6, 0, {"engine": "stacked", "workers": 2, "slots": 3}),
        (16, 0, {"engine": "stacked", "workers": 1, "trials": 100}),  # of the cores' cache
        # At B = 16 and 32, all trials without pruning have finished.
        (4, 4, {"engine": "stacked", "workers": 1}),
    ],
)
def test_trials_at_a_time_count_the_networks_of_stacks(at_a_time, finished, study):
    of = setup(**study)
    results = {}
    for cell in of.cells:
        results[cell] = []
        if cell.sparsity == 0:
            trials = [Trial(cell, point) for point in range(finished)]
            results[cell] = [TrialResult(trial, Status.INCOMPLETE, None) for trial in trials]
    record = SimpleNamespace(results=results, repeats={})
    assert of.trials_at_a_time(of.loop_choices(), of.workers, record) == at_a_time
