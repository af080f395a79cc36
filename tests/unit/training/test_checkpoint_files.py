"""Which files a trial goes on from, what happens where none can be written, and when they are
removed."""

from __future__ import annotations

import dataclasses
import errno
import math

import optuna
import pytest
import torch

from lit_dps.core.config import StudyConfig
from lit_dps.core.goal import Goal
from lit_dps.core.search_space import Range
from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.storage.header import declare
from lit_dps.training.checkpoint_files import Checkpoints, clear_checkpoints
from tests.support.runs import train_one
from tests.support.saved_study import GOAL, USER, USER_DATA, Steps, Study, workload
from tests.unit.engines.test_engine import PARAMS, quiet  # noqa: F401


def damage(path):
    """One bit in the middle, which torch itself does not notice."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "harm",
    [
        damage,
        lambda path: path.write_bytes(path.read_bytes()[:-100]),
        lambda path: path.write_bytes(b""),
        lambda path: torch.save({"callbacks": print}, path),  # code in it is not executed
    ],
    ids=["bit", "short", "empty", "code"],
)
def test_a_damaged_file_is_not_used(tmp_path, harm):
    study, trial = Study(tmp_path, goal={**GOAL, "max_steps": 16}), Trial(Cell(16, 0.5), 1, PARAMS)
    whole, reference = study.run(trial, saved=False)
    study.run(trial, interrupt=2)
    harm(study.checkpoints().path(trial))
    result, steps = study.run(trial)
    assert (result, steps.taken) == (whole, reference.taken)
    (line,) = study.said
    assert line.startswith(f"{trial} restarts")


@pytest.mark.parametrize(
    ("change", "params"),
    [
        ({"study": "another of its name"}, {}),
        ({"goal": {**GOAL, "max_steps": 16, "early_reject": True}}, {}),
        ({"lean": False}, {}),
        ({}, {"model.learning_rate": 0.03}),
    ],
    ids=["study", "goal", "lean", "params"],
)
def test_a_foreign_file_is_not_used(tmp_path, change, params):
    study = Study(tmp_path, goal={**GOAL, "max_steps": 16})
    study.run(Trial(Cell(16, 0.5), 1, PARAMS), interrupt=2)
    other = Study(tmp_path, **{"goal": study.goal, **change})
    trial = Trial(Cell(16, 0.5), 1, {**PARAMS, **params})
    whole, reference = other.run(trial, saved=False)
    result, steps = other.run(trial)
    assert (result, steps.taken) == (whole, reference.taken)
    (line,) = other.said
    assert line.startswith(f"{trial} restarts") and "another" in line


def test_a_checkpoint_of_an_earlier_version_has_the_name_of_its_trial(tmp_path):
    """Earlier versions cut a batch schedule at its last dot."""
    cell = Cell(32, 0.0, (("batch.schedule", "0:B/4 2.5%:B/2 10%:B"),))
    checkpoints = Checkpoints(tmp_path, "study", 1.0)
    identity = checkpoints.file(Trial(cell, 3, repeat=1), {}).identity
    assert identity["name"] == "B=32 S=0 schedule=5%:B/2 10%:B point 3 repeat 1"


CODE = {"sources": {"mine.py": ["bytes of a", "tree of a"]}, "data": {"": ["data of a"]}}


@pytest.mark.parametrize(
    ("saved", "now", "named"),
    [
        (CODE, {**CODE, "sources": {"mine.py": ["bytes of b", "tree of b"]}}, "mine.py"),
        (CODE, {**CODE, "data": {"": ["data of b"]}}, "the data"),
        (CODE, {**CODE, "sources": {"mine.py": ["bytes of c", "tree of a"]}}, None),
        (CODE, {"sources": {**CODE["sources"], "new.py": ["bytes", "tree"]}}, None),
        ({}, CODE, None),
    ],
    ids=["code", "data", "comment", "new-file", "earlier-version"],
)
def test_a_file_of_other_code_or_data_is_not_used(tmp_path, saved, now, named):
    """A study accepts changed code, is interrupted, and runs with its former code again."""
    goal = {**GOAL, "max_steps": 16}
    trial = Trial(Cell(16, 0.5), 1, PARAMS)
    study = Study(tmp_path, goal=goal, environment=saved)
    _, whole = study.run(trial, saved=False)
    _, begun = study.run(trial, interrupt=2)
    other = Study(tmp_path, goal=goal, environment=now)
    _, steps = other.run(trial)
    if named is None:
        assert steps.taken == whole.taken - begun.taken
    else:
        assert steps.taken == whole.taken
        assert any(line.startswith(f"{trial} restarts") and named in line for line in other.said)


def test_a_run_begins_again_if_its_checkpoint_cannot_be_restored(tmp_path, monkeypatch):
    """The file is valid, but the module's code takes another state by now."""
    study = Study(tmp_path, goal={**GOAL, "max_steps": 16})
    trial = Trial(Cell(16, 0.5), 1, PARAMS)
    whole, reference = study.run(trial, saved=False)
    study.run(trial, interrupt=2)
    states = []

    def fail(optimizer, state):
        states.append(state)
        raise KeyError("another state")

    monkeypatch.setattr(torch.optim.Optimizer, "load_state_dict", fail)
    result, steps = study.run(trial)
    assert len(states) == 1
    assert (result, steps.taken) == (whole, reference.taken)
    (line,) = study.said
    assert line.startswith(f"{trial} restarts")


def test_a_full_disk_is_told_once_and_stops_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    study, trial = Study(tmp_path, goal={**GOAL, "max_steps": 16}), Trial(Cell(16, 0.5), 1, PARAMS)
    whole, _ = study.run(trial, saved=False)
    monkeypatch.setattr("os.fsync", full)
    assert study.run(trial)[0] == whole
    (line,) = study.said
    assert line.startswith("warning: ") and "(No space left on device)" in line
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_state_that_is_no_plain_data_is_told_and_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tests.support.saved_user.Dropping.on_save_checkpoint",
        lambda self, saved: saved.update(x=Steps()),
    )
    study = Study(
        tmp_path, model=USER, data={"class_path": USER_DATA}, goal={**GOAL, "max_steps": 16}
    )
    trial = Trial(Cell(8, 0.0), 0, {"model.rate": 0.01})
    assert study.run(trial)[0] == study.run(trial, saved=False)[0]
    (line,) = study.said
    assert line.startswith("warning: ") and "Dropping" in line


def test_time_counts_from_the_first_begin_and_a_short_trial_is_not_saved(tmp_path, monkeypatch):
    study, trial = Study(tmp_path, minutes=1.0), Trial(Cell(16, 0.5), 1, PARAMS)
    assert study.run(trial, interrupt=2)[0] is None
    assert not study.checkpoints().path(trial).exists(), "not worth a file"
    clock = iter(range(0, 100_000, 25))  # every look at the clock is 25 seconds later
    monkeypatch.setattr("lit_dps.engines.run_group.time.monotonic", lambda: float(next(clock)))
    study.run(trial, interrupt=4)
    assert study.checkpoints().path(trial).exists()
    monkeypatch.undo()
    found, _ = workload(study.model)
    result = train_one(trial, found, study.goal, checkpoints=study.checkpoints())
    assert result.seconds > 100


def test_files_go_when_the_result_is_stored_or_nobody_needs_them(tmp_path):
    study, cell = Study(tmp_path, goal={**GOAL, "max_steps": 24}), Cell(16, 0.5)
    trials = [Trial(cell, point, PARAMS) for point in range(4)]
    for trial, step in zip(trials, (8, 12, 16, 20), strict=True):
        result, _ = study.run(trial, pause=lambda cell, step=step: step)
        study.checkpoints().remove_unneeded(result, math.inf)
    there = [study.checkpoints().path(trial) for trial in trials]
    assert all(path.exists() for path in there), "they have to go on"
    study.checkpoints().remove_unneeded(study.run(trials[0], limit=lambda cell: 16)[0], 16)
    assert [path.exists() for path in there] == [False, True, True, True]
    best = TrialResult(Trial(cell, 4, PARAMS), Status.COMPLETE, 8)
    study.checkpoints().remove_unneeded(best, 16)
    assert [path.exists() for path in there] == [False, True, False, False]


def test_a_study_that_is_deleted_and_made_again_is_another(tmp_path):
    url, config = (
        f"sqlite:///{tmp_path}/study.db",
        StudyConfig(name="s", space={"model.rate": Range(1e-3, 1.0)}),
    )

    def declared(**more) -> str:
        return declare(url, dataclasses.replace(config, **more), "w", Goal(0.1), {"seed": 0}, {})[1]

    first = declared(trials=2)
    assert declared(trials=3) == first
    optuna.delete_study(study_name="s", storage=url)
    assert declared(trials=2) != first


def test_files_are_removed_alone(tmp_path):
    folder = tmp_path / "checkpoints" / "s"
    study, trial = Study(folder, goal={**GOAL, "max_steps": 16}), Trial(Cell(16, 0.5), 1, PARAMS)
    study.run(trial, interrupt=2)
    study.run(Trial(Cell(16, 0.5), 2, PARAMS), interrupt=2)
    study.checkpoints().remove(trial)
    assert [path.name for path in folder.rglob("*.ckpt")] == ["point-2.ckpt"]
    (folder / "mine.txt").touch()
    clear_checkpoints(folder)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    (folder / "mine.txt").unlink()
    clear_checkpoints(folder)
    assert not folder.parent.exists()
