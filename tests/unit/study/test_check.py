"""The check of a stored study: what remains under a larger race factor, and another study's best
points."""

from __future__ import annotations

import dataclasses

import pytest

from lit_dps.core.config import StorageConfig
from lit_dps.core.search_space import Choices, Range
from lit_dps.core.trial import Cell
from lit_dps.report.notes import Level
from lit_dps.study.preflight.check import (
    _check_ranges,
    _note_on_processes,
    _stored_record,
    check_study,
)
from lit_dps.training.workload import Workload
from tests.support.errors import refuses
from tests.support.fake_study import GOAL, result, write_study
from tests.support.texts import numbers_in
from tests.unit.study.test_grid import setup

CELL = Cell(8)


def stopped_at(point: int, step: int):
    """A trial that the race stopped at a step."""
    steps = list(range(16, step + 1, 16))
    curve = {"step": steps, "val_error": [0.5] * len(steps), "train_loss": [1.0] * len(steps)}
    return result(CELL, point, None, "outraced", curve=curve)


@pytest.mark.parametrize(
    ("factor", "remaining"), [(0.5, 0), (1.0, 0), (2.0, 1), (4.0, 2), (None, 2)]
)
def test_a_larger_race_factor_leaves_stopped_trials_to_train(tmp_path, factor, remaining):
    """K* is 32 steps, and the race stopped two trials at 32 and 64 steps."""
    url = f"sqlite:///{tmp_path}/study.db"
    results = {CELL: [result(CELL, 0, 32), stopped_at(1, 32), stopped_at(2, 64)]}
    write_study(url, results, "s", goal=GOAL, race_factor=1.0)
    given = setup({}, batch_sizes=[8], sparsities=[0.0])
    study = dataclasses.replace(given.study, name="s", trials=3, race_factor=factor)
    storage = StorageConfig(folder=str(tmp_path), optuna=url)
    asked = dataclasses.replace(given, study=study, storage=storage)
    assert asked.remaining_trials(_stored_record(asked)) == remaining


@pytest.mark.parametrize(("slack", "remaining"), [(4.0, 0), (8.0, 0), (16.0, 1), (None, 2)])
def test_a_larger_repeat_slack_leaves_stopped_repeats_to_train(tmp_path, slack, remaining):
    """K* is 32 steps, and two repeats stopped at 256 and 512 steps: 8 and 16 times K*."""
    url = f"sqlite:///{tmp_path}/study.db"
    repeats = []
    for number, step in ((1, 256), (2, 512)):
        stopped = stopped_at(0, step)
        trial = dataclasses.replace(stopped.trial, repeat=number)
        repeats.append(dataclasses.replace(stopped, trial=trial))
    write_study(url, {CELL: [result(CELL, 0, 32)]}, "s", goal=GOAL, repeated={CELL: repeats})
    given = setup({}, batch_sizes=[8], sparsities=[0.0])
    study = dataclasses.replace(given.study, name="s", trials=1, repeats=2, repeat_slack=slack)
    storage = StorageConfig(folder=str(tmp_path), optuna=url)
    asked = dataclasses.replace(given, study=study, storage=storage)
    assert asked.remaining_trials(_stored_record(asked)) == remaining


NAMES = Choices(["torch.optim.SGD", "torch.optim.Adam"])


@pytest.mark.parametrize(
    ("box", "value", "is_allowed"),
    [
        (Range(0.1, 1.0), 0.1, True),
        (Range(0.1, 1.0), 1.5, False),
        (Range(0.1, 1.0), "torch.optim.SGD", False),
        (Range(1, 8, integer=True), 2, True),
        (Range(1, 8, integer=True), 2.5, False),
        (Choices([0, 0.1]), 0.1, True),
        (Choices([0, 0.1]), 0.01, False),
        (NAMES, "torch.optim.Adam", True),
        (NAMES, "torch.optim.RMSprop", False),
    ],
)
def test_a_best_point_must_be_in_the_search_space(box, value, is_allowed):
    key = "model.value"
    given = setup({})
    study = dataclasses.replace(given.study, space={key: box})
    asked = dataclasses.replace(given, study=study)
    assert box.contains(value) == is_allowed
    if is_allowed:
        _check_ranges(asked, CELL, {key: value})
        return
    with refuses(f"study.space.{key}", str(box)):
        _check_ranges(asked, CELL, {key: value})


@pytest.mark.parametrize(
    ("others", "count"),
    [
        ([64], 0),
        ([], 1),
        ([None], 1),
    ],
)
def test_best_samples_of_an_unfinished_study_have_a_note(tmp_path, monkeypatch, others, count):
    """One of two trials is complete. The other one is complete, has not run, or failed."""
    monkeypatch.setattr("lit_dps.study.preflight.check.check_with_dry_run", lambda _: (None, {}))
    given = setup({}, batch_sizes=[8], sparsities=[0.0], name="w", best_of="s")
    storage = StorageConfig(folder=str(tmp_path))
    params = {"model.learning_rate": 0.1}
    results = [result(CELL, 0, 32, params=params)]
    for steps in others:
        status = "complete" if steps else "failed"
        results.append(result(CELL, 1, steps, status, params=params))
    space = given.study.space
    write_study(storage.optuna_url, {CELL: results}, "s", goal=GOAL, space=space, trials=2)
    notes = check_study(dataclasses.replace(given, storage=storage)).notes
    assert [numbers_in(note)[0] for note in notes] == [1] * count
    assert list(notes.values()) == [Level.WRONG] * count


def test_a_cell_that_has_its_best_sample_has_no_note(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_dps.study.preflight.check.check_with_dry_run", lambda _: (None, {}))
    monkeypatch.setattr("lit_dps.study.preflight.check.check_unchanged", lambda *_: None)
    given = setup({}, batch_sizes=[8], sparsities=[0.0], name="w", best_of="s")
    given = given.with_study(trials=2)
    storage = StorageConfig(folder=str(tmp_path))
    params = {"model.learning_rate": 0.1}
    results = {CELL: [result(CELL, 0, 32, params=params)]}
    for name in ("s", "w"):
        space = given.study.space
        write_study(storage.optuna_url, results, name, goal=GOAL, space=space, trials=2)
    assert check_study(dataclasses.replace(given, storage=storage)).notes == {}


@pytest.mark.parametrize(("workers", "of_default"), [(None, True), (1, False)])
def test_a_note_says_that_fit_cannot_import_classes_of_a_script(workers, of_default):
    given = setup({}).with_study(workers=workers, name="scripted")
    assert _note_on_processes(given) == []
    workload = Workload({"class_path": "__main__.Net"}, {}, {})
    (note,) = _note_on_processes(dataclasses.replace(given, workload=workload))
    assert "__main__.Net" in note and "fit --of scripted" in note
    assert note.startswith("One worker") == of_default
