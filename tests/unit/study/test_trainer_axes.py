"""Clipping and precision as axes of the grid: a cell trains as a study with these arguments."""

from __future__ import annotations

import dataclasses

import pytest

from lit_dps.core.local_sgd import LocalSGDSchedule
from lit_dps.core.trial import Cell, Trial
from lit_dps.core.trial_config import BatchConfig, SmoothnessConfig
from lit_dps.storage.header import StudyChanged, check_unchanged
from lit_dps.study.preflight.keys import check_effects, check_keys, check_new_axes, check_workers
from tests.support.errors import refuses
from tests.support.fake_study import write_study
from tests.support.runs import train, train_one
from tests.unit.engines.test_engine import GOAL, PARAMS, WORKLOAD, quiet  # noqa: F401
from tests.unit.study.test_grid import setup

CLIP = "trainer.gradient_clip_val"
PRECISION = "trainer.precision"


def trial(*axes: tuple) -> Trial:
    return Trial(Cell(16, 0.5, axes), 0, PARAMS)


@pytest.mark.parametrize(
    ("name", "value", "engine"),
    [("gradient_clip_val", 0.01, "single"), ("precision", "bf16-mixed", "lightning")],
)
def test_a_cell_trains_as_a_study_with_its_argument(name, value, engine):
    in_cell = train_one(trial((f"trainer.{name}", value)), WORKLOAD, GOAL)
    workload = dataclasses.replace(WORKLOAD, trainer={**WORKLOAD.trainer, name: value})
    of_study = train_one(trial(), workload, GOAL)
    without = train_one(trial(), WORKLOAD, GOAL)
    assert in_cell.curve == of_study.curve
    assert in_cell.curve != without.curve
    assert (in_cell.engine, without.engine) == (engine, "single")
    assert (name in in_cell.engine_reason) == (engine == "lightning")


def test_only_the_cells_that_need_it_train_in_lightnings_loop():
    trials = [trial((CLIP, 0.0)), trial((CLIP, 0.01)), trial(), trial((PRECISION, "bf16-mixed"))]
    results = train(trials, WORKLOAD, GOAL)
    assert [each.engine for each in results] == ["single", "single", "single", "lightning"]
    # Lightning does not clip at 0.
    assert results[0].curve == results[2].curve
    assert results[1].curve != results[2].curve


def test_the_argument_of_the_study_decides_nothing_if_the_cells_set_it():
    identities = []
    for clip in (None, 1.0):
        study = setup({CLIP: [0.5, 1.0]}, batch_sizes=[8])
        trainer = {**study.workload.trainer, "gradient_clip_val": clip}
        workload = dataclasses.replace(study.workload, trainer=trainer)
        study = dataclasses.replace(study, workload=workload)
        check_keys(study)
        identities.append(study.identity(None))
    assert identities[0] == identities[1]


@pytest.mark.parametrize("name", ["max_epochs", "devices", "callbacks"])
def test_other_arguments_of_the_trainer_are_no_axes(name):
    with refuses("study.grid", f"trainer.{name}"):
        check_keys(setup({f"trainer.{name}": [1, 2]}, batch_sizes=[8]))


ACCUMULATE = "trainer.accumulate_grad_batches"


def test_accumulated_batches_divide_each_batch_size():
    check_keys(setup({ACCUMULATE: [1, 4]}, batch_sizes=[8, 16]))
    with refuses("study.batch_sizes", 6):
        check_keys(setup({ACCUMULATE: [1, 4]}, batch_sizes=[6, 8]))
    with refuses(f"study.grid.{ACCUMULATE}", 0):
        check_keys(setup({ACCUMULATE: [0, 4]}, batch_sizes=[8]))


def test_the_most_steps_of_a_cell_are_within_its_budget_of_examples():
    """Batches of 4 for 4 steps, then of 8: 100 examples are spent at step 15, validated at 16."""
    schedules = {"batch.schedule": ["constant", "doubling"]}
    made = setup(schedules, batch_sizes=[8, 64])
    goal = dataclasses.replace(made.goal, check_interval=2, max_steps=40, max_examples=100)
    batch = BatchConfig(options={"start": 0.5, "steps": 4})
    made = dataclasses.replace(made, goal=goal, batch=batch)
    constant, doubling = ((("batch.schedule", name),) for name in ("constant", "doubling"))
    assert made.most_steps(Cell(8, 0.0, constant)) == 14  # 13 steps of 8 examples
    assert made.most_steps(Cell(64, 0.0, constant)) == 2
    assert made.most_steps(Cell(8, 0.0, doubling)) == 16
    without = dataclasses.replace(made, goal=dataclasses.replace(goal, max_examples=None))
    assert without.most_steps(Cell(64, 0.0, constant)) == 40


def test_schedules_of_the_batch_fit_each_cell():
    def study(batch, grid=None, **changes):
        made = setup(grid or {}, batch_sizes=[8])
        return dataclasses.replace(made, batch=BatchConfig(**batch), **changes)

    doubling = {"schedule": "doubling", "options": {"start": 0.25, "steps": 4}}
    check_keys(study(doubling))
    check_keys(study({"options": doubling["options"]}, {"batch.schedule": ["constant", "linear"]}))
    with refuses("batch.options", doubling["options"]):  # no cell uses them
        check_keys(study({"options": doubling["options"]}))
    check_keys(study(doubling, {"batch.rate": ["none", "sqrt"]}))
    with refuses("batch.rate", "sqrt"):  # every step has the same batch size
        check_keys(study({"rate": "sqrt"}))
    late = {"schedule": "doubling", "options": {"start": 0.25, "steps": 10**6}}
    with refuses("batch.schedule", "doubling"):  # it never reaches the batch size
        check_keys(study(late))
    with refuses("batch.schedule", "doubling"):
        check_workers(study(doubling, local=LocalSGDSchedule(workers=2)), Cell(8), {})
    with refuses("batch.schedule", "doubling"):
        check_keys(study(doubling, smoothness=SmoothnessConfig(interval=4)))
    with refuses("study.grid", "batch.size"):
        check_keys(study(doubling, {"batch.size": [1, 2]}))
    # A step of 2 examples has no 4 equal parts.
    with refuses("batch.schedule", "2 examples in step 0"):
        check_keys(study(doubling, {ACCUMULATE: [4]}))


def test_studies_without_a_schedule_keep_their_configuration_and_identity():
    plain = setup({}, batch_sizes=[8])
    assert "batch" not in plain.config() and "batch" not in plain.identity(None)
    grown = dataclasses.replace(plain, batch=BatchConfig("linear", {"start": 0.5, "steps": 4}))
    assert grown.config()["batch"] == grown.identity(None)["batch"]
    assert grown.config()["batch"]["options"] == {"start": 0.5, "steps": 4}


def test_equal_studies_have_equal_identities_new_or_stored(tmp_path):
    def study(schedule="linear", grid=None, pruning=None, **options):
        made = setup(grid or {}, batch_sizes=[8])
        batch = BatchConfig(schedule, options or None)
        made = dataclasses.replace(made, batch=batch)
        if pruning is not None:
            made = dataclasses.replace(
                made, pruning=dataclasses.replace(made.pruning, options=pruning)
            )
        return made.identity(None)

    plain = study(start=0.5, steps=4)
    by_path = study("lit_dps.core.batch_schedule.LinearWarmUp", start=0.5, steps=4)
    assert by_path == plain and plain["batch"]["schedule"] == "linear"
    constant = study("lit_dps.core.batch_schedule.Constant")
    assert constant == setup({}, batch_sizes=[8]).identity(None)
    steps = {"batch.options.steps": [4, 8]}
    of_axis = study(grid=steps, start=0.5, steps=2)
    assert (
        of_axis == study(grid=steps, start=0.5, steps=9) != study(grid=steps, start=0.25, steps=2)
    )
    assert of_axis["batch"]["options"] == {"start": 0.5}
    batches = {"pruning.options.batches": [1, 2]}
    of_axis = study("constant", batches, {"batches": 3})
    assert of_axis == study("constant", batches)

    # As a former version has stored them.
    stored = {**plain, "batch": {"schedule": "linear", "options": {"start": 0.5, "steps": 2}}}
    url = f"sqlite:///{tmp_path}/studies.db"
    write_study(url, {Cell(8): []}, identity=stored, axes=steps)
    check_unchanged(url, "fake", study(grid=steps, start=0.5, steps=3))
    with pytest.raises(StudyChanged) as error:
        check_unchanged(url, "fake", study(grid=steps, start=0.25, steps=2))
    assert error.value.keys == ("batch.options.start",)


def test_an_algorithm_of_clipping_without_a_limit_is_refused():
    algorithms = {"trainer.gradient_clip_algorithm": ["norm", "value"]}
    for limits in ({}, {CLIP: [0]}):
        with refuses("study.grid", "trainer.gradient_clip_algorithm"):
            check_new_axes(setup({**algorithms, **limits}))
    assert check_effects(setup({**algorithms, CLIP: [None, 0.1]})) == []
